"""Load a directory of ``config.json`` and safetensors files, as an inference engine does, and write one line of text.

    python generate.py DIR --out generated.json

It uses no checkpoint code and no tierckpt: the directory has plain files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from model import Gpt, GptConfig
from safetensors.torch import load_file
from torch import Tensor

PROMPT = "The "
LINE_BYTES = 72


def load(directory: Path) -> tuple[Gpt, dict[str, Tensor]]:
    """Return the model in evaluation mode, and its weights under their own names."""
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    model = Gpt(GptConfig(**json.loads((directory / "config.json").read_text())))
    model.load_state_dict(weights, strict=True)
    return model.eval(), weights


@torch.inference_mode()
def write_line(model: Gpt, prompt: str) -> str:
    """Sample printable bytes after ``prompt`` until the line is full."""
    generator = torch.Generator().manual_seed(1)
    printable = torch.full((model.config.vocabulary,), float("-inf"))
    printable[32:127] = 0.0
    tokens = list(prompt.encode())
    while len(tokens) < LINE_BYTES:
        logits = model(torch.tensor([tokens[-model.config.context :]]))[0, -1] + printable
        chances = torch.softmax(logits / 0.7, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens).decode()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, weights = load(arguments.directory)
    digests = {name: digest(value) for name, value in weights.items()}
    arguments.out.write_text(json.dumps({"line": write_line(model, PROMPT), "weights": digests}, indent=1))


if __name__ == "__main__":
    main()

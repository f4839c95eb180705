"""Of the layouts of ``tests/model_layouts.py`` that transformers loads, it takes the files that we do."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.model_layouts import LAYOUTS, value_of, write


def chosen_by_transformers(directory: Path, variant: str | None) -> list[str] | None:
    """The files that ``from_pretrained`` would read; None where it refuses the directory."""
    modeling_utils = pytest.importorskip("transformers.modeling_utils")
    choose: Any = modeling_utils._get_resolved_checkpoint_files  # private: the choice alone, without a model
    given = {
        "pretrained_model_name_or_path": str(directory),
        "variant": variant,
        "gguf_file": None,
        "use_safetensors": True,
        "user_agent": {},
        "is_remote_code": False,
        "download_kwargs": {},
    }
    try:
        files, _ = choose(**{name: given[name] for name in inspect.signature(choose).parameters if name in given})
    except OSError:
        return None
    names = [str(Path(file).relative_to(directory)) for file in files]
    return names if all((directory / name).exists() for name in names) else None


def test_transformers_takes_the_same_files(tmp_path: Path, local_root: Path) -> None:
    decided = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        if layout.asked.keys() <= {"variant"}:
            directory = write(layout, tmp_path / str(number))
            files = chosen_by_transformers(directory, layout.asked.get("variant"))
            if files is None:
                continue  # its rejections do not bind us
            decided.append(name)
            wanted = {tensor: value_of(file, tensor) for file in files for tensor in layout.files[file]}
            found = tierckpt.load_safetensors(directory, **layout.asked)
            assert found.keys() == wanted.keys() and all(torch.equal(found[one], wanted[one]) for one in wanted), name
    assert len(decided) >= 12, decided

"""Names and links in the documents exist: modules, classes, functions, tests, settings, pages."""

import builtins
import functools
import re
from pathlib import Path

import pytest
import torch.distributed.checkpoint

from tierckpt.config import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (*ROOT.glob("docs/guide/*.md"), *ROOT.glob("docs/internals/*.md"), *ROOT.glob("*.md"))
    if page.name not in ("CHANGELOG.md", "AGENTS.md")
)
FOREIGN = {
    "AsyncCheckpointerType", "CheckpointException", "DataLoader", "DefaultStager", "DTensor", "FsspecReader",
    "FsspecWriter", "GradScaler", "LlamaForCausalLM", "ModelCheckpoint", "MultiStepLR", "Counter", "Namespace",
    "StatefulDataLoader", "If-Match", "If-None-Match", "Retry-After", *dir(builtins),
    *dir(torch.distributed.checkpoint),
}  # fmt: skip
"""Names of Python, PyTorch and HTTP that look like classes of this repository."""


@functools.cache
def our_files() -> frozenset[str]:
    tops = ("tierckpt", "tests", "bench", "tools", "examples")
    return frozenset(f"/{path.relative_to(ROOT).as_posix()}" for top in tops for path in (ROOT / top).rglob("*.py"))


@functools.cache
def our_names() -> frozenset[str]:
    """Return the classes, functions and assigned names of this repository."""
    named = re.compile(r"\b(?:def|class) (\w+)|^\s*([A-Z]\w*)(?:: [^=\n]+)?(?:, [\w, ]+)? = ", re.MULTILINE)
    texts = ((ROOT / path[1:]).read_text() for path in our_files())
    return frozenset(found[1] or found[2] for text in texts for found in named.finditer(text))


def unknown_names(text: str) -> list[str]:
    """Return the names in backticks in ``text`` that this repository does not define."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]+\.py", quoted):
            if not any(path.endswith(f"/{quoted}") for path in our_files()):
                wrong.append(quoted)
        elif re.fullmatch(r"TIERCKPT_(?!TEST_)[A-Z_]+", quoted):
            field = quoted.removeprefix("TIERCKPT_").lower()
            if field not in Settings.model_fields:
                wrong.append(quoted)
        else:
            word = re.match(r"(?:tierckpt\.)?([A-Z][a-z0-9]+[A-Za-z0-9]*)(?:[.(].*)?$", quoted)
            if word and word[1] not in our_names() and word[1] not in FOREIGN:
                wrong.append(quoted)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_names_in_a_page_exist(page: str) -> None:
    assert unknown_names((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_exist(page: str) -> None:
    place = (ROOT / page).parent
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / page).read_text())
    assert [link for link in links if not (place / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/internals/")])
def test_internals_pages_open_with_a_figure_and_keep_to_the_line_length(page: str) -> None:
    text = (ROOT / page).read_text()
    head = text.split("\n## ")[0]
    assert head.count("```") == 2, "no figure before the first section"
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_unknown_names_are_found() -> None:
    wrong = ["tierckpt/mover/copies.py", "Testament(1)", "TIERCKPT_SHELF"]
    assert unknown_names(f"see `{wrong[0]}`, `{wrong[1]}`, `{wrong[2]}`") == wrong
    assert unknown_names("see `tierckpt/client.py`, `Checkpointer`, `TIERCKPT_LOCAL_ROOT`") == []

"""Every public name has an example in its docstring, and every example runs, from a directory of its own."""

import doctest
import inspect
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import tierckpt

PUBLIC = {name: getattr(tierckpt, name) for name in tierckpt.__all__}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples_of(name: str) -> list[doctest.DocTest]:
    """Return the docstrings with examples of a public name and of its own public methods."""
    public = PUBLIC[name]
    found = [(name, inspect.getdoc(public) or "")]
    if inspect.isclass(public):
        methods = vars(public).items()
        found += [(f"{name}.{key}", inspect.getdoc(value) or "") for key, value in methods if not key.startswith("_")]
    names = {**PUBLIC, "tierckpt": tierckpt, "torch": torch, "dcp": dcp, "save_file": save_file, "pathlib": pathlib}
    parser = doctest.DocTestParser()
    return [parser.get_doctest(text, dict(names), where, None, 0) for where, text in found if ">>>" in text]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_of_a_public_name_run(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = examples_of(name)
    assert any(example.name == name for example in examples), f"the docstring of tierckpt.{name} has no example"
    for example in examples:
        assert len(example.examples) <= 8, f"the example of {example.name} is too long to be read"
        said: list[str] = []
        doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
        assert not said, "".join(said)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_method_says_what_it_does(name: str) -> None:
    public: Any = PUBLIC[name]
    if inspect.isclass(public):
        for key, value in vars(public).items():
            if not key.startswith("_") and (callable(value) or isinstance(value, property)):
                assert (value.__doc__ or "").strip(), f"tierckpt.{name}.{key} has no docstring"


def test_an_example_that_says_what_is_not_so_is_found() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=FLAGS).run(wrong, out=said.append).failed == 1
    assert said

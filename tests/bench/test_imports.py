"""The benchmarks outside CI use names of the package that exist."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "bench").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_imported_name_of_the_package_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tierckpt":
            try:
                found = import_module(str(node.module))
            except ModuleNotFoundError as error:
                if str(error.name).startswith("tierckpt"):
                    raise
                pytest.skip(f"{error.name} is not installed")
            for name in (alias.name for alias in node.names):
                assert hasattr(found, name) or import_module(f"{node.module}.{name}"), name

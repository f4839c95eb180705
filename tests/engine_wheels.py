"""The Python of released vLLM and SGLang, imported with everything heavy replaced, so that a changed contract is seen.

``TIERCKPT_TEST_WHEELS`` is a directory with their wheels (``vllm-*.whl``, ``sglang-*.whl``). Without it the newest
release is downloaded once, into the user's cache directory; a test is skipped, and says why, where that cannot be.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DOWNLOAD_SECONDS = 150


def load_plugin(group: str) -> None:
    """Call the entry point that pyproject.toml declares for ``group``, as an engine does."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, _, function = pyproject["project"]["entry-points"][group]["tierckpt"].partition(":")
    getattr(importlib.import_module(module), function)()


def wheel_python(name: str) -> Path:
    """Return a directory with the ``*.py`` of the newest wheel of ``name`` that is here, or skip the test."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tierckpt-test-wheels"
    wheels = Path(os.environ.get("TIERCKPT_TEST_WHEELS", cache))
    found = sorted(wheels.glob(f"{name}-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        found = [_download(name, cache)]
    target = cache / f"python-{found[-1].stem}"
    if not target.is_dir():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        with zipfile.ZipFile(found[-1]) as wheel:
            wheel.extractall(partial, [entry for entry in wheel.namelist() if entry.endswith(".py")])
        try:
            partial.rename(target)
        except OSError:  # another process of the tests was first
            shutil.rmtree(partial)
    return target


def _download(name: str, into: Path) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip3") or "pip"]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(into), name]
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        give_up = pytest.fail if os.environ.get("TIERCKPT_TEST_REQUIRE_FRAMEWORKS") == "1" else pytest.skip
        give_up(f"the wheel of {name} is not here: {reason}. Put it into the directory TIERCKPT_TEST_WHEELS")
    return max(into.glob(f"{name}-*.whl"), key=lambda path: path.stat().st_mtime)


@contextmanager
def imported(
    root: Path, real: Sequence[str], also_replaced: Sequence[str], values: Mapping[str, Any]
) -> Iterator[None]:
    """Make the package below ``root`` importable: ``real`` modules are from the wheel, the others are stand-ins.

    Args:
        real: modules, each with its submodules.
        also_replaced: packages that the engine needs, replaced if they are not installed.
        values: contents of replaced modules, by dotted name.
    """
    package = real[0].partition(".")[0]
    absent = [name for name in also_replaced if importlib.util.find_spec(name) is None]
    finder = _Finder(root, tuple(real), (package, *absent), values)
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in finder.packages:
                del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, real: tuple[str, ...], packages: tuple[str, ...], values: Mapping[str, Any]) -> None:
        self.root, self.real, self.packages, self.values = root, real, packages, values

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        if any(name == real or name.startswith(f"{real}.") for real in self.real):
            parent = self.root.joinpath(*name.split(".")[:-1])
            return importlib.machinery.PathFinder.find_spec(name, [str(parent)])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        for name, value in self.values.items():
            if name.rpartition(".")[0] == spec.name:
                setattr(module, name.rpartition(".")[2], value)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stand-in does nothing."""


class _StandIn(types.ModuleType):
    """A module that has every name: each is a class that can be a base, a decorator, an annotation, a call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _anything(name))
        return getattr(self, name)


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False  # an unset flag


def _anything(name: str) -> Any:
    members = {
        "__init__": lambda self, *_, **__: None,
        "__call__": lambda self, first=None, *_, **__: first,
        "__getattr__": lambda self, name: _anything(name)(),
        "__class_getitem__": classmethod(lambda cls, _: cls),
        "__len__": lambda self: 0,
        "__enter__": lambda self: self,
        "__exit__": lambda self, *_: None,
    }
    return _Anything(name, (), members)

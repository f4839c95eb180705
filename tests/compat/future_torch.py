"""A stand-in for a later torch: installed before torch is imported, it rewrites the source of DCP's metadata classes.

    python -m tests.compat.future_torch KIND VERB DIRECTORY

KIND   fields: each class has a further field with the value of the variable LATER at its construction
       enum:   the Enum of memory formats has a further member
       none:   torch as it is
VERB   save:   as torch_version.py does
       load:   load all that and print the metadata of the first two as JSON
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import sys
from pathlib import Path
from typing import Any

MODULES = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
FIELD = 'later: object = dataclasses.field(default_factory=lambda: (1, "two", None, 2.5, os.environ.get("LATER")))'
ENUM = """
_get, _set = TensorProperties.__getstate__, TensorProperties.__setstate__

def _getstate(self):
    if self.memory_format is not torch.channels_last_3d:
        return _get(self)
    state = list(_get(dataclasses.replace(self, memory_format=torch.contiguous_format)))
    state[3] = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST_3D
    return tuple(state)

def _setstate(self, state):
    state, is_later = list(state), state[3] is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST_3D
    if is_later:
        state[3] = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    _set(self, tuple(state))
    if is_later:
        self.memory_format = torch.channels_last_3d

TensorProperties.__getstate__, TensorProperties.__setstate__ = _getstate, _setstate
"""


class _Loader(importlib.machinery.SourceFileLoader):
    kind = ""

    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname)
        assert source is not None
        tree = ast.parse(source)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                _CHANGES[self.kind](node)
        at = next(place for place, node in enumerate(tree.body) if isinstance(node, ast.Import | ast.ImportFrom))
        tree.body[at + 1 : at + 1] = ast.parse("import dataclasses, os").body
        if self.kind == "enum" and fullname.endswith(".metadata"):
            tree.body += ast.parse(ENUM).body
        return compile(ast.unparse(ast.fix_missing_locations(tree)), self.path, "exec")


def _add_field(node: ast.ClassDef) -> None:
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    has_init = any(function.name == "__init__" for function in functions)
    node.body += ast.parse("later: object = dataclasses.field(init=False, compare=False)" if has_init else FIELD).body
    for function in functions:
        if function.name == "__init__":
            function.body += ast.parse('object.__setattr__(self, "later", (os.environ.get("LATER"),))').body
        if function.name == "__getstate__" and node.name == "TensorProperties":
            [answer] = [one for one in ast.walk(function) if isinstance(one, ast.Return)]
            assert isinstance(answer.value, ast.Tuple)
            count = len(answer.value.elts)
            answer.value.elts.append(ast.parse("self.later", mode="eval").body)
        if function.name == "__setstate__" and node.name == "TensorProperties":
            more = f"if len(state) > {count}:\n    *state, self.later = state\nelse:\n    self.later = None"
            function.body[:0] = ast.parse(more).body


def _add_member(node: ast.ClassDef) -> None:
    if node.name == "_MEM_FORMAT_ENCODING":
        node.body += ast.parse("TORCH_CHANNELS_LAST_3D = 3").body


_CHANGES = {"fields": _add_field, "enum": _add_member}


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in MODULES else None
        if spec is not None:
            spec.loader = _Loader(name, str(spec.origin))
        return spec


def load(directory: Path) -> None:
    import tierckpt
    from tests.compat import torch_version

    said = {}
    for name in ("ours", "stock"):
        reader = tierckpt.TierStorageReader(directory / name)
        torch_version.check_loaded(reader)
        meta = reader.read_metadata()
        entry: Any = meta.state_dict_metadata["plain"]
        index, place = next(iter((meta.storage_data or {}).items()))
        found = [meta, entry, entry.chunks[0], entry.properties, meta.state_dict_metadata["text"], place, index]
        said[name] = {type(one).__name__: getattr(one, "later", "none") for one in [*found, meta.storage_meta]}
    torch_version.check_restored(str(directory / "run"))
    print(json.dumps(said))


if __name__ == "__main__":
    _Loader.kind = sys.argv[1]
    if _Loader.kind != "none":
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    from tests.compat import torch_version

    {"save": torch_version.save, "load": load}[sys.argv[2]](Path(sys.argv[3]))

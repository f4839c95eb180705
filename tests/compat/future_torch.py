"""A stand-in for a later torch: installed before torch is imported, it rewrites the source of DCP's metadata classes.

    python -m tests.compat.future_torch KIND VERB DIRECTORY

KIND   fields: each class has a further field with the value of the variable LATER at its construction
       enum:   the Enum of memory formats has a further member
       none:   torch as it is
VERB   save:   DIRECTORY/ours and DIRECTORY/stock, and DIRECTORY/mine by Checkpointer
       load:   load all three and print the metadata of the first two as JSON
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import sys
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


def save(directory: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    import tierckpt

    state = {"w": torch.arange(12.0).reshape(3, 4), "n": {"b": torch.ones(2), "text": "x"}}
    dcp.save(state, storage_writer=tierckpt.TierStorageWriter(f"{directory}/ours"), no_dist=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{directory}/stock"), no_dist=True)
    model = torch.nn.Linear(3, 2)
    with tierckpt.Checkpointer(f"{directory}/mine") as checkpointer:
        checkpointer.save(1, {"model": model, "step": 1})


def load(directory: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    import tierckpt

    said = {}
    for name in ("ours", "stock"):
        reader = tierckpt.TierStorageReader(f"{directory}/{name}")
        into = {"w": torch.zeros(3, 4), "n": {"b": torch.zeros(2), "text": ""}}
        dcp.load(into, storage_reader=reader, no_dist=True)
        assert torch.equal(into["w"], torch.arange(12.0).reshape(3, 4)) and into["n"]["text"] == "x"  # type: ignore[index]
        meta = reader.read_metadata()
        entry: Any = meta.state_dict_metadata["w"]
        index, place = next(iter((meta.storage_data or {}).items()))
        found = [meta, entry, entry.chunks[0], entry.properties, meta.state_dict_metadata["n.text"], place, index]
        said[name] = {type(one).__name__: getattr(one, "later", "none") for one in [*found, meta.storage_meta]}
    model = torch.nn.Linear(3, 2)
    with tierckpt.Checkpointer(f"{directory}/mine") as checkpointer:
        assert checkpointer.restore({"model": model, "step": 0}) == 1
    print(json.dumps(said))


if __name__ == "__main__":
    _Loader.kind = sys.argv[1]
    if _Loader.kind != "none":
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    {"save": save, "load": load}[sys.argv[2]](sys.argv[3])

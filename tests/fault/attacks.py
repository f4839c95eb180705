"""Attacks on a process that opens a checkpoint: the bytes of each. ``test_attacks.py`` runs them.

Each attack names its effect on a trusting reader (``control``), so that an outdated corpus is noticed:
    runs      executes code, which creates a canary file
    dies      ends the process by a signal, or exhausts the memory
    pollutes  changes a class of torch in the reading process
    believed  is accepted as metadata
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@dataclass(frozen=True)
class Attack:
    """``make(canary, genuine)`` returns the bytes of ``.metadata``, or of an object's item."""

    name: str
    make: Callable[[Path, Metadata], bytes]
    match: str
    control: str = ""
    item: bool = False


# --- pickle programs --------------------------------------------------------------------------------------------


def program(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def shell(canary: Path) -> str:
    return f"touch {canary}"


def in_planner_data(value: Callable[[Path], Any]) -> Callable[[Path, Metadata], bytes]:
    def make(canary: Path, genuine: Metadata) -> bytes:
        genuine.planner_data = {**genuine.planner_data, "x": value(canary)}
        return pickle.dumps(genuine)

    return make


def raw(body: Callable[[Path], bytes] | bytes) -> Callable[[Path, Metadata], bytes]:
    return lambda canary, _: program(body if isinstance(body, bytes) else body(canary))


def pollution(kind: type, attribute: str, control: str = "pollutes") -> Attack:
    """BUILD with a state for slots sets attributes of the object on the stack: here a class."""
    state = b"N}" + text(attribute) + text("HACKED") + b"s\x86b"
    body = global_(kind.__module__, kind.__name__) + state
    return Attack(f"pollutes {kind.__name__}.{attribute}", raw(body), "sets the state of Class", control)


def called(module: str, name: str, *arguments: str) -> Callable[[Path], bytes]:
    """REDUCE of a global, by opcodes that no pickler writes."""
    return lambda canary: global_(module, name) + b"(" + b"".join(map(text, arguments or (shell(canary),))) + b"tR"


def stack_global(module: str, name: str) -> Callable[[Path], bytes]:
    return lambda canary: text(module) + text(name) + b"\x93(" + text(shell(canary)) + b"tR"


def metadata_with(opcodes: bytes) -> bytes:
    """A Metadata with only ``planner_data``, which ``opcodes`` create."""
    fields = text("state_dict_metadata") + b"}" + text("planner_data") + opcodes
    return global_(metadata.__name__, "Metadata") + b")\x81}(" + fields + b"ub"


def billion_laughs(levels: int = 60) -> Any:
    """Nested lists, each twice in the next: a full traversal visits the first 2**60 times."""
    value: Any = ["ha"]
    for _ in range(levels):
        value = [value, value]
    return value


PATHLIB = "pathlib" if hasattr(pathlib, "os") else "pathlib._local"
"""A module that Python's own paths are pickled with, and that imports ``os``."""

PICKLE_PROGRAMS = [
    Attack(
        "os.system in planner_data", in_planner_data(lambda canary: Call(os.system, shell(canary))), "system", "runs"
    ),
    Attack("eval", in_planner_data(lambda canary: Call(eval, f"open({str(canary)!r}, 'w')")), "builtins.eval", "runs"),
    Attack("exec", in_planner_data(lambda canary: Call(exec, f"open({str(canary)!r}, 'w')")), "builtins.exec", "runs"),
    Attack("open", in_planner_data(lambda canary: Call(open, str(canary), "w")), "'(_)?io.open'", "runs"),
    Attack("GLOBAL os.system", raw(called("os", "system")), "'os.system'", "runs"),
    Attack("STACK_GLOBAL os.system", raw(stack_global("os", "system")), "'os.system'", "runs"),
    Attack("dotted name through torch", raw(stack_global("torch", "os.system")), "'torch.os.system'", "runs"),
    Attack("dotted name through an allowed module", raw(stack_global(PATHLIB, "os.system")), "os.system", "runs"),
    Attack(
        "getattr of a module", raw(text("builtins") + text("getattr") + b"\x93" + global_("torch", "hub")), "torch.hub"
    ),
    Attack(
        "getattr of an allowed class",
        raw(global_("builtins", "getattr") + global_("pathlib", "PosixPath") + text("unlink") + b"\x86R"),
        "builtins.getattr",
        "believed",
    ),
    Attack("INST", raw(lambda canary: b"(" + text(shell(canary)) + b"ios\nsystem\n"), "opcode b'i'", "runs"),
    Attack("OBJ", raw(lambda canary: b"(" + global_("os", "system") + text(shell(canary)) + b"o"), "'os.system'"),
    Attack("NEWOBJ of a function", raw(global_("torch", "Size") + b")\x81"), "makes an instance of Function"),
    Attack("NEWOBJ_EX", raw(global_(metadata.__name__, "Metadata") + b")}\x92"), "opcode"),
    Attack("call of a class", raw(global_(metadata.__name__, "Metadata") + b")R"), "calls Class"),
    Attack("EXT1", raw(b"\x82\x01"), "opcode"),
    Attack("EXT4", raw(b"\x84\1\0\0\0"), "opcode"),
    Attack("PERSID", raw(b"Px\n"), "opcode b'P'"),
    Attack("BINPERSID", raw(b"NQ"), "opcode b'Q'"),
    Attack("out-of-band buffer", lambda *_: program(b"\x97", 5), "opcode"),
    Attack("BYTEARRAY8", lambda *_: program(b"\x96" + struct.pack("<Q", 1 << 62), 5), "opcode"),
    Attack("protocol 0", lambda canary, _: pickle.dumps(Call(os.system, shell(canary)), 0), "no pickle", "runs"),
    Attack("nothing at all", lambda *_: b"", "truncated"),
    Attack("text", lambda *_: b"<html>not found</html>", "no pickle"),
    Attack("a second pickle behind", lambda _, genuine: pickle.dumps(genuine) * 2, "goes on after", "believed"),
    Attack("cut short", lambda _, genuine: pickle.dumps(genuine)[:-3], "longer than the file"),
    Attack(
        "state twice", lambda _, g: program(pickle.dumps(g)[2:-1] + b"}b"), "sets the state of InertObject", "believed"
    ),
    Attack("item into a tuple", raw(b")" + text("a") + b"Ns"), "puts items into"),
    Attack("append to a dict", raw(b"}Na"), "appends to"),
    pollution(metadata.Metadata, "version"),
    pollution(metadata.MetadataIndex, "index"),
    pollution(metadata.TensorProperties, "pin_memory", ""),
    pollution(metadata.StorageMeta, "save_id"),
    pollution(metadata.BytesStorageMetadata, "__doc__"),
    pollution(filesystem._StorageInfo, "transform_descriptors"),
    pollution(OldTensorProperties, "requires_grad", ""),
]

BOMBS = [
    Attack("memo bomb", lambda *_: bytes.fromhex("80044e72ffffff0f2e"), "memo index", "dies"),
    Attack("memo bomb in steps", raw(b"Nq\0q\1r\xff\xff\xff\x0f"), "memo index", "dies"),
    Attack("BINBYTES8 of 8 EiB", raw(b"\x8e" + struct.pack("<Q", (1 << 63) - 1)), "opcode"),
    Attack("BINUNICODE8 of 1 TiB", raw(b"\x8d" + struct.pack("<Q", 1 << 40)), "opcode"),
    Attack("BINUNICODE of 4 GiB", raw(b"X\xff\xff\xff\xff"), "longer than the file"),
    Attack("BINBYTES of 4 GiB", raw(b"B\xff\xff\xff\xff"), "longer than the file"),
    Attack("SHORT_BINUNICODE beyond the end", lambda *_: b"\x80\x04\x8c\xffab.", "truncated"),
    Attack("LONG4 of 2 GiB", raw(b"\x8b\xff\xff\xff\x7f"), "opcode"),
    Attack("LONG1 of 255 bytes", raw(b"\x8a\xff" + b"\x7f" * 255), "integer of 255 bytes", "believed"),
    Attack("frame of 8 EiB", raw(b"\x95" + b"\xff" * 8 + metadata_with(b"N")), "longer than the file"),
    Attack("a million tuples deep as a key", raw(b"})" + b"\x85" * 1_000_000 + b"Ns"), "a key of a dict", "dies"),
    Attack("300,000 lists deep", raw(metadata_with(b"]" * 300_000 + b"a" * 299_999)), "nested", "believed"),
    Attack("a million marks", raw(b"(" * 1_000_000), "left over"),
    Attack("billion laughs", in_planner_data(lambda _: billion_laughs()), "over and over", "believed"),
    Attack("chunks of all tensors shared", lambda _, genuine: shared_chunks(genuine), "over and over", "believed"),
    Attack("a list that holds itself", in_planner_data(lambda _: self_containing_list()), "nested", "believed"),
]


def self_containing_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def shared_chunks(genuine: Metadata) -> bytes:
    """20,000 tensors that share a list of 20,000 chunks: 400 million checks from half a megabyte."""
    size = torch.Size([1])
    chunks = [metadata.ChunkStorageMetadata(torch.Size([0]), size)] * 20_000
    tensors = {str(index): TensorStorageMetadata(PROPERTIES, size, chunks) for index in range(20_000)}
    genuine.state_dict_metadata = tensors
    return pickle.dumps(genuine)


PROPERTIES = metadata.TensorProperties(dtype=torch.float32)


# --- invalid metadata -------------------------------------------------------------------------------------------


def changed(change: Callable[[Metadata], Any]) -> Callable[[Path, Metadata], bytes]:
    def make(_: Path, genuine: Metadata) -> bytes:
        change(genuine)
        return pickle.dumps(genuine)

    return make


def place(**changes: Any) -> Callable[[Path, Metadata], bytes]:
    """Change the place of every item."""
    return changed(lambda genuine: [set_(info, **changes) for info in genuine.storage_data.values()])


def tensor(change: Callable[[Any], Any]) -> Callable[[Path, Metadata], bytes]:
    return changed(lambda genuine: change(genuine.state_dict_metadata["weight"]))


def set_(target: Any, **values: Any) -> None:
    vars(target).update(values)


PATHS = ["/etc/passwd", "../../etc/passwd", "a/../../b", "./x", "a//b", "", "a\\..\\b", "a\0b", "..", "x/"]
INVALID_METADATA = [
    *(Attack(f"path {path!r}", place(relative_path=path), "path", "believed") for path in PATHS),
    Attack("path that is no string", place(relative_path=7), "path", "believed"),
    Attack("offset -5", place(offset=-5), "number from 0", "believed"),
    Attack("length '9'", place(length="9"), "number from 0", "believed"),
    Attack("length True", place(length=True), "number from 0", "believed"),
    Attack("transforms that are no strings", place(transform_descriptors=[1]), "not made of strings", "believed"),
    Attack("transforms that are a number", place(transform_descriptors=1), "not a list", "believed"),
    Attack("item beyond its file", place(offset=1 << 40), "should end at byte", "believed"),
    Attack("item shorter than its tensor", place(length=10), "needs 64 bytes", "believed"),
    Attack("2**60 elements", tensor(lambda t: set_(t, size=torch.Size([1 << 60]))), "elements", "believed"),
    Attack(
        "2**62 by 2**62 elements", tensor(lambda t: set_(t, size=torch.Size([1 << 62] * 2))), "elements", "believed"
    ),
    Attack("size with -1", tensor(lambda t: set_(t, size=Call(torch.Size, (-1,)))), "numbers from 0", "believed"),
    Attack("size that is a tuple", tensor(lambda t: set_(t, size=(4, 4))), "a size of weight", "believed"),
    Attack("chunk outside", tensor(lambda t: set_(t.chunks[0], offsets=torch.Size([1, 0]))), "outside", "believed"),
    Attack(
        "chunk of 1 dimension", tensor(lambda t: set_(t.chunks[0], sizes=torch.Size([4]))), "dimensions", "believed"
    ),
    Attack("chunks that do not fill", tensor(lambda t: set_(t, size=torch.Size([4000, 4]))), "do not fill", "believed"),
    Attack("chunks that are a tuple", tensor(lambda t: set_(t, chunks=())), "no list of chunks", "believed"),
    Attack("chunk that is a dict", tensor(lambda t: set_(t, chunks=[{}])), "ChunkStorageMetadata belongs", "believed"),
    Attack("tensor with more that is no data", tensor(lambda t: set_(t, more=[1])), "not plain data", "believed"),
    Attack("tensor with more that is long", tensor(lambda t: set_(t, more=(1,) * 65)), "not plain data", "believed"),
    Attack("tensor with more that is a class", tensor(lambda t: set_(t, __class__=1)), "no class can", "believed"),
    Attack("tensor without size", tensor(lambda t: vars(t).pop("size")), "has no size", "believed"),
    Attack("properties that are text", tensor(lambda t: set_(t, properties="x")), "properties of a tensor", "believed"),
    Attack("entry that is text", changed(lambda m: m.state_dict_metadata.update(x="y")), "belongs", "believed"),
    Attack(
        "name that is a number", changed(lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()})), "a name"
    ),
    Attack("entries that are a list", changed(lambda m: set_(m, state_dict_metadata=[])), "not a dict", "believed"),
    Attack("places that are a list", changed(lambda m: set_(m, storage_data=[1])), "not a dict", "believed"),
    Attack("place of a string", changed(lambda m: m.storage_data.update(x=1)), "MetadataIndex belongs", "believed"),
    Attack("place that is a number", changed(lambda m: m.storage_data.update({MetadataIndex("a"): 1})), "belongs"),
    Attack(
        "index with an odd offset",
        changed(lambda m: m.storage_data.update({index("a", offset="b"): 1})),
        "offset of a is no size",
        "believed",
    ),
    Attack(
        "id that is a number", changed(lambda m: set_(m.storage_meta, checkpoint_id=3)), "id is no path", "believed"
    ),
    Attack("version that is a list", changed(lambda m: set_(m, version=[])), "version is not", "believed"),
    Attack(
        "path made of a number",
        changed(lambda m: set_(m.storage_meta, checkpoint_id=Call(type(Path()), 3))),
        "of strings",
    ),
    Attack("layout that is none", changed(lambda m: set_(m, version=Call(layout_of, "torch.os"))), "layout", ""),
    Attack(
        "memory format 9", changed(lambda m: set_(m, version=Call(metadata._MEM_FORMAT_ENCODING, 9))), "no member of"
    ),
    Attack("list of 2**40 items", in_planner_data(lambda _: ("x", 1 << 40)), "list of", "believed"),
    Attack("list position -1", in_planner_data(lambda _: ("x", -1)), "list of", "believed"),
    Attack("many long lists", changed(lambda m: set_(m, planner_data=long_lists())), "has lists of", "believed"),
    Attack("index in planner_data", in_planner_data(lambda _: MetadataIndex("a")), "more than plain data", "believed"),
    Attack(
        "index as a key of planner_data", in_planner_data(lambda _: {MetadataIndex("a"): 1}), "a key of", "believed"
    ),
    Attack("tuple as a key", in_planner_data(lambda _: {("a",): 1}), "a key of a dict", "believed"),
]
layout_of = torch.serialization._get_layout


def index(fqn: str, **fields: Any) -> MetadataIndex:
    made = MetadataIndex(fqn)
    vars(made).update(fields)
    return made


def long_lists() -> dict[str, Any]:
    return {str(number): (str(number), 60_000) for number in range(40)}


# --- items ------------------------------------------------------------------------------------------------------


def torch_saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def saved_call(canary: Path, **options: Any) -> bytes:
    return torch_saved(Call(os.system, shell(canary)), **options)


def archive(*pickles: bytes) -> bytes:
    """A torch archive. With two pickles of one name, readers differ in the one that they take."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for content in pickles:
            made.writestr("archive/data.pkl", content)
        made.writestr("archive/byteorder", b"little")
        made.writestr("archive/version", b"3\n")
    return stream.getvalue()


def script() -> bytes:
    class Adds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(Adds(), torch.ones(1)), stream)
    return stream.getvalue()


def evil_pickle(canary: Path) -> bytes:
    return pickle.dumps(Call(os.system, shell(canary)), 2)


def polluted_instance() -> bytes:
    state = pickle.dumps({"__reduce_ex__": torch.Size}, 2)[2:-1]
    return archive(b"\x80\x02ccollections\nOrderedDict\n)R" + state + b"b.")


BENIGN = pickle.dumps(7, 2)
ITEMS = [
    Attack("os.system in an item", lambda canary, _: saved_call(canary), "system", "runs", item=True),
    Attack(
        "os.system in an item of the old format",
        lambda canary, _: saved_call(canary, _use_new_zipfile_serialization=False),
        "system",
        "runs",
        item=True,
    ),
    Attack("a bare pickle as an item", lambda canary, _: evil_pickle(canary), "system", "runs", item=True),
    Attack("a bare pickle of protocol 4", lambda c, _: pickle.dumps(Call(os.system, shell(c))), "", "runs", item=True),
    Attack(
        "eval in an item", lambda c, _: torch_saved(Call(eval, f"open({str(c)!r}, 'w')")), "eval", "runs", item=True
    ),
    Attack("TorchScript archive", lambda *_: script(), "TorchScript", "", item=True),
    Attack("good and evil under one name", lambda c, _: archive(BENIGN, evil_pickle(c)), "", "", item=True),
    Attack("evil and good under one name", lambda c, _: archive(evil_pickle(c), BENIGN), "", "runs", item=True),
    Attack("bytearray of 1 TiB", lambda *_: torch_saved(Call(bytearray, 1 << 40)), "MemoryError", "dies", item=True),
    Attack("instance that says how it pickles", lambda *_: polluted_instance(), "written again", "", item=True),
    Attack("an item that is nothing", lambda *_: b"", "cannot read it", "", item=True),
    Attack("an item that is noise", lambda *_: bytes(range(256)), "cannot read it", "", item=True),
]
CORPUS = [*PICKLE_PROGRAMS, *BOMBS, *INVALID_METADATA, *ITEMS]

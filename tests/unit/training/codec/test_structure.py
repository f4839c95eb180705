"""A training state, encoded as text and tensors, decodes to equal types and values (V1 to V4)."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import io
import json
import math
import pathlib
import types
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.exact import check_same
from tierckpt.errors import StateMismatchError, UnsafeCheckpointError
from tierckpt.training.codec import job_state as states
from tierckpt.training.codec import reconstruction
from tierckpt.training.codec.reconstruction import Decoder
from tierckpt.training.codec.structure import DEPTH_MAX, Encoder


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Mode(enum.Flag):
    FAST = 1
    SAFE = 2


class Level(enum.IntEnum):
    LOW = 3


@dataclasses.dataclass
class Meter:
    total: float
    history: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.made_by_init = True


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    at: int
    table: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Finalized:
    path: str

    def __del__(self) -> None: ...


@dataclasses.dataclass
class Failure(Exception):
    why: str


def round_trip(value: Any, live: Any = None) -> Any:
    """Return ``value`` encoded and decoded, without a checkpoint."""
    return restored(states.collect({"x": value}), live)


def restored(saved: dict[str, Any], live: Any = None) -> Any:
    flat, _ = flatten_state_dict(saved)
    entries: dict[str, Any] = {}
    for name, item in flat.items():
        entries[name] = BytesStorageMetadata()
        if isinstance(item, torch.Tensor):
            chunk = ChunkStorageMetadata(torch.Size([0] * item.dim()), item.shape)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=item.dtype), item.shape, [chunk])
    decoder = Decoder(flat["__tierckpt__.state.x"], Metadata(entries), lambda: live)
    for name, tensor in decoder.tensors.items():
        with torch.no_grad():
            tensor.copy_(flat[name])
    decoder.finish()
    return decoder.value


# --- the property -----------------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.floats(),
    st.complex_numbers(allow_nan=False),
)
texts = st.text(st.characters(exclude_categories=()), max_size=5)
times = st.one_of(
    st.datetimes(timezones=st.none() | st.just(datetime.UTC) | st.just(zoneinfo.ZoneInfo("UTC"))),
    st.dates(),
    st.times(),
    st.timedeltas(),
)
members = st.sampled_from([Colour.RED, Colour.BLUE, Level.LOW, Mode.FAST, Mode.FAST | Mode.SAFE, Mode(0)])
dtypes = st.sampled_from(["<f4", ">f8", "<i8", "|b1", "<U3", "|S2", "<M8[s]", "<c8", "|u1", "<f2"])


@st.composite
def arrays(draw: Callable[[Any], Any]) -> Any:
    dtype = np.dtype(draw(dtypes))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind in "bUSM":
        data = bytes(count * dtype.itemsize)
    array = np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    return array if draw(st.booleans()) else np.asfortranarray(array)


tensors = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape, dtype=dtype))
)
plain_keys = st.one_of(
    st.integers(), texts, st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(max_size=4)
)
keys = st.one_of(plain_keys, members, times, st.tuples(plain_keys, plain_keys), st.frozensets(plain_keys, max_size=2))
leaves = st.one_of(
    numbers,
    texts,
    times,
    members,
    st.binary(max_size=9),
    st.binary(max_size=9).map(bytearray),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), range(4), slice(1, None)]),
    st.sampled_from([pathlib.Path("/a"), pathlib.PureWindowsPath("c:/b"), np.float64(2.5), np.int8(-1), np.str_("é")]),
    st.frozensets(keys, max_size=3),
    arrays(),
    tensors,
)


def containers(inner: Any) -> Any:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(keys, inner, max_size=4)
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.lists(numbers, max_size=6),
        lists.map(lambda items: collections.deque(items, maxlen=7)),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.sets(keys, max_size=3),
        named.map(lambda fields: argparse.Namespace(**fields)),
        named.map(lambda fields: types.SimpleNamespace(**fields)),
        st.builds(Meter, numbers, lists),
        st.builds(Place, st.integers(), inner),
        st.builds(Pair, inner, inner),
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(leaves, containers, max_leaves=20))
def test_round_trip_preserves_types_and_values(value: Any) -> None:
    check_same(value, round_trip(value))


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b", False: "c", None: "d", (1, 2): "e", 2.5: "f", Colour.RED: "g"},
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {1: torch.zeros(2), "1": torch.ones(2), "rest": torch.ones(1)},
        [[], {}, (), set(), "", b"", [[]], {"a": {}}],
        ["\ud83d\ude00", "\ud800", {"\udfff": "\ud83d\ude00"}, "😀"],
        [-0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
        [1 << 63, -(1 << 63), (1 << 63) - 1, 1 << 20_000, [1, 1 << 64]],
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.timezone(datetime.timedelta(hours=-3), "somewhere"),
        np.array([(1, (2.5, 3.5))], dtype=[("count", "<i4"), ("values", "<f8", (2,))]),
        np.array([{1: 2}, None, torch.ones(2)], dtype=object),
        np.asfortranarray(np.random.rand(120, 90)),
        np.random.rand(120, 90)[::2, ::3],
        np.zeros((0, 4)),
        [np.float32(1.5), np.datetime64("2024-01-01"), np.bool_(True), np.bytes_(b"x"), np.dtype("<f4")],
        torch.nn.Parameter(torch.ones(2)),
        [torch.ones(2, requires_grad=True), torch.tensor(3), torch.zeros(0, 2)],
        torch.channels_last,
        (torch.channels_last, 1),
        io.BytesIO(b"abc"),
        torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).state_dict(),
        collections.defaultdict(None, {1: 2}),
        {1 << 20_000: torch.ones(1)},
        [Decimal("1.20"), Decimal("NaN")],
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip_of_edge_cases(value: Any) -> None:
    check_same(value, round_trip(value))


def test_state_dict_attributes_are_restored() -> None:
    state = torch.nn.BatchNorm1d(1).state_dict()
    assert round_trip(state)._metadata == state._metadata  # private: torch's metadata of a module's state


def test_generators_are_restored_in_place() -> None:
    generator, live = torch.Generator().manual_seed(7), torch.Generator()
    made = round_trip({"g": [generator]}, {"g": [live]})
    assert made["g"][0] is live
    assert torch.equal(torch.rand(3, generator=live), torch.rand(3, generator=generator))
    assert isinstance(round_trip(generator), torch.Generator)


def test_other_programs_see_the_layout_of_dcp() -> None:
    state = {"a": {1: torch.ones(1), "b": [torch.ones(2), 3]}, "pair": (torch.ones(3), "x"), "n": 5, "list": [1, 2]}
    flat, _ = flatten_state_dict(states.collect(state))
    assert [name for name in flat if not name.startswith("__tierckpt__")] == [
        *("a.1", "a.b.0", "a.b.1", "pair.0", "pair.1", "n", "list")
    ]


def test_large_arrays_are_stored_as_tensors() -> None:
    saved = states.collect({"x": {"buffer": np.arange(100_000.0)}})
    assert saved["x"]["buffer"].nbytes == 800_000
    assert len(saved["__tierckpt__"]["state"]["x"]) < 200


# --- values that a save rejects because they cannot be restored ------------------------------------------------------


def local_class() -> Any:
    class Inner(enum.Enum):
        ONE = 1

    return Inner.ONE


def within_itself() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


class Attributes(dict[str, Any]):
    pass


UNSUPPORTED: list[tuple[str, Any]] = [
    ("builtins.function", lambda: 0),
    ("functools.partial", functools.partial(print, 1)),
    ("builtins.builtin_function", len),
    ("builtins.type", int),
    ("Attributes", Attributes(a=1)),
    ("object", object()),
    ("__del__|its own code", Finalized("/tmp")),
    ("its own code", Failure("x")),
    ("no module has by that name", local_class()),
    ("contains itself", within_itself()),
    ("nested more than", functools.reduce(lambda inner, _: [inner], range(DEPTH_MAX + 1), [])),
    ("sparse_coo", torch.eye(2).to_sparse()),
    ("qint8; only dense", torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)),
    ("Linear, which needs its own name", torch.nn.Linear(1, 1)),
    ("default_factory", collections.defaultdict(lambda: 0)),
    ("time zone", datetime.datetime(2024, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {})())),
    ("numpy", np.ma.array([1])),
    ("key or a member", {torch.ones(1): 1}),
    ("key or a member", {Place(1)}),
    ("generator", (number for number in ())),
]


@pytest.mark.parametrize(
    ("why", "value"), UNSUPPORTED, ids=[f"{index}-{why}" for index, (why, _) in enumerate(UNSUPPORTED)]
)
def test_unsupported_values_are_rejected_by_name(why: str, value: Any) -> None:
    with pytest.raises(StateMismatchError, match=why) as caught:
        states.collect({"job": {"inner": [0, value]}})
    assert "'job.inner.1" in caught.value.message


def test_entry_names_are_strings_and_not_reserved() -> None:
    for name in (1, "__tierckpt__"):
        with pytest.raises(StateMismatchError, match="is named"):
            states.collect({name: 1})  # type: ignore[dict-item]


# --- decoding runs no code -------------------------------------------------------------------------------------------

_ran: list[Any] = []


@dataclasses.dataclass
class Gadget:
    path: str = ""

    def __init__(self, *_: Any) -> None:
        _ran.append("init")

    def __post_init__(self) -> None:
        _ran.append("post_init")

    def __setattr__(self, name: str, value: Any) -> None:
        _ran.append(name)

    def __hash__(self) -> int:
        _ran.append("hash")
        return 1


def decode(node: Any) -> Any:
    return Decoder(json.dumps(node), Metadata({}), lambda: None).value


def test_no_code_of_a_dataclass_runs() -> None:
    made = decode({"dataclass": [__name__, "Gadget", {"dict": {"path": "/x", "more": 1}}]})
    assert vars(made) == {"path": "/x", "more": 1}
    assert type(made) is Gadget
    with pytest.raises(UnsafeCheckpointError, match="is a key"):
        decode({"set": [{"dataclass": [__name__, "Gadget", {"dict": {}}]}]})
    assert not _ran


MALICIOUS: list[Any] = [
    {"dataclass": ["subprocess", "Popen", {"dict": {}}]},
    {"dataclass": [__name__, "Finalized", {"dict": {"path": "/"}}]},
    {"dataclass": [__name__, "Failure", {"dict": {"why": "x"}}]},
    {"enum": ["os", "system", "x"]},
    {"enum": [__name__, "Meter", "x"]},
    {"namedtuple": ["builtins", "list", [1]]},
    {"flags": [__name__, "Colour", ["RED"]]},
    {"defaultdict": ["eval", {"dict": {}}]},
    {"deque": [1]},
    {"ndarray": ["|O", [1], "C", "AAAAAAAAAAA="]},
    {"ndarray": ["<f8", [1 << 40], "C", ""]},
    {"numpy": ["O", ""]},
    {"bytes": "?"},
    {"path": ["Popen", "x"]},
    {"dtype": "torch.save"},
    {"timezone": "../../etc/passwd"},
    {"tensor": ["nowhere", "", False]},
    {"function": "print"},
    {"dict": {}, "map": []},
    {"map": [[[1], 2]]},
    {"set": [{"bytearray": "AA=="}]},
    {"map": [[{"int": format(number * ((1 << 61) - 1), "x")}, 0] for number in range(1, 200)]},
    functools.reduce(lambda inner, _: {"tuple": [inner]}, range(220), 1),
]


@pytest.mark.parametrize("node", MALICIOUS, ids=lambda node: next(iter(node)))
def test_malicious_encodings_are_rejected(node: Any) -> None:
    with pytest.raises((UnsafeCheckpointError, StateMismatchError)):
        decode(node)


def test_invalid_text_is_rejected() -> None:
    for text in ("", "{", "[" * 5000, '{"int": "z"}', 5, None, b"1"):
        with pytest.raises(UnsafeCheckpointError):
            if Decoder(text, Metadata({}), lambda: None).value == 1:
                raise UnsafeCheckpointError("bytes are text to json")


def test_errors_name_a_class_that_is_not_imported() -> None:
    for module in ("wave_that_nobody_imports", "wsgiref.handlers"):
        with pytest.raises(StateMismatchError, match=f"{module}.Thing, which this process has not imported"):
            decode({"enum": [module, "Thing", "A"]})


def test_shared_tensors_are_decoded_once() -> None:
    stored = TensorStorageMetadata(TensorProperties(), torch.Size([1 << 20]), [])
    text = json.dumps([{"tensor": ["w", "", False]}] * 2)
    with pytest.raises(UnsafeCheckpointError, match="named twice"):
        Decoder(text, Metadata({"w": stored}), lambda: None)


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_accelerator_tensors_return_to_an_accelerator(has_accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies if the live object has no value there. ``meta`` represents the accelerator."""
    monkeypatch.setattr(reconstruction, "has_device", lambda kind: has_accelerator and kind == "meta")
    stored = TensorStorageMetadata(TensorProperties(), torch.Size([4]), [])
    text = json.dumps([{"tensor": ["w", "", False, "meta"]}, {"tensor": ["x", "", False]}])
    decoder = Decoder(text, Metadata({"w": stored, "x": stored}), lambda: None)
    assert [one.device.type for one in decoder.value] == ["meta" if has_accelerator else "cpu", "cpu"]
    decoder = Decoder(text, Metadata({"w": stored, "x": stored}), lambda: [torch.ones(4, device="cpu"), None])
    assert decoder.value[0].device.type == "cpu", "the live object decides"


def test_the_device_of_a_tensor_is_recorded() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    tensor = torch.ones(2, device=accelerator or "cpu")
    node, _ = Encoder("").encode(tensor, ("x",))
    assert node == {"tensor": ["x", "", False, *([accelerator.type] if accelerator else [])]}

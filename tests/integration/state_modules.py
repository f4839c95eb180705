"""Modules as users and libraries write them, for the table of training states."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.integration.state_objects import Int8State


def _stream(history: list[float]) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(history, stream)
    stream.seek(0)
    return stream


EXTRA_STATES: dict[str, tuple[Callable[[list[float]], Any], Callable[[Any], list[float]]]] = {
    "uint8 tensor": (
        lambda history: torch.frombuffer(bytearray(pickle.dumps(history)), dtype=torch.uint8).clone(),
        lambda state: pickle.loads(bytes(state.tolist())),
    ),
    "BytesIO": (_stream, lambda state: torch.load(io.BytesIO(state.getvalue()))),
    "dict": (
        lambda history: {"amax": torch.tensor(history), "count": len(history), 3: ("a", None)},
        lambda state: state["amax"].tolist() if (state["count"], state[3]) == (len(state["amax"]), ("a", None)) else [],
    ),
    "None at first": (
        lambda history: {"amax": torch.tensor(history)} if history else None,
        lambda state: state["amax"].tolist() if state else [],
    ),
    "tensor at first": (
        lambda history: list(history) if history else torch.zeros(1),
        lambda state: state if isinstance(state, list) else [],
    ),
    "list": (lambda history: [torch.tensor(one) for one in history], lambda state: [one.item() for one in state]),
    "bytes": (pickle.dumps, pickle.loads),
}
"""What becomes of a history of numbers in an extra state, and back."""


class Extra(nn.Module):
    """Keeps a growing history, as fp8 recipes do, and returns it as extra state in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.to_state, self.from_state = EXTRA_STATES[form]
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(float(x.detach().abs().max()))
        return x * self.weight

    def get_extra_state(self) -> Any:
        return self.to_state(self.history)

    def set_extra_state(self, state: Any) -> None:
        self.history = self.from_state(state)


BUFFERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float8": lambda _: torch.randn(5).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda _: torch.randn(5).to(torch.float8_e5m2),
    "bool": lambda _: torch.rand(7) > 0.5,
    "int8": lambda _: torch.randint(-9, 9, (3,), dtype=torch.int8),
    "uint16": lambda _: torch.randint(0, 60000, (3,), dtype=torch.int32).to(torch.uint16),
    "int64": lambda _: torch.randint(0, 1 << 40, (2, 2)),
    "complex64": lambda _: torch.randn(3, dtype=torch.complex64),
    "float16": lambda _: torch.randn(3).half(),
    "scalar": lambda _: torch.randn(()),
    "nan": lambda _: torch.full((3,), float("nan")) * torch.randn(3).sign(),
    "empty": lambda _: torch.empty(0, 3),
    "whole": lambda base: base,
    "rows": lambda base: base[1:3],
    "column": lambda base: base[:, 2],
    "float8_e8m0": lambda _: torch.rand(5).to(torch.float8_e8m0fnu),
    "bfloat16": lambda _: torch.randn(3).bfloat16(),
    "uint32": lambda _: torch.randint(0, 1 << 20, (3,)).to(torch.uint32),
    "uint64": lambda _: torch.randint(0, 1 << 40, (3,)).to(torch.uint64),
    "complex128": lambda _: torch.randn(3, dtype=torch.complex128),
    "complex32": lambda _: torch.randn(3, 2).half().view(torch.complex32).squeeze(-1),
    "conjugated": lambda _: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda _: torch.randn(3, dtype=torch.complex64).conj().imag,
    "subclass": lambda _: Int8State.of(torch.randn(3, 5)),
    "sparse": lambda _: torch.eye(3).mul(torch.rand(1)).to_sparse(),
    "quantized": lambda _: torch.quantize_per_tensor(torch.randn(3), float(torch.rand(1)) + 0.1, 3, torch.qint8),
    "transposed": lambda _: torch.randn(3, 4).t(),
    "expanded": lambda _: torch.randn(1).expand(4),
}
"""Buffers of each kind; three of them share the storage of one tensor."""


class Buffers(nn.Module):
    """A linear layer and some of ``BUFFERS``."""

    def __init__(self, names: Iterable[str], persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        base = torch.randn(4, 6)
        for name in names:
            self.register_buffer(f"of_{name}", BUFFERS[name](base), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Tied(nn.Module):
    """Embedding and head share one parameter."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding((x[:, 0].abs() * 3).long() % 9))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding((x[:, 0].abs() * 3).long() % 9)


class Branches(nn.Module):
    """Trains its left branch for four steps, then its right one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return (self.left if self.steps < 5 else self.right)(self.first(x))


class Renaming(nn.Module):
    """Loads checkpoints that use the old name of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(f"{prefix}proj.")]:
            state_dict[key.replace("proj.", "projection.")] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Versioned(nn.Module):
    """Converts the negated weights of its version 1, as BatchNorm checks the version of its state."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.found: Any = "nothing loaded"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 3:
            state_dict[f"{prefix}weight"] = -state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Queue(nn.Module):
    """A buffer with one row for each input; loading resizes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, x.detach()[:2]])
        return self.linear(x)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.rows = self.rows.new_empty(state_dict[prefix + "rows"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Adapter(nn.Module):
    """Saves only its adapter, as LoRA libraries do, and loads it with ``strict=False``."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x) + self.adapter(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        whole = super().state_dict(*args, **options)
        return {key: value for key, value in whole.items() if "backbone" not in key}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class Mixed(nn.Module):
    """A hook adds numbers, strings and lists to its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {"count": 0, "names": []}
        self.loads = 0
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)
        self.register_load_state_dict_post_hook(self._count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"count": self.seen["count"] + 1, "names": [*self.seen["names"], f"step {self.seen['count']}"]}
        return self.linear(x)

    @staticmethod
    def _add(module: Any, state_dict: Any, prefix: str, _: Any) -> None:
        state_dict[f"{prefix}count"] = module.seen["count"]
        state_dict[f"{prefix}names"] = list(module.seen["names"])
        state_dict[f"{prefix}where"] = {"device": "cpu", 1: torch.arange(module.seen["count"])}
        state_dict[f"{prefix}scaled"] = state_dict.pop(f"{prefix}linear.weight") * 2

    @staticmethod
    def _take(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        module.seen = {key: state_dict.pop(f"{prefix}{key}") for key in ("count", "names")}
        assert len(state_dict.pop(f"{prefix}where")[1]) == module.seen["count"]
        state_dict[f"{prefix}linear.weight"] = state_dict.pop(f"{prefix}scaled") / 2

    @staticmethod
    def _count(module: Any, _: Any) -> None:
        module.loads += 1
        assert module.loads == 1


class Nested(nn.Module):
    """Saves and loads a nested state dict, as pipelines of diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [*self.seen, x.detach()[0].clone()]
        return self.linear(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"linear": super().state_dict(*args, **options), "seen": list(self.seen), "count": len(self.seen)}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state_dict["seen"]
        assert state_dict["count"] == len(self.seen)
        return super().load_state_dict(state_dict["linear"], strict, assign)


class Recurrent(nn.Module):
    """An LSTM, which keeps references to its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class OneParameter(nn.Module):
    """Scales the input by one parameter of this shape and dtype."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))
        self.other = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum() * self.other


class ListsAndDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.dict = nn.ParameterDict({"a": torch.randn(4), "b-c": torch.randn(4)})
        self.modules_by_name = nn.ModuleDict({"0": nn.Linear(4, 4), "weight": nn.ModuleList([nn.Linear(4, 4)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.modules_by_name["weight"][0](self.modules_by_name["0"](x))
        return x * self.list[0] + self.list[1] + self.dict["a"] * self.dict["b-c"]


class WithExtra(nn.Linear):
    """The keys of a linear layer, plus extra state."""

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"a": 1}

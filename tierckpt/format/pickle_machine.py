"""Interprets the part of the pickle language used by ``.metadata``. It is not an unpickler.

It makes numbers, strings, containers, constants from its caller's table, and inert records. It cannot import, call
anything but the caller's functions, or set an attribute.

Invariants (tests cite them):
    S1  Only globals in the caller's exact table exist. All others are rejected by name.
    S2  Memory and time are linear in the data's length (at worst 75 bytes per byte).
    S3  No hash, comparison or recursion reaches a nested value: dict keys are strings, integers, records, or objects
        that the caller's functions made as keys.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

MARK, STOP, REDUCE, BUILD, APPEND, SETITEM, APPENDS, SETITEMS = b"(.Rbaseu"
EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT, TUPLE = b")]}t"
BININT, BININT1, BININT2, BINGET, LONG_BINGET = b"JKMhj"
CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
PROTO, NEWOBJ, TUPLE1, TUPLE2, TUPLE3, SHORT_BINUNICODE, MEMOIZE = b"\x80\x81\x85\x86\x87\x8c\x94"
NEW_WITH_STATE = bytes((NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK))
CALL = bytes((MEMOIZE, REDUCE, MEMOIZE))
PROTOCOLS = range(2, 6)


class RefusedPickle(Exception):
    def __init__(self, reason: str, wanted: str = "") -> None:
        super().__init__(reason)
        self.global_name = wanted


class Function:
    """A caller's function that the data may call. It must check its arguments: the data chooses them."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class Class(Function):
    __slots__ = ("name",)

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        super().__init__(call or self._refuse)
        self.name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise RefusedPickle(f"it calls Class {self.name}")


class InertObject:
    __slots__ = ("kind", "state")

    def __init__(self, kind: Class) -> None:
        self.kind = kind
        self.state: Any = None


Globals = Mapping[tuple[str, str], Any]

KEYS = frozenset({str, int, InertObject})
_unpack_double = struct.Struct(">d").unpack_from
_unpack_int = struct.Struct("<i").unpack_from
_unpack_unsigned = struct.Struct("<I").unpack_from
_unpack_long = struct.Struct("<Q").unpack_from


def run(data: bytes, known: Globals, keys: Iterable[type] = ()) -> Any:
    """Return the value that ``data`` describes.

    ``keys``: types that may be dict keys. Raises RefusedPickle. Cost: 0.13 us an opcode.
    """
    try:
        return PickleMachine(data, known, keys).run()
    except RefusedPickle:
        raise
    except (IndexError, struct.error):
        raise RefusedPickle("it is truncated, or uses a value that was never stored") from None
    except Exception as error:
        raise RefusedPickle(f"{type(error).__name__}: {error}") from error


class PickleMachine:
    __slots__ = ("data", "keys", "known", "memo", "texts")

    def __init__(self, data: bytes, known: Globals, keys: Iterable[type]) -> None:
        self.data = data
        self.known = known
        self.keys = frozenset(keys)
        self.memo: list[Any] = []
        self.texts: dict[str, str] = {}

    def run(self) -> Any:
        """One loop, frequent opcodes first: calls would take three times as long."""
        data, memo = self.data, self.memo
        stack: list[Any] = []
        outer: list[list[Any]] = []
        if data[0] != PROTO or data[1] not in PROTOCOLS:
            raise RefusedPickle("it is no pickle of protocol 2 to 5")
        position = 2
        while True:
            op = data[position]
            position += 1
            if op == MEMOIZE:
                memo.append(stack[-1])
            elif op == LONG_BINGET:
                stack.append(memo[_unpack_unsigned(data, position)[0]])
                position += 4
            elif op == BINGET:
                stack.append(memo[data[position]])
                position += 1
            elif op == TUPLE3:
                last, middle = stack.pop(), stack.pop()
                arguments = (stack[-1], middle, last)
                if data[position : position + 3] == CALL:  # four opcodes as one
                    del stack[-1]
                    made = _call(stack[-1], arguments)
                    memo += (arguments, made)
                    stack[-1] = made
                    position += 3
                else:
                    stack[-1] = arguments
            elif op == EMPTY_TUPLE:
                if data[position : position + 5] == NEW_WITH_STATE:  # six opcodes as one
                    record = _new(stack[-1], ())
                    state: Any = {}
                    memo += (record, state)
                    stack[-1] = record
                    stack.append(state)
                    outer.append(stack)
                    stack = []
                    position += 5
                else:
                    stack.append(())
            elif op == SETITEMS:
                items, stack = stack, outer.pop()
                self._set_items(stack[-1], items)
                if data[position] == BUILD:
                    state = stack.pop()
                    _build(stack[-1], state)
                    position += 1
            elif op == REDUCE:
                arguments = stack.pop()
                stack[-1] = _call(stack[-1], arguments)
            elif op == BININT:
                stack.append(_unpack_int(data, position)[0])
                position += 4
            elif op == TUPLE1:
                stack[-1] = (stack[-1],)
            elif op == BININT1:
                stack.append(data[position])
                position += 1
            elif op == BININT2:
                stack.append(data[position] | data[position + 1] << 8)
                position += 2
            elif op == SHORT_BINUNICODE:
                end = position + 1 + data[position]
                stack.append(str(data[position + 1 : end], "utf-8", "surrogatepass"))
                position = end
            elif op == EMPTY_LIST:
                stack.append([])
            elif op == APPEND:
                item = stack.pop()
                _append(stack[-1], (item,))
            elif op == TUPLE2:
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == MARK:
                outer.append(stack)
                stack = []
            elif op == NEWOBJ:
                arguments = stack.pop()
                stack[-1] = _new(stack[-1], arguments)
            elif op == EMPTY_DICT:
                stack.append({})
            elif op == BUILD:
                state = stack.pop()
                _build(stack[-1], state)
            elif op == TUPLE:
                items, stack = stack, outer.pop()
                stack.append(tuple(items))
            elif op == APPENDS:
                items, stack = stack, outer.pop()
                _append(stack[-1], items)
            elif op == SETITEM:
                items = [stack.pop(-2), stack.pop()]
                self._set_items(stack[-1], items)
            elif op in CONSTANTS:
                stack.append(CONSTANTS[op])
            elif op == STOP:
                return self.result(stack, outer, position)
            else:
                rare = _RARE.get(op)
                if rare is None:
                    raise RefusedPickle(f"opcode {bytes([op])!r} at byte {position - 1} is not one that DCP writes")
                position = rare(self, stack, position)

    def result(self, stack: list[Any], outer: list[list[Any]], position: int) -> Any:
        if len(stack) != 1 or outer:
            raise RefusedPickle(f"it ends at byte {position}, where something else is missing or left over")
        if position != len(self.data):
            raise RefusedPickle(f"it goes on after its end, at byte {position}")
        return stack[0]

    def take(self, position: int, count: int) -> bytes:
        taken = self.data[position : position + count]
        if len(taken) != count:
            raise RefusedPickle(f"a length of {count} at byte {position} is longer than the file")
        return taken

    def _set_items(self, target: Any, items: list[Any]) -> None:
        keys = items[::2]
        if type(target) is not dict or len(items) % 2:
            _raise_misuse("puts items into", target)
        if not KEYS.issuperset(set(map(type, keys)) - self.keys):
            raise RefusedPickle("a key of a dict is neither a string nor an integer nor an index")
        target.update(zip(keys, items[1::2], strict=True))

    def _sized(self, position: int, width: int) -> tuple[bytes, int]:
        """Return the bytes after their own number, and the position after them."""
        start = position + width
        taken = self.take(start, int.from_bytes(self.data[position:start], "little"))
        return taken, start + len(taken)

    def _long(self, stack: list[Any], position: int) -> int:
        """Accept at most 64 bits: wider integers could all share one hash."""
        number, end = self._sized(position, 1)
        if len(number) > 8:
            raise RefusedPickle(f"an integer of {len(number)} bytes at byte {position}")
        stack.append(int.from_bytes(number, "little", signed=True))
        return end

    def _float(self, stack: list[Any], position: int) -> int:
        stack.append(_unpack_double(self.data, position)[0])
        return position + 8

    def _text(self, stack: list[Any], position: int) -> int:
        taken, end = self._sized(position, 4)
        text = str(taken, "utf-8", "surrogatepass")
        # As dict keys, two long equal texts would be compared each time.
        stack.append(self.texts.setdefault(text, text))
        return end

    def _bytes(self, stack: list[Any], position: int, width: int = 4) -> int:
        taken, end = self._sized(position, width)
        stack.append(taken)
        return end

    def _frame(self, stack: list[Any], position: int) -> int:
        count = _unpack_long(self.data, position)[0]
        if count > len(self.data) - position - 8:
            raise RefusedPickle(f"a frame of {count} bytes at byte {position} is longer than the file")
        return position + 8

    def _put(self, stack: list[Any], position: int, width: int = 1) -> int:
        return self.put_at(stack, int.from_bytes(self.data[position : position + width], "little"), position + width)

    def put_at(self, stack: list[Any], index: int, position: int) -> int:
        """Picklers number memo entries consecutively. Another index would only enlarge the memo."""
        if index != len(self.memo):
            raise RefusedPickle(f"memo index {index} at byte {position} where {len(self.memo)} comes next")
        self.memo.append(stack[-1])
        return position

    def _stack_global(self, stack: list[Any], position: int) -> int:
        name, module = stack.pop(), stack.pop()
        stack.append(self.lookup(module, name))
        return position

    def _global(self, stack: list[Any], position: int) -> int:
        middle = self.data.index(b"\n", position)
        end = self.data.index(b"\n", middle + 1)
        stack.append(self.lookup(str(self.data[position:middle], "utf-8"), str(self.data[middle + 1 : end], "utf-8")))
        return end + 1

    def lookup(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise RefusedPickle("the name of a global is not a string")
        if (module, name) not in self.known:
            wanted = f"{module}.{name}"[:200]
            raise RefusedPickle(
                f"it refers to {wanted!r}, which is not part of any known checkpoint's metadata", wanted
            )
        return self.known[module, name]


_RARE: dict[int, Callable[[PickleMachine, list[Any], int], int]] = {
    0x8A: PickleMachine._long,
    ord("G"): PickleMachine._float,
    ord("X"): PickleMachine._text,
    ord("C"): partial(PickleMachine._bytes, width=1),
    ord("B"): PickleMachine._bytes,
    0x95: PickleMachine._frame,
    ord("q"): PickleMachine._put,
    ord("r"): partial(PickleMachine._put, width=4),
    0x93: PickleMachine._stack_global,
    ord("c"): PickleMachine._global,
}


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Function) or type(arguments) is not tuple:
        _raise_misuse("calls", function)
    return function.call(*arguments)


def _new(kind: Any, arguments: Any) -> InertObject:
    if type(kind) is not Class or arguments != ():
        _raise_misuse("makes an instance of", kind)
    return InertObject(kind)


def _build(record: Any, state: Any) -> None:
    if type(record) is not InertObject or record.state is not None:
        _raise_misuse("sets the state of", record)
    record.state = state


def _append(target: Any, items: Sequence[Any]) -> None:
    if type(target) is not list:
        _raise_misuse("appends to", target)
    target.extend(items)


def _raise_misuse(what: str, target: Any) -> NoReturn:
    raise RefusedPickle(f"it {what} {type(target).__name__} {getattr(target, 'name', '')}".rstrip())

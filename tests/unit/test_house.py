"""Rules of this repository that no linter checks: private names in tests, and time limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PRIVATE_MAX = 40
REASON = "# private: "
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


DEFINITION = re.compile(
    r"\b(?:def|class) (_[A-Za-z]\w*)|(?:^|self\.)(_[A-Za-z]\w*)(?:: [^=\n]+)?(?:, [\w., ]+)? = ", re.MULTILINE
)


@cache
def ours() -> frozenset[str]:
    """Private names that tierckpt defines: of functions, classes, variables and attributes."""
    texts = (path.read_text() for path in (REPOSITORY / "tierckpt").rglob("*.py"))
    return frozenset(found[1] or found[2] for text in texts for found in DEFINITION.finditer(text))


def own(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that a module defines itself."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name of tierckpt: as an attribute, imported, or replaced by its name."""
    theirs = ours() - {*own(nodes)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in theirs and not is_self(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tierckpt"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call | ast.Tuple):  # setattr(owner, "_name", ...), (owner, "_name", ...)
            owner, name, *_ = *(node.args if isinstance(node, ast.Call) else node.elts), None, None
            if isinstance(owner, ast.Constant) and str(owner.value).startswith("tierckpt."):
                found = str(owner.value).rpartition(".")[2]
            elif isinstance(name, ast.Constant) and not isinstance(owner, ast.Constant):
                found = str(name.value)
            else:
                continue
            if found in theirs:
                yield node.lineno, found


def is_time_passed(node: ast.expr) -> bool:
    """``time.monotonic() - begun``."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and isinstance(node.left.func, ast.Attribute)
        and node.left.func.attr in CLOCKS
    )


def upper_bounds(nodes: list[ast.AST]) -> Iterator[int]:
    """Lines that say that something took less than so long."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                is_less, is_more = isinstance(operator, ast.Lt | ast.LtE), isinstance(operator, ast.Gt | ast.GtE)
                if (is_less and is_time_passed(left)) or (is_more and is_time_passed(right)):
                    yield node.lineno


def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def test_tests_use_public_names_and_say_why_where_they_do_not() -> None:
    used, without_reason = 0, []
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        text = path.read_text()
        lines = ["", *text.splitlines()]
        for line, name in private_uses(nodes_of(text)):
            used += 1
            if REASON not in lines[line - 1] + lines[line]:
                without_reason.append(f"{path.relative_to(REPOSITORY)}:{line}: {name}")
    assert not without_reason, f"use a public name, or say why not after {REASON!r}:\n" + "\n".join(without_reason)
    assert used < PRIVATE_MAX


def test_no_unit_test_says_that_something_took_less_than_so_long() -> None:
    """A busy machine is slow without a fault: see CONTRIBUTING.md."""
    files = sorted((REPOSITORY / "tests/unit").rglob("*.py"))
    assert [f"{path.name}:{line}" for path in files for line in upper_bounds(nodes_of(path.read_text()))] == []


FACTORIES = {"arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "randperm", "tensor", "zeros"}


def without_device(nodes: list[ast.AST]) -> Iterator[int]:
    """Lines that make a tensor on the default device, which is the user's (``torch.set_default_device``)."""
    for node in nodes:
        is_made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        if is_made and ast.unparse(node.func.value) == "torch" and "device" not in {k.arg for k in node.keywords}:
            yield node.lineno


def test_every_tensor_of_ours_says_its_device() -> None:
    assert [*without_device(nodes_of("torch.empty(3)\ntorch.zeros(2, device='cpu')"))] == [1]
    found = {
        str(path): [*without_device(nodes_of(path.read_text()))] for path in (REPOSITORY / "tierckpt").rglob("*.py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_class_name_has_one_module() -> None:
    owners: dict[str, list[str]] = {}
    for path in sorted((REPOSITORY / "tierckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


def test_every_unit_test_is_named_after_its_module() -> None:
    """``tests/unit/FOLDER/test_MODULE.py``, or ``test_MODULE_ASPECT.py``, tests ``tierckpt/FOLDER/MODULE.py``."""
    tests = REPOSITORY / "tests/unit"
    strays = []
    for path in tests.rglob("*/test_*.py"):
        folder, name = path.relative_to(tests).parent, path.stem.removeprefix("test_")
        modules = [module.stem for module in (REPOSITORY / "tierckpt" / folder).glob("*.py")]
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            strays.append(str(path.relative_to(tests)))
    assert strays == []


def test_both_rules_find_what_they_are_for() -> None:
    name = min(ours())
    uses = f"from tierckpt.x import {name}\nmade.{name}\nsetattr(made, '{name}', 1)\nBUGS = [(made, '{name}')]\n"
    assert [line for line, _ in private_uses(nodes_of(uses))] == [1, 2, 3, 4]
    assert list(private_uses(nodes_of(f"class Mine:\n    def {name}(self): ...\nMine().{name}()"))) == []
    assert list(upper_bounds(nodes_of("assert 0.1 <= time.monotonic() - begun < 2"))) == [1]
    assert list(upper_bounds(nodes_of("assert 2 > time.perf_counter() - begun"))) == [1]
    assert list(upper_bounds(nodes_of("assert time.monotonic() - begun >= 2"))) == []

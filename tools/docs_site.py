"""Hooks of the documentation site (`make docs`): the pages that are made from the code.

    reference/api.md           every public name, from its docstring
    reference/command-line.md  every verb, from the command itself
    reference/errors.md        every message of every error, with its hint and exit code

Links to files outside ``docs/`` become plain text: the site does not have them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

import tierckpt
from tierckpt import errors
from tierckpt.cli.ui.app import app

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:bench|deploy|examples|tests|tierckpt|README)[^)]*)\)")


class Sections(Extension):
    """Our docstrings have one example; the parser looks for examples."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for name, text in {"api": api_page(), "command-line": command_line_page(), "errors": errors_page()}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files of the repository that the site has no page of."""
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].replace('../', '')}`)", markdown)


def api_page() -> str:
    """Return the reference of every public name."""
    lines = ["# Python", "", "Each name is imported from `tierckpt`, and loads on first use."]
    for name in sorted(tierckpt.__all__, key=str.lower):
        if name not in ("errors", "TierckptError"):
            lines += [_object(getattr(tierckpt, name), f"tierckpt.{name}", 2)]
    lines += [
        "",
        "## Errors",
        "",
        "Every error of ours is a `TierckptError`, says what to do in `hint`, and has an exit code.",
    ]
    lines += [_object(one, f"tierckpt.errors.{one.__name__}", 3) for one in _errors()]
    return "\n".join(lines) + "\n"


def _object(value: Any, name: str, level: int) -> str:
    options = {"heading_level": level, "heading": name, "toc_label": value.__qualname__}
    lines = "".join(f"      {key}: {setting}\n" for key, setting in options.items())
    return f"\n::: {value.__module__}.{value.__qualname__}\n    options:\n{lines}"


def _errors() -> Iterator[type[Exception]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.TierckptError):
            yield value


def errors_page() -> str:
    """Return the messages of every error; ``{...}`` stands for a value."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in Path(tierckpt.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                hints = [_text(keyword.value) for keyword in node.keywords if keyword.arg == "hint"]
                found[node.func.id].add((_text(node.args[0]), "".join(hints)))
    lines = ["# Errors", "", "Every message of every error, by class. `{...}` stands for a value.", ""]
    for kind in _errors():
        if rows := sorted((message, hint) for message, hint in found[kind.__name__] if message):
            lines += [f"## {kind.__name__}", "", f"Exit code {kind.exit_code}.", "", "| message | hint |", "|---|---|"]
            lines += [f"| {message} | {hint} |".replace("<", "&lt;") for message, hint in rows] + [""]
    return "\n".join(lines)


def _text(node: ast.expr) -> str:
    """Return a string expression with the name of each value in braces; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("|", "\\|")
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + "".join(re.findall(r"[A-Za-z]\w*", ast.unparse(node.value))[-1:]) + "}"
    return ""


def command_line_page() -> str:
    """Return the reference of every verb, as ``--help`` says it."""
    lines = ["# Command line", "", "```text", _help(), "```", ""]
    verbs = [[_name(verb)] for verb in app.registered_commands]
    for group in app.registered_groups:
        verbs += [[str(group.name), _name(verb)] for verb in group.typer_instance.registered_commands]
    for words in verbs:
        lines += [f"## tierckpt {' '.join(words)}", "", "```text", _help(*words), "```", ""]
    return "\n".join(lines)


def _name(verb: Any) -> str:
    return str(verb.name or verb.callback.__name__)


def _help(*words: str) -> str:
    shown = CliRunner().invoke(app, [*words, "--help"], prog_name="tierckpt", terminal_width=100)
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())

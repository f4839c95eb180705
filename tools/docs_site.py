"""Hooks of the documentation site (`make docs`): the pages that are made from the code.

    reference/api.md           every public name, from its docstring
    reference/command-line.md  every verb, from the command itself

Links to files outside ``docs/`` become plain text: the site does not have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    for name, text in {"api": api_page(), "command-line": command_line_page()}.items():
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

"""SVG picture of one run: bars of seconds to durable with the blocked part dark; the limit is a dashed line."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from .report import kind_of
from .rows import LIMIT, MEMCPY, OURS, RAW
from .states import CASES

WIDTH, LABEL, GAP = 960, 330, 14
BAR, PITCH, HEAD = 13, 20, 46
RIGHT = 70

_COLOURS = {LIMIT: ("#7a8793", "#7a8793"), "stock": ("#d9b48f", "#a9682f"), OURS: ("#7fb3e6", "#1d5fa6")}
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px }
.ours { font-weight: 600 }
.faint { fill: #6e7781; font-size: 11px }
.limit { stroke: #24292f; stroke-dasharray: 4 3 }
.page { fill: #ffffff }
"""


def draw(tables: dict[str, dict[str, dict[str, Any]]], machine: str, path: Path) -> bool:
    """Draw the save cases among ``tables``. Returns False if there are none."""
    cases = [case for case in tables if case in CASES and _bars(tables[case])]
    if not cases:
        return False
    top, parts = 64, []
    for case in cases:
        part, height = _panel(case, tables[case], top)
        parts.append(part)
        top += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'role="img" aria-label="Seconds blocked and seconds to durable, by way of saving">\n'
        f'<style>{_STYLE}</style>\n<rect class="page" width="{WIDTH}" height="{top}"/>\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + _legend(machine) + "".join(parts) + "</svg>\n")
    return True


def _bars(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row: values for row, values in rows.items() if "durable_seconds" in values and row != MEMCPY}


def _legend(machine: str) -> str:
    dark, light = _COLOURS[OURS][1], _COLOURS[OURS][0]
    return (
        '<text class="title" x="14" y="24">Saving: how long training is blocked, and when the checkpoint is durable'
        "</text>\n"
        f'<rect x="14" y="36" width="12" height="12" fill="{dark}"/><text x="32" y="46">blocked</text>\n'
        f'<rect x="92" y="36" width="12" height="12" fill="{light}"/><text x="110" y="46">to durable</text>\n'
        '<line class="limit" x1="188" x2="212" y1="42" y2="42"/>'
        '<text x="218" y="46">the disk: raw O_DIRECT + fsync of the same bytes</text>\n'
        f'<text class="faint" x="{WIDTH - 14}" y="46" text-anchor="end">{escape(machine)}</text>\n'
    )


def _panel(case: str, rows: dict[str, dict[str, Any]], top: int) -> tuple[str, int]:
    bars = _bars(rows)
    longest = max(values["durable_seconds"] for values in bars.values())
    room = WIDTH - LABEL - GAP - RIGHT

    def x(seconds: float) -> float:
        return float(LABEL + GAP + room * seconds / longest)

    lines = [f'<text class="title" x="14" y="{top + 28}">{escape(f"{case}: {CASES[case].title}")}</text>']
    for index, (row, values) in enumerate(bars.items()):
        y = top + HEAD + index * PITCH
        lines += _bar(row, values, x, y)
    height = HEAD + len(bars) * PITCH + 10
    if RAW in bars:
        at = x(bars[RAW]["durable_seconds"])
        bottom = top + HEAD + len(bars) * PITCH
        lines.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{top + HEAD - 6}" y2="{bottom}"/>')
    return "\n".join(lines) + "\n", height


def _bar(row: str, values: dict[str, Any], x: Any, y: int) -> list[str]:
    light, dark = _COLOURS[kind_of(row)]
    begin, durable, blocked = x(0), x(values["durable_seconds"]), x(values["blocked_seconds"])
    name = ' class="ours"' if kind_of(row) == OURS else ""
    middle = y + BAR - 2
    figures = f"{values['durable_seconds']:.2f} s"
    return [
        f'<text{name} x="{LABEL}" y="{middle}" text-anchor="end">{escape(row)}</text>',
        f'<rect x="{begin:.1f}" y="{y}" width="{max(durable - begin, 1):.1f}" height="{BAR}" fill="{light}"/>',
        f'<rect x="{begin:.1f}" y="{y}" width="{max(blocked - begin, 1):.1f}" height="{BAR}" fill="{dark}"/>',
        f'<text class="faint" x="{durable + 5:.1f}" y="{middle}">{figures}</text>',
    ]

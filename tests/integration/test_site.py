"""The documentation site in a browser: no page is cut off at a width of 1280 pixels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, MISSING, Browser

ROOT = Path(__file__).parents[2]
HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))

FIND_CUT_OFF = """(() => {
  const article = document.querySelector("article"), right = article.getBoundingClientRect().right + 1, found = [];
  for (const one of article.querySelectorAll("*")) {
    const box = one.getBoundingClientRect(), scrolls = getComputedStyle(one).overflowX !== "visible";
    if (!box.width || one.closest("nav, svg, .headerlink") || one.matches("[class^=md-typeset__], .md-clipboard"))
      continue;  // the wraps of a table reach into the margin, the table may not
    if (box.right > right || (scrolls && one.scrollWidth > one.clientWidth + 1))
      found.push(`${one.tagName} ${one.scrollWidth} ${one.textContent.trim().slice(0, 60)}`);
  }
  return found;
})()"""
WIDE = """document.querySelector("article").insertAdjacentHTML("beforeend",
  "<table><tr><td>&nbsp;</td><td><code>" + "x".repeat(200) + "</code></td></tr></table>")"""
PAGE_SCROLLS = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The pages of the site, built as by ``make docs``."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", directory],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [directory / "index.html", *sorted(directory.glob("*/**/*.html"))]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.skipif(not HAS_MKDOCS, reason="no MkDocs in this environment (`make docs` installs it)")
@pytest.mark.parametrize("width", [1280, 420])
async def test_no_page_is_cut_off(site: list[Path], width: int) -> None:
    """At 1280 pixels no table, signature or code block scrolls; at 420 those may, but the page does not."""
    front, cut_off = site[0], {}
    assert len(site) > 50
    async with Browser(width, 900) as browser:
        for page in site:
            await browser.open(page.as_uri())
            await browser.until("document.querySelectorAll('table:not(.md-typeset__table > table)').length === 0")
            found = [*await browser.value(FIND_CUT_OFF)] if width == 1280 else []
            if found or await browser.value(PAGE_SCROLLS):
                cut_off[page.relative_to(front.parent).as_posix()] = found
        assert cut_off == {}

        await browser.open(front.as_uri())
        assert await browser.value("document.querySelector('img[src=\"tiers.svg\"]').naturalWidth") > 0
        await browser.value(WIDE)
        assert await browser.value(FIND_CUT_OFF), "the check does not find a wide table"

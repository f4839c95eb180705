"""A headless Chromium that opens a page, for tests of what people see. Speaks the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium on this machine (Debian: apt-get install chromium)"
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.2


class Browser:
    """One tab. ``errors`` has what its console complained of."""

    def __init__(self, width: int = 1400, height: int = 1100) -> None:
        self.width, self.height = width, height
        self.errors: list[str] = []
        self._number = 0

    def _start(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        size, profile = f"--window-size={self.width},{self.height}", f"--user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(
            [CHROMIUM, *options, size, profile, "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    async def __aenter__(self) -> Browser:
        self._start()
        self._session = aiohttp.ClientSession()
        port = (await self._port()).splitlines()[0]
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [row for row in await answer.json(content_type=None) if row["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self._say(f"{domain}.enable")
        size = {"width": self.width, "height": self.height, "deviceScaleFactor": 1, "mobile": False}
        await self._say("Emulation.setDeviceMetricsOverride", **size)  # no window is narrower than 500 pixels
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._profile.cleanup()

    async def open(self, url: str) -> None:
        await self._say("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def emulate_theme(self, theme: str) -> None:
        """``light`` or ``dark``: the page's ``prefers-color-scheme``."""
        await self._say("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def value(self, expression: str) -> Any:
        """Return the page's value of ``expression``."""
        answer = await self._say("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until the page says true."""
        async for _ in self._tries(expression):
            if await self.value(expression):
                return

    async def screenshot(self, name: str) -> bytes:
        """A PNG of the whole page, which is also saved in the directory SCREENSHOTS, if that is set."""
        answer = await self._say("Page.captureScreenshot", captureBeyondViewport=True)
        picture = base64.b64decode(answer["data"])
        if folder := os.environ.get("SCREENSHOTS"):
            await asyncio.to_thread(Path(folder, name).write_bytes, picture)
        return picture

    async def _port(self) -> str:
        async for _ in self._tries("a port"):
            if text := self._port_file():
                return text
        raise AssertionError

    def _port_file(self) -> str:
        path = Path(self._profile.name, "DevToolsActivePort")
        return path.read_text() if path.exists() else ""

    async def _tries(self, what: str) -> AsyncIterator[None]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            yield
            await asyncio.sleep(POLL_SECONDS)
        raise AssertionError(f"not in {PATIENCE_SECONDS} s: {what}; {self.errors}")

    async def _say(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                message = json.loads(await self._socket.receive_str())
                if message.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(str(message["params"]["exceptionDetails"]))
                if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                    self.errors.append(message["params"]["entry"]["text"])
                if message.get("id") == self._number:
                    assert "error" not in message, message
                    return message["result"]

"""Polls a cloud's metadata address for the notice of preemption.

Requests bypass proxies; an answer can only trigger a checkpoint. Another cloud needs a ``_poll`` method, its
``ADDRESSES`` and ``GRACE_SECONDS``, and a value of ``Settings.preempt_notices``.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ..config import Settings
from ..resources import start_thread
from ..telemetry import logger

log = logger("notices")

ANSWER_SECONDS = 2.0
ANSWER_BYTES_MAX = 1 << 20
TOKEN_SECONDS = 21600
GRACE_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The providers' minimum notice, for a notice that states none."""
ADDRESSES = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
POLL_SECONDS = 5.0
"""AWS recommends this period."""
MEMORY_LOSS_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""These events of Azure lose the memory. A freeze keeps it."""

NoticeCallback = Callable[[float, str], None]


class Notices:
    """Polls until a notice or ``close``. Calls back once, on its own thread."""

    def __init__(self, settings: Settings, callback: NoticeCallback) -> None:
        self._cloud = settings.preempt_notices
        self._address = ADDRESSES.get(self._cloud, "")
        self._callback = callback
        self._closed = threading.Event()
        self._has_failed = False
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        if self._cloud != "none":
            start_thread(threading.Thread(target=self._watch, name="tierckpt-notices", daemon=True))

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        poll = {"aws": self._poll_aws, "gcp": self._poll_gcp, "azure": self._poll_azure}[self._cloud]
        while not self._closed.is_set():
            try:
                seconds = poll()
                self._has_failed = False
            except (OSError, ValueError) as error:
                self._say_once(error)
                seconds = None
            if seconds is not None:
                self._callback(seconds, f"a notice of {self._cloud}, {seconds:.0f} s ahead")
                return
            self._closed.wait(POLL_SECONDS)

    def _say_once(self, error: Exception) -> None:
        if not self._has_failed:
            log.warning("%s does not report preemptions at the moment: %s", self._address, error)
        self._has_failed = True

    def _poll_aws(self) -> float | None:
        token = self._ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}, "PUT")
        headers = {"X-aws-ec2-metadata-token": (token or b"").decode("ascii", "replace").strip()}
        answer = self._ask("/latest/meta-data/spot/instance-action", headers)
        if answer is None:
            return None
        notice = _object(answer)
        if notice.get("action") not in ("terminate", "stop", "hibernate"):
            return None
        return self._until(str(notice.get("time", "")))

    def _poll_gcp(self) -> float | None:
        answer = self._ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return GRACE_SECONDS["gcp"] if answer is not None and answer.strip() == b"TRUE" else None

    def _poll_azure(self) -> float | None:
        answer = self._ask("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        events = _object(answer or b"{}").get("Events", [])
        ending = [one for one in events if isinstance(one, dict) and one.get("EventType") in MEMORY_LOSS_EVENTS]
        if not ending:
            return None
        return min(self._until(str(one.get("NotBefore", ""))) for one in ending)

    def _until(self, when: str) -> float:
        try:
            at = datetime.fromisoformat(when) if when[:1].isdigit() else parsedate_to_datetime(when)
        except (ValueError, TypeError):
            return GRACE_SECONDS[self._cloud]
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return max(0.0, at.timestamp() - time.time())

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> bytes | None:
        request = urllib.request.Request(self._address + path, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return bytes(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("the answer is not an object")  # noqa: TRY004  # not of a caller
    return found

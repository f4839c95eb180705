"""What a Checkpointer knows of one of its saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class SaveRecord:
    """How one save went. Seconds count from the call of ``save``; None until known (or not known on this rank)."""

    step: int
    uri: str
    size_bytes: int = 0
    blocked_seconds: float = 0.0
    local_commit_seconds: float | None = None
    shared_commit_seconds: float | None = None
    error: str = ""
    is_sent: bool = True
    """False: it stays on the local tier; only newer ones go to shared storage."""
    is_straight: bool = False
    """True: it does not lie on the SSD on its way, or not all of it; its local and its shared commit are one."""
    begun_at: float = field(default_factory=time.monotonic, repr=False)

    @property
    def age_seconds(self) -> float:
        """Time since the call of ``save``."""
        return time.monotonic() - self.begun_at

    @property
    def drain_seconds(self) -> float | None:
        """Time from the local to the shared commit."""
        if self.shared_commit_seconds is None or self.local_commit_seconds is None:
            return None
        return max(0.0, self.shared_commit_seconds - self.local_commit_seconds)

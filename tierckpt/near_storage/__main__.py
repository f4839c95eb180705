"""``python -m tierckpt.near_storage``: how a trainer starts the process of its optimizer. Its order comes on stdin."""

from __future__ import annotations

from .updater import main

if __name__ == "__main__":
    main()

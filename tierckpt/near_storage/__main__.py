"""Entry point of the updater process, with its order on stdin."""

from __future__ import annotations

from .updater import main

if __name__ == "__main__":
    main()

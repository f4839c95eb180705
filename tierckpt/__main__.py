"""``python -m tierckpt``: the same command."""

from .cli import main

main()

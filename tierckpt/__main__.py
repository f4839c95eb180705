"""``python -m tierckpt``: the same as the command ``tierckpt``."""

from .cli import main

if __name__ == "__main__":
    main()

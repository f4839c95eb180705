"""The mover: asyncio code that moves checkpoints between tiers, with its journal, commit protocol and retention."""

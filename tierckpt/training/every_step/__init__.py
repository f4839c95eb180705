"""Checkpoints that follow the optimizer: a save over several steps, its redo log, and a log of every step."""

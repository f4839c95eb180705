"""Optimizer steps as a write-ahead log: state(n + 1) = update(state(n), gradients(n + 1)), element by element."""

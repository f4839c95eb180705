"""Optimizer steps as a write-ahead log: state(n + 1) = update(state(n), gradients(n + 1)), element by element.

``capture`` records the inputs of each ``optimizer.step()``, ``frame`` encodes them, ``apply`` replays them with the
same ``torch.optim`` implementation, ``checksum`` and ``guard`` compare the result with training. ``log`` stores them on
disk. ``multi_step`` copies a state in parts over several steps, and ``redo`` brings the parts to one version.

Sources: GoCkpt (multi-step checkpoints); LowDiff and Checkmate (gradient logs).
"""

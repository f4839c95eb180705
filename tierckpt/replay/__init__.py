"""Optimizer steps as a write-ahead log: state(n + 1) = update(state(n), gradients(n + 1)), element by element.

``capture`` records what each ``optimizer.step()`` used, ``frame`` makes bytes of it, ``apply`` makes the step again
with the same ``torch.optim`` implementation, ``checksum`` says whether the result is the state that training had.
``log`` is such a log on the disk; ``multi_step`` moves a state in parts over several steps and brings these to one
version.

Sources: GoCkpt (multi-step checkpoints); LowDiff and Checkmate (gradients as a log).
"""

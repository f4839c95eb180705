"""The parts of ``bench/save.py``.

limits    limits of the machine: raw O_DIRECT writes, warm memcpy (standard library only)
meter     cost of one save: wall, CPU, faults, memory; interleaved rounds; medians
states    the saved state dicts, and their comparison with the loaded ones
rows      one row of a table: a save by stock PyTorch, another library or tierckpt
training  effects on a training loop: step time while flushing, lazy staging, memory over many saves
worker    one case in its own process (or one per rank)
report    tables and verdicts
plot      the SVG picture in docs/
"""

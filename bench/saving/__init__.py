"""The parts of ``bench/save.py``.

limits    what the machine can do: raw O_DIRECT writes, warm memcpy (standard library only)
meter     what one save costs: wall, CPU, faults, memory; interleaved rounds; medians
states    the state dicts that are saved, and the comparison of what was loaded with them
rows      one row of a table: how stock PyTorch, other libraries and tierckpt save a state
training  what a training loop notices: step time while flushing, lazy staging, memory over many saves
worker    one case in a process (or one per rank) of its own
report    tables and verdicts
plot      the picture in docs/, written as SVG by hand
"""

"""The names and meaning of a checkpoint's objects. Pure: no I/O, no torch."""

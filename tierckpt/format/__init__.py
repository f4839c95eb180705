"""The format: location and meaning of every object of a checkpoint. Pure: no I/O, no torch."""

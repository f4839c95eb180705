"""The format: where every object of a checkpoint lies, and what each byte of it means. Pure: no I/O, no torch."""

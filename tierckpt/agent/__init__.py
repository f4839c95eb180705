"""The node agent: the process that runs the mover, one per node and local root (P6)."""

"""Restores a checkpoint from any tier to a directory of this node."""

"""Nodes that read from each other (docs/internals/fanout.md)."""

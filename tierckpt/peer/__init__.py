"""Nodes that read from each other: membership, catalog, and chunk fetches (docs/internals/fanout.md)."""

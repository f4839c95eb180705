"""Nodes that read from each other: who is there, who has what, who fetches what (docs/internals/fanout.md)."""

"""Nodes that read from each other (docs/internals/fanout.md). No peer names a file of the node cache."""

"""From any tier to a directory of this node."""

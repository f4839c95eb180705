"""One fill of one version by several nodes: who fetches which chunk, and from whom."""

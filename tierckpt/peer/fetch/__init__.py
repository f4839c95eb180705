"""One fill of one version by several nodes."""

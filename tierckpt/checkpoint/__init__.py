"""The state of checkpoints: journal, commits on each tier, lookup, selection, retention, verification."""

"""Where a checkpoint stands: journal, commit on each tier, finding one, choosing one, retention, verification."""

"""Multi-step saves, redo logs and gradient logs."""

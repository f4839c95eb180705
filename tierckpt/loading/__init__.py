"""Model files to tensors, and checkpoints to model files."""

"""A training job's state as text and tensors, and back: equal in type and in value."""

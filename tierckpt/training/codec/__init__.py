"""Converts a training job's state to text and tensors, and back: equal in type and in value."""

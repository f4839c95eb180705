"""Converts a training job's state to text and tensors, and back."""

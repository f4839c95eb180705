"""Reading a checkpoint without running its code."""

from .metadata import load_metadata, read_back
from .objects import Objects, load_tensor

__all__ = ["Objects", "load_metadata", "load_tensor", "read_back"]

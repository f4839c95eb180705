"""Reading a checkpoint without running its code."""

from .metadata import load_metadata
from .objects import Objects, load_tensor
from .self_check import read_back

__all__ = ["Objects", "load_metadata", "load_tensor", "read_back"]

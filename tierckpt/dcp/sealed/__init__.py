"""Reading a checkpoint without running it.

machine    the part of the pickle language that ``.metadata`` is written in
metadata   what may be said in it
objects    the items: tensors and objects, as data
"""

from .metadata import load_metadata, read_back
from .objects import Objects, load_tensor

__all__ = ["Objects", "load_metadata", "load_tensor", "read_back"]

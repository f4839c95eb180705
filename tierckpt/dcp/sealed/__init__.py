"""Reading a checkpoint without running its code.

metadata   its permitted content
self_check the check of a save: could this process load its metadata?
objects    the items: tensors and objects, as data
"""

from .metadata import load_metadata
from .objects import Objects, load_tensor
from .self_check import read_back

__all__ = ["Objects", "load_metadata", "load_tensor", "read_back"]

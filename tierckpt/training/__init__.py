"""Training loops: the Checkpointer, and state that differs by rank."""

from .checkpointer import Checkpointer, SaveRecord
from .state import PerRank, RngState

__all__ = ["Checkpointer", "PerRank", "RngState", "SaveRecord"]

"""Training loops: the Checkpointer, and state that differs by rank."""

from .checkpointer import Checkpointer
from .codec.rank_state import PerRank, RngState
from .saves import SaveRecord

__all__ = ["Checkpointer", "PerRank", "RngState", "SaveRecord"]

"""Training loops: the Checkpointer, and state that differs by rank."""

from .checkpointer import Checkpointer
from .record import SaveRecord
from .sampling import DataOrder
from .state import PerRank, RngState

__all__ = ["Checkpointer", "DataOrder", "PerRank", "RngState", "SaveRecord"]

"""Planning: costs of checkpoints, intervals, placement of replicas. Pure arithmetic, also used by running jobs."""

from .ettr import Level
from .optimal_interval import Schedule, checkfreq_steps, daly, exact, plan, to_steps, two_level, young
from .sizer import Site, Sizing, size
from .training_state import Mesh, Model, TrainingState, from_config, from_number, from_shapes, measured_state, state_of
from .transfer_times import Bandwidths

__all__ = [
    "Bandwidths",
    "Level",
    "Mesh",
    "Model",
    "Schedule",
    "Site",
    "Sizing",
    "TrainingState",
    "checkfreq_steps",
    "daly",
    "exact",
    "from_config",
    "from_number",
    "from_shapes",
    "measured_state",
    "plan",
    "size",
    "state_of",
    "to_steps",
    "two_level",
    "young",
]

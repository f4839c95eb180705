"""Planning: costs of checkpoints, intervals, placement of replicas. Pure arithmetic, also used by running jobs.

    checked_numbers    parses numbers with units
    training_state     parameters, bytes for each, and the ranks that hold and write them
    transfer_times     transfer times
    ettr               the share of time that becomes training
    optimal_interval   intervals from rates and costs, adapted while a job runs
    replica_placement  which node holds which replica
    drain_policy       which checkpoint to drain, and when
    sizer              all of them together
    simulator          the same, with failures and queues

No torch, no files, no clock. The trainer, the mover and the simulator share these functions.
"""

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

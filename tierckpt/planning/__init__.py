"""Planning: what checkpoints will cost, how often to take them, where replicas go. Pure arithmetic, also of live jobs.

    checked_numbers    numbers as people write them
    training_state     parameters, bytes for each, and which rank holds and writes what
    transfer_times     how long bytes take
    ettr               what share of the time becomes training
    optimal_interval   how often, from rates and costs, and adapted while a job runs
    replica_placement  which node holds whose replica
    drain_policy       which checkpoint to drain, and when
    sizer              all of it at once
    simulator          the same, with failures and queues in it

No torch, no files, no clock. What the trainer, the mover and the simulator decide, they decide with these same
functions.
"""

from .ettr import Level
from .optimal_interval import Schedule, checkfreq_steps, daly, exact, plan, to_steps, two_level, young
from .sizer import Site, Sizing, size
from .training_state import Mesh, Model, State, from_config, from_number, from_shapes, measured_state, state_of
from .transfer_times import Bandwidths

__all__ = [
    "Bandwidths",
    "Level",
    "Mesh",
    "Model",
    "Schedule",
    "Site",
    "Sizing",
    "State",
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

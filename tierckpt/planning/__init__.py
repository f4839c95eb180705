"""Planning: what checkpoints will cost and how often to take them, before there is a cluster to try it on.

    quantities   numbers as people write them
    model        parameters: from a number, a config.json, shapes
    state        bytes per parameter, by component
    mesh         who holds and writes what
    transfer     how long bytes take
    ettr         what share of the time becomes training
    interval     how often
    placement    which node holds whose replica
    policy       which checkpoint to drain, and when
    sizer        all of it at once
    simulator    the same, with failures and queues in it

Pure: no torch, no files, no clock. What the trainer, the mover and the simulator decide, they decide with these same
functions.
"""

from .ettr import Level
from .interval import Schedule, checkfreq_steps, daly, exact, plan, to_steps, two_level, young
from .mesh import Mesh
from .model import Model, from_config, from_number, from_shapes
from .sizer import Site, Sizing, size
from .state import State, measured_state, state_of
from .transfer import Bandwidths

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

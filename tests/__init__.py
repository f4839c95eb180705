"""Several tests run at a time: OpenMP's threads, which spin while they wait, would take the processors from each other.

Twice as long for 410 unit tests on two cores. Set before torch is imported; child processes inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

"""How the CPU threads of separate worker processes wait for one another.

Target, drafter and router take turns on the same cores. Threads that spin at the end of a parallel region, the default
of OpenMP, hold the core that the next process needs; threads that sleep at once pay a wake-up at every region. Workers
therefore spin for a short while, then sleep. Offline use has one process and keeps OpenMP's default.
"""

import os

_DEFAULTS = {"GOMP_SPINCOUNT": "100000"}


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables for a worker process of `num_threads` threads; how they wait stays as the user has set it."""
    waiting = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
    return {**waiting, "OMP_NUM_THREADS": str(num_threads)}

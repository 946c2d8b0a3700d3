"""How CPU threads wait for one another.

Target, drafter and router take turns on the same cores. Threads that spin at the end of a parallel region, the default
of OpenMP, then hold the core that the next process needs; on two shared cores that made steps ten times slower.
"""

THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}

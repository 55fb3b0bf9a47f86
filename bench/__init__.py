"""Measurements. Tests assert, these measure: `python -m bench`."""

import os

# Where this process may run, before a library binds the thread that loads it: a process that it
# starts would have that one CPU too.
CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

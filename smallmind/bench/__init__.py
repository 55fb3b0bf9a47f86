"""Measurements that `smallmind bench` shows. Tests assert, these measure."""

import os

# Where this process may run, read before a library binds the thread that loads it: any process
# started from it would inherit that one CPU.
CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

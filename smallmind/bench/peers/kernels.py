"""Measures kernels in a process of its own: python -m smallmind.bench.peers.kernels [torch]."""

import os
import sys
from pathlib import Path

import psutil

from smallmind.kernels.timing import serve


class ThreadPools:
    """The threads that each package has started, to be bound to CPUs.

    To save power, systems may put two threads that sleep between calls on one core and leave the
    other idle: a contestant then randomly runs at half its speed. When bound, the n-th thread of
    every pool runs on the n-th CPU. Only Linux supports binding; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.pools: list[list[int]] = []
        self.known = self._threads()

    def note(self) -> None:
        """Records the threads started since the last call as one pool."""
        started = self._threads() - self.known
        self.pools.append(sorted(started))
        self.known |= started

    def bind(self) -> None:
        if not hasattr(os, "sched_setaffinity"):
            return
        cpus = _one_of_each_core_first(sorted(os.sched_getaffinity(0)))
        # Without the CPU of the main thread, which computes too.
        others = cpus[1:] or cpus
        for pool in self.pools:
            for place, thread in enumerate(pool):
                os.sched_setaffinity(thread, {others[place % len(others)]})
        os.sched_setaffinity(0, {cpus[0]})

    @staticmethod
    def _threads() -> set[int]:
        return {thread.id for thread in psutil.Process().threads()}


def _one_of_each_core_first(cpus: list[int]) -> list[int]:
    """Returns the CPUs, with those that share a core with an earlier one last."""
    first: list[int] = []
    others: list[int] = []
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        (others if core in cores else first).append(cpu)
        cores.add(core)
    return first + others


def import_and_bind(threads: int, has_torch: bool) -> None:
    """Imports the peers of the kernels and binds the threads that each of them starts.

    NumPy and PyTorch come first, so that they keep their own OpenMP settings.
    """
    pools = ThreadPools()
    import numpy as np

    matrix = np.ones((512, 512), np.float32)
    np.matmul(matrix, matrix)
    pools.note()
    if has_torch:
        import torch

        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.mm(torch.from_numpy(matrix), torch.from_numpy(matrix))
        pools.note()
    from smallmind.kernels.ceilings import multiply_add

    multiply_add()
    pools.note()
    pools.bind()


def main() -> None:
    from smallmind.bench import machine

    others = machine.listen()
    import_and_bind(int(os.environ["NUMBA_NUM_THREADS"]), "torch" in sys.argv)
    from smallmind.bench import kernels

    serve(
        machine=lambda _: machine.describe(),
        known=kernels.known,
        check=kernels.checked,
        limits=lambda asked: kernels.limits(others, *asked),
        measure=lambda case: kernels.measured(*case),
    )


if __name__ == "__main__":
    main()

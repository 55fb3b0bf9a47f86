"""Runs a contestant of `bench step`: python -m smallmind.bench.peers NAME JOB.

Reads commands from stdin, one JSON object per line, and answers each with a line:
`{"run": [first, count]}` -> seconds, processor seconds and losses of these steps;
`{"memory": true}` -> bytes. Ours also answers `{"python": true}` -> seconds per step,
`{"ceiling": true}` -> operations per second.
"""

import sys
import time

from smallmind.bench.peers.job import Job, Step
from smallmind.kernels.timing import serve, wait_for_idle_threads
from smallmind.memory.tracker import peak_resident_bytes
from smallmind.settings.config import Precision


def _build(name: str, work: Job) -> Step:
    if name.startswith("ours"):
        from smallmind.bench.peers import ours

        return ours.build(work, Precision(name.removeprefix("ours").strip() or "float32"))
    if name == "jax":
        from smallmind.bench.peers import jax_model

        return jax_model.build(work)
    from smallmind.bench.peers import torch_step

    bfloat16 = name.endswith("bfloat16")
    return torch_step.build(work, compiled=name.startswith("torch compile"), bfloat16=bfloat16)


def _run(step: Step, first: int, count: int) -> dict[str, list[float]]:
    seconds, processor_seconds, losses = [], [], []
    for index in range(first, first + count):
        start, processor_start = time.perf_counter(), time.process_time()
        losses.append(step(index))
        seconds.append(time.perf_counter() - start)
        processor_seconds.append(time.process_time() - processor_start)
    wait_for_idle_threads()
    return {"seconds": seconds, "processor_seconds": processor_seconds, "losses": losses}


def main() -> None:
    name, path = sys.argv[1:]
    work = Job(path)
    step = _build(name, work)

    def python(_: object) -> float:
        from smallmind.bench.peers import ours

        return ours.python_seconds(work)

    def ceiling(_: object) -> float:
        from smallmind.bench.ceilings import multiply_add_rate

        return multiply_add_rate()

    serve(
        run=lambda place: _run(step, *place),
        memory=lambda _: peak_resident_bytes(),
        python=python,
        ceiling=ceiling,
    )


if __name__ == "__main__":
    main()

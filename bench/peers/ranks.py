"""Training steps on one or several ranks, for `bench.ranks`: python -m bench.peers.ranks '{JSON}'.

Rank 0 reads the number of steps to take from each line of its input, and answers with the seconds
per step and of the exchange in each; 0 ends it.
With a network, what ranks exchange arrives as late as over a network of that latency and bandwidth:
the cores of this machine stand for machines of one core each.
"""

import dataclasses
import json
import statistics
import sys
import time

import numpy as np

from smallmind import Training, TrainingConfig, TransformerModel
from smallmind.kernels.codegen.threads import bind_to_cores, set_threads
from smallmind.kernels.timing import Stopwatch
from smallmind.parallel.group import Group
from smallmind.parallel.launch import join
from smallmind.text.char_tokenizer import CharTokenizer
from smallmind.text.dataset import Dataset

VOCABULARY = "".join(map(chr, range(32, 97)))
PATIENCE = 600.0  # seconds


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch, and how it is computed. Latency in seconds, bandwidth in bytes/s."""

    B: int
    T: int
    C: int
    layers: int
    heads: int
    shards: int
    threads: int
    optimizer: str = "adamw"
    reduce_precision: str = "float32"
    latency: float = 0.0
    bandwidth: float = 0.0  # 0: that of this machine's memory
    overlap: bool | None = None  # None: as the run chooses

    @property
    def bytes_exchanged(self) -> float:
        """The bytes that each rank sends in a step on very many ranks."""
        model = TransformerModel(**self.model())
        return 2 * model.flat.grad.size * (2 if self.reduce_precision == "bfloat16" else 4)

    def model(self) -> dict[str, int]:
        """The arguments of the model."""
        shape = {"block_size": self.T, "n_embd": self.C, "n_layer": self.layers}
        return {"vocab_size": len(VOCABULARY), "n_head": self.heads, **shape}


def _slow_down(latency: float, bandwidth: float) -> None:
    """Lets what is sent arrive as over a network whose links carry one message at a time."""
    from smallmind.parallel import mpi

    class Link:
        free = 0.0  # when it has sent everything so far

    def arrival(nbytes: float) -> float:
        Link.free = max(Link.free, time.perf_counter()) + nbytes / bandwidth
        return Link.free + latency

    def delayed(original, count):  # type: ignore[no-untyped-def]
        def exchange(self, vector, ends, *others):  # type: ignore[no-untyped-def]
            pending = original(self, vector, ends, *others)
            lengths = np.diff(ends)
            # This rank receives its piece from all others, or theirs.
            elements = count(lengths, self.rank, self.size)
            itemsize = (others[-1] if others else vector).itemsize
            due, has_arrived = arrival(float(elements) * itemsize), pending.has_arrived
            pending.has_arrived = lambda: has_arrived() and time.perf_counter() >= due
            return pending

        return exchange

    mpi.MPIGroup.spread = delayed(  # type: ignore[method-assign]
        mpi.MPIGroup.spread, lambda lengths, rank, size: lengths[rank] * (size - 1)
    )
    mpi.MPIGroup.collect = delayed(  # type: ignore[method-assign]
        mpi.MPIGroup.collect, lambda lengths, rank, _: lengths.sum() - lengths[rank]
    )


def _training(case: Case, group: Group) -> Training:
    tokenizer = CharTokenizer(VOCABULARY)
    tokens = np.random.default_rng(0).integers(0, len(VOCABULARY), 100_000, np.int32)
    data = Dataset(tokens, case.T, case.B, 1, tokenizer)
    return Training(TransformerModel(**case.model()), data=data, group=group)


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    ranks = join(PATIENCE)
    if ranks.size == 1:
        bind_to_cores()
    set_threads(case.threads)
    if case.bandwidth:
        _slow_down(case.latency, case.bandwidth)
    if case.overlap is not None:
        from smallmind.training import gradients

        gradients.WORTH_OVERLAP = -1.0 if case.overlap else 2.0
    training = _training(case, ranks)
    stopwatch = Stopwatch("ReduceGradients")
    training.model.workspace.profile = stopwatch
    config = TrainingConfig(
        steps=10**6,
        schedule="constant",
        optimizer=case.optimizer,
        data_shards=case.shards,
        reduce_precision=case.reduce_precision,
        val_every=0,
        save_every=0,
        log_every=1,
        max_rollbacks=0,
    )
    steps = training.steps(config)
    if ranks.rank:
        for _ in steps:
            pass
        return
    for line in iter(sys.stdin.readline, "0\n"):  # mpiexec does not pass on the end of its input
        seconds = []
        stopwatch.seconds.clear()
        for _ in range(int(line)):
            start = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - start)
        answer = statistics.median(seconds), statistics.median(stopwatch.seconds)
        print(json.dumps(answer), flush=True)
    training.stop()
    for _ in steps:
        pass


if __name__ == "__main__":
    main()

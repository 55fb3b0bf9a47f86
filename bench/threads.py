"""Counts and measures how a training step divides among threads: python -m bench threads.

What a step does is counted call by call: parallel regions, arithmetic, bytes, and how evenly the
kernels' own division functions divide the work among any number of workers. From the counts and the
times on one thread follows how much faster more threads could be, on a machine with that many
cores; on as many as this machine has, it is measured.
"""

import argparse
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numba import prange
from tabulate import tabulate

from smallmind import AdamW, TransformerModel
from smallmind.bench.ceilings import copy_rate, one_thread
from smallmind.bench.peers import job
from smallmind.bench.peers.job import Sizes
from smallmind.kernels import reference
from smallmind.kernels.attention.layout import row_of_share
from smallmind.kernels.codegen.cpus import cores
from smallmind.kernels.codegen.jit import parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up, row_share
from smallmind.kernels.codegen.simd import LANES, share
from smallmind.kernels.codegen.threads import PARALLEL, set_threads, threads
from smallmind.kernels.description import KERNELS
from smallmind.kernels.gemm.blocked import product_region, single_columns
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_A, TRANSPOSE_B
from smallmind.kernels.gemm.tile import TILE_ROWS
from smallmind.nn.recorded_passes import MIN_PASSES

SHAPES = [Sizes(16, 128, 128, 4, 4), Sizes(8, 256, 384, 6, 6)]
WORKERS = (1, 2, 4, 8, 16)
COPIED = 256e6  # bytes, for the rate of memory
WARMUP = MIN_PASSES + 2  # steps until passes are repeated, if they are
TURN = 3  # steps in a row on the same number of threads

Arguments = Mapping[str, Any]  # of a kernel, by name
Work = Sequence[float]  # of each worker, in any unit


def _rows(R: int, workers: int) -> Work:
    """Rows that do not depend on each other."""
    shares = [row_share(R, worker, workers) for worker in range(workers)]
    return [last - first for first, last in shares]


def _elements(size: int, workers: int) -> Work:
    shares = [share.py_func(size, worker, workers) for worker in range(workers)]
    return [last - first for first, last in shares]


def _iterations(costs: Sequence[float], workers: int) -> Work:
    """A prange loop over pieces of work: each thread has as many as any other, within one."""
    bounds = [row_share(len(costs), worker, workers) for worker in range(workers)]
    return [sum(costs[first:last]) for first, last in bounds]


def _chunks(size: int, chunk: int, workers: int) -> Work:
    """Sums in chunks of a fixed size."""
    return _iterations([min(chunk, size - i) for i in range(0, size, chunk)], workers)


def _product(M: int, N: int, variant: int, workers: int) -> Work:
    """Elements of a product, in whole tiles and vectors."""
    work = []
    single = single_columns(N, variant)
    for worker in range(workers):
        own = product_region(M, N, single, variant, TILE_ROWS, worker, workers)
        rows = own.last - own.first
        dots = single if own.right == N else 0
        vectors = ceil_div(own.right - dots - own.left, LANES)
        work.append(round_up(rows, TILE_ROWS) * vectors * LANES + rows * dots)
    return work


def _heads(groups: int, T: int, place: Callable[[float], float], workers: int) -> Work:
    """Causal rows of attention: the work of the first n grows as the square of n.

    place: the share of a head's rows that come before a share of its work.
    """
    work = []
    for worker in range(workers):
        begin, end = groups * worker, groups * (worker + 1)
        total = 0
        for group in range(begin // workers, ceil_div(end, workers)):
            first, last = (
                row_of_share.py_func(T, place(x / workers))
                for x in (max(0, begin - group * workers), min(workers, end - group * workers))
            )
            total += last**2 - first**2
        work.append(total)
    return work


@dataclass(frozen=True)
class Divided:
    """A call of a kernel, and the array that it divides among workers."""

    arguments: Arguments
    array: Any
    module: Any  # of the kernel
    workers: int


def _shared_heads(call: Divided) -> Work:
    B, H, T = call.array.shape
    D = call.arguments["out"].shape[1] // H
    G = (call.arguments["qkv"].shape[1] // D - H) // 2
    # The rows of a shared head cost about as much wherever they are: its gradients of keys need
    # the later queries.
    return _heads(B * G, T, lambda x: x, call.workers)


def _columns(call: Divided) -> Work:
    """Vectors of columns, for each array that is summed over all rows."""
    R, C = call.array.shape
    kinds = 1 if call.arguments["daddend"] is None else 2
    return _iterations([R * LANES] * (kinds * ceil_div(C, LANES)), call.workers)


def _kept_heads(call: Divided) -> Work:
    """A head of keys and values of each new token that is kept."""
    _, G, S, _ = call.array.shape
    B = len(call.arguments["slots"])
    T = len(call.arguments["qkv"]) // B
    return _iterations([1] * (B * G * min(T, S)), call.workers)


def _matrices(call: Divided) -> Work:
    """Whole matrices, sorted by size: back and forth over the workers."""
    work = [0.0] * call.workers
    blocks = zip(call.array.rows.tolist(), call.array.columns.tolist(), strict=True)
    for i, (rows, columns) in enumerate(blocks):
        turn, place = divmod(i, call.workers)
        worker = place if turn % 2 == 0 else call.workers - 1 - place
        work[worker] += min(rows, columns) ** 2 * (17 * min(rows, columns) + 3 * max(rows, columns))
    return work


# By the name that the description of a kernel gives.
DIVISIONS: dict[str, Callable[[Divided], Work]] = {
    "alone": lambda call: [1.0] + [0.0] * (call.workers - 1),
    "rows": lambda call: _rows(len(call.array), call.workers),
    "elements": lambda call: _elements(call.array.size, call.workers),
    "chunks": lambda call: _chunks(len(call.array), call.module.CHUNK_ROWS, call.workers),
    "chunks of elements": lambda call: _chunks(
        call.array.size, call.module.CHUNK_ELEMENTS, call.workers
    ),
    "columns": _columns,
    "product": lambda call: _product(*call.array.shape, PLAIN, call.workers),
    "product of a^T": lambda call: _product(*call.array.shape, TRANSPOSE_A, call.workers),
    "product of b^T": lambda call: _product(*call.array.shape, TRANSPOSE_B, call.workers),
    "heads": lambda call: _heads(
        math.prod(call.array.shape[:2]), call.array.shape[2], np.sqrt, call.workers
    ),
    "shared heads": _shared_heads,
    "heads of queries": lambda call: _rows(
        call.array.size // call.arguments["values"].shape[3], call.workers
    ),
    "kept heads": _kept_heads,
    "matrices": _matrices,
}


def kernel_imbalance(name: str, arguments: Arguments, workers: int) -> float:
    """-> how unevenly a compiled kernel divides its work: see `imbalance`."""
    kind, key = KERNELS[name].division
    array, module = arguments.get(key), f"smallmind.kernels.{KERNELS[name].module}"
    work = DIVISIONS[kind](Divided(arguments, array, import_module(module), workers))
    # A product is divided into whole tiles; one worker would have to do its elements only.
    return imbalance(work, array.size if kind.startswith("product") else None)


def shape_of(name: str, arguments: Arguments) -> str:
    """Returns the sizes of the kernel's axes, such as 768x128x512, from its arguments.

    Or, where its arrays do not tell them, the shape of the largest.
    """
    takes = KERNELS[name].arguments
    sizes = {axis: arguments[axis] for axis in takes.axes if axis in arguments}
    found = []
    for key, array in takes.arrays.items():
        if isinstance(x := arguments.get(key), np.ndarray):
            found += zip(array.dims, x.shape, strict=False)
    found.sort(key=lambda pair: any(map(str.isdecimal, pair[0].split("*"))))
    for _ in takes.axes:
        for text, size in found:
            factors = text.split("*")
            if len(unknown := [x for x in factors if not x.isdecimal() and x not in sizes]) == 1:
                known = [int(sizes.get(x, x)) for x in factors if x not in unknown]
                sizes[unknown[0]] = size // math.prod(known)
                break
    if len(sizes) < len(takes.axes):
        arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
        return "x".join(map(str, max((x.shape for x in arrays), key=math.prod)))
    return "x".join(str(sizes[axis]) for axis in takes.axes)


@dataclass
class Calls:
    """The calls of a kernel with the same shapes in a step. Figures are for all of them."""

    kernel: str
    shape: str
    calls: int
    regions: int  # parallel ones: at the end of each, threads wait for each other
    operations: int
    read: int  # bytes
    written: int
    imbalance: dict[int, float]  # by workers: the work of the busiest over the mean
    seconds: dict[int, float]  # by threads


def _nbytes(name: str, a: Arguments) -> tuple[int, int]:
    """Bytes read and written: each element once, of what a kernel adds to or changes twice."""
    about = KERNELS[name]
    made = about.arguments.arrays
    arrays = {key: x for key, x in a.items() if isinstance(x, np.ndarray)}
    outputs = [key for key in list(a)[: about.writes] if key in arrays]
    read = sum(x.nbytes for key, x in arrays.items() if key not in outputs or made[key].is_read)
    return read, sum(arrays[key].nbytes for key in outputs)


class _Regions(AbstractContextManager[None]):
    """In place of the lock that every parallel kernel takes: counts them."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.lock, self.count = lock, 0

    def __enter__(self) -> None:
        self.count += 1
        self.lock.__enter__()

    def __exit__(self, *details: Any) -> None:
        self.lock.__exit__(*details)


@contextmanager
def counting_regions() -> Iterator[_Regions]:
    """Counts the parallel regions that kernels enter within the block."""
    with PARALLEL.region:  # the first one of all replaces it
        pass
    lock = PARALLEL.region
    regions = PARALLEL.region = _Regions(lock)
    try:
        yield regions
    finally:
        PARALLEL.region = lock


def imbalance(work: Work, total: float | None = None) -> float:
    """The work of the busiest worker over the mean; `total` is what one would have to do alone."""
    mean = (sum(work) if total is None else total) / len(work)
    return max(work) / mean if mean else 1.0


class Step:
    """A training step of a model of some sizes, on random tokens."""

    def __init__(self, sizes: Sizes, arch: str = "gpt2") -> None:
        self.model = TransformerModel(job.model_config(sizes, arch))
        self.optimizer = AdamW(self.model, job.LEARNING_RATE)
        random = np.random.default_rng(0)
        shape = 2, sizes.B, sizes.T
        self.ids, self.targets = random.integers(0, sizes.V, shape).astype(np.int32)

    def __call__(self) -> None:
        self.model.loss_and_gradients(self.ids, self.targets)
        self.optimizer.step(job.MAX_GRAD_NORM)

    def count(self, workers: Sequence[int] = WORKERS) -> dict[tuple[str, str], Calls]:
        """Kernel and shape -> its calls. KeyError if KERNELS lacks one."""
        found: dict[tuple[str, str], Calls] = {}

        def wrap(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
            names = inspect.signature(getattr(reference, name))

            def counted(*arguments: Any, **named: Any) -> Any:
                bound = names.bind(*arguments, **named).arguments
                before = regions.count
                result = kernel(*arguments, **named)
                entered = regions.count - before
                shape = shape_of(name, bound)
                if (name, shape) not in found:
                    found[name, shape] = self._new(name, shape, bound, entered, workers)
                calls = found[name, shape]
                read, written = _nbytes(name, bound)
                calls.calls += 1
                calls.regions += entered
                if operations := KERNELS[name].operations:
                    calls.operations += operations(*arguments, **named)
                calls.read += read
                calls.written += written
                return result

            return counted

        with counting_regions() as regions, self.model.workspace.wrapped_kernels(wrap):
            self()
        return found

    def _new(
        self, name: str, shape: str, bound: Arguments, regions: int, workers: Sequence[int]
    ) -> Calls:
        balance = {
            count: kernel_imbalance(name, bound, count) if regions else float(count)
            for count in workers
        }
        return Calls(name, shape, 0, 0, 0, 0, 0, balance, {})

    def time(self, found: dict[tuple[str, str], Calls], counts: Sequence[int], rounds: int) -> dict:
        """Number of threads -> the median seconds of a step; adds those of kernels to `found`.

        The numbers of threads take turns.
        """
        steps: dict[int, list[float]] = {count: [] for count in counts}
        kernels: dict[tuple[str, str], dict[int, list[float]]] = {
            key: {count: [] for count in counts} for key in found
        }
        begun = threads()
        try:
            for count in counts:  # each has a recording of its own
                set_threads(count)
                for _ in range(WARMUP):
                    self()
            for _ in range(rounds):
                for count in counts:
                    set_threads(count)
                    self()  # caches and threads are warm afterwards
                    for _ in range(TURN):
                        start = time.perf_counter()
                        self()
                        steps[count].append(time.perf_counter() - start)
                    for key, seconds in self._timed_kernels().items():
                        kernels[key][count].append(seconds)
        finally:
            set_threads(begun)
        for key, by_count in kernels.items():
            found[key].seconds = {n: statistics.median(values) for n, values in by_count.items()}
        return {count: statistics.median(seconds) for count, seconds in steps.items()}

    def _timed_kernels(self) -> dict[tuple[str, str], float]:
        seconds: dict[tuple[str, str], float] = {}

        def wrap(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
            names = inspect.signature(getattr(reference, name))

            def timed(*arguments: Any, **named: Any) -> Any:
                start = time.perf_counter()
                result = kernel(*arguments, **named)
                taken = time.perf_counter() - start
                key = name, shape_of(name, names.bind(*arguments, **named).arguments)
                seconds[key] = seconds.get(key, 0.0) + taken
                return result

            return timed

        with self.model.workspace.wrapped_kernels(wrap):
            self()
        return seconds


@parallel_jit
def _empty(out, workers):
    for worker in prange(workers):
        out[worker] = worker


def region_seconds(count: int) -> float:
    """The time of a parallel region in which threads have nothing to do."""
    begun, out = threads(), np.zeros(count, np.int64)
    set_threads(count)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            _empty(out)
        times.append((time.perf_counter() - start) / 100)
    set_threads(begun)
    return statistics.median(times[5:])


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that a prediction needs."""

    region: dict[int, float]  # by threads: seconds
    core_rate: float  # bytes per second of memory that one core reads and writes
    memory_rate: float  # that all have together

    def region_of(self, workers: int) -> float:
        """The time of a parallel region; beyond the measured threads, each adds the same amount."""
        if workers in self.region:
            return self.region[workers]
        most = max(self.region)
        each = (self.region[most] - self.region[1]) / (most - 1) if most > 1 else 1e-6
        return self.region[most] + each * (workers - most)


def predicted(
    found: dict[tuple[str, str], Calls],
    undivided: float,
    machine: Machine,
    workers: int,
    measured: int = 1,
) -> float:
    """Seconds of a step on so many cores, from the times on a `measured` number of threads.

    Of each kernel, the time of its busiest worker, or of its bytes at the rate of memory if that is
    longer; a region for each barrier; and `undivided`, what one thread does alone. What cores lose
    by reading what others wrote is in the times on several threads only.
    """
    rate = min(machine.core_rate * workers, machine.memory_rate)
    seconds = undivided
    for calls in found.values():
        waited = calls.regions * machine.region_of(measured)
        alone = (calls.seconds[measured] - waited) * measured / calls.imbalance[measured]
        busiest = max(0.0, alone) * calls.imbalance[workers] / workers
        moved = (calls.read + calls.written) / rate if workers > 1 else 0.0
        extra = machine.region_of(workers) - machine.region_of(1)
        seconds += max(busiest, moved) + calls.regions * extra
    return seconds


def undivided_seconds(sizes: Sizes, arch: str, rounds: int) -> float:
    """The seconds that more threads do not shorten: Python, and the way into each kernel.

    That is a step of a model with as many layers, and hardly any work: one token, two channels per
    head.
    """
    step = Step(Sizes(1, 1, 2 * sizes.n_head, sizes.n_layer, sizes.n_head, V=2), arch)
    with step.model.workspace.wrapped_kernels(lambda _, kernel: kernel):  # without recordings
        return step.time(step.count([1]), [1], rounds)[1]


def measure(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Counts and measures a step -> the record. Units: seconds, bytes."""
    measured = [n for n in range(1, cores() + 1) if n & (n - 1) == 0 or n == cores()]
    workers = sorted({*WORKERS, *measured})
    step = Step(sizes, options.arch)
    step()
    found = step.count(workers)
    seconds = step.time(found, measured, options.rounds)
    undivided = undivided_seconds(sizes, options.arch, options.rounds)
    with one_thread():
        rate = copy_rate(COPIED)
    memory = options.bandwidth * 1e9 if options.bandwidth else rate * max(workers)
    machine = Machine({n: region_seconds(n) for n in measured}, rate, memory)
    return {
        "sizes": sizes.name,
        "arch": options.arch,
        "kernels": [vars(calls) for calls in found.values()],
        "seconds": seconds,
        "undivided_seconds": undivided,
        "region_seconds": {n: machine.region_of(n) for n in workers},
        "core_bytes_per_second": rate,
        "memory_bytes_per_second": memory,
        "predicted_seconds": {
            base: {n: predicted(found, undivided, machine, n, base) for n in workers}
            for base in (1, measured[-1])
        },
    }


def show(record: dict[str, Any]) -> None:
    """Prints the record as tables."""
    predictions, measured = record["predicted_seconds"], list(record["seconds"])
    workers, most = list(predictions[1]), measured[-1]
    rows = []
    for calls in sorted(record["kernels"], key=lambda calls: -calls["seconds"][1]):
        times = calls["seconds"]
        rows.append(
            {
                "": calls["kernel"],
                "shape": calls["shape"],
                "calls": calls["calls"],
                "regions": calls["regions"],
                "GFLOP": f"{calls['operations'] / 1e9:.2f}" if calls["operations"] else "",
                "MB read": f"{calls['read'] / 1e6:.1f}",
                "written": f"{calls['written'] / 1e6:.1f}",
                **{f"busiest of {n}": f"{calls['imbalance'][n]:.2f}" for n in workers if n > 1},
                "ms on 1": f"{times[1] * 1e3:.2f}",
                **{f"x on {n}": f"{times[1] / times[n]:.2f}" for n in measured if n > 1},
            }
        )
    print(f"\n{record['arch']}, {record['sizes']}")
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True))
    moved = sum(calls["read"] + calls["written"] for calls in record["kernels"])
    regions = sum(calls["regions"] for calls in record["kernels"])
    first, alone = predictions[1][1], record["seconds"][1]
    rows = []
    for n in workers:
        seconds, realistic, own = predictions[1][n], predictions[most][n], record["seconds"].get(n)
        rows.append(
            [
                n,
                f"{record['region_seconds'][n] * 1e6:.1f}",
                f"{moved / seconds / 1e9:.0f}",
                f"{seconds * 1e3:.2f}",
                f"{first / seconds:.2f}",
                f"{first / realistic:.2f}" if n >= most else "",
                f"{first / realistic / n * 100:.0f} %" if n >= most else "",
                *([f"{own * 1e3:.2f}", f"{alone / own:.2f}"] if own else ["", ""]),
                f"{alone / own / n * 100:.0f} %" if own else "",
            ]
        )
    heads = ["threads", "region us", "GB/s", "predicted ms", "speed-up"]
    heads += [f"from {most} threads", "efficiency", "measured ms", "speed-up", "efficiency"]
    print(tabulate(rows, heads, stralign="right", disable_numparse=True))
    print(
        f"{regions} parallel regions per step; {record['undivided_seconds'] * 1e3:.2f} ms on one "
        f"thread alone; a core moves {record['core_bytes_per_second'] / 1e9:.0f} GB/s",
        flush=True,
    )


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, Any]]:
    """Counts, measures and prints; returns the records."""
    records = []
    for sizes in [Sizes(*shape) for shape in options.shapes] if options.shapes else SHAPES:
        records.append(measure(options, sizes))
        show(records[-1])
    return records

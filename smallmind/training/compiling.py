"""Compiles the kernels of a run in as many processes as there are cores, at a first start.

Each helper passes through a tiny model in which all kernels but one do nothing, one kernel after
another, the slowest to compile first. The process that they help goes its usual way. Whoever comes
to a function first compiles it; the others load it (see `kernels.codegen.cache`).
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from smallmind.kernels import compiled
from smallmind.kernels.alignment import aligned_zeros
from smallmind.memory.available import available_bytes
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.backend import Backend, NoKernels
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import make_optimizer
from smallmind.parallel.environment import launched, python
from smallmind.settings.config import ModelConfig, TrainingConfig

MOST = 8  # processes: the slowest function takes a tenth of the time of all
NEEDED = 600e6  # bytes that each of them may take
# Slowest first. The others follow in the order in which a pass calls them.
SLOWEST = (
    "attention_backward",
    "matmul_transpose_a",
    "cached_attention",
    "muon",
    "attention",
    "norm_heads_backward",
    "matmul",
    "norm_heads",
    "cross_entropy",
)
# It ends when nobody holds the other end of its standard input any more.
PROGRAM = (
    "import json, os, sys, threading\n"
    "job = json.loads(sys.stdin.readline())\n"
    "wait = lambda: (sys.stdin.read(), os._exit(0))\n"
    "threading.Thread(target=wait, daemon=True).start()\n"
    "from smallmind.training.compiling import compile_kernels\n"
    "compile_kernels(*job)\n"
)


@contextmanager
def helpers(model: ModelConfig, training: TrainingConfig) -> Iterator[None]:
    """Within the block, other processes compile kernels of this tiny model too."""
    from smallmind.kernels.codegen.threads import USABLE

    count = min(len(USABLE), MOST, 1 + int(available_bytes() // NEEDED)) - 1
    with ExitStack() as stack:
        # The system may refuse more processes. Those of mpiexec share what they compile anyway.
        with suppress(OSError):
            for _ in range(0 if launched() else count):
                process = _start()
                stack.callback(_end, process)
                assert process.stdin
                settings = vars(model), vars(training)
                process.stdin.write(json.dumps([*settings, sorted(USABLE)]) + "\n")
                process.stdin.flush()
        yield


def _start() -> "subprocess.Popen[str]":
    from smallmind.kernels.codegen import cache_directory

    variables = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **cache_directory.environment()}
    others = {name: value for name, value in os.environ.items() if not name.startswith("OMP_P")}
    return subprocess.Popen(
        python(PROGRAM),
        env={**others, **variables},
        stdin=subprocess.PIPE,
        encoding="utf-8",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with suppress(OSError), process:  # closes its input, which it may not have read
        pass


class _OneKernel(NoKernels):
    """Kernels that do nothing, but for the one of this name."""

    name = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        nothing = super().__getattr__(name)
        if name != self.name:
            return nothing
        kernel: Callable[..., Any] = getattr(compiled, name)
        return kernel


def compile_kernels(
    model_fields: dict[str, Any], training_fields: dict[str, Any], cpus: list[int]
) -> None:
    """Compiles the kernels of training and evaluating a model that nobody else has compiled.

    On any of these CPUs: the process that started this one may be bound to one.
    """
    from smallmind.kernels.codegen.cache import BusyError, skip_what_others_compile
    from smallmind.kernels.codegen.threads import threads

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    skip_what_others_compile()
    config, training = ModelConfig(**model_fields), TrainingConfig(**training_fields)
    kernels = _OneKernel()
    backend = Backend("numba", kernels, TensorPool(), aligned_zeros, None, threads)
    model = TransformerModel(config, backend=backend, adapter=training.adapter)
    model.use_precision(training.requested_precision)
    optimizer = make_optimizer(model, training)
    ids = np.zeros((2, config.block_size), np.int32)

    def decode() -> None:
        cache = KeyValueCache(model, 1, config.block_size)
        for count in (2, 1):
            model.decode(ids[:1, :count], cache)

    parts: list[Callable[[], object]] = [
        lambda: model.loss_and_gradients(ids, ids),
        lambda: optimizer.step(training.max_grad_norm or None),
        lambda: model.losses(ids, ids),
        decode,
    ]
    for part in parts:
        part()
    for name in (*SLOWEST, *sorted(kernels.names.difference(SLOWEST))):
        kernels.name = name
        for part in parts:
            with suppress(BusyError):
                part()

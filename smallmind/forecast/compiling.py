"""Loads or compiles all kernels that a run calls, in a short run of a tiny model of the same kind.

Then it is known what the program itself takes, on whatever CPU, and passes can be timed. At a first
start there are as many processes as cores: each helper passes through a tiny model in which all
kernels but one do nothing, one kernel after another, the slowest to compile first. Whoever comes to
a function first compiles it; the others load it (see `kernels.codegen.cache`).
"""

import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from smallmind.console import activity
from smallmind.kernels import compiled
from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.description import KERNELS, described
from smallmind.losses.loss import CROSS_ENTROPY, Outline
from smallmind.memory.available import available_bytes
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.backend import Backend, NoKernels, dry_run_backend
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import make_optimizer
from smallmind.parallel.environment import launched, python
from smallmind.settings.config import ModelConfig, Precision, TrainingConfig
from smallmind.text.dataset import Dataset
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.operations import multiply_add_ceiling
from smallmind.training.step_threads import on_one_thread
from smallmind.training.training import Training
from smallmind.writing.generation import generate

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
STEPS = 3  # the second is recorded, the third repeated
SAMPLE_TOKENS = 40
# The largest sizes of the tiny model: beyond these, kernels call no others.
WINDOW, HEAD, WIDTH, LAYERS, BATCH, VOCABULARY = 64, 64, 128, 2, 4, 1024
HALF_FUNCTIONS = 49  # more that products and attention of 16-bit numbers compile
MAX_HELPERS = 7  # the slowest function takes a tenth of the time of all
BYTES_PER_HELPER = 700e6
# A helper ends when nobody holds the other end of its standard input any more.
PROGRAM = (
    "import json, os, sys, threading\n"
    "job = json.loads(sys.stdin.readline())\n"
    "wait = lambda: (sys.stdin.read(), os._exit(0))\n"
    "threading.Thread(target=wait, daemon=True).start()\n"
    "from smallmind.forecast.compiling import compile_kernels\n"
    "compile_kernels(*job)\n"
)


def rehearse(
    model: ModelConfig, training: TrainingConfig, backend: str, loss: Outline = CROSS_ENTROPY
) -> None:
    """Trains, evaluates and writes with a tiny model of this kind, once in a process.

    training.requested_precision must not be AUTO.
    """
    with activity.doing("Loading the kernels", usual=True):
        models = tuple(map(_tiny, loss.models))
        loss = dataclasses.replace(loss, models=models, config=None)
        _rehearse(_tiny(model), _short(training), loss, backend)


@functools.cache
def _rehearse(
    config: ModelConfig, training: TrainingConfig, outline: Outline, backend: str
) -> None:
    expected = _expected(config, training) if backend == "numba" else 0
    text = ALPHABET * (20 * WINDOW // len(ALPHABET))
    with ExitStack() as stack:
        stack.enter_context(activity.expecting_kernels(expected, _compiled))
        if expected:
            stack.enter_context(helpers(config, training))
        if backend == "numba":  # several would wait for each other
            stack.enter_context(on_one_thread())
        pool = stack.enter_context(TensorPool())
        model = TransformerModel(config, backend=backend, adapter=training.adapter)
        loss = outline.build(backend)
        for each in (model, *loss.models):
            each.workspace.pool = pool
            each.forget_recorded(after=1)
        tokenizer = Tokenizer(ALPHABET)
        loss = loss.rehearsal(model, tokenizer)
        data = loss.dataset(tokenizer, BATCH, 0) or Dataset.from_text(
            text, tokenizer, config.block_size, BATCH, 0
        )
        run = Training(model, data=data, loss=loss)
        run.counts_operations = False
        for _ in run.steps(training):
            pass
        if backend == "numba":
            multiply_add_ceiling(model.precision)  # which the real run needs
        run.evaluate_held_out()
        generate(model, run.tokenizer, max_tokens=SAMPLE_TOKENS)


def _compiled() -> int:
    """Counts the functions that any process has compiled of modules that this one has loaded."""
    from smallmind.kernels.codegen.cache_directory import cache_directory, kernels_in
    from smallmind.kernels.codegen.sources import modules

    folders = {cache_directory(module) for module in modules() if module in sys.modules}
    return sum(1 for folder in folders if folder for _ in kernels_in(folder))


def _expected(config: ModelConfig, training: TrainingConfig) -> int:
    """Estimates how many functions a first start compiles; 0 if it is not the first one.

    Which of them a later one lacks is not known before it has asked for them.
    """
    if not any(map(_is_new, ("matmul", "attention"))):  # those that take long
        return 0
    kernels = NoKernels()
    for call in _calls(config, training, dry_run_backend(kernels)):
        call()
    is_half = training.requested_precision.of_trained != Precision.FLOAT32
    new = sum(KERNELS[x].functions for x in kernels.names & KERNELS.keys() if _is_new(x))
    return new + is_half * HALF_FUNCTIONS


def _is_new(kernel: str) -> bool:
    """Returns True if nothing of a kernel's module is compiled, and what is compiled is kept."""
    from smallmind.kernels.codegen.cache_directory import cache_directory, kernels_in
    from smallmind.kernels.codegen.sources import PACKAGE

    directory = cache_directory(f"{PACKAGE}.{KERNELS[kernel].module}")
    return directory is not None and not any(kernels_in(directory))


def _calls(
    config: ModelConfig, training: TrainingConfig, backend: Backend
) -> list[Callable[[], object]]:
    """Lists calls that together call all kernels of training, evaluating and writing."""
    model = TransformerModel(config, backend=backend, adapter=training.adapter)
    model.use_precision(training.requested_precision)
    optimizer = make_optimizer(model, training)
    ids = backend.zeros(2 * config.block_size, np.int32).reshape(2, config.block_size)

    def decode() -> None:
        cache = KeyValueCache(model, 1, config.block_size)
        for count in (2, 1):
            model.decode(ids[:1, :count], cache)

    return [
        lambda: model.loss_and_gradients(ids, ids),
        lambda: optimizer.step(training.max_grad_norm or None),
        lambda: model.losses(ids, ids),
        decode,
    ]


@contextmanager
def helpers(model: ModelConfig, training: TrainingConfig) -> Iterator[None]:
    """Starts processes that compile kernels of this tiny model too, within the block."""
    from smallmind.kernels.codegen import cache_directory
    from smallmind.kernels.codegen.cpus import USABLE

    most = min(len(USABLE) - 1, MAX_HELPERS, int(available_bytes() // BYTES_PER_HELPER))
    others = {name: value for name, value in os.environ.items() if not name.startswith("OMP_P")}
    others |= {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **cache_directory.environment()}
    job = json.dumps([vars(model), vars(training), sorted(USABLE)])
    with ExitStack() as stack:
        # The system may refuse more processes. Those of mpiexec share what they compile anyway.
        with suppress(OSError):
            for _ in range(0 if launched() else most):
                process = subprocess.Popen(
                    python(PROGRAM),
                    env=others,
                    stdin=subprocess.PIPE,
                    encoding="utf-8",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                stack.callback(_end, process)
                assert process.stdin
                process.stdin.write(job + "\n")
                process.stdin.flush()
        yield


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with suppress(OSError), process:  # closes its input, which it may not have read
        pass


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
    gc.disable()  # a fifteenth of the time, for 200 MB
    now = ""  # the kernel that is not left out

    def call_one(name: str, *arguments: Any, **named: Any) -> None:
        if name == now:
            getattr(compiled, name)(*arguments, **named)

    kernels = NoKernels(call_one)
    backend = Backend("numba", kernels, TensorPool(), aligned_zeros, None, threads)
    calls = _calls(ModelConfig(**model_fields), TrainingConfig(**training_fields), backend)
    for call in calls:
        call()
    for name in sorted(kernels.names, key=lambda name: (-described(name).functions, name)):
        now = name
        for call in calls:
            with suppress(BusyError):
                call()


def _tiny(config: ModelConfig) -> ModelConfig:
    """Returns a small model whose layers call the kernels that those of a model call."""
    shared = min(2, config.n_head // config.kv_heads)  # heads that share their keys and values
    D = min(config.head_channels, HEAD + config.head_channels % 2)
    return dataclasses.replace(
        config,
        vocab_size=max(len(ALPHABET), min(config.vocab_size, VOCABULARY)),
        block_size=min(config.block_size, WINDOW),
        n_layer=min(config.n_layer, LAYERS),
        n_head=shared,
        n_kv_head=1,
        n_embd=min(config.n_embd, WIDTH) if config.head_size else shared * D,
        head_size=D if config.head_size else None,
        mlp_width=min(config.hidden_size, WIDTH),
        bigram_rows=min(config.bigram_rows, WIDTH),
        document_token=None if config.document_token is None else 0,
        bigram_vocab=None,
    )


def _short(training: TrainingConfig) -> TrainingConfig:
    """Returns the settings of a few steps, after which nothing but the end of a run follows."""
    precision = training.precision
    if precision and training.adapter is None:  # all of the tiny model is trained
        precision = Precision(precision).of_trained
    return dataclasses.replace(
        training,
        steps=STEPS,
        lengths=None,
        epochs=0,
        learning_rate=min(training.learning_rate, 1e-3),
        schedule="constant",
        min_lr=None,
        grad_accum_steps=1,
        micro_batch_size=None,
        freeze=None,  # the tiny model has fewer blocks
        precision=precision,
        val_every=0,
        save_every=0,
        sample_every=0,
        target_loss=None,
        max_rollbacks=0,
        enable_diagnostics=False,
        check_gradient_health=False,
        detect_anomaly=False,
        prefetch=None,
    )

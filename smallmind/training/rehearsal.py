"""A short run of a tiny model of the same kind: after it, all kernels that a run calls are loaded.

Then it is known what the program itself takes, on whatever CPU, and passes can be timed. Kernels
that have to be compiled are compiled here, all in one go.
"""

import dataclasses
import functools
import sys
from contextlib import ExitStack

import numpy as np

from smallmind.console import activity
from smallmind.kernels.description import KERNELS
from smallmind.losses.loss import CROSS_ENTROPY, Outline
from smallmind.memory.tensor_pool import TensorPool, unbacked
from smallmind.nn.backend import NoKernels, dry_run_backend
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import make_optimizer
from smallmind.settings.config import ModelConfig, Precision, TrainingConfig
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.compiling import helpers
from smallmind.training.operations import multiply_add_ceiling
from smallmind.training.step_threads import on_one_thread
from smallmind.training.training import Training
from smallmind.writing.generation import generate

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
STEPS = 3  # the second is recorded, the third repeated
TOKENS = 40  # of a sample
# The largest sizes of the tiny model: beyond these, kernels call no others.
WINDOW, HEAD, WIDTH, LAYERS, BATCH, VOCABULARY = 64, 64, 128, 2, 4, 1024

# Functions that become machine code with a kernel, counted on AVX-512 and AVX2 at a first start.
COMPILED = {
    "matmul": 39,
    "attention": 53,
    "attention_backward": 30,
    "norm_heads": 12,
    "norm_heads_backward": 11,
    "swiglu": 8,
    "cross_entropy": 7,
    "muon": 17,
    **dict.fromkeys(("matmul_gelu", "matmul_transpose_a", "matmul_transpose_b"), 0),  # as matmul
}
FEW = 4  # with any other
HALF = 49  # more for products and attention of 16-bit numbers
DECODING = 18  # with those that write the sample


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
        run = Training(model, Tokenizer(ALPHABET), text, batch_size=BATCH, loss=loss)
        run.counts_operations = False
        for _ in run.steps(training):
            pass
        if backend == "numba":
            multiply_add_ceiling(model.precision)  # which the real run needs
        run.evaluate_held_out()
        generate(model, run.tokenizer, max_tokens=TOKENS)


def _compiled() -> int:
    """How many functions are compiled, by any process, of the modules that this one has loaded."""
    from smallmind.kernels.codegen.cache_directory import cache_directory, kernels_in
    from smallmind.kernels.codegen.sources import modules

    places = {cache_directory(module) for module in modules() if module in sys.modules}
    return sum(1 for place in places if place for _ in kernels_in(place))


def _expected(config: ModelConfig, training: TrainingConfig) -> int:
    """About how many functions a first start compiles; 0 if it is not the first one.

    Which of them a later one lacks is not known before it has asked for them.
    """
    if not any(map(_is_new, ("matmul", "attention"))):  # those that take long
        return 0
    kernels = NoKernels()
    model = TransformerModel(config, backend=dry_run_backend(kernels), adapter=training.adapter)
    model.use_precision(training.requested_precision)
    ids = unbacked((1, config.block_size), np.int32)
    model.loss_and_gradients(ids, ids)
    make_optimizer(model, training).step()
    is_half = training.requested_precision.of_trained != Precision.FLOAT32
    new = sum(COMPILED.get(name, FEW) for name in kernels.names if _is_new(name))
    return new + DECODING * _is_new("cached_attention") + is_half * HALF


def _is_new(kernel: str) -> bool:
    """True if nothing of a kernel's module has been compiled, and what is compiled is kept."""
    from smallmind.kernels.codegen.cache_directory import cache_directory, kernels_in
    from smallmind.kernels.codegen.sources import PACKAGE

    directory = cache_directory(f"{PACKAGE}.{KERNELS[kernel].module}")
    return directory is not None and not any(kernels_in(directory))


def _tiny(config: ModelConfig) -> ModelConfig:
    """A small model whose layers call the kernels that those of a model call."""
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
    """The settings of a few steps, after which nothing but the end of a run follows."""
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

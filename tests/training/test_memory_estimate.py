"""The estimate equals what a run really holds."""

import dataclasses
import functools
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from smallmind import (
    Distillation,
    InputError,
    ModelConfig,
    Precision,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.forecast.memory import (
    STARTED_BYTES,
    TYPICAL,
    Program,
    TextSize,
    estimate,
)
from smallmind.kernels import rope
from smallmind.kernels.alignment import ALIGNMENT
from smallmind.kernels.codegen import scratch
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gemm import blocked
from smallmind.losses.loss import CROSS_ENTROPY, Outline
from smallmind.losses.teacher_settings import DistillationConfig
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn import head
from smallmind.nn.cache import KeyValueCache
from smallmind.optim.optimizer import make_optimizer
from smallmind.settings.config import CheckpointStrategy
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.chat import Turn, encode_each
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.stories import built_in_text
from smallmind.text.templates import fit_template
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.evaluation import evaluate, evaluate_held_out
from tests.architectures import BROUGHT

LLAMA = {**ARCHITECTURES["llama"], "n_kv_head": 2, "qk_norm": True}
WINDOWS = {"part_settings": {"window": 7, "window_layers": (1, 0), "window_theta": 50.0}}
EVERYTHING = {
    **ARCHITECTURES["modern"],
    "x0_scalars": True,
    "zero_init": True,
    "logit_softcap": 15.0,
}
PRECISIONS = ["float32", "float16", "bfloat16"]
STRATEGIES = [
    {},
    {"use_gradient_checkpointing": True, "checkpoint_strategy": "every_layer"},
    {"use_gradient_checkpointing": True},
    {"use_gradient_checkpointing": True, "checkpoint_strategy": "custom", "checkpoint_interval": 2},
]


def taught_by(teacher, top_k=None):
    """The loss of a student, with a cache of the teacher's logits if top_k is set."""
    cached = {"teacher_cache": "cache", "teacher_top_k": top_k} if top_k else {}
    return Outline("distillation", (teacher,), DistillationConfig(teacher="teacher", **cached))


class SmallRun:
    """A run on some tokens with its own pool, trained and evaluated as the command line does it."""

    def __init__(self, config, training, batch_size, tokens, teacher=None, **distillation):
        if isinstance(tokens, Dataset):
            data = tokens
        else:
            vocabulary = "".join(map(chr, range(200, 200 + config.vocab_size)))
            ids = np.random.default_rng(0).integers(0, config.vocab_size, tokens).astype(np.int32)
            data = Dataset(ids, config.block_size, batch_size, 1, Tokenizer(vocabulary))
        model = TransformerModel(config, adapter=training.adapter)
        self.teacher = teacher and TransformerModel(teacher)
        with TensorPool() as pool:
            distilled = None
            if self.teacher:
                distilled = Distillation(self.teacher, **distillation)
                distilled.prepare(model, data)
                self.teacher.workspace.pool = pool
            model.workspace.pool = pool
            run = Training(model, data=data, distillation=distilled)
            for _ in run.steps(training):
                pass
            if data.is_packed:
                evaluate_held_out(model, data, batch_size)
            else:
                evaluate(model, data.held_out, batch_size=batch_size)
            self.held_by_pool = pool.statistics().bytes_held
        flat, optimizer = model.flat, run.optimizer
        self.weights = sum(array.nbytes for array in flat.arrays)
        self.working_weights = flat.copied_bytes
        self.gradients = flat.grad.nbytes
        self.moments = sum(tensor.nbytes for tensor in optimizer.tensors().values())
        self.snapshot = run.spikes.held_bytes


VECTORS = ("weights", "working_weights", "gradients", "moments", "snapshot")


# Model, batch, micro-batch, tokens of the text, length.
RUNS = [
    (ModelConfig(65, 32, 5, 3, 48), 4, None, 5000, {"steps": 1}),
    (ModelConfig(65, 32, 3, 3, 48), 5, 5, 200, {"steps": 2, "val_every": 0}),
    (
        ModelConfig(300, 40, 4, 2, 64, dropout=0.1, bias=False),
        7,
        3,
        300,
        {"steps": 1, "val_batches": 0},
    ),
    (ModelConfig(11, 64, 9, 2, 32, tie_weights=False), 3, 1, 400, {"steps": 1}),
    (ModelConfig(65, 17, 1, 3, 33, dropout=0.2), 5, 5, 900, {"epochs": 1}),
    (ModelConfig(65, 64, 2, 3, 96), 11, None, 1800, {"epochs": 1, "grad_accum_steps": 2}),
    (ModelConfig(65, 64, 2, 3, 96), 50, 50, 1800, {"epochs": 1, "prefetch": 3}),
    (ModelConfig(65, 24, 3, 4, 48, **LLAMA), 5, None, 900, {"steps": 1}),
    (ModelConfig(65, 24, 5, 4, 48, **EVERYTHING), 5, 3, 900, {"steps": 2}),
    (ModelConfig(65, 24, 5, 4, 48, **EVERYTHING, **WINDOWS), 5, 3, 900, {"steps": 2}),
    (ModelConfig(65, 24, 4, 4, 48, document_token=3), 5, 2, 900, {"steps": 2}),
    (ModelConfig(65, 24, 3, 4, 50, head_size=21, **LLAMA), 5, None, 900, {"steps": 1}),
    (ModelConfig(65, 24, 3, 4, 48, head_size=5, **EVERYTHING), 5, 3, 900, {"steps": 2}),
    (ModelConfig(65, 32, 5, 3, 48), 4, None, 5000, {"steps": 1, "freeze": "embedding,blocks.0-1"}),
    (
        ModelConfig(65, 24, 5, 4, 48, **EVERYTHING),
        5,
        3,
        900,
        {"steps": 2, "freeze": "embedding,blocks.0-1,blocks.3"},
    ),
    (
        ModelConfig(11, 64, 4, 2, 32, tie_weights=False, dropout=0.1),
        3,
        1,
        400,
        {"steps": 1, "freeze": "embedding,blocks.0-3,final_norm"},
    ),
    (ModelConfig(65, 32, 3, 3, 48), 4, None, 900, {"steps": 2, "optimizer": "muon"}),
    (ModelConfig(11, 24, 2, 4, 48, **EVERYTHING), 4, 3, 900, {"steps": 2, "optimizer": "muon"}),
    *((ModelConfig(65, 24, 5, 4, 48, **x), 5, 3, 900, {"steps": 2}) for x in BROUGHT.values()),
]


def test_an_estimate_touches_no_weights(monkeypatch):
    monkeypatch.setattr("smallmind.nn.parameters.round_to", None)
    for precision in ("float16", "bfloat16"):
        estimate(ModelConfig(n_embd=4096, n_head=32), TrainingConfig(precision=precision), 2)


@pytest.mark.parametrize(
    ("run", "strategy", "precision"),
    [  # each run with each strategy, and both with each precision
        (run, strategy, PRECISIONS[(i + j) % 3])
        for i, run in enumerate(RUNS)
        for j, strategy in enumerate(STRATEGIES)
    ],
)
def test_the_estimate_is_exactly_what_pool_and_vectors_hold(run, strategy, precision):
    model, batch_size, micro_batch_size, tokens, length = run
    settings = {"val_batches": 1, "val_every": 1, **length, **strategy}
    config = TrainingConfig(precision=precision, micro_batch_size=micro_batch_size, **settings)
    expected = estimate(model, config, batch_size, text=TextSize(tokens, tokens))
    trained = SmallRun(model, config, batch_size, tokens)
    assert expected.activations == trained.held_by_pool
    for name in VECTORS:
        assert getattr(expected, name) == getattr(trained, name), name


@pytest.mark.parametrize("precision", ["q8_0", "q4_0"])
@pytest.mark.parametrize(
    "run",
    [
        (
            ModelConfig(65, 32, 3, 2, 64, tie_weights=False),
            4,
            None,
            {"freeze": "embedding,blocks.0"},
        ),
        (ModelConfig(65, 24, 4, 4, 32, **EVERYTHING), 5, 3, {"freeze": "blocks.0-1,blocks.3"}),
        (ModelConfig(65, 32, 3, 2, 64), 4, None, {"lora_rank": 3}),
        (ModelConfig(65, 24, 4, 4, 32, **EVERYTHING), 5, 3, {"lora_rank": 2, "lora_dropout": 0.1}),
    ],
)
def test_the_estimate_knows_the_bytes_of_blocks(run, precision):
    *shape, part = run
    length = {"steps": 2, **part}
    test_the_estimate_is_exactly_what_pool_and_vectors_hold((*shape, 900, length), {}, precision)
    exact, less = (
        estimate(run[0], TrainingConfig(precision=kind, **length), run[1])
        for kind in ("float32", precision)
    )
    assert less.weights < exact.weights and less.activations == exact.activations
    # A file of an adapter has nothing that is frozen.
    assert less.saving == 0 if "lora_rank" in part else less.saving > exact.saving == 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("run", [RUNS[1], RUNS[3], RUNS[8], RUNS[13], RUNS[14]])
def test_logits_of_a_few_rows_at_a_time_are_counted(monkeypatch, run, precision):
    model, batch_size, micro_batch_size, tokens, length = run
    rows = model.vocab_size * model.block_size * batch_size
    config = TrainingConfig(
        precision=precision, micro_batch_size=micro_batch_size, val_batches=1, **length
    )
    whole = estimate(model, config, batch_size, text=TextSize(tokens, tokens))
    monkeypatch.setattr(head, "MAX_LOGITS", rows // 9)
    expected = estimate(model, config, batch_size, text=TextSize(tokens, tokens))
    trained = SmallRun(model, config, batch_size, tokens)
    assert expected.activations == trained.held_by_pool != whole.activations


def test_logits_of_a_large_vocabulary_are_never_whole():
    small, large = (
        estimate(ModelConfig(V, 256, 2, 4, 64), TrainingConfig(precision="float32"), 8).activations
        for V in (1000, 150_000)
    )
    assert large - small < 4 * head.MAX_LOGITS + 2 * 4 * 8 * 256 * 64 < 4 * 8 * 256 * 150_000


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_freezing_takes_less_memory_in_every_part(precision, optimizer):
    model = ModelConfig(65, 32, 6, 3, 48)
    config = TrainingConfig(optimizer=optimizer, precision=precision, steps=2)
    frozen = dataclasses.replace(config, freeze="embedding,blocks.0-3")
    whole, less = (estimate(model, each, 4) for each in (config, frozen))
    parts = ["gradients", "moments", "snapshot", "activations", "total"]
    parts += [] if precision == "float32" else ["weights", "working_weights"]
    for name in parts:
        assert getattr(less, name) < getattr(whole, name), name
    assert less.gradients < 0.4 * whole.gradients
    assert less.activations < 0.8 * whole.activations


def test_muon_has_fewer_moments_and_more_scratch():
    config = TrainingConfig(optimizer="muon", steps=2, val_batches=1)
    model = ModelConfig(11, 24, 2, 4, 48, **LLAMA)
    with_muon = estimate(model, config, 4)
    with_adamw = estimate(model, dataclasses.replace(config, optimizer="adamw"), 4)
    assert with_muon.moments < with_adamw.moments
    assert with_muon.scratch > with_adamw.scratch


@pytest.mark.parametrize("arch", ["llama", "modern"])
def test_rotary_tables_are_counted(monkeypatch, arch):
    made = []

    @functools.cache
    def tables(*arguments):
        both = rope._make_tables(*arguments)
        made.extend(both)
        return both

    monkeypatch.setattr(rope, "_tables", tables)
    model, config = ModelConfig(11, 40, 1, 2, 48, **ARCHITECTURES[arch]), TrainingConfig(steps=1)
    SmallRun(model, config, 4, 900)
    learned = dataclasses.replace(model, position="learned")
    counted = estimate(model, config, 4).scratch - estimate(learned, config, 4).scratch
    assert counted == sum(table.nbytes for table in made) > 0


# Student, teacher, length.
LESSONS = [
    (ModelConfig(65, 32, 1, 3, 48), ModelConfig(65, 32, 5, 4, 128), {"steps": 1, "prefetch": 2}),
    (
        ModelConfig(65, 32, 4, 3, 96, dropout=0.1),
        ModelConfig(65, 64, 2, 1, 32, bias=False),
        {"epochs": 1},
    ),
]


@pytest.mark.parametrize(
    ("lesson", "top_k", "precision"),
    [  # each top k with each precision, and both with each lesson
        (LESSONS[(i + j) % 2], top_k, precision)
        for i, top_k in enumerate((None, 16, 99))
        for j, precision in enumerate(PRECISIONS)
    ],
)
def test_a_teacher_is_counted(tmp_path, lesson, top_k, precision):
    student, teacher, length = lesson
    config = TrainingConfig(precision=precision, val_batches=1, **length)
    size = TextSize(700, 700)
    expected = estimate(student, config, 4, loss=taught_by(teacher, top_k), text=size)
    cache = tmp_path / "cache" if top_k else None
    run = SmallRun(student, config, 4, 700, teacher, cache=cache, top_k=top_k or 16)
    assert expected.activations == run.held_by_pool
    assert expected.teacher == (0 if top_k else run.teacher.flat.data.nbytes)
    assert not top_k or expected.preparation > run.teacher.flat.data.nbytes + expected.weights
    alone = estimate(student, config, 4, text=size)
    assert expected.total - alone.total >= expected.teacher > alone.teacher or top_k
    assert expected.activations > alone.activations


@pytest.mark.parametrize("top_k", [None, 16])
def test_a_teacher_by_rows_is_counted(tmp_path, monkeypatch, top_k):
    monkeypatch.setattr(head, "MAX_LOGITS", 33 * 65)
    lesson = ModelConfig(65, 24, 2, 4, 48), ModelConfig(65, 32, 3, 4, 64), {"steps": 2}
    test_a_teacher_is_counted(tmp_path, lesson, top_k, "bfloat16")


@pytest.mark.parametrize(
    ("arch", "C", "settings"),
    [
        ("gpt2", 32, {}),
        ("modern", 200, {"precision": "bfloat16", "micro_batch_size": 2, "prefetch": 2}),
        ("llama", 200, {**STRATEGIES[1], "val_batches": 1}),
        ("gpt2", 200, {"epochs": 1, "grad_accum_steps": 2}),
    ],
)
def test_conversations_take_what_is_estimated(arch, C, settings):
    tokenizer, template = fit_template(Tokenizer(kind="byte"), "chatml")
    turns = [Turn("user", "How are you?"), Turn("assistant", "Very well, thank you.")]
    each = list(encode_each(tokenizer, template, [turns, 2 * turns, turns] * 20))
    data = PackedDataset(*map(np.concatenate, (each[:50], each[50:])), 150, 4, 1, tokenizer)
    model = ModelConfig(tokenizer.vocab_size, 150, 2, 4, C, **ARCHITECTURES[arch])
    length = {} if "epochs" in settings else {"steps": 3}
    defaults = {"precision": "float32", "val_every": 1, "val_batches": 0}
    config = TrainingConfig(**{**defaults, **length, **settings})
    expected = estimate(model, config, 4, text=TextSize.of(0, data))
    assert expected.activations == SmallRun(model, config, 4, data).held_by_pool
    as_one_text = estimate(model, config, 4, text=TextSize(0, len(data.train)))
    assert expected.activations > as_one_text.activations


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_conversations_by_rows_take_what_is_estimated(monkeypatch, arch):
    monkeypatch.setattr(head, "MAX_LOGITS", 100 * 258)
    test_conversations_take_what_is_estimated(arch, 200, {"micro_batch_size": 2})


def test_without_a_text_a_long_one_is_assumed():
    model, config = ModelConfig(65, 32, 2, 3, 48), TrainingConfig()
    long = estimate(model, config, 4, text=TextSize(10**6, 10**6))
    assert estimate(model, config, 4) == dataclasses.replace(long, text=0)
    assert long.text == 5 * 10**6
    epochs = TrainingConfig(epochs=1)
    for tokens in range(900, 1100, 7):  # whatever remains for the last batch
        known = estimate(model, epochs, 4, text=TextSize(tokens, tokens)).activations
        assert known <= estimate(model, epochs, 4).activations


def test_the_total_is_the_sum():
    total = estimate(ModelConfig(), TrainingConfig(), 12)
    names = *set(VECTORS) - {"working_weights"}, "activations", "scratch", "sample"
    parts = [getattr(total, name) for name in names]
    assert total.total == sum(parts) + TYPICAL.resident + STARTED_BYTES
    assert total.gradients == total.weights == total.moments / 2 == total.snapshot / 3
    # Without rollbacks it is the saver that makes this copy.
    assert estimate(ModelConfig(), TrainingConfig(max_rollbacks=0), 12).snapshot == total.snapshot
    assert total.working_weights == 0


def test_a_large_teacher_counts_while_its_logits_are_cached():
    teacher = taught_by(ModelConfig(n_embd=1024), top_k=16)
    taught = estimate(ModelConfig(n_embd=1024), TrainingConfig(), 12)
    alone = estimate(ModelConfig(), TrainingConfig(), 12, loss=teacher)
    program = TYPICAL.resident + STARTED_BYTES
    assert alone.total == program + alone.preparation > program + taught.weights > 2e8


def test_a_program_is_measured_and_no_estimate_is_below_what_it_has_taken():
    block = np.ones(80_000_000, np.uint8)  # which malloc gives back to the system at once
    larger = Program.measured()
    del block
    smaller = Program.measured(TextSize(10_000_000, 0))
    assert (
        larger.resident - smaller.resident >= 80_000_000 and smaller.peak > 0.99 * larger.resident
    )
    model, config = ModelConfig(), TrainingConfig()
    totals = [
        estimate(model, config, 12, program=Program(resident, peak))
        for resident, peak in ((10**8, 0), (2 * 10**8, 0), (10**8, 10**9))
    ]
    assert totals[1].total - totals[0].total == 10**8 and totals[2].total == 10**9


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("T", "D"), [(20, 8), (32, 33), (33, 32), (700, 5), (1024, 64)])
def test_the_scratch_of_kernels_is_counted(monkeypatch, T, D, optimizer, precision):
    kept = scratch._Kept()
    monkeypatch.setattr(scratch, "_kept", kept)
    model = ModelConfig(11, T, 1, 2, 2 * D)
    config = TrainingConfig(steps=1, val_every=0, precision=precision, optimizer=optimizer)
    SmallRun(model, config, 2, 4 * T)
    counted = estimate(model, config, 2, threads()).scratch
    # Products of so few numbers run on one thread.
    most = max(kept.elements.nbytes, 4 * blocked.SCRATCH * threads())
    assert kept.elements.nbytes <= counted + 64 * threads() and counted <= most


def test_the_keys_and_values_of_the_sample_are_counted():
    model = ModelConfig(11, 40, 3, 4, 48, n_kv_head=2)
    cache = KeyValueCache(TransformerModel(model), 1)
    assert estimate(model, TrainingConfig(), 4).sample == cache.nbytes
    longer = dataclasses.replace(model, block_size=4096)
    assert estimate(longer, TrainingConfig(), 4).sample < 12 * cache.nbytes


def test_a_teacher_that_does_not_fit_is_refused():
    for model, message in [
        (ModelConfig(block_size=63), "the teacher sees 63 tokens"),
        (ModelConfig(vocab_size=7), "the teacher has 7 tokens"),
    ]:
        with pytest.raises(InputError, match=message):
            estimate(ModelConfig(block_size=64), TrainingConfig(), 12, loss=taught_by(model))


def test_batches_that_are_drawn_ahead_are_counted():
    model, text = ModelConfig(65, 64, 2, 3, 96), TextSize(0, 9000)
    counted = {
        ahead: estimate(model, TrainingConfig(prefetch=ahead), 16, text=text).activations
        for ahead in (None, 0, 2, 4)
    }
    buffer = 2 * (4 * 16 * 64 + ALIGNMENT)  # ids and targets
    assert counted[0] == counted[None]
    assert counted[2] == counted[0] + 2 * buffer and counted[4] == counted[0] + 4 * buffer
    on_disk = dataclasses.replace(text, is_on_disk=True)
    assert estimate(model, TrainingConfig(), 16, text=on_disk).activations == counted[2]


def test_a_run_by_minutes_copies_its_weights():
    timed = estimate(ModelConfig(), TrainingConfig(), 12, timed=True)
    assert timed.total - estimate(ModelConfig(), TrainingConfig(), 12).total == timed.weights


@pytest.mark.parametrize(
    ("model", "batch_size"),
    [
        (ModelConfig(65, 128, 1, 4, 64), 8),  # attention
        (ModelConfig(65, 128, 1, 4, 64, dropout=0.1), 8),
        (ModelConfig(65, 128, 1, 1, 64, document_token=3), 8),
        (ModelConfig(65, 16, 2, 2, 128), 40),  # GELU
        (ModelConfig(1000, 16, 1, 1, 32), 40),  # the loss
        (ModelConfig(65, 16, 4, 2, 192), 1),  # the optimizer
        (ModelConfig(65, 16, 2, 4, 128, **LLAMA), 40),  # SwiGLU
        (ModelConfig(65, 16, 2, 4, 128, **EVERYTHING), 40),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("teacher", [False, True])
def test_the_temporary_arrays_of_numpy_are_counted(model, batch_size, teacher, optimizer):
    config = TrainingConfig(micro_batch_size=batch_size, optimizer=optimizer)
    loss = taught_by(model) if teacher else CROSS_ENTROPY
    expected = estimate(model, config, batch_size, backend="numpy", loss=loss).scratch
    built = TransformerModel(model, backend="numpy")
    built.micro_batch_size = batch_size
    peaks = {}

    def wrap(name, kernel):
        def measured(*arguments, **named):
            tracemalloc.start()
            result = kernel(*arguments, **named)
            peaks[name] = max(peaks.get(name, 0), tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            return result

        return measured

    ids = np.random.default_rng(0).integers(0, model.vocab_size, (batch_size, model.block_size))
    batch = Batch(ids.astype(np.int32), ids.astype(np.int32), np.zeros(batch_size, np.int64))
    made = make_optimizer(built, config)
    with built.workspace.wrapped_kernels(wrap):
        if teacher:
            distillation = Distillation(TransformerModel(model, backend="numpy"))
            distillation.loss_and_gradients(built, batch)
        else:
            built.loss_and_gradients(batch.ids, batch.targets)
        made.step()
    assert expected == pytest.approx(max(peaks.values()), rel=0.15), peaks


def test_a_larger_batch_takes_memory_only_for_its_tokens():
    model = ModelConfig(block_size=128)
    small, large = (estimate(model, TrainingConfig(), batch) for batch in (16, 160))
    tokens = 144 * 128
    assert large.total - small.total <= 2 * (2 * 4 * tokens)  # ids and targets, in whole buckets


@pytest.mark.parametrize("strategy", list(CheckpointStrategy))
def test_strategies_are_known_by_name(strategy):
    training = TrainingConfig(
        use_gradient_checkpointing=True, checkpoint_strategy=strategy, precision=Precision.FLOAT16
    )
    assert estimate(ModelConfig(n_layer=16), training, 12).activations > 0


def test_a_huge_model_is_estimated_in_little_memory():
    tracemalloc.start()
    total = estimate(ModelConfig(50_000, 1024, 12, 12, 12_288), TrainingConfig(), 4).total
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 5e11 and peak < 1e7


LENGTH = ["--val-every", "6", "--val-batches", "2", "--save-every", "6", "--threads", "2"]
STEPS = ["--steps", "12"]
TEACHER = ["--size", "tiny", "--teacher", "{teacher}", *STEPS]
PROCESSES = [
    ["--size", "nano", *STEPS],
    ["--size", "tiny", *STEPS],
    ["--size", "small", *STEPS],
    ["--size", "medium", *STEPS],
    ["--size", "nano", "--precision", "bfloat16", *STEPS],
    ["--size", "small", "--precision", "float16", *STEPS],
    ["--block-size", "2048", "--batch-size", "2", "--n-layer", "8", "--use-gradient-checkpointing",
     "--checkpoint-strategy", "every_layer", *STEPS],
    ["--n-layer", "5", "--n-embd", "132", "--tokenizer", "byte", "--no-tie-weights",
     "--batch-size", "40", "--dropout", "0.1", *STEPS],
    ["--size", "small", "--max-rollbacks", "0", *STEPS],
    TEACHER,
    [*TEACHER, "--teacher-cache", "{cache}"],
    ["--size", "tiny", "--batch-size", "50", "--epochs", "1"],
    ["--size", "small", "--minutes", "1.5"],
    ["--size", "nano", "--backend", "numpy", *STEPS],
    ["--size", "small", "--backend", "numpy", *STEPS],
    ["--block-size", "1024", "--batch-size", "2", "--dropout", "0.1", "--backend", "numpy", *STEPS],
]  # fmt: skip


PROGRAM_AND_PEAK = """
import dataclasses
import sys
from smallmind.cli import main
from smallmind.memory.tracker import peak_resident_bytes
from smallmind.forecast import pace

# With --minutes steps are timed too, but as many are trained however busy the machine is.
pace.fit_steps = lambda config, *_: dataclasses.replace(config, steps=12, warmup_steps=1)
status = main(sys.argv[1:])
print("peak", peak_resident_bytes())
sys.exit(status)
"""


def smallmind(command, *flags):
    """The output of a command, and the peak of its process in bytes."""
    arguments = [sys.executable, "-c", PROGRAM_AND_PEAK, command, *flags]
    printed = subprocess.run(arguments, check=True, text=True, stdout=subprocess.PIPE).stdout
    return printed, int(re.search(r"peak (\d+)", printed)[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A text, a teacher and a name for its cache, by their names in PROCESSES."""
    root = tmp_path_factory.mktemp("files")
    text, teacher = root / "text.txt", root / "teacher"
    text.write_text(built_in_text(60_000)[:60_000], encoding="utf-8")
    shape = ["--n-layer", "3", "--n-embd", "192", "--block-size", "128"]
    smallmind("train", str(text), *shape, "--steps", "2", "--val-every", "0", "--out", str(teacher))
    return {"text": str(text), "teacher": str(teacher), "cache": str(root / "cache")}


@pytest.mark.slow
@pytest.mark.parametrize("flags", PROCESSES, ids=" ".join)
def test_the_peak_of_a_whole_process(tmp_path, files, flags):
    flags = [files["text"], *(flag.format(**files) for flag in flags), *LENGTH]
    printed, peak = smallmind("train", *flags, "--out", str(tmp_path / "first"))
    if "Compiling" in printed:  # which takes memory
        Path(files["cache"]).unlink(missing_ok=True)
        _, peak = smallmind("train", *flags, "--out", str(tmp_path / "second"))
    printed, _ = smallmind("estimate", *flags)
    total = re.search(r"total +│ +([\d,.]+) MB", printed)[1]
    print(f"peak {peak / 1e6:.1f} MB, estimate {total} MB")
    assert float(total.replace(",", "")) * 1e6 == pytest.approx(peak, rel=0.05)

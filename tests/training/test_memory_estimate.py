"""The estimate is what a run then holds."""

import numpy as np
import pytest

from smallmind import (
    AdamW,
    Distillation,
    ModelConfig,
    Precision,
    TrainingConfig,
    TransformerModel,
)
from smallmind.config import CheckpointStrategy
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.recompute import CheckpointManager
from smallmind.text.dataset import Dataset
from smallmind.training.memory_estimate import PROGRAM, Teacher, estimate

STRATEGIES = [
    {},
    {"use_gradient_checkpointing": True, "checkpoint_strategy": "every_layer"},
    {"use_gradient_checkpointing": True},
    {"use_gradient_checkpointing": True, "checkpoint_strategy": "custom", "checkpoint_interval": 2},
]


def held_after_a_step(model_config, training_config, batch_size):
    """Bytes of the pool, and of the flat vectors."""
    settings = vars(model_config)
    model = TransformerModel(**settings)
    with TensorPool() as pool:
        model.workspace.pool = pool
        model.micro_batch_size = training_config.micro_batch_size
        model.use_precision(training_config.requested_precision)
        model.use_checkpointing(
            CheckpointManager.of(
                training_config.recompute, model_config.n_layer,
                training_config.checkpoint_interval,
            )
        )  # fmt: skip
        optimizer = AdamW(model)
        shape = batch_size, model_config.block_size
        with pool.borrow(shape, np.int32) as ids, pool.borrow(shape, np.int32) as targets:
            ids[...] = targets[...] = 1
            model.loss_and_gradients(ids, targets)
        flat = model.flat
        vectors = [flat.data, flat.grad, optimizer.m, optimizer.v]
        vectors += [] if flat.working is None else [flat.working]
        return pool.statistics().bytes_held, sum(vector.nbytes for vector in vectors)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.get("checkpoint_strategy", len(s)))
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    ("model", "batch_size", "micro_batch_size"),
    [
        (ModelConfig(65, 32, 5, 3, 48), 4, None),
        (ModelConfig(300, 40, 4, 2, 64, dropout=0.1, bias=False), 7, 3),
        (ModelConfig(11, 64, 9, 2, 32, tie_weights=False), 3, 1),
        (ModelConfig(65, 17, 1, 3, 33, dropout=0.2), 5, 5),
    ],
)
def test_it_is_what_pool_and_vectors_then_hold(
    model, batch_size, micro_batch_size, precision, strategy
):
    training = TrainingConfig(precision=precision, micro_batch_size=micro_batch_size, **strategy)
    expected = estimate(model, training, batch_size)
    pool, vectors = held_after_a_step(model, training, batch_size)
    assert expected.activations == pytest.approx(pool, rel=0.05)
    of_vectors = expected.weights + expected.working_weights + expected.gradients + expected.moments
    assert of_vectors == pytest.approx(vectors, rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("top_k", [None, 16, 99])
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (ModelConfig(65, 32, 1, 3, 48), ModelConfig(65, 32, 5, 4, 128)),
        (ModelConfig(65, 32, 4, 3, 96, dropout=0.1), ModelConfig(65, 64, 2, 1, 32, bias=False)),
    ],
)
def test_a_teacher_is_counted(tmp_path, student, teacher, precision, top_k):
    config = TrainingConfig(precision=precision)
    expected = estimate(student, config, 4, teacher=Teacher(teacher, top_k))
    model, its_teacher = (TransformerModel(**vars(c)) for c in (student, teacher))
    model.use_precision(config.requested_precision)
    dataset = Dataset(np.ones(500, np.int32), 32, 4, seed=1)
    cache = tmp_path / "cache" if top_k else None
    distillation = Distillation(its_teacher, cache=cache, top_k=top_k or 16)
    distillation.prepare(model, dataset)
    sampler = RandomWindows(dataset, stride=distillation.stride)
    with TensorPool() as pool:
        model.workspace.pool = its_teacher.workspace.pool = pool
        with pool.borrow((4, 32), np.int32) as ids, pool.borrow((4, 32), np.int32) as targets:
            batch = draw(sampler, 0, Batch(ids, targets, np.empty(0)))
            distillation.loss_and_gradients(model, batch)
        held = pool.statistics().bytes_held
    assert expected.activations == pytest.approx(held, rel=0.05)
    assert expected.teacher == (0 if top_k else its_teacher.flat.data.nbytes)
    alone = estimate(student, config, 4)
    assert expected.total - alone.total >= expected.teacher > alone.teacher or top_k
    assert expected.activations > alone.activations


def test_the_total_is_the_sum():
    total = estimate(ModelConfig(), TrainingConfig(), 12)
    parts = (
        total.weights, total.gradients, total.moments, total.snapshot, total.activations,
        total.scratch,
    )  # fmt: skip
    assert total.total == sum(parts) + PROGRAM
    assert total.gradients == total.weights == total.moments / 2 == total.snapshot / 3
    assert estimate(ModelConfig(), TrainingConfig(max_rollbacks=0), 12).snapshot == 0
    assert total.working_weights == 0


def test_the_largest_batch_that_fits():
    model, training = ModelConfig(block_size=512), TrainingConfig()
    memory = 400 * 2**20
    windows = largest_at_once(model, training, memory)

    def total(windows):
        config = TrainingConfig(micro_batch_size=windows)
        return estimate(model, config, windows).total

    assert total(windows) <= memory < total(windows + 1)
    assert largest_at_once(model, training, 1) == 0
    frugal = TrainingConfig(
        precision="float16", use_gradient_checkpointing=True, checkpoint_strategy="every_layer"
    )
    assert largest_at_once(model, frugal, memory) >= 3 * windows


def test_a_larger_batch_takes_no_more_memory_but_for_itself():
    model = ModelConfig(block_size=128)
    small, large = (estimate(model, TrainingConfig(), batch) for batch in (16, 160))
    tokens = 144 * 128
    assert large.total - small.total <= 2 * (2 * 4 * tokens)  # ids and targets, in whole buckets


@pytest.mark.parametrize("strategy", list(CheckpointStrategy))
def test_strategies_by_their_name(strategy):
    training = TrainingConfig(
        use_gradient_checkpointing=True, checkpoint_strategy=strategy, precision=Precision.FLOAT16
    )
    assert estimate(ModelConfig(n_layer=16), training, 12).activations > 0

"""The step in smallmind."""

import time
from typing import Any
from unittest.mock import patch

from smallmind.bench.peers import job
from smallmind.bench.peers.job import Job, Step
from smallmind.kernels.codegen.recording import Recording
from smallmind.nn.recorded_passes import MIN_PASSES
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.optim.loss_scaler import LossScaler
from smallmind.settings.config import Precision


def build(work: Job, precision: Precision = Precision.FLOAT32) -> Step:
    model, optimizer = _prepare(work)
    model.use_precision(precision)
    return _step(work, model, optimizer)


def python_seconds(work: Job, repeat: int = 200) -> float:
    """Returns the time of a step whose kernels do nothing: the overhead of Python."""
    model, optimizer = _prepare(work)
    step = _step(work, model, optimizer)
    for index in range(MIN_PASSES + 2):  # until passes are repeated, if they are
        step(index)
    model.workspace.kernels = _NoKernels()
    seconds = []
    with patch.object(Recording, "repeat", _nothing):
        for index in range(repeat):
            start = time.perf_counter()
            step(index)
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeat // 2]


def _step(work: Job, model: TransformerModel, optimizer: AdamW) -> Step:
    scale = LossScaler().scale if model.precision == Precision.FLOAT16 else 1.0

    def step(index: int) -> float:
        ids, targets = work.batch(index)
        loss = model.loss_and_gradients(ids, targets, scale)
        optimizer.step(job.MAX_GRAD_NORM, scale)
        return loss

    return step


def _prepare(work: Job) -> tuple[TransformerModel, AdamW]:
    model = TransformerModel(job.model_config(work.sizes, work.arch))
    for name, value in work.weights.items():
        model.parameters[name][...] = value
    optimizer = AdamW(model, job.LEARNING_RATE, job.BETAS, job.EPSILON, job.WEIGHT_DECAY)
    return model, optimizer


class _NoKernels:
    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*_: object, **__: object) -> float:
    return 1.0

"""The training loop. It yields records and prints nothing."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from smallmind.config import InputError, Precision, RunConfig, TrainingConfig
from smallmind.nn.recompute import CheckpointManager
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.optim.loss_scaler import LossScaler
from smallmind.optim.schedule import Schedule, schedule
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StepRecord:
    """One update: loss in nats a token, norm of the gradient before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    elapsed_seconds: float


@dataclass(frozen=True)
class OverflowRecord:
    """A step whose gradient was too large for float16: no update, and a smaller loss scale."""

    step: int
    loss_scale: float


@dataclass(frozen=True)
class EvaluationRecord:
    """Mean losses in nats a token over fixed windows of the training and of the held-out part."""

    step: int
    train_loss: float
    val_loss: float


Record = StepRecord | EvaluationRecord | OverflowRecord


class Training:
    """Trains model on text, whose last tenth is held out.

    Batches of batch_size windows of block_size tokens are drawn by seed. InputError where the text
    is shorter than a window or has characters that the tokenizer does not know.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        text: str,
        block_size: int | None = None,
        batch_size: int = 12,
        seed: int = 1337,
    ) -> None:
        run = RunConfig(batch_size=batch_size, seed=seed)
        self.model = model
        self.tokenizer = tokenizer
        block_size = model.config.block_size if block_size is None else block_size
        if block_size > model.config.block_size:
            raise InputError(
                f"block_size={block_size} must be at most the model's, {model.config.block_size}"
            )
        if tokenizer.vocab_size > model.config.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only "
                f"vocab_size={model.config.vocab_size}"
            )
        self.dataset = Dataset(tokenizer.encode(text), block_size, run.batch_size, run.seed)
        self.optimizer: AdamW | None = None  # of the last run
        self.schedule: Schedule | None = None  # of the last run
        self.scaler: LossScaler | None = None  # of the last run, if it was in float16

    def steps(self, config: TrainingConfig) -> Iterator[Record]:
        """Trains step by step, yielding a record every `log_every` steps and at each evaluation.

        The caller may stop whenever it likes. FloatingPointError where the loss is not finite, or
        in float16 where no scale of it keeps the gradient finite; the weights are then those before
        that step.
        """
        model, dataset = self.model, self.dataset
        optimizer = self.optimizer = AdamW(
            model, config.learning_rate, (config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )  # fmt: skip
        model.use_checkpointing(
            CheckpointManager.of(config.recompute, model.config.n_layer, config.checkpoint_interval)
        )
        model.windows_at_once = config.windows_at_once
        model.use_precision(config.storage)
        self.scaler = LossScaler() if model.precision == Precision.FLOAT16 else None
        rates = self.schedule = schedule(config)
        model.zero_gradients()
        shape, pool = (dataset.batch_size, dataset.block_size), model.workspace.pool
        with pool.borrow(shape, np.int32) as ids, pool.borrow(shape, np.int32) as targets:
            yield from self._steps(config, optimizer, rates, (ids, targets))

    def _steps(
        self, config: TrainingConfig, optimizer: AdamW, rates: Schedule, batch: Batch
    ) -> Iterator[Record]:
        tokens_per_step = batch[0].size * config.grad_accum_steps
        start = last_time = time.perf_counter()
        last_step = 0
        for step in range(1, config.steps + 1):
            loss = self._accumulate(step, config.grad_accum_steps, batch)
            if not math.isfinite(loss) and not self.scaler:
                raise FloatingPointError(
                    f"the loss became {loss} at step {step}: lower the learning rate, "
                    f"now {config.learning_rate}"
                )
            optimizer.learning_rate = rates.lr(step - 1)
            norm = self._update(optimizer, config.max_grad_norm or None)
            if norm is None:
                assert self.scaler
                yield OverflowRecord(step, self.scaler.scale)
            elif step % config.log_every == 0 or step in (1, config.steps):
                now = time.perf_counter()
                speed = (step - last_step) * tokens_per_step / (now - last_time)
                yield StepRecord(step, loss, optimizer.learning_rate, norm, speed, now - start)
                last_time, last_step = now, step
            if config.val_every and (step % config.val_every == 0 or step == config.steps):
                before = time.perf_counter()
                evaluation = self.evaluate(step, config.val_batches)
                rates.observe(evaluation.val_loss)
                yield evaluation
                last_time += time.perf_counter() - before

    def _update(self, optimizer: AdamW, max_grad_norm: float | None) -> float | None:
        """-> the norm of the gradient; None where it overflowed, and only the scale has changed."""
        scaler = self.scaler
        if scaler is None:
            return optimizer.step(max_grad_norm)
        try:
            norm = optimizer.step(max_grad_norm, scaler.scale)
        except FloatingPointError:
            scaler.update(overflowed=True)
            if scaler.is_lost:
                raise FloatingPointError(
                    f"{scaler.skips} gradients in a row overflowed float16, down to a loss scale "
                    f"of {scaler.scale:g}; {self._first_overflow()} was the first: lower the "
                    "learning rate, or take precision bfloat16 or float32"
                ) from None
            self.model.zero_gradients()
            return None
        scaler.update(overflowed=False)
        return norm

    def _first_overflow(self) -> str:
        """The parameter whose gradient, of those not finite, the backward pass reached first."""
        gradients = reversed(list(self.model.gradients.items()))
        return next(name for name, gradient in gradients if not np.isfinite(gradient).all())

    def train(self, steps: int, **settings: float | str) -> list[Record]:
        """Trains for `steps` with TrainingConfig's other fields as keywords -> all records."""
        return list(self.steps(TrainingConfig(steps=steps, **settings)))  # type: ignore[arg-type]

    def evaluate(self, step: int, batches: int) -> EvaluationRecord:
        """Mean losses over `batches` fixed batches of each part."""

        def mean(part: str) -> float:
            pairs = (self.dataset.evaluation_batch(part, i) for i in range(batches))
            return sum(self.model.loss(ids, targets) for ids, targets in pairs) / batches

        with self.model.workspace.profile("Evaluate"):
            return EvaluationRecord(step, mean("train"), mean("held_out"))

    def _accumulate(self, step: int, batches: int, batch: Batch | None = None) -> float:
        """Adds the gradients of the step's batches, drawn into batch -> their mean loss."""
        scale = (self.scaler.scale if self.scaler else 1.0) / batches
        total = 0.0
        for i in range(batches):
            with self.model.workspace.profile("GetBatch"):
                ids, targets = self.dataset.batch((step - 1) * batches + i, batch)
            total += self.model.loss_and_gradients(ids, targets, scale)
        return total / batches

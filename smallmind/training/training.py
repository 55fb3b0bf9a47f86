"""The training loop. It yields records and prints nothing."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from smallmind.config import InputError, RunConfig, TrainingConfig
from smallmind.nn.recompute import CheckpointManager
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
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
class EvaluationRecord:
    """Mean losses in nats a token over fixed windows of the training and of the held-out part."""

    step: int
    train_loss: float
    val_loss: float


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

    def steps(self, config: TrainingConfig) -> Iterator[StepRecord | EvaluationRecord]:
        """Trains step by step, yielding a record every `log_every` steps and at each evaluation.

        The caller may stop whenever it likes. FloatingPointError where the loss is not finite; the
        weights are then those before that step.
        """
        model, dataset = self.model, self.dataset
        optimizer = self.optimizer = AdamW(
            model, config.learning_rate, (config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )  # fmt: skip
        model.use_checkpointing(
            CheckpointManager.of(config.recompute, model.config.n_layer, config.checkpoint_interval)
        )
        rates = self.schedule = schedule(config)
        model.zero_gradients()
        shape, pool = (dataset.batch_size, dataset.block_size), model.workspace.pool
        with pool.borrow(shape, np.int32) as ids, pool.borrow(shape, np.int32) as targets:
            yield from self._steps(config, optimizer, rates, (ids, targets))

    def _steps(
        self, config: TrainingConfig, optimizer: AdamW, rates: Schedule, batch: Batch
    ) -> Iterator[StepRecord | EvaluationRecord]:
        tokens_per_step = batch[0].size * config.grad_accum_steps
        start = last_time = time.perf_counter()
        last_step = 0
        for step in range(1, config.steps + 1):
            loss = self._accumulate(step, config.grad_accum_steps, batch)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss became {loss} at step {step}: lower the learning rate, "
                    f"now {config.learning_rate}"
                )
            optimizer.learning_rate = rates.lr(step - 1)
            norm = optimizer.step(config.max_grad_norm or None)
            if step % config.log_every == 0 or step in (1, config.steps):
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

    def train(self, steps: int, **settings: float | str) -> list[StepRecord | EvaluationRecord]:
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
        total = 0.0
        for i in range(batches):
            with self.model.workspace.profile("GetBatch"):
                ids, targets = self.dataset.batch((step - 1) * batches + i, batch)
            total += self.model.loss_and_gradients(ids, targets, scale=1 / batches)
        return total / batches

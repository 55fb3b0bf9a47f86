"""The gradient of each step of a run: batch by batch and shard by shard, over all processes."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from smallmind.console import activity
from smallmind.losses.loss import Loss
from smallmind.nn.recompute import RecomputePlan
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.parallel.gradient_sum import GradientSum
from smallmind.parallel.shards import ShardSampler
from smallmind.settings.config import Precision, TrainingConfig, micro_batch_sizes
from smallmind.text.dataset import Batch
from smallmind.text.samplers import Sampler
from smallmind.training.live_state import LiveState
from smallmind.training.prefetch import Batches, drawing

# Gradients are sent during the backward pass if sending them takes more than this share of a step,
# in the median of some steps after the first ones.
MIN_EXCHANGE_SHARE, COLD_STEPS, TIMED_STEPS = 0.05, 3, 5
FIRST_PASS = Pass(0)  # of a run


def set_up(model: TransformerModel, config: TrainingConfig, precision: Precision) -> None:
    """Makes the passes of a model those of a run with this config, in a precision."""
    strategy, interval = config.recompute, config.checkpoint_interval
    model.use_recompute(RecomputePlan.of(strategy, model.config.n_layer, interval))
    model.micro_batch_size = config.micro_batch_size
    if config.freeze is not None:  # else what the model trains already
        model.freeze(config.freeze)
    model.use_precision(precision)
    model.use_products(config.products)


class Summed(NamedTuple):
    """The mean loss of a step's targets, or a part of the sum, and their mean weight.

    Gradients are those of the loss. Divided by the weight, both are the weighted means, with the
    same bits however the targets are divided into batches and shards.
    """

    loss: float
    weight: float  # in windows: exact where all targets count the same

    def over(self, windows: int) -> float:
        """Returns the divisor of the loss and the gradients of this many windows."""
        return self.weight / windows if self.weight else 1.0


def accumulate_gradients(
    model: TransformerModel,
    sampler: Sampler,
    step: int,
    loss: Loss,
    get_batch: Callable[[int], Batch],
    loss_scale: float = 1.0,
    at: Pass = FIRST_PASS,
) -> Summed:
    """Adds loss_scale times the gradients of a step's batches -> mean loss, and its weight.

    get_batch takes the number of a batch, and may return some of its windows: the result is then
    their part of the sum. Every window counts the same, as in one large batch. `at` is the first
    pass of the step.
    """
    windows, total, weight = sampler.windows_in_step(step), 0.0, 0.0
    for number in activity.parts(sampler.batches_in_step(step)):
        with model.workspace.profile("GetBatch"):
            batch = get_batch(number)
        if len(batch.ids):  # the last update of an epoch may need fewer batches
            share = len(batch.ids) / windows
            here = at._replace(first_row=batch.first_row)
            total += share * loss.loss_and_gradients(model, batch, loss_scale * share, share, here)
            weight += batch.windows
        # Dropout depends on the number of the batch, whichever of its windows are here.
        at = at._replace(number=at.number + (sampler.windows_in_batch(number) > 0))
    return Summed(total, weight)


def passes_in_step(sampler: Sampler, step: int) -> int:
    """Counts the batches of a step that are not empty."""
    return sum(sampler.windows_in_batch(number) > 0 for number in sampler.batches_in_step(step))


class Gradients:
    """Computes the gradients of a run's steps, with the other processes. See `computing`."""

    def __init__(
        self,
        run: LiveState,
        sampler: ShardSampler,
        batches: Batches,
        gradient_sum: GradientSum,
        check_stop: Callable[[], object],
    ) -> None:
        self.run = run
        self.losses: list[float] = []  # of each shard in the last step, as parts of the mean
        self.divisor = 1.0  # what the gradients of the last step have to be divided by
        self.learned = 0.0  # targets that the loss of the last step is a mean of, by their weights
        self.sampler = sampler
        self.waiting = 0.0  # seconds that all steps have waited for their batches
        self._batches = batches
        self._sum = gradient_sum
        self.agree, self.collect = gradient_sum.agree, gradient_sum.collect
        self._check_stop = check_stop
        self._exchange_share = 0.0  # of the time of the last step
        self._exchange_shares: list[float] = []  # of the first steps, the largest of all processes

    def compute(self, step: int, loss_scale: float) -> float:
        """Adds loss_scale times the gradient of a step to the model's -> its mean loss.

        All processes have the same sum then. Errors, Stopped included, are raised on all of them.
        """
        begun = time.perf_counter()
        try:
            shared = self._sum.together(
                lambda: (self._own_shards(step, loss_scale), self._exchange_share)
            )
        except Exception:
            self.run.clear_gradients()
            raise
        computed = [part for part, _ in shared]
        shards = [shard for part in computed for shard in part]
        self.losses = [loss for loss, _, _ in shards]
        total = Summed(sum(self.losses), sum(weight for _, weight, _ in shards))
        self.divisor = total.over(self.sampler.windows_in_step(step))
        self.learned = total.weight * self.run.loss.terms(self.sampler.dataset.block_size)
        if parameter := self.run.loss.parameter:
            for _, _, gradient in shards:
                parameter.dx += gradient / self.divisor
        exchanging = time.perf_counter()
        with self.run.model.workspace.profile("ReduceGradients"):
            self._sum.total()
        ended = time.perf_counter()
        self._exchange_share = (ended - exchanging) / (ended - begun)
        self._choose_overlap(max(share for _, share in shared))
        return total.loss / self.divisor

    def place_of_fault(self) -> str:
        """-> where the loss of the last step is not finite, for a message; empty if alone."""
        bad = [shard for shard, loss in enumerate(self.losses) if not math.isfinite(loss)]
        if not bad or not self._sum.is_divided:
            return ""
        return f" in data shard {bad[0]}, on {self._sum.rank_of(bad[0])}"

    def last_batch(self, step: int) -> Batch:
        """Returns the windows here, perhaps none, of the last batch that the step has computed."""
        sampler = self.sampler
        last = max(filter(sampler.windows_in_batch, sampler.batches_in_step(step)))
        count = sum(sampler.windows_of(last, shard) for shard in self._sum.own)
        return self._batches.latest.part(slice(count))

    def _own_shards(self, step: int, loss_scale: float) -> list[tuple[float, float, float]]:
        """Adds up the gradients of this process's shards.

        -> of each shard its part of the mean loss, its weight and the gradient of the loss's own.
        """
        run, sampler = self.run, self.sampler
        are_copied = len(self._sum.own) > 1 and sampler.batches > 1
        computed = []
        run.loss.begin_step(run.model, step, self._starts, self._check_stop)

        @functools.cache
        def get_batch(number: int) -> Batch:
            begun = time.perf_counter()
            batch = self._batches.get(number)
            self.waiting += time.perf_counter() - begun
            # Each shard has windows of all batches of the step, which share their buffers.
            return batch.copy() if are_copied else batch

        def compute(shard: int) -> Summed:
            def windows(number: int) -> Batch:
                self._check_stop()
                return sampler.shard(number, get_batch(number), shard)

            at = Pass(run.passes)
            if self._sum.early and shard == self._sum.own[-1]:
                at = self._sending_early(at, step)
            model = run.model
            return accumulate_gradients(model, sampler, step, run.loss, windows, loss_scale, at)

        parameter = run.loss.parameter
        try:
            for shard in self._sum.own:
                summed = compute(shard)
                computed.append((*summed, parameter.take_gradient() if parameter else 0.0))
                self._sum.add(shard)
        finally:
            self._sum.send_early()  # others wait for it, even after an error
        return computed

    def _starts(self, step: int) -> np.ndarray:
        """Returns where the windows of a step begin."""
        sampler = self.sampler
        return np.concatenate([sampler.starts(x) for x in sampler.batches_in_step(step)])

    def _choose_overlap(self, exchange_share: float) -> None:
        """Begins to send gradients during the backward pass if sending takes much of a step.

        exchange_share: the largest share that it took of the last step on any process.
        """
        shares, enough = self._exchange_shares, COLD_STEPS + TIMED_STEPS
        if not self._sum.is_divided or len(shares) == enough:
            return
        shares.append(exchange_share)
        if len(shares) < enough:
            return
        if statistics.median(shares[COLD_STEPS:]) > MIN_EXCHANGE_SHARE:
            self._sum.early = [part for part in self._parts_of_blocks() if part.start < part.stop]

    def _parts_of_blocks(self) -> list[slice]:
        """-> the matrices that are trained in each block, in the order of the backward pass."""
        flat, network = self.run.model.flat, self.run.model.network
        blocks = reversed(range(network.lowest, len(network.blocks)))
        return [flat.matrices(network.parts[f"blocks.{i}"]) for i in blocks]

    def _sending_early(self, at: Pass, step: int) -> Pass:
        """Passes of the last shard, the last of which sends the gradients of each block."""
        model, sampler, shard = self.run.model, self.sampler, self._sum.own[-1]
        T = sampler.dataset.block_size
        sizes = [sampler.windows_of(number, shard) for number in sampler.batches_in_step(step)]
        passes = sum(len(micro_batch_sizes(n, T, model.micro_batch_size)) for n in sizes if n)
        parts = self._parts_of_blocks()
        blocks_done = -len(parts) * (passes - 1)  # in the last pass

        def after_block() -> None:
            nonlocal blocks_done
            blocks_done += 1
            part = parts[blocks_done - 1] if blocks_done > 0 else slice(0, 0)
            if part.start < part.stop:
                self._sum.send_next()

        def poll() -> None:
            if blocks_done > 0:
                self._sum.poll()

        return at._replace(after_block=after_block, poll=poll)


@contextmanager
def computing(
    run: LiveState,
    sampler: Sampler,
    gradient_sum: GradientSum,
    steps: int,
    check_stop: Callable[[], object],
) -> Iterator[Gradients]:
    """Computes the gradients of a run within the block, up to a step.

    check_stop raises Stopped to end the run before its next batch.
    """
    config, data, pool = run.config, run.data, run.model.workspace.pool
    shards, ahead = config.shards, config.batches_ahead(data.is_on_disk)
    own = ShardSampler(sampler, shards, gradient_sum.own)
    with drawing(own, pool, ahead, steps * sampler.batches) as batches:
        yield Gradients(run, own, batches, gradient_sum, check_stop)

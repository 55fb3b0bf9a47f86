"""The steps of a run: updates, evaluations, snapshots, saves, and rollbacks after spikes."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.signals import Stopped
from smallmind.memory.tracker import peak_resident_bytes, resident_bytes
from smallmind.optim.optimizer import rate_settings
from smallmind.training.checkpoint import Saver
from smallmind.training.clock import StepClock
from smallmind.training.evaluation import Evaluations
from smallmind.training.gradients import Gradients, passes_in_step
from smallmind.training.health import checked_update, largest_gradients, not_finite
from smallmind.training.live_state import LiveState
from smallmind.training.operations import Usage
from smallmind.training.records import (
    EarlyStopRecord,
    FallingScaleRecord,
    LossRecord,
    OverflowRecord,
    Record,
    RollbackRecord,
    SampleRecord,
    SaveFailedRecord,
    StepRecord,
    TargetRecord,
)
from smallmind.training.state import Snapshot
from smallmind.training.step_threads import FastestThreads
from smallmind.training.target import Target

# Times max_grad_norm: there AdamW's epsilon begins to count beside clipped gradients.
FAR_FACTOR = 1000


@dataclass
class Loop:
    """Takes a run through its steps, and yields a record of whatever happens.

    `gradients` computes those of its steps; `threads` chooses on how many, unless it is None;
    `saver` gets the state when a save is due; `evaluations` are what it does between steps;
    `on_step` is called about once a second with the number of the step, and how far it is if it
    takes long: "17%, 0:12 left"; `usage` counts the steps; `refit` returns another length for the
    run, if it should have one from here on.
    """

    run: LiveState
    gradients: Gradients
    threads: FastestThreads | None
    saver: Saver | None
    snapshot_every: int
    evaluations: Evaluations
    on_step: Callable[[int, str], object] | None
    usage: Usage
    refit: Callable[[], int | None] | None = None

    def __post_init__(self) -> None:
        self._saved = self.run.progress.step  # the step of the last save

    def records(self, until: float = math.inf) -> Iterator[Record]:
        """Trains to the end or to the step `until`, and yields what happens."""
        run, gradients = self.run, self.gradients
        clock, self._reported = StepClock(run.progress), replace(self.usage)
        # The run was stopped during it.
        if self._evaluation_is_due() or self._target.is_due():
            yield from self._after_step(clock)
        if not run.spikes.good:
            self._keep_state()
        while run.progress.step < min(until, run.config.steps) and not run.progress.ended:
            self._refit()
            step = run.progress.step + 1
            if step in run.spikes.skipped:
                run.progress.step = step
                yield from self._after_step(clock)
                continue
            if self.threads:
                self.threads.begin()
            try:
                with self._announced(step):
                    loss = gradients.compute(step, run.loss_scale)
            except Stopped:
                break
            except (InputError, OSError, MemoryError):
                # Perhaps its batch could not be read. The steps before it are as good as ever.
                yield from self._finish()
                raise
            if self._is_broken(loss):
                yield self._roll_back(step, loss)
                clock.restart(run.progress)
                continue
            yield from self._update(step, loss, gradients.sampler.windows_in_step(step), clock)
            if self.threads and (news := self.threads.news(step)):
                yield news
            yield from self._after_step(clock)
        yield from self._finish()

    def _refit(self) -> None:
        """Gives a run by minutes another length from here on, if that is due; in all processes."""
        run = self.run
        fitted, step = run.config.fitted, run.progress.step
        if not fitted or step <= fitted[-1][0]:
            return  # a step that has been trained before: its lengths are known
        steps = self.gradients.agree(self.refit() if self.refit else None)
        if steps is not None:
            run.refit(steps)

    def _announced(self, step: int) -> AbstractContextManager[None]:
        if self.on_step:
            return activity.refreshing(functools.partial(self.on_step, step))
        return activity.doing(f"Training step {step}", usual=True)

    def _update(self, step: int, loss: float, windows: int, clock: StepClock) -> Iterator[Record]:
        """Updates the parameters from their gradients, and reports the step."""
        run, config, progress = self.run, self.run.config, self.run.progress
        rate = run.schedule.lr(step - 1) * run.spikes.lr_factor
        run.optimizer.learning_rate = rate
        batch = self.gradients.last_batch(step)
        with checked_update(run, step, batch, self.gradients.collect) as health:
            divisor = run.loss_scale * self.gradients.divisor
            limit, max_value = config.max_grad_norm, config.max_grad_value or None
            norm = run.optimizer.step(limit or None, divisor, max_value)
            if self.threads:
                self.threads.end()
            if run.scaler:
                run.scaler.update(overflowed=not math.isfinite(norm))
        if reason := self._fatal_reason(norm):
            raise FloatingPointError(reason)
        progress.step = step
        run.passes += passes_in_step(self.gradients.sampler, step)
        is_updated, largest = math.isfinite(norm), None
        if run.scaler and run.scaler.keeps_falling:
            largest = largest_gradients(run.model, divisor)
        if not is_updated:
            run.clear_gradients()
        elif run.loss.parameter:
            run.loss.parameter.step(rate)
        clock.count(windows)
        usage, waiting = self.usage, self.gradients.waiting
        usage.count(clock.stepping - usage.seconds, waiting - usage.waiting, windows)
        yield from health
        if not is_updated:
            if largest:
                yield FallingScaleRecord(step, run.loss_scale, largest)
            else:
                yield OverflowRecord(step, run.loss_scale)
            return
        run.spikes.observe(loss, self.gradients.learned)
        progress.clipped += 0 < limit < norm
        progress.far_clipped += 0 < FAR_FACTOR * limit < norm
        if step % config.log_every and step not in (1, config.steps):
            return
        if sampled := run.loss.sampled():
            yield LossRecord(step, *sampled)
        seconds, windows_per_second = clock.since_last()
        recent, self._reported = self.usage.since(self._reported), replace(self.usage)
        yield StepRecord(
            step=step,
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens_per_second=windows_per_second * run.data.block_size,
            elapsed_seconds=progress.seconds["total"],
            step_ms=1000 * seconds,
            windows=windows,
            precision=run.model.precision.value,
            loss_scale=run.loss_scale,
            clip_share=progress.clipped / run.optimizer.steps,
            memory=resident_bytes(),
            peak_memory=peak_resident_bytes(),
            gflops=recent.rate / 1e9,
            waiting_share=recent.waiting_share,
        )

    def _fatal_reason(self, norm: float) -> str | None:
        """Returns why a run cannot continue after an update with this norm, or None."""
        run = self.run
        if math.isfinite(norm) or (run.scaler and not run.scaler.is_lost):
            return None
        culprits = not_finite(run.model)
        if run.scaler is None:
            reason = f"the norm of the gradient is {norm}; nothing was updated"
            others = len(culprits) - 1
            more = f" (and {others} more parameters)" if others > 0 else ""
            return "; ".join([reason, *map(str, culprits[:1])]) + more
        first = culprits[0].name if culprits else "the norm of all gradients"
        return (
            f"{run.scaler.skips} gradients in a row overflowed float16, down to a loss scale of "
            f"{run.scaler.scale:g}; {first} was the first: lower the learning rate, or use "
            "precision bfloat16 or float32"
        )

    def _after_step(self, clock: StepClock) -> Iterator[Record]:
        """Yields what comes of an evaluation, a sample and a save, each if it is due."""
        config, progress = self.run.config, self.run.progress
        if self._evaluation_is_due():
            is_end = progress.step == config.steps
            with clock.counting("last evaluation" if is_end else "evaluations"):
                records = list(self._evaluation())
            yield from records
            if self._evaluation_is_due():  # it was stopped
                return
        if self._target.is_due():
            with clock.counting("looks"):
                look = functools.partial(self.evaluations.look, progress.step, progress.looks)
                found = self._target.look(look)
            if found is None:
                return
            yield found
        step = progress.step
        # The final evaluation runs after the last save.
        is_last = progress.ended or step == config.steps
        if config.sample_every and step % config.sample_every == 0 and not is_last:
            with clock.counting("samples"):
                text = self.evaluations.sample()
            yield SampleRecord(step, text)
        best = progress.best_step == progress.evaluated == step
        is_save_due = best or bool(config.save_every and step % config.save_every == 0)
        # A run that resumes from a saved state has it as its snapshot, so this run needs it too.
        broken = None
        if is_save_due or step % self.snapshot_every == 0:
            with clock.counting("saves"):
                broken = self._keep_state()
        if is_save_due and self.saver and broken:
            yield SaveFailedRecord(step, f"{broken} has NaN or Inf: the last checkpoint stays")
        elif is_save_due and self.saver:
            with clock.counting("saves"):
                failed = list(self._save(self.saver, best))
            yield from failed
        if self.saver:
            yield from self.saver.news()

    def _evaluation_is_due(self) -> bool:
        """Returns True if the step that the run has reached still has to be evaluated."""
        step, every = self.run.progress.step, self.run.config.val_every
        if not step or not every or self.run.progress.evaluated == step:
            return False
        return step % every == 0 or step == self.run.config.steps

    def _evaluation(self) -> Iterator[Record]:
        """Evaluates -> the record, and another one if the run ends."""
        config, progress = self.run.config, self.run.progress
        record = self.evaluations.evaluate(progress.step, config.val_batches)
        if not record:
            return
        yield record
        if compared := self.evaluations.compare(progress.step, config.val_batches):
            yield compared
        best, loss = progress.best_loss, record.val_loss
        self.run.schedule.observe(loss)
        is_lower = best is None or loss < best - config.early_stopping_min_delta
        progress.evaluated = record.step
        progress.waited = 0 if is_lower else progress.waited + 1
        if math.isfinite(loss) and (best is None or loss < best):
            progress.best_loss, progress.best_step = loss, record.step
        # Windows that do not overlap read high: the loss on the whole held-out text is lower still.
        if config.target_loss is not None and loss <= config.target_loss:
            progress.ended = True
            yield TargetRecord(record.step, loss, config.target_loss)
        elif progress.best_loss is not None and (
            0 < config.early_stopping_patience <= progress.waited
        ):
            progress.ended = True
            yield EarlyStopRecord(record.step, progress.best_step, progress.best_loss)

    @property
    def _target(self) -> Target:
        run = self.run
        return Target(run.config, run.data, run.progress, run.spikes.average)

    def _is_broken(self, loss: float) -> bool:
        """Returns True if a loss must not lead to an update."""
        if self.run.config.max_rollbacks:
            return self.run.spikes.is_spike(loss, self.gradients.learned)
        return not math.isfinite(loss) and not self.run.scaler  # a scaler skips the update itself

    def _roll_back(self, step: int, loss: float) -> RollbackRecord:
        """Restores the last good state after the loss of a step."""
        run = self.run
        run.clear_gradients()
        average, seconds = run.spikes.average, run.progress.seconds
        factor = run.spikes.lr_factor
        try:
            good = run.spikes.roll_back(step, loss, is_last=step == run.config.steps)
        except FloatingPointError as error:
            rate, peak = run.schedule.lr(step - 1) * factor, run.config.learning_rate * factor
            others = rate_settings(run.config)[1:]
            also = "".join(f", and the {name.replace('_', ' ')}" for name in others)
            raise FloatingPointError(
                f"{error}{self.gradients.place_of_fault()}: lower the learning rate, which was "
                f"{rate:.3g} at that step, with a peak of {peak:.3g}{also}"
            ) from None
        run.load(good)
        run.progress.seconds = seconds
        spike_loss = loss if math.isfinite(loss) else None
        factor = run.spikes.lr_factor
        next_rate = run.schedule.lr(good.step) * factor
        return RollbackRecord(good.step, step, spike_loss, average, factor, next_rate)

    def _keep_state(self) -> str | None:
        """Takes a snapshot, unless a tensor is not finite -> the name of the first such tensor."""
        if not self.run.config.max_rollbacks:
            return None
        if self.run.spikes.doubtful:  # perhaps there is nothing good about it
            return self.run.capture().first_non_finite()
        # A saver may still write the last snapshot, or fail and try it again later.
        failure = self.saver.wait() if self.saver else None
        return self.run.spikes.keep(self.run.capture(), overwrite=failure is None)

    def _save(self, saver: Saver, best: bool) -> Iterator[Record]:
        """Saves the state, from the snapshot if that has just been taken."""
        step, good = self.run.progress.step, self.run.spikes.good
        self._saved = step
        state = good if good and good.step == step else self.run.capture_all()
        state = self.run.gathered(state)
        if failure := saver.save(state, best):
            yield SaveFailedRecord(step, str(failure))

    def _finish(self) -> Iterator[Record]:
        """Saves the last state, unless it is saved already."""
        progress, good, saver = self.run.progress, self.run.spikes.good, self.saver
        is_end = progress.ended or progress.step >= self.run.config.steps
        is_kept = good is not None and good.step == progress.step
        if is_end and not is_kept and (broken := self._keep_state()):
            raise FloatingPointError(f"{broken} has NaN or Inf after step {progress.step}")
        if saver and progress.step > self._saved:
            state = self.run.gathered(self.run.capture_all())
            self._saved = state.step
            # Nothing changes the state while this waits, so it is saved without a copy.
            failure = saver.save(Snapshot(state.step, state.tensors, state.state), False)
            if failure:
                yield SaveFailedRecord(state.step, str(failure))
            if saver.wait():
                saver.save(state, False)  # with a copy, to be tried again later
        elif saver:
            saver.wait()
        if saver:
            yield from saver.news(wait=True)

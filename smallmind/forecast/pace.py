"""How many steps and evaluations fit in a given time, extrapolated from a few that are timed."""

import bisect
import dataclasses
import math
import platform
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.activity import clock
from smallmind.console.signals import Stopped
from smallmind.files.checkpoint_names import TIMING
from smallmind.forecast.law import OPERATIONS
from smallmind.nn.backend import resolve_precision
from smallmind.optim.optimizer import make_optimizer
from smallmind.optim.schedule import WARMUP_SHARE
from smallmind.settings.config import TrainingConfig, __version__, micro_batch_sizes
from smallmind.settings.rules import EVALUATIONS
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import Dataset
from smallmind.training.answers import MIN_QUESTIONS
from smallmind.training.checkpoint import save
from smallmind.training.evaluation import (
    EVALUATION_SHARE,
    MAX_HELD_OUT,
    SAMPLE_TOKENS,
    evaluating_seconds,
)
from smallmind.training.gradients import FIRST_PASS, set_up
from smallmind.training.state import split_snapshot
from smallmind.training.step_threads import may_choose, on_one_thread
from smallmind.training.target import LOOK_SHARE
from smallmind.training.training import Training

if TYPE_CHECKING:
    # Numba takes a quarter of a second to import.
    from smallmind.kernels.codegen.cache import CheckedFiles

CROWDED = 2.0  # times as long as on one thread: other programs use the cores
MAX_TIMING_SECONDS = 5.0
MAX_TIMING_SHARE = 0.05  # of the whole time
SLACK = 0.02  # share of the time that is left unused: steps vary
TIMED_TOKENS = 40  # of a sample
MIN_TOKENS = 4096  # in windows of an evaluation, which is more often rather than on more
ASKING_SHARE = 0.2  # of the time for evaluations that questions before the first step may take
# The length of a run is fitted again after this share of its time, or half of the time or the steps
# that are left, to the steps since so many fits before.
REFIT_SHARE, REFITS_BACK = 0.02, 10
REFIT_SECONDS = 0.2  # between two fits, at least
# Shares of the steps left, and of all, by which a fit must change the length.
CHANGE_OF_REST, CHANGE_OF_ALL = 0.02, 0.005
MIN_RATIO = 0.5  # of the time of an evaluation, while none has been seen
COLD_STEPS = 2  # wait for kernels and memory: their time tells nothing
MAX_PASSES = 64  # over the text: more memorise it, and its held-out part is predicted worse

MIN_TRIES = 3  # calls of each part of a step that are timed
UNTIMED = 2  # calls before: one waits for memory, the next is recorded
BUSY = 1.5  # usual over least time from which a pace is not kept: other programs slowed it down
MAX_OPERATIONS = 1e10  # of a pass that is timed: some tenths of a second on two cores
LONG_WINDOW = 10 * MAX_OPERATIONS  # of one window: the wait for memory is short next to it

MULTIPLYING = "smallmind.kernels.matmul"  # beside the kernels of which a pace is kept
# Settings by which no part of a run takes longer.
LENGTH_FIELDS = ("steps", "lengths", "epochs", "warmup_steps")


@dataclass(frozen=True)
class Pace:
    """How long the parts of a run take. Units: seconds."""

    step: float
    evaluation: float
    save: float
    end: float  # once, after the last step
    sample: float = 0.0
    update: float = 0.0  # of a step: what takes no longer with more windows; 0 if not timed apart
    spread: float = 1.0  # usual time / least time of what was timed: more on a busy machine

    def total(self, config: TrainingConfig, done: int = 0, steps: int | None = None) -> float:
        """Adds up the time of `steps` steps, by default those of the config; some are done.

        As if every evaluation is the best so far and therefore saved, and with a target as if the
        run looks at its held-out loss as often as it may.
        """
        steps = config.steps if steps is None else steps
        val_every, save_every = config.val_every, config.save_every

        def times(every: int, last: int = steps) -> int:
            return max(0, last // every - done // every) if every else 0

        # The last step is evaluated in any case.
        is_between = bool(val_every and steps > done and steps % val_every)
        evaluations = times(val_every) + is_between
        saves = 1 + sum(times(every) for every in {val_every, save_every})
        samples = times(config.sample_every, steps - 1)
        between = evaluations * self.evaluation + samples * self.sample + saves * self.save
        training = max(0, steps - done) * self.step
        looks = 0.0 if config.target_loss is None else LOOK_SHARE * training
        return training + looks + between + self.end


def measure(
    training: Training, config: TrainingConfig, seconds: float, directory: Path | None = None
) -> Pace | None:
    """Times a run of about `seconds` that saves to directory; None if it was stopped.

    All processes that train together call it, but only the first has a directory, and only its
    measurement counts. Changes nothing.
    """
    found, saving = None, [0.0]
    with training.preserved(config):
        with suppress(Stopped):
            longest = min(MAX_TIMING_SECONDS, MAX_TIMING_SHARE * seconds)
            found = _timed_pace(training, config, longest, training.check_stop)
        if any(training.together(lambda: found is None)):  # any of them may have been told
            return None
        state, _ = split_snapshot(training.state())
        training.spikes.keep(state)  # as a run does before it saves
        if directory:
            # Removed by whoever next locks the directory if the program is killed meanwhile.
            with (
                tempfile.TemporaryDirectory(prefix=TIMING, dir=directory) as scratch,
                _timed() as saving,
            ):
                save(scratch, training.state(), best=True)
    return found and dataclasses.replace(found, save=saving[0], spread=1.0)


def kept_pace(training: Training, config: TrainingConfig) -> Pace:
    """Returns the rough pace of a run, from an earlier start of one like it here, or timed.

    It is kept beside the compiled kernels, unless other programs have slowed it down.
    """
    if (kept := earlier_pace(training, config)) is not None:
        return kept
    found, files = rough_pace(training, config), _files(training)
    if files and found.spread < BUSY:
        with suppress(OSError):  # a disk that is full or cannot be written to
            files.save(_key(training, config), dataclasses.asdict(found))
    return found


def earlier_pace(training: Training, config: TrainingConfig) -> Pace | None:
    """Returns the pace that an earlier run like this one kept here; None if there is none."""
    files = _files(training)
    kept = files and files.load(_key(training, config))
    return Pace(**kept) if kept else None


def _files(training: Training) -> "CheckedFiles | None":
    """Opens the files that paces are kept in; None where they cannot be."""
    if training.model.backend != "numba":  # Numba stays out of runs that do not compute with it
        return None
    from smallmind.kernels.codegen.cache import CheckedFiles
    from smallmind.kernels.codegen.cache_directory import cache_directory

    directory = cache_directory(MULTIPLYING)
    return None if directory is None else CheckedFiles(directory, "pace")


def _key(training: Training, config: TrainingConfig) -> str:
    """Describes all that the time of a run's parts depends on, but not how long it is."""
    from smallmind.kernels.codegen.threads import are_fixed, max_threads, threads

    data, loss = training.data, (training.loss.name, training.loss.settings())
    settings = {name: value for name, value in vars(config).items() if name not in LENGTH_FIELDS}
    settings["precision"] = resolve_precision(config.requested_precision, training.model.backend)
    sizes = data.batch_size, data.block_size, data.held_out_batches, training.processes
    machine = platform.node(), threads(), max_threads(), are_fixed()
    parts = training.model.config, settings, loss, type(data).__name__, sizes, machine
    return repr((__version__, *parts))


def rough_pace(training: Training, config: TrainingConfig) -> Pace:
    """Times a few passes of a run: in about a second."""
    return _timed_pace(training, config)


def _timed_pace(
    training: Training,
    config: TrainingConfig,
    seconds: float = 0.0,
    check_stop: Callable[[], object] = lambda: None,
) -> Pace:
    """Times passes of this process for `seconds`, or about one, but no saves. Changes nothing.

    A batch of a large model is extrapolated from some of its windows. `check_stop` may raise.
    """
    model, data = training.model, training.data
    B, T = data.batch_size, data.block_size
    operations = OPERATIONS * model.flat.count * T  # of a window
    largest = max(micro_batch_sizes(B, T, config.micro_batch_size))
    windows = max(1, min(largest, int(MAX_OPERATIONS / operations)))
    waiting = activity.doing("Timing a few passes", usual=True)
    with waiting, training.preserved(), ExitStack() as stack:
        set_up(model, config, resolve_precision(config.requested_precision, model.backend))
        batch = data.windows(np.zeros(windows, np.int64))
        ids, targets = training.loss.seen(batch)
        optimizer, right = make_optimizer(model, config), np.empty(ids.shape, np.bool_)
        optimizer.learning_rate *= 1e-3  # passes over one batch must not lead anywhere
        calls = (
            lambda: training.loss.loss_and_gradients(model, batch, at=FIRST_PASS),
            lambda: optimizer.step(config.max_grad_norm or None),
            lambda: model.losses(ids, targets, right),
        )

        def tries(untimed: int, count: int, seconds: float = 0.0) -> list[list[float]]:
            """Makes each call in turn at least `count` times after untimed ones -> seconds."""
            rounds: list[list[float]] = []
            end = clock() + seconds
            while len(rounds) < untimed + count or clock() < end:
                rounds.append([])
                for call in calls:
                    check_stop()
                    with _timed() as taken:
                        call()
                    rounds[-1] += taken
            return list(map(list, zip(*rounds[untimed:], strict=True)))

        model.forget_recorded(after=UNTIMED - 1)
        is_long, alone = operations > LONG_WINDOW, None
        if not is_long and may_choose(model, training.processes):  # as the run will
            with on_one_thread():
                alone = [min(times) for times in tries(UNTIMED, 1)]
            if CROWDED * sum(alone) < sum(map(min, tries(1, 1))):
                # Threads wait for each other in every kernel.
                stack.enter_context(on_one_thread())
        timed = tries(0, 1) if is_long else tries(UNTIMED, MIN_TRIES, seconds)
        # Reading is never recorded: all its tries should take as long.
        spread = statistics.median(timed[2]) / min(timed[2]) if min(timed[2]) else 1.0
        learning, update, reading = map(statistics.median, timed)
        if alone and alone[0] + alone[1] < learning + update:
            learning, update, reading = alone
        training.sample(2)  # waits for kernels and memory
        with _timed() as sampling:
            training.sample(TIMED_TOKENS)
        model.forget_recorded()
    model.workspace.pool.trim()  # a run has batches of other sizes
    # Processes divide the windows, of a step by shards; what they exchange is left out.
    size = training.processes
    largest_share = math.ceil(config.shards / size) / config.shards
    learning, reading = learning / windows * largest_share, reading / windows / size
    sample = sampling[0] * SAMPLE_TOKENS / TIMED_TOKENS
    batches = config.val_batches or 1.5 * data.held_out_batches
    return Pace(
        step=config.grad_accum_steps * B * learning + update,
        evaluation=2 * B * batches * reading if config.val_every else 0.0,
        save=0.0,
        end=2 * B * batches_at_the_end(data) * reading + sample,  # windows overlap by half
        sample=sample,
        update=update,
        spread=spread,
    )


def batches_at_the_end(data: Dataset) -> int:
    """Counts batches that have the tokens that the evaluation after training predicts."""
    tokens = data.batch_size * data.block_size
    return min(data.held_out_batches, math.ceil(MAX_HELD_OUT / tokens))


def most_steps(config: TrainingConfig, data: Dataset) -> int:
    """Counts the steps that a run by minutes trains at most: MAX_PASSES over the text."""
    tokens = config.grad_accum_steps * data.batch_size * data.block_size
    return max(1, MAX_PASSES * len(data.train) // tokens)


def fit_steps(
    config: TrainingConfig, pace: Pace, seconds: float, most: float = math.inf
) -> TrainingConfig:
    """Returns the config with the number of steps that fit, at most `most`. InputError if none do.

    At most a tenth of them is warmup, unless the config says which share.
    """
    if pace.total(config, steps=1) > (1 - SLACK) * seconds:
        needed = pace.total(config, steps=10) / (1 - SLACK)
        raise InputError(
            f"{max(0, seconds):.1f} seconds are left, and a run of 10 steps takes {needed:.1f}: "
            "give more minutes, or a smaller model"
        )
    most = int(min(most, math.ceil(seconds / pace.step)))
    fitting = _most_that_fit(lambda steps: pace.total(config, 0, steps), seconds, 1, most)
    fitted = dataclasses.replace(config, steps=fitting, lengths=None)
    if config.warmup_share is not None:
        return fitted.with_warmup(0)
    warmup = min(config.warmup_steps, fitting // WARMUP_SHARE)
    return dataclasses.replace(fitted, warmup_steps=warmup)


def _most_that_fit(total: Callable[[int], float], seconds: float, least: int, most: int) -> int:
    """Returns the steps, from `least` to `most`, whose total time fits in so many seconds."""
    lengths = range(least, max(least, most) + 1)
    limit = (1 - SLACK) * seconds
    return lengths[bisect.bisect_left(lengths, True, lo=1, key=lambda n: total(n) > limit) - 1]


def refitting(training: Training, measured: Pace, end: float) -> Callable[[], int | None]:
    """Returns a function that fits the length of a run to the time that its steps really take.

    Called before each step, it returns another number of steps for the run if with the present one
    it would end before or after `end`, in activity.clock's seconds; else None.
    """
    asks = isinstance(training.data, PackedDataset)
    begun = clock()
    looks: deque[tuple[int, float]] = deque(maxlen=REFITS_BACK)  # steps, seconds until then
    evaluations: list[int] = []  # after which steps
    calls = next_step = 0
    next_time = begun
    before = training.progress.seconds["evaluations"]

    def refit() -> int | None:
        nonlocal calls, next_step, next_time
        progress, config, now = training.progress, training.config, clock()
        calls += 1
        if progress.evaluated not in (0, *evaluations[-1:]):
            evaluations.append(progress.evaluated)
        if calls <= COLD_STEPS or (now < next_time and calls < next_step):
            return None
        others = sum(x for name, x in progress.seconds.items() if name != "total")
        looks.append((calls, progress.seconds["total"] - others))
        left, remaining = end - now, config.steps - progress.step
        next_time = now + max(REFIT_SECONDS, min(REFIT_SHARE * (end - begun), left / 2))
        next_step = calls + math.ceil(remaining / 2)
        steps, seconds = (last - first for first, last in zip(looks[0], looks[-1], strict=True))
        if not (steps and seconds > 0):
            return None
        step = seconds / steps
        # Evaluations and the end are slower or faster as steps are, until there is one to measure.
        ratio = max(MIN_RATIO, step / measured.step)
        if measured.evaluation and evaluations:
            spent = progress.seconds["evaluations"] - before
            ratio = spent / len(evaluations) / measured.evaluation
        pace = Pace(
            step=step,
            evaluation=ratio * measured.evaluation,
            save=ratio * measured.save,
            # Writing takes no longer or shorter with the steps.
            end=ratio * (measured.end - measured.sample) + measured.sample,
            sample=measured.sample,
        )

        def total(steps: int) -> float:
            """Adds the questions at the end, which take what evaluations leave of their share."""
            seconds = pace.total(config, progress.step, steps)
            if not asks:
                return seconds
            to_come = (steps - progress.step) * step
            evaluating = progress.seconds["evaluations"] + (seconds - to_come)
            return seconds + max(0.0, evaluating_seconds(looks[-1][1] + to_come) - evaluating)

        most = max(most_steps(config, training.data), config.fitted[0][1])
        fitting = _most_that_fit(total, left, progress.step + 1, most)
        change = max(CHANGE_OF_REST * remaining, CHANGE_OF_ALL * config.steps)
        return fitting if abs(fitting - config.steps) > change else None

    return refit


def fit_evaluations(
    training: Training, config: TrainingConfig, seconds: float | None = None
) -> tuple[TrainingConfig, float]:
    """Fits evaluations, of held-out answers too, into their share of the time of the steps.

    With seconds, of a run that takes so long. -> the config, and the seconds for questions before
    the first step, perhaps 0. Times a few passes.
    """
    data = training.data
    timed = kept_pace(training, dataclasses.replace(config, val_every=1, val_batches=1))
    steps = config.steps
    if seconds is not None:
        steps = max(1, int((1 - EVALUATION_SHARE) * seconds / timed.step))
    seconds, batch = evaluating_seconds(steps * timed.step), timed.evaluation / 2
    asking = MIN_QUESTIONS * timed.sample * TIMED_TOKENS / SAMPLE_TOKENS
    seconds -= batches_at_the_end(data) * batch + asking
    before = asking if asking < ASKING_SHARE * seconds else 0.0
    seconds -= before

    def cost(batches: int) -> float:
        return batch * sum(min(batches, data.batches_of(part)) for part in ("train", "held_out"))

    few = math.ceil(MIN_TOKENS / (data.batch_size * data.block_size))
    count = max(1, min(EVALUATIONS, int(seconds / max(cost(few), 1e-9))))
    fitting = [n for n in range(1, config.val_batches + 1) if count * cost(n) <= seconds]
    batches, every = max(fitting, default=1), math.ceil(steps / count)
    if not fitting and config.schedule != "plateau" and config.target_loss is None:
        every = 0  # the evaluation at the end takes all the time there is
    return dataclasses.replace(config, val_every=every, val_batches=batches), before


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Yields a list that holds the seconds of the block once it has ended."""
    seconds: list[float] = []
    start = clock()
    yield seconds
    seconds.append(clock() - start)

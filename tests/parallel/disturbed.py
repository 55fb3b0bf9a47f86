"""The command line on ranks of which one meets a fault in training.

    python -m tests.parallel.disturbed [FAULT RANK BATCH] -- train TEXT ...

BATCH is the number of the batch, from 0, in which the fault comes.
"""

import hashlib
import os
import signal
import sys

import pytest

from smallmind.checks import InputError
from smallmind.cli import main
from smallmind.console import activity
from smallmind.forecast import pace
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel import launch
from smallmind.parallel.environment import rank
from smallmind.runs import parallel as runs_parallel
from smallmind.runs import session
from smallmind.text.dataset import Dataset
from smallmind.training import clock, evaluation, training
from tests.programs import start_untimed

SPIKE = 1e4


def in_batch(number, act, is_here=lambda: True):
    """Calls act(model) once, when a model has been trained on a batch; it may return a loss."""
    original, done = TransformerModel.loss_and_gradients, []

    def disturbed(self, ids, targets, scale=1.0, at=None, **named):
        is_trained = self.backend != "none" and at and at.number == number
        is_due = is_trained and not done and is_here()
        loss = original(self, ids, targets, scale, at, **named)
        if not is_due:
            return loss
        done.append(True)
        return act(self) or loss

    TransformerModel.loss_and_gradients = disturbed


def raising(error):
    def act(_):
        raise error

    return act


def signalling(number):
    return lambda _: os.kill(os.getpid(), number)


def poison(model):
    model.flat.data[...] = float("nan")
    model.flat.refresh()
    return float("nan")


def unreadable(number, is_here=lambda: True):
    """The tokens of a batch cannot be read."""
    original, calls = Dataset.windows, []

    def windows(self, *arguments):
        calls.extend([1] * is_here())
        if len(calls) == number + 1 and is_here():
            raise OSError("Input/output error: tokens.bin")
        return original(self, *arguments)

    Dataset.windows = windows


def no_tokens(_):
    """This rank's machine lacks the tokens on disk."""
    runs_parallel.find_tokens = lambda *_: None


def no_token_files(_):
    def find_tokens(*_):
        raise InputError("no such directory")

    runs_parallel.find_tokens = find_tokens


def without_mpi4py(_):
    launch.GRACE = 1  # the other ranks do not fail
    sys.modules["mpi4py"] = None


def on_a_clock(patch, planned=0.5, each=0.05):
    """Passes take `each` second on a clock that else stands still; a step was timed at `planned`.

    So a run by minutes gets other lengths as it goes, however busy the machine is.
    """
    now = activity.clock()
    original, measure = TransformerModel.loss_and_gradients, pace.measure

    def passing(self, *arguments, **named):
        nonlocal now
        now += each * (self.backend != "none")
        return original(self, *arguments, **named)

    patch.setattr(TransformerModel, "loss_and_gradients", passing)
    for module in (pace, session, clock):
        patch.setattr(module, "clock", lambda: now)
    # All ranks time steps together.
    patch.setattr(pace, "measure", lambda *given: measure(*given) and pace.Pace(planned, 0, 0, 0))
    patch.setattr(pace, "most_steps", lambda *_: 10**6)  # a short text must not end the run


def clocked(number):
    """A run by minutes on a clock, whose rank is killed in a batch."""
    on_a_clock(pytest.MonkeyPatch(), each=0.1)
    in_batch(number, signalling(signal.SIGKILL))


FAULTS = {
    "clock": clocked,
    "memory": lambda n: in_batch(n, raising(MemoryError("12 GB for activations"))),
    "bug": lambda n: in_batch(n, raising(ZeroDivisionError("a planted bug"))),
    "kill": lambda n: in_batch(n, signalling(signal.SIGKILL)),
    "pause": lambda n: in_batch(n, signalling(signal.SIGSTOP)),
    "terminate": lambda n: in_batch(n, signalling(signal.SIGTERM)),
    "no tokens": no_tokens,
    "no token files": no_token_files,
    "no mpi4py": without_mpi4py,
}


def telling(tell):
    """Calls tell(rank, steps, digest of the weights) in each rank that evaluates them at the end.

    Returns what takes the place of `Training.evaluate_held_out`.
    """
    original = training.Training.evaluate_held_out

    def evaluate_held_out(self):
        digest = hashlib.sha256(self.model.flat.data.tobytes()).hexdigest()
        tell(rank(), self.progress.step, digest)
        return original(self)

    return evaluate_held_out


def prepare():
    """Runs end with a short sample, and nothing is timed before they start."""
    evaluation.SAMPLE_TOKENS = 20
    start_untimed(pytest.MonkeyPatch())
    training.Training.evaluate_held_out = telling(
        lambda *told: print("At its end, rank {} after {} steps: {}".format(*told), flush=True)
    )


if __name__ == "__main__":
    place = sys.argv.index("--")
    prepare()
    if place > 1:
        name, chosen, number = sys.argv[1:place]
        if (rank() or 0) == int(chosen):
            FAULTS[name](int(number))
    sys.exit(main(sys.argv[place + 1 :]))

"""Ctrl-C and SIGTERM at every stage: the run is saved, and resumes as if uninterrupted."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from smallmind import durable, generation
from smallmind.cli.signals import STOPPING
from smallmind.nn.transformer import TransformerModel
from smallmind.runs import interrupt
from smallmind.runs.session import Run
from smallmind.training import evaluation
from smallmind.training.checkpoint import newest
from smallmind.training.live_state import LiveState
from smallmind.training.training import Training
from tests.faults.disk import Quick
from tests.faults.runs import FLAGS, outcome, status, train, write_text

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals for one process")
ACCUMULATE = ["--grad-accum-steps", "2"]
NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def unhandled():
    """A signal that the command line does not handle fails one test instead of ending them all."""

    def fail(number, _):
        raise AssertionError(f"signal {number} was not handled")

    before = {number: signal.signal(number, fail) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is fail  # handlers are put back
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of a run without signals."""
    root = tmp_path_factory.mktemp("whole")
    assert train(root) == 0
    return outcome(root / "run")


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory):
    """The outcome of a run of two batches per step, without signals."""
    root = tmp_path_factory.mktemp("accumulated")
    assert train(root, *ACCUMULATE) == 0
    return outcome(root / "run")


def signal_at(patch, owner, name, call, number):
    """Raises a signal at this call of a function, which then runs as usual."""
    original, calls = getattr(owner, name), []

    def disturbed(*arguments, **settings):
        if getattr(arguments[0], "backend", None) != "none":  # not in the estimate's dry run
            calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return original(*arguments, **settings)

    patch.setattr(owner, name, disturbed)


# Where a signal comes, the number of that call, and the step of the last checkpoint then.
STAGES = {
    "step": (TransformerModel, "loss_and_gradients", 19, 9),  # in the first of two batches
    "evaluation": (TransformerModel, "losses", 2, 7),
    "before it": (Training, "evaluate", 2, 14),
    "snapshot": (LiveState, "capture", 3, 5),  # while the state is captured
    "save": (durable.Files, "replace", 4, None),  # while it is written
    "whole evaluation": (evaluation, "evaluate", 1, 20),
    "sampling": (generation, "choose", 5, 20),
}


@pytest.mark.parametrize(
    ("stage", "number"),
    [  # one handler serves all signals: all of them in a step, and in turn at the other stages
        *(("step", number) for number in NUMBERS),
        *((stage, NUMBERS[i % 3]) for i, stage in enumerate(STAGES) if i),
    ],
)
def test_an_interrupted_run_resumes_as_if_uninterrupted(
    tmp_path, monkeypatch, capsys, accumulated, stage, number
):
    owner, name, call, steps = STAGES[stage]
    with monkeypatch.context() as patch:
        patch.setattr(durable, "files", Quick())
        signal_at(patch, owner, name, call, number)
        assert train(tmp_path, *ACCUMULATE) == 128 + number
    run = tmp_path / "run"
    assert not (run / ".lock").exists()
    saved = newest(run)[0]
    if steps:
        assert saved.step == steps
    assert status("train", "--resume", run) == 0
    assert outcome(run) == accumulated
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_the_first_step_leaves_nothing(tmp_path, monkeypatch, number):
    signal_at(monkeypatch, TransformerModel, "loss_and_gradients", 1, number)
    assert train(tmp_path) == 128 + number
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_end_other_commands_too(tmp_path, monkeypatch, capsys, number, whole):
    assert train(tmp_path, "--steps", "2") == 0
    signal_at(monkeypatch, generation, "choose", 3, number)
    assert status("generate", tmp_path / "run") == 128 + number
    assert "Traceback" not in capsys.readouterr().err


def test_an_ignored_signal_stays_ignored(tmp_path, monkeypatch):
    """As under nohup: the run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signal_at(monkeypatch, TransformerModel, "loss_and_gradients", 9, signal.SIGHUP)
        assert train(tmp_path) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def smallmind(code, *arguments, **environment):
    """The command line in a separate process, after some lines of code."""
    program = f"import sys\n{code}\nfrom smallmind.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_signal_while_kernels_compile_leaves_nothing(tmp_path):
    """With an empty cache: the signal comes after the line about compiling."""
    run, cache = tmp_path / "run", tmp_path / "cache"
    flags = ["train", write_text(tmp_path), *FLAGS, "--out", run]
    with smallmind("", *flags, SMALLMIND_CACHE_DIR=str(cache)) as process:
        for line in process.stdout:
            if line.startswith("Compiling"):
                process.send_signal(signal.SIGINT)
                break
        process.stdout.read()
        assert process.stderr.read() == "\nsmallmind: interrupted\n"
    assert process.returncode == 130
    assert not run.exists()


STUCK = """
import time
from smallmind import durable

class Stuck(durable.Files):
    def fsync(self, file):
        if self.stuck:
            print("stuck", flush=True)
            time.sleep(60)

    stuck = False

    def create(self, path):
        self.stuck = "00000010" in path.name
        return super().create(path)

durable.files = Stuck()
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path, whole):
    """The disk hangs, so the first Ctrl-C waits for its save."""
    run = tmp_path / "run"
    flags = ["train", write_text(tmp_path), *FLAGS, "--out", run]
    with smallmind(STUCK, *flags) as process:
        try:
            for line in process.stdout:
                if line == "stuck\n":
                    break
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            time.sleep(interrupt.PATIENCE)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert newest(run)[0].step in (5, 7)
    assert status("train", "--resume", run) == 0
    assert outcome(run) == whole


@pytest.fixture
def clock(monkeypatch):
    """A list whose only element is the time that the handlers see."""
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("pair", ["HUP HUP", "TERM TERM", "HUP TERM", "INT INT", "TERM INT"])
@pytest.mark.parametrize("owner", [TransformerModel, durable.Files], ids=["step", "save"])
def test_a_second_signal_does_not_prevent_saving(tmp_path, monkeypatch, clock, pair, owner, whole):
    """Both at once, as from the kernel and the shell when a terminal is closed."""
    first, second = (getattr(signal, f"SIG{name}") for name in pair.split())
    name, call = ("loss_and_gradients", 9) if owner is TransformerModel else ("replace", 4)

    def quit_at_once(code):
        raise AssertionError("ended without saving")

    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", quit_at_once)
        patch.setattr(durable, "files", Quick())
        signal_at(patch, owner, name, call, second)
        signal_at(patch, owner, name, call, first)
        # Signals that arrive together are handled in the order of their numbers.
        assert train(tmp_path) in (128 + first, 128 + second)
    assert status("train", "--resume", tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == whole


@pytest.mark.parametrize("pair", ["HUP HUP", "TERM HUP"])
def test_a_second_signal_before_the_first_step_still_leaves_nothing(tmp_path, monkeypatch, pair):
    first, second = (getattr(signal, f"SIG{name}") for name in pair.split())
    signal_at(monkeypatch, TransformerModel, "loss_and_gradients", 1, first)
    signal_at(monkeypatch, Run, "discard_untrained", 1, second)
    assert train(tmp_path) == 128 + first
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("seconds", "quits"), [(0.9, False), (1.1, True)])
def test_only_a_ctrl_c_after_a_second_quits(monkeypatch, clock, seconds, quits):
    stopped = []
    with pytest.raises(KeyboardInterrupt) if quits else nullcontext():
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with interrupt.stopping_on_interrupt(lambda: stopped.append(True)):
                signal.raise_signal(signal.SIGINT)
                clock[0] += seconds
                signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
    assert stopped == [True] * (1 if quits else 2)


LONG_STEP = """
import signal
import time
from smallmind.nn.transformer import TransformerModel
from smallmind.runs import pace

pace.rough_pace = lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01)  # its passes would count as steps
original, calls, ended = TransformerModel.loss_and_gradients, [], []

def long_step(self, *arguments):
    calls.append(self.backend)
    if calls.count("numba") == 9:
        print("within a step", flush=True)
        while not ended:
            time.sleep(0.01)
    return original(self, *arguments)

signal.signal(signal.SIGUSR1, lambda *_: ended.append(True))
TransformerModel.loss_and_gradients = long_step
"""


def test_the_first_ctrl_c_is_answered_within_the_step(tmp_path):
    flags = ["train", write_text(tmp_path), *FLAGS, "--out", tmp_path / "run"]
    with smallmind(LONG_STEP, *flags) as process:
        for line in process.stdout:
            if line == "within a step\n":
                break
        process.send_signal(signal.SIGINT)
        # The step goes on until the process is told that the answer has been read.
        assert next(process.stdout).strip() == STOPPING
        process.send_signal(signal.SIGUSR1)
        rest = process.stdout.read()
        assert "Interrupted after step 9; everything is saved." in rest
    assert process.returncode == 130

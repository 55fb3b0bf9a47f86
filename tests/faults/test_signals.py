"""Ctrl-C and SIGTERM at every stage: the run is saved, and resumes as if uninterrupted."""

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest

from smallmind.cli.signals import STOPPING, ending_on_signals
from smallmind.console import signals
from smallmind.files import durable
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.run import Run
from smallmind.training import evaluation
from smallmind.training.checkpoint import newest
from smallmind.training.evaluation import Evaluations
from smallmind.training.live_state import LiveState
from smallmind.views.listing import find_runs
from smallmind.writing import decoder
from tests.faults.disk import Quick
from tests.faults.runs import FLAGS, outcome, status, train, write_text
from tests.programs import last_of_each, started

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
    "before it": (Evaluations, "evaluate", 2, 14),
    "snapshot": (LiveState, "capture", 3, 5),  # while the state is captured
    "save": (durable.Files, "replace", 4, None),  # while it is written
    "whole evaluation": (evaluation, "_held_out_batches", 1, 20),
    "sampling": (decoder, "choose_each", 5, 20),
}


@pytest.mark.parametrize(
    ("stage", "number"),
    [  # one handler serves all signals: all of them in a step, and in turn at the other stages
        *(("step", number) for number in NUMBERS),
        *((stage, NUMBERS[i % 3]) for i, stage in enumerate(STAGES) if i),
    ],
)
def test_an_interrupted_run_resumes_as_if_uninterrupted(
    tmp_path, monkeypatch, capsys, undisturbed, stage, number
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
    assert outcome(run) == undisturbed(*ACCUMULATE)
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("stage", "state", "last"),
    [
        ("whole evaluation", "interrupted", r"train \ --resume"),
        ("sampling", "finished", "generate"),
    ],
)
def test_after_a_signal_at_the_end_all_say_the_same_of_the_run(
    tmp_path, monkeypatch, capsys, stage, state, last
):
    owner, name, call, _ = STAGES[stage]
    with monkeypatch.context() as patch:
        signal_at(patch, owner, name, call, signal.SIGINT)
        assert train(tmp_path) == 130
    printed = capsys.readouterr().out
    assert f"Next: smallmind {last}" in " ".join(printed.split())
    assert ("Interrupted after step 20" in printed) == (state == "interrupted")
    (found,) = find_runs(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert found.state == state and f": {state}" in repr(run)
    assert run.is_finished == (state == "finished")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_the_first_step_leaves_nothing(tmp_path, monkeypatch, number):
    signal_at(monkeypatch, TransformerModel, "loss_and_gradients", 1, number)
    assert train(tmp_path) == 128 + number
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_end_other_commands_too(tmp_path, monkeypatch, capsys, number):
    assert train(tmp_path, "--steps", "2") == 0
    signal_at(monkeypatch, decoder, "choose_each", 3, number)
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
    program = f"import sys\n{code}\nfrom smallmind.cli import main\nsys.exit(main())"
    return started(
        [sys.executable, "-c", program, *last_of_each(*map(str, arguments))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
    )


def read_until(start, process):
    """Reads what a process prints, and shows it, to a line that begins like this."""
    for line in process.stdout:
        print(line, end="")
        if line.startswith(start):
            break


def test_a_signal_while_kernels_compile_leaves_nothing(tmp_path):
    """With an empty cache: the signal comes after the line about compiling."""
    run, cache = tmp_path / "run", tmp_path / "cache"
    flags = ["train", write_text(tmp_path), *FLAGS, "--out", run]
    with smallmind("", *flags, SMALLMIND_CACHE_DIR=str(cache)) as process:
        read_until("Compiling", process)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == "\nsmallmind: interrupted\n"
    assert process.returncode == 130
    assert not run.exists()


STUCK = """
import os, time
from smallmind.files import durable

class Stuck(durable.Files):
    def fsync(self, file):
        if self.stuck:
            os.write(1, b"\\nstuck\\n")  # a line of its own, whatever the other thread prints
            time.sleep(3600)

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
        read_until("stuck\n", process)
        process.send_signal(signal.SIGINT)
        read_until(STOPPING, process)  # from now on the second one is awaited
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(signals.PATIENCE)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert newest(run)[0].step in (5, 7)
    assert status("train", "--resume", run) == 0
    assert outcome(run) == whole


@pytest.fixture
def clock(monkeypatch):
    """A list whose only element is the time that the handlers see."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
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
            with signals.stopping_on_interrupt(lambda: stopped.append(True)):
                signal.raise_signal(signal.SIGINT)
                clock[0] += seconds
                signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
    assert stopped == [True] * (1 if quits else 2)


LONG_STEP = """
import signal
import time
import pytest
from smallmind.nn.transformer import TransformerModel
from tests.programs import start_untimed

start_untimed(pytest.MonkeyPatch())  # passes before the first step would count as steps
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
        read_until("within a step\n", process)
        process.send_signal(signal.SIGINT)
        # The step goes on until the process is told that the answer has been read.
        assert next(process.stdout).strip() == STOPPING
        process.send_signal(signal.SIGUSR1)
        rest = process.stdout.read()
        assert "Interrupted after step 9; everything is saved." in rest
    assert process.returncode == 130


class Thing:
    """Can be finalised, and referred to weakly."""


def in_a_finaliser(act):
    class Final(Thing):
        def __del__(self):
            act()

    Final()


def in_a_callback_of_a_weak_reference(act):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: act())
    del thing
    assert reference() is None


def in_a_callback_of_the_garbage_collector(act):
    def callback(phase, _):
        gc.callbacks.remove(callback)
        act()

    gc.callbacks.append(callback)
    gc.collect()


def in_a_callback_of_c(act):
    ctypes.CFUNCTYPE(None)(act)()


def in_one_finaliser_within_another(act):
    in_a_finaliser(lambda: (in_a_finaliser(act), time.sleep(0.05)))


def in_the_body_of_a_class(act):
    """Python 3.11 raises a RuntimeError instead."""

    class Named:
        def __set_name__(self, *_):
            act()

    class _:
        named = Named()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "where",
    [
        in_a_finaliser,
        in_a_callback_of_a_weak_reference,
        in_a_callback_of_the_garbage_collector,
        in_a_callback_of_c,
        in_one_finaliser_within_another,
        in_the_body_of_a_class,
    ],
)
def test_a_signal_ends_a_command_wherever_it_comes(where, number):
    """Python drops an exception in most of these places."""
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught, ending_on_signals():
        where(lambda: signal.raise_signal(number))
        time.sleep(60)  # the signal that is sent again ends a wait
        pytest.fail("the signal was lost")
    assert getattr(caught.value, "code", 130) == 128 + number


def test_errors_that_python_drops_are_still_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(found.exc_value))
    with ending_on_signals():
        in_a_finaliser(lambda: 1 // 0)
    assert [type(error) for error in reported] == [ZeroDivisionError]


# Raises a signal in the nth import of the program: as it is, or where Python drops exceptions.
AT_IMPORT = """
import atexit
import signal
import sys

class AtImport:
    count = None

    def find_spec(self, name, *_):
        if name == "smallmind.cli.program":
            self.count = 0
        if self.count is None:
            return
        if self.count == NTH:
            Final() if DROPPED else signal.raise_signal(NUMBER)
        self.count += 1

class Final:
    def __del__(self):
        signal.raise_signal(NUMBER)

at_import = AtImport()
sys.meta_path.insert(0, at_import)
atexit.register(lambda: print("imports:", at_import.count))
"""


def signalled_at_import(nth, number, dropped, *arguments):
    """-> exit status, what was printed, the errors."""
    code = f"NTH, NUMBER, DROPPED = {nth}, {int(number)}, {dropped}\n{AT_IMPORT}"
    with smallmind(code, *arguments) as process:
        printed, errors = process.communicate()
    return process.returncode, printed, errors


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    """The number of imports of a whole run whose kernels are kept: compiling needs many more."""
    root = tmp_path_factory.mktemp("imports")
    for name in "cold", "warm":
        flags = ["train", write_text(root), *FLAGS, "--out", root / name]
        code, printed, errors = signalled_at_import(-1, 0, False, *flags)
        assert (code, errors) == (0, "")
    return int(printed.split()[-1])


CHOSEN = (0, False), (2, True), (3, True), (5, False)  # with every signal


@pytest.mark.parametrize(
    ("eighth", "dropped"),
    [  # all others are long proofs
        pytest.param(
            *(eighth, dropped),
            marks=[] if (eighth, dropped) in CHOSEN else pytest.mark.slow,
        )
        for eighth in range(8)
        for dropped in (False, True)
    ],
)
def test_a_signal_during_any_import_ends_the_program(tmp_path, imports, eighth, dropped):
    number, nth = NUMBERS[(eighth + dropped) % 3], imports * eighth // 8
    flags = ["train", write_text(tmp_path), *FLAGS, "--out", tmp_path / "run"]
    code, _, errors = signalled_at_import(nth, number, dropped, *flags)
    if number == signal.SIGINT:
        assert (code, errors) == (130, "\nsmallmind: interrupted\n")
    else:
        # By the system's default, as long as no command has begun: a shell sees the same.
        assert code in (128 + number, -number) and errors == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("nth", range(0, 24, 5))
def test_ctrl_c_before_a_command_begins_is_one_line(nth):
    code, _, errors = signalled_at_import(nth, signal.SIGINT, nth % 2, "--help")
    assert (code, errors) == (130, "\nsmallmind: interrupted\n")


CONSOLE_SCRIPT = "import sys; from smallmind.cli import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("words", [("-m", "smallmind"), ("-c", CONSOLE_SCRIPT)])
def test_a_signal_at_a_random_moment_of_the_start_ends_the_program(tmp_path, words, number):
    """Until Python has found the package it answers Ctrl-C itself, with a traceback."""
    moments, root = random.Random(int(number)), Path(__file__).parents[2]
    for index in range(28):
        run = tmp_path / str(index)
        flags = last_of_each(write_text(tmp_path), *FLAGS, "--steps", "1000000", "--out", str(run))
        command = [sys.executable, *words, "train", *flags]
        with started(command, cwd=root, stderr=subprocess.PIPE) as process:
            time.sleep(moments.uniform(0, 2))
            process.send_signal(number)
            printed, errors = process.communicate()
        assert process.returncode
        assert f"{root}{os.sep}" not in errors and "ignored in" not in errors, errors
        if "Traceback" not in errors:
            assert process.returncode in (128 + number, -number)
            assert errors in ("", "\nsmallmind: interrupted\n")
        assert not run.exists() or "everything is saved" in printed

"""Faults of one rank: all end soon, with one clear message, and the run can be resumed.

Those that all ranks learn of in order are planted in ranks that are threads.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import threading
import time

import psutil
import pytest

from smallmind import Run
from smallmind.checks import InputError
from smallmind.cli import parallel as cli_parallel
from smallmind.console import signals
from smallmind.files.lock import RunLock
from smallmind.nn.transformer import TransformerModel
from smallmind.text.dataset import Dataset
from smallmind.training.checkpoint import newest
from tests.faults.runs import FLAGS, TEXT, outcome, status, train, write_text
from tests.parallel import in_process
from tests.parallel.disturbed import in_batch, poison, unreadable
from tests.parallel.launching import (
    BOUND,
    LAUNCHERS,
    OPEN_MPI,
    ROOT,
    ended,
    needs_mpi,
    on_every_mpi,
    ranks_of,
    run,
    started,
    train_words,
)
from tests.programs import last_of_each, refusal

pytestmark = [needs_mpi, pytest.mark.skipif(os.name == "nt", reason="no signals on Windows")]
SLOW = pytest.mark.slow
ONE_THREAD = "--threads", "1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of an undisturbed run without mpiexec."""
    root = tmp_path_factory.mktemp("whole")
    assert train(root, "--data-shards", "8") == 0
    return outcome(root / "run")


def words(root, *flags, fault=()):
    return train_words(
        write_text(root), *FLAGS, *ONE_THREAD, "--out", root / "run", *flags, fault=fault
    )


def disturbed(root, fault, *flags, launcher=None, ranks=2):
    """A run with a fault on one rank -> exit status, what was printed, and the errors."""
    return run((launcher or LAUNCHERS[0]).command((ranks, words(root, *flags, fault=fault))))


def smallmind_lines(errors):
    return [line for line in errors.splitlines() if line.startswith("smallmind: ")]


def assert_refused(root, result):
    """All ranks have ended before there was a run -> the only line, which says why."""
    code, _, errors = result
    assert code == 2
    (line,) = smallmind_lines(errors)
    assert not (root / "run").exists()
    return line


def wait_for_files_of_killed(run):
    """A killed rank may be a zombie with a thread left, whose files the system has yet to close."""
    end = time.monotonic() + BOUND
    while True:
        try:
            return RunLock(run).release()
        except InputError:
            assert time.monotonic() < end
            time.sleep(0.01)


def assert_resumes(root, whole, steps):
    """The last checkpoint is one of these steps, and the run resumes to the same end."""
    saved, skipped = newest(root / "run")
    assert saved.step in steps and not skipped
    wait_for_files_of_killed(root / "run")
    assert status("train", "--resume", root / "run") == 0
    assert outcome(root / "run") == whole


@pytest.fixture
def threads(tmp_path, monkeypatch, capsys):
    """Trains a run on two ranks that are threads -> exit status and errors."""
    for kind, name in ((TransformerModel, "loss_and_gradients"), (Dataset, "windows")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # a planted fault ends with the test

    def train(*flags):
        flags = [
            write_text(tmp_path),
            *FLAGS,
            "--data-shards",
            8,
            "--out",
            tmp_path / "run",
            *flags,
        ]
        return in_process.status(2, "train", *flags), capsys.readouterr().err

    return train


def on_rank_1():
    return threading.current_thread() is not threading.main_thread()


def test_an_error_of_one_rank_saves_the_run_and_is_reported_once(tmp_path, whole):
    code, _, errors = disturbed(tmp_path, ("memory", 1, 12))
    assert code == 1
    said = "not enough memory: rank 1: 12 GB for activations (smallmind guide memory)"
    assert smallmind_lines(errors) == [f"smallmind: {said}"]
    assert "Traceback" not in errors
    assert_resumes(tmp_path, whole, {12})


def test_a_disk_that_one_rank_cannot_read_saves_the_run(tmp_path, whole, threads, monkeypatch):
    unreadable(12, on_rank_1)
    code, errors = threads()
    assert code == 1
    assert smallmind_lines(errors) == ["smallmind: rank 1: Input/output error: tokens.bin"]
    # The batches of evaluations are read from the tokens too.
    assert_resumes(tmp_path, whole, range(5, 13))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_a_bug_on_one_rank_ends_all_with_its_traceback(tmp_path, whole, rank):
    code, _, errors = disturbed(tmp_path, ("bug", rank, 12))
    assert code == 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.count("ZeroDivisionError: a planted bug") == 1
    assert_resumes(tmp_path, whole, {7, 10, 12})


@on_every_mpi
@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_a_killed_rank_ends_all(tmp_path, whole, launcher, rank):
    code, _, _ = disturbed(tmp_path, ("kill", rank, 12), launcher=launcher)
    assert code != 0
    assert_resumes(tmp_path, whole, {7, 10})


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_a_rank_that_does_not_answer_is_given_up_by_name(tmp_path, whole, rank):
    code, _, errors = disturbed(tmp_path, ("pause", rank, 12), "--rank-timeout", "10")
    assert code != 0
    (line,) = smallmind_lines(errors)
    assert f"no answer from rank {rank} for 10 seconds" in line
    assert_resumes(tmp_path, whole, {7, 10, 12})  # rank 0 saves before it gives up


GIVEN_UP = """
from mpi4py import MPI
from smallmind.parallel.mpi import MPIGroup

group = MPIGroup(MPI.COMM_WORLD, 0.01, 1)
for patience in (0.01, 1e9):
    group.patience = patience
    try:
        group._wait(lambda: False, lambda: [0])
    except TimeoutError as error:
        print(error)
group._wait(lambda: True, lambda: [0])  # what has arrived counts
"""


def test_ranks_that_were_given_up_are_not_waited_for_again():
    code, output, errors = run(LAUNCHERS[0].command((1, ["-c", GIVEN_UP])))
    assert code == 0, errors
    assert output.splitlines() == 2 * ["no answer from rank 0 for 0.01 seconds"]


def test_a_nan_on_one_rank_rolls_all_back(tmp_path, threads):
    in_batch(12, poison, on_rank_1)
    code, errors = threads()
    assert code == 0, errors
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["spike_step"] for line in lines if "spike_step" in line] == [13]


def test_an_anomaly_on_one_rank_names_rank_and_layer(tmp_path, threads):
    in_batch(12, poison, on_rank_1)
    code, errors = threads("--detect-anomaly")
    assert code == 1
    (line,) = smallmind_lines(errors)
    assert re.match("smallmind: rank 1: the first NaN is in .*embedding", line)
    assert newest(tmp_path / "run")[0].step in (7, 10, 12)


@pytest.mark.parametrize("flags", [[], ["--allow-mixed-cpus"]], ids=len)
def test_ranks_with_other_instruction_sets_refuse_unless_a_flag_allows_them(
    tmp_path, whole, threads, monkeypatch, flags
):
    own = TransformerModel.instruction_set.fget
    found = property(lambda model: "AVX-1024" if on_rank_1() else own(model))
    monkeypatch.setattr(TransformerModel, "instruction_set", found)
    code, errors = threads(*flags)
    if flags:
        assert code == 0, errors
        assert outcome(tmp_path / "run") == whole
    else:
        line = assert_refused(tmp_path, (code, "", errors))
        assert "rank 1: it uses AVX-1024 but rank 0 uses " in line


def test_ranks_of_other_versions_refuse_at_the_start(monkeypatch):
    def check(ranks):
        monkeypatch.setattr(cli_parallel, "__version__", f"0.1.{ranks.rank}")
        cli_parallel._check_equal(ranks, argparse.Namespace(steps=3))

    said = refusal(in_process.on_ranks, 2, check, check)
    assert said.startswith("rank 1: it has version='0.1.1', rank 0 '0.1.0': start all")


def test_ranks_with_other_arguments_refuse_at_the_start(tmp_path):
    programs = (1, words(tmp_path)), (1, words(tmp_path, "--steps", "21"))
    line = assert_refused(tmp_path, run(LAUNCHERS[0].command(*programs)))
    assert line.startswith("smallmind: rank 1: it has steps=21, rank 0 ")


def test_more_ranks_than_shards_are_refused_with_what_to_do(tmp_path, threads):
    code, errors = threads("--data-shards", 1)
    line = assert_refused(tmp_path, (code, "", errors))
    advice = "start at most 1, or a new run with --data-shards 2"
    assert f"data_shards=1 is too few for 2 ranks: {advice}" in line


def test_wrong_flags_are_reported_once(tmp_path):
    code, _, errors = disturbed(tmp_path, (), "--stepps", "9")
    assert code == 2
    assert errors.count("did you mean --steps?") == 1


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_a_rank_without_mpi4py_ends_all_and_says_what_to_install(tmp_path, rank):
    line = assert_refused(tmp_path, disturbed(tmp_path, ("no mpi4py", rank, 0)))
    assert line.startswith(f"smallmind: rank {rank}: several ranks need mpi4py")
    assert "python -m pip install mpi4py mpich" in line


@pytest.mark.parametrize(
    "environment", [{"PYTHONPATH": "STUBS"}, {"NUMBA_NUM_THREADS": "0"}], ids=lambda given: [*given]
)
def test_ranks_that_cannot_start_end_by_themselves(tmp_path, environment):
    """Each with a line and status 2: none is killed, and mpiexec does not wait."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not installed')\n")
    if "PYTHONPATH" in environment:
        environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    # In one write: mpiexec forwards what it reads, and would mix parts of several lines.
    code = (
        "import os, subprocess as s, sys; ended = s.call(sys.argv[1:], close_fds=False); "
        "os.write(1, b'ended: %d\\n' % ended)"
    )
    program = "-c", code, LAUNCHERS[0].python, "-m", "smallmind", "train", write_text(tmp_path)
    code, printed, errors = run(LAUNCHERS[0].command((3, program)), **environment)
    assert code == 0
    assert printed.count("ended: 2") == 3, printed
    lines = errors.splitlines()
    assert sorted(line[:18] for line in lines) == [f"smallmind: rank {i}:" for i in range(3)]


@pytest.mark.skipif(len({launcher.name for launcher in LAUNCHERS}) < 2, reason="needs two MPIs")
@pytest.mark.parametrize("first", [0, 1])
def test_the_mpiexec_of_another_mpi_is_refused(tmp_path, first):
    starting, other = LAUNCHERS[first], LAUNCHERS[1 - first]
    command = starting.command((2, words(tmp_path)))
    command[command.index(starting.python)] = other.python
    code, _, errors = run(command)
    assert code != 0
    assert "different kinds" in errors or "Fatal error in" in errors
    assert not (tmp_path / "run").exists()


def wait_for(root, words, process):
    """Waits until the metrics of a run hold these words."""
    log, end = root / "run" / "metrics.jsonl", time.monotonic() + BOUND
    while not log.exists() or words not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)


def signalled(root, launcher, number):
    """A run that mpiexec is told to end after its first step -> exit status, printed, errors."""
    command = launcher.command(
        (2, words(root, "--steps", "100000", "--keep", "2", "--max-rollbacks", "0"))
    )
    with started(command) as process:
        wait_for(root, '"step"', process)
        process.send_signal(number)
        return ended(process)


SIGNALS = [
    pytest.param(
        *(launcher, number),
        marks=[] if number == signal.SIGINT or launcher.name == OPEN_MPI else SLOW,
        id=f"{launcher.name}-{number}",
    )
    for launcher in LAUNCHERS
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    if launcher.name != OPEN_MPI or number == signal.SIGUSR1  # it kills its ranks after others
]


@pytest.mark.parametrize(("launcher", "number"), SIGNALS)
def test_a_signal_to_mpiexec_stops_and_saves(tmp_path, launcher, number):
    code, printed, errors = signalled(tmp_path, launcher, number)
    assert code not in (0, 1), errors
    if launcher.name != OPEN_MPI:
        assert code == 128 + number
    found = re.search(r"Interrupted after step (\d+); everything is saved", printed)
    assert found, printed + errors
    saved, skipped = newest(tmp_path / "run")
    assert saved.step == int(found[1]) and not skipped
    assert "Traceback" not in printed + errors


def wait_for_paused(process):
    """Until one of the ranks hangs: before, a signal would end the run in order."""
    end = time.monotonic() + BOUND
    while all(child.status() != psutil.STATUS_STOPPED for child in ranks_of(process)):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)


@pytest.mark.skipif(LAUNCHERS[:1] == [] or LAUNCHERS[0].name == OPEN_MPI, reason="kills its ranks")
def test_a_second_ctrl_c_quits(tmp_path, whole):
    """A rank hangs, so the first one waits for it."""
    command = LAUNCHERS[0].command((2, words(tmp_path, fault=("pause", 1, 12))))
    with started(command) as process:
        wait_for(tmp_path, '"step": 12', process)
        wait_for_paused(process)
        process.send_signal(signal.SIGINT)
        time.sleep(1.5 * signals.PATIENCE)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, printed, _ = ended(process)
    # MPICH's mpiexec itself ends at a second one, with status 0.
    assert "everything is saved" not in printed
    assert_resumes(tmp_path, whole, {7, 10})


@on_every_mpi
def test_a_signal_to_another_rank_interrupts_the_run_which_resumes_on_ranks(
    tmp_path, whole, launcher
):
    code, printed, _ = disturbed(tmp_path, ("terminate", 1, 12), launcher=launcher)
    assert code == 128 + signal.SIGTERM if launcher.name != OPEN_MPI else code != 0
    assert "Interrupted after step 12; everything is saved" in printed
    program = ["-m", "tests.parallel.disturbed", "--", "train", "--resume", tmp_path / "run"]
    code, printed, errors = run(launcher.command((2, [*program, *ONE_THREAD])))
    assert code == 0, errors
    assert "2, each with 4 of 8 data shards" in printed
    assert outcome(tmp_path / "run") == whole


@SLOW  # tests/parallel/test_same_bits.py does so with ranks that are threads
def test_a_run_resumes_with_other_numbers_of_ranks(tmp_path, whole):
    code, _, errors = disturbed(tmp_path, ("terminate", 0, 6), ranks=3)
    assert code == 143, errors
    resume = ("train", "--resume", tmp_path / "run", *ONE_THREAD)
    for ranks, batch in ((5, 11), (1, 16)):
        fault = "terminate", ranks - 1, batch  # the first of five has no windows
        program = ["-m", "tests.parallel.disturbed", *fault, "--", *resume]
        code, _, errors = run(LAUNCHERS[0].command((ranks, program)))
        assert code == 143, errors
        assert newest(tmp_path / "run")[0].step in (batch - 1, batch, batch + 1)
    assert status(*resume) == 0
    assert outcome(tmp_path / "run") == whole


@pytest.mark.parametrize("fault", ["no tokens", pytest.param("no token files", marks=SLOW)])
def test_a_rank_without_the_tokens_gets_them(tmp_path, whole, fault):
    assert status("prepare", write_text(tmp_path), "--out", tmp_path / "prepared") == 0
    flags = [*FLAGS, *ONE_THREAD, "--out", tmp_path / "run"]
    program = train_words(tmp_path / "prepared", *flags, fault=(fault, 1, 0))
    code, _, errors = run(LAUNCHERS[0].command((2, program)))
    assert code == 0, errors
    alone = tmp_path / "alone"
    words = "train", tmp_path / "prepared", *FLAGS, "--data-shards", 8, "--out", alone
    assert status(*words) == 0
    assert outcome(tmp_path / "run") == outcome(alone)


MINUTES = ["--minutes", "10", "--n-embd", "16", "--block-size", "16", "--n-layer", "1"]
MINUTES += ["--n-head", "2", *ONE_THREAD]


def test_a_rank_that_is_told_to_stop_while_steps_are_timed_ends_all(tmp_path):
    flags = [write_text(tmp_path), *MINUTES, "--out", tmp_path / "run"]
    program = train_words(*flags, fault=("terminate", 1, 0))  # the number of a timed batch
    code, printed, errors = run(LAUNCHERS[0].command((2, program)))
    assert code == 128 + signal.SIGTERM and not errors
    assert "Interrupted while steps were being timed; nothing has been trained." in printed
    assert not (tmp_path / "run").exists()


@SLOW
@on_every_mpi
def test_a_run_by_minutes_that_is_killed_has_the_bits_of_its_lengths(tmp_path, launcher):
    """All ranks take each new length together, and go on with those of a killed run."""
    flags = [*MINUTES, "--minutes", "1", "--log-every", "1", "--save-every", "20"]
    flags = last_of_each(write_text(tmp_path), *flags, "--out", tmp_path / "run")
    killed = run(launcher.command((2, train_words(*flags, fault=("clock", 0, 75)))))
    assert killed[0] != 0
    before = Run.open(tmp_path / "run").settings.training
    assert len(before.fitted) > 1 and before.steps > 75 > newest(tmp_path / "run")[0].step
    program = ["-m", "tests.parallel.disturbed", "clock", "0", str(10**9), "--", "train"]
    program += ["--resume", tmp_path / "run", *ONE_THREAD]
    code, printed, errors = run(launcher.command((2, program)))
    assert code == 0, errors
    ends = re.findall(r"At its end, rank (\d) after (\d+) steps: (\w{64})", printed)
    again = Run.open(tmp_path / "run")
    training, settings = again.training, again.settings.training
    assert settings.fitted[: len(before.fitted)] == before.fitted
    for _ in training.steps(settings):  # alone and at once
        pass
    digest = hashlib.sha256(training.model.flat.data.tobytes()).hexdigest()
    assert sorted(ends) == [(rank, str(settings.steps), digest) for rank in "01"]


def test_a_run_by_minutes_ends_on_ranks(tmp_path, capsys):
    """Sooner than after the minutes, which would memorise so short a text: on any machine."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:1000], encoding="utf-8")
    places = text, "--out", tmp_path / "run"
    assert in_process.status(2, "train", *places, *MINUTES, "--data-shards", 8) == 0
    assert re.search(r"[\d,]+ steps fit in", capsys.readouterr().out)
    assert (tmp_path / "run" / "samples.txt").exists()

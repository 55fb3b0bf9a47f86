"""Kills random ranks at random moments: python -m tests.parallel.killing DIRECTORY KILLS.

Each run is resumed, with another number of ranks, until it ends; its bits must be those of an
undisturbed run without mpiexec. Prints how many ranks were killed.
"""

import random
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from smallmind.training.checkpoint import newest
from tests.faults.runs import FLAGS, outcome, status, write_text
from tests.parallel.disturbed import prepare
from tests.parallel.launching import BOUND, LAUNCHERS, ended, ranks_of, started
from tests.programs import last_of_each

RANKS = 1, 2, 4
PROGRAM = "-m", "tests.parallel.disturbed", "--", "train"
LENGTH = "--steps", "60", "--threads", "1"


def python_ranks(process):
    """The processes that mpiexec has started and that run Python."""
    found = []
    for child in ranks_of(process):
        with suppress(psutil.NoSuchProcess):
            if "tests.parallel.disturbed" in child.cmdline():
                found.append(child)
    return found


def run_or_kill(moments, launcher, ranks, words, delay):
    """Starts a run and kills one of its ranks after a delay, if it still runs -> whether."""
    with started(launcher.command((ranks, [*PROGRAM, *words]))) as process:
        with suppress(psutil.TimeoutExpired):
            psutil.Process(process.pid).wait(delay)
        alive = python_ranks(process)
        killed = False
        if alive:
            with suppress(psutil.NoSuchProcess):
                moments.choice(alive).kill()
                killed = True
        begin = time.monotonic()
        code, _, errors = ended(process)
        assert time.monotonic() - begin < BOUND / 2, "the others did not end soon"
        assert killed or code == 0, errors
        return code != 0


def main(root, kills):
    prepare()
    text, moments, done = write_text(root), random.Random(4), 0
    flags = last_of_each(text, *FLAGS, *LENGTH)
    assert status("train", *flags, "--data-shards", "8", "--out", root / "whole") == 0
    expected = outcome(root / "whole")
    launcher = LAUNCHERS[0]
    begin = time.monotonic()
    run = root / "timed"
    assert not run_or_kill(moments, launcher, 2, [*flags, "--out", run], BOUND)
    assert outcome(run) == expected
    duration = time.monotonic() - begin
    number = 0
    while done < kills:
        number += 1
        run, died, deaths = root / str(number), True, 0
        while died:
            begun = (run / "config.json").exists()
            if not begun:  # it was killed before it wrote anything
                shutil.rmtree(run, ignore_errors=True)
            resumed = ["--resume", run, "--threads", "1"]
            words = resumed if begun else [*flags, "--data-shards", "8", "--out", run]
            delay = moments.uniform(0.2, 1.2) * duration * (1 + deaths / 10)
            begin = time.monotonic()
            died = run_or_kill(moments, launcher, moments.choice(RANKS), words, delay)
            done, deaths = done + died, deaths + died
            if not died:  # the machine may have been busier when the first one was timed
                duration = min(duration, max(1.0, time.monotonic() - begin))
            if died and (run / "config.json").exists():
                assert not newest(run)[1]
        assert outcome(run) == expected
        shutil.rmtree(run)
        print(f"{done} kills in {number} runs", file=sys.stderr)
    return done


if __name__ == "__main__":
    count = main(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"\n{count} ranks were killed")

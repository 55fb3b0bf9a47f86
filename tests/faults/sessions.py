"""Ends runs as sessions end: python -m tests.faults.sessions DIRECTORY (pairs|terminals) NUMBER.

Pairs of signals, also while kernels compile, and terminals that are closed. Prints how many runs
were ended; each must have left a checkpoint, unless it had not trained a step, and its status.
"""

import os
import pty
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from smallmind.training.checkpoint import newest
from tests.faults.runs import FLAGS, write_text
from tests.programs import last_of_each, started

ROOT = Path(__file__).parents[2]
# Without an end, whatever becomes of its loss.
LONG = shlex.split("--steps 1000000 --save-every 1000000 --val-every 0 --max-rollbacks 0")
# Both signals, the seconds between them, and whether kernels compile then.
PAIRS = [
    (signal.SIGHUP, signal.SIGHUP, 0.05, False),
    (signal.SIGTERM, signal.SIGTERM, 0.05, False),
    (signal.SIGINT, signal.SIGINT, 0.5, False),
    (signal.SIGINT, signal.SIGINT, 1.2, False),
    (signal.SIGHUP, signal.SIGHUP, 0.05, True),
    (signal.SIGINT, signal.SIGINT, 0.5, True),
]


def command(root, run):
    flags = last_of_each(write_text(root), *FLAGS, *LONG, "--threads", "1", "--out", str(run))
    return [sys.executable, "-m", "smallmind", "train", *flags]


def has_trained(run):
    """True if the run has logged a step."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def check(run, status, first):
    # The second signal may come when Python has restored its default: a shell sees 128 + first too.
    assert status in (128 + first, -first), (run, status)
    if run.exists():
        assert newest(run)[0] is not None, f"{run} has no checkpoint"


def send(process, number):
    if process.poll() is None:
        process.send_signal(number)


def pairs(root, number):
    """Signals in pairs at random moments."""
    moments = random.Random(3)
    for index in range(number):
        first, second, pause, compiling = PAIRS[index % len(PAIRS)]
        run, environment = root / str(index), dict(os.environ)
        if compiling:
            environment["SMALLMIND_CACHE_DIR"] = str(root / f"cache{index}")
        settings = {"cwd": ROOT, "env": environment, "stderr": subprocess.DEVNULL}
        with started(command(root, run), **settings) as process:
            if compiling:
                for line in process.stdout:
                    if line.startswith("Compiling"):
                        break
            else:
                while not has_trained(run) and process.poll() is None:
                    time.sleep(0.01)
            time.sleep(moments.uniform(0, 1))
            send(process, first)
            time.sleep(moments.uniform(0.8, 1) * pause)
            send(process, second)
            process.stdout.read()
        check(run, process.returncode, first)
        if not compiling:
            assert run.exists()
    return number


def terminals(root, number):
    """Terminals closed at random moments: SIGHUP from the kernel and, for every other, a shell."""
    moments = random.Random(4)
    for index in range(number):
        run = root / str(index)
        child, master = pty.fork()
        if not child:
            os.chdir(ROOT)
            words = command(root, run)
            os.execv(words[0], words)
        while not has_trained(run):
            os.read(master, 65536)
        end = time.monotonic() + moments.uniform(0, 1)
        while time.monotonic() < end:
            os.read(master, 65536)
        os.close(master)
        if index % 2:
            time.sleep(moments.uniform(0, 0.01))
            os.kill(child, signal.SIGHUP)
        check(run, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.SIGHUP)
        assert run.exists()
    return number


if __name__ == "__main__":
    # Ignored by what nohup or a shell starts in the background, and so by what that starts.
    for ignored in (signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_DFL)
    kinds = {"pairs": pairs, "terminals": terminals}
    print(kinds[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3])))

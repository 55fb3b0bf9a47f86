"""Kills children: python -m tests.faults.killed DIRECTORY (operations|saves|starts|runs) KILLS.

In a separate process, because children are made by fork. Prints how many were killed.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path

from smallmind import InputError, Run
from smallmind.files import durable
from smallmind.training import evaluation
from smallmind.training.checkpoint import BackgroundSaver, clear_stale, load, newest, save
from smallmind.views.listing import find_runs
from tests.faults.disk import Faulty, Quick, assert_sound, checkpoint, kill, names
from tests.faults.runs import TEXT, write_text
from tests.runs.small import FIELDS

RECIPES = (  # of whole runs
    ("--recipe", "gpt2"),
    ("--arch", "modern", "--n-kv-head", "1", "--optimizer", "muon"),
)


def start(work, *arguments):
    """Forks a child that does the work -> its number."""
    child = os.fork()
    if child:
        return child
    try:
        work(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def killed(child):
    """Waits for a child -> whether it was killed; if not, it must have succeeded."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def at_every_operation(root, _):
    before = root / "before"
    before.mkdir()
    for step in (10, 20, 30):
        save(before, checkpoint(step), keep=2, best=step == 20)

    def save_and_die(directory, operation):
        durable.files = Faulty(operation, kill)
        with closing(BackgroundSaver(directory, keep=2)) as saver:
            saver.save(checkpoint(40), best=True)

    for operation in itertools.count():
        directory = root / str(operation)
        shutil.copytree(before, directory)
        died = killed(start(save_and_die, directory, operation))
        found, skipped = newest(directory)
        assert_sound(found, {30, 40} if died else {40})
        assert not skipped
        best = load(directory / "checkpoints" / "best.safetensors")
        assert_sound(best, {40} if found.step == 40 else {20, 40})
        clear_stale(directory)  # as a run that resumes does, once it has the lock
        save(directory, checkpoint(50), keep=2)
        saved = "step-00000040.safetensors" if found.step == 40 else "step-00000030.safetensors"
        assert names(directory) == {saved, "step-00000050.safetensors", "best.safetensors"}
        if not died:
            return operation


def at_random_moments(root, kills):
    moments = random.Random(1)
    directory = root / "run"
    directory.mkdir()
    last = 0

    def save_from(first, writer):
        durable.files = Quick()
        with closing(BackgroundSaver(directory, keep=2)) as saver:
            for step in range(first, sys.maxsize):
                saver.save(checkpoint(step), best=step % 3 == 0)
                os.write(writer, b"%d\n" % step)

    for _ in range(kills):
        reader, writer = os.pipe()
        child = start(save_from, last + 1, writer)
        os.close(writer)
        with os.fdopen(reader) as lines:
            started = [int(lines.readline()) for _ in range(2)]
            time.sleep(moments.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            assert killed(child)
            started += map(int, lines)
        found, skipped = newest(directory)
        assert not skipped
        # When a save starts, the previous one has ended; one more may have started unannounced.
        assert_sound(found, {started[-1] - 1, started[-1], started[-1] + 1})
        last = found.step
    assert last >= kills
    return kills


def at_every_operation_of_a_start(root, _):
    """The next start takes over what one has left that died; what is the user's stays.

    It dies before each thing that it does to its directory, or within each write.
    """
    path, left_behind = write_text(root), set()
    for text, dies in itertools.product((TEXT, path), (before_each, within_each)):
        mine = {"notes.txt": b"mine"} | ({} if text is TEXT else {"text.txt": b"mine"})
        for operation in itertools.count():
            out = root / f"{dies.__name__}-{len(mine)}-{operation}"
            out.mkdir()
            for name, content in mine.items():
                (out / name).write_bytes(content)
            died = killed(start(dies, operation, out, lambda out=out, text=text: begin(out, text)))
            left = {re.sub(r"[0-9a-f]{16}", "*", name) for name in os.listdir(out)} - mine.keys()
            if "config.json" not in left:
                left_behind.add(frozenset(left))
                assert not find_runs(out)
                advice = refusal(Run.open, out)
                assert f"{out} is not a run" in advice and "\n" not in advice
                assert not left or f"start it again with --out {out}" in advice
                begin(out, text)
            assert Run.open(out).data
            assert all((out / name).read_bytes() == content for name, content in mine.items())
            assert not [name for name in os.listdir(out) if name.endswith(".smallmind")] or not died
            if not died:
                break
    return len(left_behind)


def begin(out, text):
    Run.create(text=text, out=out, **FIELDS).unlock()


def before_each(operation, directory, work):
    """Works, and dies before it does something for the nth time to a file in the directory."""
    count, events = 0, {"open", "os.mkdir", "os.rename", "os.remove", "os.truncate"}

    def audit(event, arguments):
        nonlocal count
        if event in events and str(arguments[0]).startswith(f"{directory}{os.sep}"):
            count += 1
            if count > operation:
                kill()

    durable.files = Quick()
    sys.addaudithook(audit)
    work()


def within_each(operation, _, work):
    """Works, and dies in the nth operation of what has to survive."""
    durable.files = Faulty(operation, kill)
    work()


def refusal(function, *arguments):
    """The message of the InputError that a call raises."""
    try:
        function(*arguments)
    except InputError as error:
        return str(error)
    raise AssertionError("not refused")


def of_whole_runs(root, kills):
    """Kills and resumes each run until it finishes, with the outcome of an undisturbed one.

    Each recipe has every second run.
    """
    # Children use the parent's kernels, which this threading layer allows after a fork.
    os.environ |= {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "3"}
    from tests.faults.runs import STEPS_BETWEEN_SAVES, ended, status, train

    evaluation.SAMPLE_TOKENS = 20  # or most kills would come while the sample is written
    moments, done = random.Random(2), 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def undisturbed(flags):
        for _ in range(2):  # the first one compiles
            shutil.rmtree(root / "whole", ignore_errors=True)
            begin = time.perf_counter()
            assert quietly(train, root, *flags, name="whole") == 0
        return flags, time.perf_counter() - begin, ended(root / "whole")

    def start_or_resume(run, flags, threads):
        if (run / "config.json").exists():
            assert quietly(status, "train", "--resume", run, "--threads", threads) == 0
        else:  # it was killed before it wrote anything
            shutil.rmtree(run, ignore_errors=True)
            assert quietly(train, root, *flags, "--threads", threads, name=run.name) == 0

    recipes = [undisturbed(flags) for flags in RECIPES]
    for number, (flags, duration, expected) in enumerate(itertools.cycle(recipes), 1):
        run, died, deaths = root / str(number), True, 0
        while died:
            child = start(start_or_resume, run, flags, moments.randint(1, 3))
            # Longer after each death: on a disk that has become slow no run would end otherwise.
            time.sleep(moments.uniform(0, 1.2 * duration * (1 + deaths / 10)))
            os.kill(child, signal.SIGKILL)
            died = killed(child)
            done, deaths = done + died, deaths + died
            if died and (run / "config.json").exists():
                found, skipped = newest(run)
                logged = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
                steps = [json.loads(line)["step"] for line in logged if line.endswith(b"\n")]
                lost = max(steps, default=0) - (found.step if found else 0)
                # The save of the last interval may have been under way.
                assert lost < 2 * STEPS_BETWEEN_SAVES and not skipped, (lost, skipped)
        assert ended(run) == expected
        shutil.rmtree(run)
        if done >= kills and number >= len(recipes):
            return done


def quietly(function, *arguments, **settings):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return function(*arguments, **settings)


if __name__ == "__main__":
    kinds = {
        "operations": at_every_operation,
        "saves": at_random_moments,
        "starts": at_every_operation_of_a_start,
        "runs": of_whole_runs,
    }
    print(kinds[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3])))

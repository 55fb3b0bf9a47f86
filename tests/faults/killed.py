"""Saves in children that are killed: python -m tests.faults.killed DIRECTORY (operations | KILLS).

In a process of its own, because children are made by fork. Prints how many were killed.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path

from smallmind import durable
from smallmind.training.checkpoint import BackgroundSaver, load, newest, save
from tests.faults.disk import Faulty, Quick, assert_sound, checkpoint, kill, names


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
    """Waits for a child -> whether it was killed; if not, it must have gone well."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def at_every_operation(root):
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
        found, passed_over = newest(directory)
        assert_sound(found, {30, 40} if died else {40})
        assert not passed_over
        best = load(directory / "checkpoints" / "best.safetensors")
        assert_sound(best, {40} if found.step == 40 else {20, 40})
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

    def save_from(first, told):
        durable.files = Quick()
        with closing(BackgroundSaver(directory, keep=2)) as saver:
            for step in range(first, sys.maxsize):
                saver.save(checkpoint(step), best=step % 3 == 0)
                os.write(told, b"%d\n" % step)

    for _ in range(kills):
        hears, told = os.pipe()
        child = start(save_from, last + 1, told)
        os.close(told)
        with os.fdopen(hears) as lines:
            begun = [int(lines.readline()) for _ in range(2)]
            time.sleep(moments.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            assert killed(child)
            begun += map(int, lines)
        found, passed_over = newest(directory)
        assert not passed_over
        # When a save begins, the one before has ended; one more may have begun untold.
        assert_sound(found, {begun[-1] - 1, begun[-1], begun[-1] + 1})
        last = found.step
    assert last >= kills
    return kills


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    print(
        at_every_operation(where) if what == "operations" else at_random_moments(where, int(what))
    )

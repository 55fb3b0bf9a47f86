"""Processes in one directory: python -m tests.faults.together DIRECTORY (writers|starts) NUMBER.

In a separate process, because children are made by fork. Prints how many writes or pairs of starts
were tried, and how many of them were lost.
"""

import os
import shutil
import sys
from pathlib import Path

from smallmind.files import durable
from smallmind.training import evaluation
from tests.faults.disk import Quick
from tests.faults.killed import quietly, start
from tests.faults.runs import ended, train

WRITERS = 8
REFUSED = 2  # the exit status


def writers(root, writes):
    """Processes write files, in turn one of their own and one of all, and all have number 1."""
    each = -(-writes // WRITERS)

    def write_all(own, gate, failures):
        durable.files, os.getpid = Quick(), lambda: 1
        os.read(gate, 1)
        for number in range(each):
            path = root / (own if number % 2 else "shared")
            content = f"{own} {number}".encode()
            try:
                durable.write(path, [content, b"\n"])
                sound = path.name == "shared" or path.read_bytes() == content + b"\n"
            except OSError:
                sound = False
            if not sound:
                os.write(failures, b"x")

    lost = len(together(write_all, [f"own-{number}" for number in range(WRITERS)])[1])
    assert len(list(root.iterdir())) == WRITERS + 1  # nothing temporary is left
    return each * WRITERS, lost


def starts(root, pairs):
    """Two runs start in one directory: one is refused, the other ends as if it were alone."""
    evaluation.SAMPLE_TOKENS = 20  # which takes longer than the steps
    train_quietly(root, "alone")
    expected, lost = ended(root / "alone"), 0

    def train_together(name, gate, _):
        os.read(gate, 1)
        os._exit(train_quietly(root, name))

    for number in range(pairs):
        statuses, _ = together(train_together, [str(number)] * 2)
        run = root / str(number)
        lost += sorted(statuses) != [0, REFUSED] or ended(run) != expected
        shutil.rmtree(run)
    return pairs, lost


def train_quietly(root, name):
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return quietly(train, root, "--backend", "numpy", "--steps", "4", name=name)


def together(work, names):
    """Runs work(name, gate, failures) in children that wait at the gate -> statuses, failures."""
    gate, opened = os.pipe()
    reader, failures = os.pipe()
    children = [start(work, name, gate, failures) for name in names]
    os.close(failures)
    os.write(opened, b"x" * len(names))
    with os.fdopen(reader, "rb") as failed:
        lost = failed.read()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(gate)
    os.close(opened)
    return statuses, lost


if __name__ == "__main__":
    tried, lost = globals()[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))
    print(tried, lost)

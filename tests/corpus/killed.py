"""Kills writers: python -m tests.corpus.killed DIRECTORY (operations|moments) WRITER NUMBER.

At every NUMBERth operation, or at NUMBER random moments.
They write shards of given ids, or prepare texts or conversations with all that comes before the
first id. In a separate process, because children are made by fork. Prints how many were killed.
However often it happens, the shards are in the end those of a writer that was never killed.
"""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

from smallmind.corpus.shards import open_shards
from smallmind.files import durable
from tests.corpus.texts import prepare_conversations, prepare_texts
from tests.corpus.writing import contents, prepare
from tests.faults.disk import Faulty, Quick, kill
from tests.faults.killed import killed, start


def at_operations(root, prepare, every):
    expected = unbroken(root, prepare)

    def prepare_and_die(directory, operation):
        durable.files = Faulty(operation, kill)
        prepare(directory)

    for operation in itertools.count(step=every):
        directory = root / str(operation)
        died = killed(start(prepare_and_die, directory, operation))
        # The second one dies while it cleans up, or a little later.
        killed(start(prepare_and_die, directory, operation % 7))
        prepare(directory)
        assert contents(directory) == expected
        if not died:
            return operation


def at_random_moments(root, prepare, kills):
    moments, done = random.Random(1), 0
    unbroken(root / "compiled", prepare)
    begin = time.perf_counter()
    expected = unbroken(root, prepare)
    duration = time.perf_counter() - begin
    for number in itertools.count():
        directory, died, deaths = root / str(number), True, 0
        while died:
            child = start(prepare, directory)
            # Longer after each death: on a disk that has become slow none would end otherwise.
            time.sleep(moments.uniform(0, duration * (0.5 + deaths / 10)))
            os.kill(child, signal.SIGKILL)
            died = killed(child)
            done, deaths = done + died, deaths + died
        assert contents(directory) == expected
        open_shards(directory).verify()
        if done >= kills:
            return done


def unbroken(root, prepare):
    durable.files = Quick()
    prepare(root / "unbroken")
    return contents(root / "unbroken")


if __name__ == "__main__":
    kinds = {"operations": at_operations, "moments": at_random_moments}
    writers = {"ids": prepare, "texts": prepare_texts, "conversations": prepare_conversations}
    _, where, kind, name, count = sys.argv
    print(kinds[kind](Path(where), writers[name], int(count)))

"""Programs that need a process of their own, for their number of threads or threading layer."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from smallmind import InputError
from smallmind.cli import main
from smallmind.forecast import budget, compiling, pace

CATS = "the cat sat on the mat. the dog sat on the log.\n" * 60


ROOT = Path(__file__).parents[1]

PATIENCE = 600  # seconds for an answer: on a busy machine, with all kernels to compile


def finished(words, cwd=ROOT, timeout=None, **environment):
    """A process that has ended, with its status and what it printed on both streams."""
    settings = {
        "cwd": cwd,
        "timeout": timeout,
        "env": {**os.environ, **environment},
        "encoding": "utf-8",
    }
    return subprocess.run(words, capture_output=True, check=False, **settings)


def printed_by(words, **settings):
    """The standard output of a process, which must succeed."""
    result = finished(words, **settings)
    assert result.returncode == 0, result.stderr
    return result.stdout


def output_of(program, *arguments, **environment):
    """The output of a program; a warning or an error fails the test."""
    words = [sys.executable, "-W", "error", "-c", program, *arguments]
    return printed_by(words, **environment)


@contextmanager
def started(words, **settings):
    """A process whose output is read as text; it ends with the block, also if the test gives up."""
    settings = {"stdout": subprocess.PIPE, "text": True, **settings}
    process = subprocess.Popen(words, **settings)
    try:
        yield process
        with process:  # closes its streams and waits for its end
            pass
    finally:
        process.kill()
        with process:
            pass


def start_untimed(patch):
    """Runs start without training a tiny model for the estimate and without timing some passes."""

    def kept_pace(training, config):  # none is kept
        return pace.rough_pace(training, config)

    patch.setattr(compiling, "rehearse", lambda *_: None)
    patch.setattr(pace, "rough_pace", lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01))
    patch.setattr(pace, "kept_pace", kept_pace)


def costs_at(operations):
    """The costs of a machine that makes so many operations per second in models of any size."""
    return lambda N: budget.Cost(budget.OPERATIONS * N / operations, 0.0)


def last_of_each(*words):
    """The words of a command line, without a flag that is given again later: that is refused."""
    groups = []
    for word in words:
        if str(word).startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    flags = [group[0] for group in groups]
    kept = [group for i, group in enumerate(groups) if group[0] not in flags[i + 1 :]]
    return [word for group in kept for word in group]


def status(*arguments):
    """The exit status of the command line, as a shell would see it; later flags replace earlier."""
    try:
        return main(last_of_each(*map(str, arguments)))
    except SystemExit as exit_:
        return exit_.code


class Printed(NamedTuple):
    """The output of a command line."""

    out: str
    err: str

    @property
    def flat(self):
        """The standard output with every line break and its indentation as one space."""
        return flat(self.out)

    @property
    def cells(self):
        """The first cell of each row of the boxes -> the last one."""
        lines = [line for line in self.out.splitlines() if line.startswith("│")]
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
        return {row[0]: row[-1] for row in rows}


def flat(printed):
    return " ".join(printed.split())


@contextmanager
def edited(path):
    """The content of a JSON file, which is saved as the block leaves it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    yield content
    path.write_text(json.dumps(content), encoding="utf-8")


def refusal(function, /, *arguments, **settings):
    """The message, which is one line, with which a call is refused."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refuses(pattern, function, /, *arguments, **settings):
    """The call is refused in a line in which the pattern occurs."""
    message = refusal(function, *arguments, **settings)
    assert re.search(pattern, message), message


class CommandLine:
    """Runs command lines in this process, given as text, which is split at spaces, and other words.

    Paths and the words of lists are taken as they are.
    """

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *parts, ends=0):
        """-> what this command line printed; `ends` is the exit status that it must have."""
        words = []
        for part in parts:
            words += part.split() if isinstance(part, str) else part if is_list(part) else [part]
        self.capsys.readouterr()
        ended, printed = status(*words), Printed(*self.capsys.readouterr())
        assert ended == ends, f"exit status {ended} instead of {ends}: {printed}"
        return printed

    def on(self, stream, *parts):
        """-> what this command line shows on a stream in place of the standard output."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            self(*parts)
        return stream.shown()

    def refuses(self, message, *parts):
        """The command line is wrong input, and says so in one line with these words."""
        error = self(*parts, ends=2).err
        assert message in error and error.count("\n") == 1 and "Traceback" not in error, error


def is_list(part):
    return isinstance(part, list | tuple)

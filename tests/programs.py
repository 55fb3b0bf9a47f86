"""Programs that need a process of their own, for their number of threads or threading layer."""

import os
import subprocess
import sys
from contextlib import contextmanager

from smallmind.runs import pace
from smallmind.training import rehearsal


def output_of(program, *arguments, **environment):
    """The output of a program; a warning or an error fails the test."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


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
    patch.setattr(rehearsal, "rehearse", lambda *_: None)
    patch.setattr(pace, "rough_pace", lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01))


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

"""The program in which a person's reward function runs: it may fail or hang without harm.

    python reward_program.py FILE SECONDS

It imports nothing of this package, and a pipe is its standard input: a line of JSON holds a list of
[question, answer, wanted]. For each of them it writes a line of JSON: {"reward": a number}, or
{"error": why there is none}. The first line that it writes says that FILE was read, or why not.
"""

import faulthandler
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

NAME = "reward"  # of the function
LARGEST = 1e30  # reward: the deviations of larger ones could not be computed
GRACE = 5.0  # seconds after which this ends itself, if nobody else has ended it


def load(path: str) -> Callable[[str, str, str | None], object]:
    """Returns the function of a file. ValueError, or whatever the file raises."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("reward_file", path)
    if spec is None or spec.loader is None:
        raise ValueError("its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, NAME, None)
    if not callable(function):
        raise ValueError(f"it has no function {NAME}(question, answer, wanted)")
    for count in (3, 2):
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError:
            continue
        return lambda *texts: function(*texts[:count])
    raise ValueError(f"its function must be {NAME}(question, answer, wanted)")


def number(value: object) -> float:
    """Returns a number as a float. ValueError for anything else, also if it is not finite."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {value!r:.60}, not a number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"returned {found}, not a finite number")
    if abs(found) > LARGEST:
        raise ValueError(f"returned {found:g}, which is farther from 0 than {LARGEST:g}")
    return found


def reason(error: BaseException, path: str) -> str:
    """Returns what was raised, and on which line of the file, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    path = os.path.abspath(path)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == path]
    if not lines and isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f"line {lines[-1]} " if lines else ""
    said = " ".join(str(error).split())
    return f"{where}raised {type(error).__name__}{said and ': '}{said:.200}"


def main(path: str, seconds: float) -> None:
    """Answers until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    questions = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    # The function reads nothing, and must not print anything that is taken for a reply.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    nowhere = os.open(os.devnull, os.O_WRONLY)

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        function = load(path)
    except ValueError as error:
        reply(error=" ".join(str(error).split()))
        return
    except BaseException as error:
        reply(error=reason(error, path))
        return
    reply(reward=0.0)
    for line in questions:
        for texts in json.loads(line):
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=nowhere)
            try:
                value = function(*texts)
            except BaseException as error:
                reply(error=reason(error, path))
                continue
            try:
                earned = number(value)
            except Exception as error:
                reply(error=" ".join(str(error).split()))
                continue
            reply(reward=earned)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

"""Scores of answers: rewards by name, and those of a person's own Python, in its own process.

A file of Python runs because somebody has named it. It is not imported here: an endless loop, a
crash, or a regular expression that never ends would take the training with it.
"""

import hashlib
import json as json_text
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, count_of, from_json, shown_value
from smallmind.console import activity
from smallmind.files import durable
from smallmind.losses import reward_program

START_SECONDS = 60.0  # until a file has been read: what it imports may take long
MAX_BYTES = 1 << 24  # of such a file


class Attempt(NamedTuple):
    """A question, an answer to it, and the wanted one if there is one."""

    question: str
    answer: str
    wanted: str | None

    def __str__(self) -> str:
        return f"the question {shown_value(self.question)} and the answer " + shown_value(
            self.answer
        )


Reward = Callable[[str, str, str | None], object]  # question, answer, wanted -> a number


def exact(_question: str, answer: str, wanted: str) -> float:
    """Gives 1 to the wanted answer, but for spaces around it."""
    return float(answer.strip() == wanted.strip())


def contains(_question: str, answer: str, wanted: str) -> float:
    """Gives 1 to an answer with the wanted one in it."""
    return float(wanted.strip() in answer)


def json(_question: str, answer: str, _wanted: str | None) -> float:
    """Gives 1 to an object or a list of JSON."""
    try:
        return float(isinstance(from_json(answer), dict | list))
    except ValueError:
        return 0.0


def length(_question: str, answer: str, wanted: str) -> float:
    """Divides the shorter of an answer and the wanted one by the longer, in characters."""
    shorter, longer = sorted((len(answer.strip()), len(wanted.strip())))
    return shorter / longer if longer else 1.0


NEED_WANTED = exact, contains, length


class Judge:
    """`Judge("exact")`: what answers earn, by a name in `parts.REWARDS`, a file or a function.

    `seconds` limit the reward of each answer by a file, which runs in a process of its own from the
    first `scores` on, until `close`. InputError if there is no such file.
    """

    def __init__(self, reward: str | Reward, seconds: float) -> None:
        self.name, self.seconds = str(reward), seconds
        self.file: Path | None = None
        self.digest: str | None = None  # of the file
        self._process: _RewardProcess | None = None
        if not isinstance(reward, str):
            self.name, self._function = getattr(reward, "__name__", self.name), reward
        elif reward in parts.REWARDS:
            self._function = parts.load(parts.REWARDS, reward)
        else:
            self.file = Path(reward)
            self.name = self.file.name
            self.digest = hashlib.sha256(_content(self.file)).hexdigest()

    @property
    def needs_wanted(self) -> bool:
        """True if each question needs a wanted answer."""
        return not self.file and self._function in NEED_WANTED

    def scores(self, answers: Sequence[Attempt]) -> list[float]:
        """Returns what each answer earns. InputError that names the question if one earns none."""
        if not self.file:
            return [self._score(answer) for answer in answers]
        if not self._process:
            self._process = _RewardProcess(self.file, self.seconds)
        try:
            return self._process.scores(answers)
        except BaseException:
            self.close()
            raise

    def _score(self, answered: Attempt) -> float:
        try:
            return reward_program.number(self._function(*answered))
        except Exception as error:
            words = str(error)
            if not (isinstance(error, ValueError) and words.startswith("returned ")):
                words = f"raised {type(error).__name__}: {' '.join(words.split())}"
            raise InputError(f"the reward {self.name} {words}, for {answered}") from error

    def close(self) -> None:
        """Ends the process, if there is one; the next `scores` begin another."""
        if self._process:
            self._process.close()
        self._process = None


def _content(path: Path) -> bytes:
    """Returns the bytes of a file of Python. InputError if there is none."""
    names = ", ".join(parts.REWARDS)
    try:
        if path.suffix != ".py":
            raise ValueError("its name does not end with .py")
        with durable.open_regular(path) as file:
            content: bytes = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return content
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"reward={str(path)!r} is neither one of {names} nor a Python file that defines "
            f"reward(question, answer, wanted): {reason}"
        ) from None


class _RewardProcess:
    """The process in which a reward function runs."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.seconds = file, seconds
        command = [sys.executable, "-P", reward_program.__file__, str(file), str(seconds)]
        # The order of sets must not differ from run to run.
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._replies), daemon=True
        ).start()
        self._ended = weakref.finalize(self, _end, self._process)
        try:
            with activity.doing(f"Reading {file.name}", usual=True):
                reply = self._reply(max(START_SECONDS, self.seconds), "reading it")
            if problem := reply.get("error"):
                raise InputError(f"{file}: {problem}")
        except BaseException:
            self.close()
            raise

    def scores(self, answers: Sequence[Attempt]) -> list[float]:
        """Returns what each answer earns. InputError for the first that earns nothing."""
        assert self._process.stdin
        found = []
        with suppress(OSError):  # it has ended: there is no reply either
            self._process.stdin.write(json_text.dumps(answers).encode() + b"\n")
            self._process.stdin.flush()
        for answer in answers:
            reply = self._reply(self.seconds, str(answer))
            if problem := reply.get("error"):
                raise InputError(f"{self.file.name} {problem}, for {answer}")
            found.append(float(reply["reward"]))
        return found

    def _reply(self, seconds: float, what: str) -> dict[str, Any]:
        """Waits for a line. InputError if it does not come in so many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._replies.get(timeout=min(left, activity.REFRESH))
            except queue.Empty:
                activity.tick()
                continue
            if not line:
                status = self._process.wait()
                raise InputError(
                    f"{self.file.name} ended its process, with status {status}, for {what}"
                )
            reply: dict[str, Any] = json_text.loads(line)
            return reply
        raise InputError(
            f"{self.file.name} took more than {count_of(seconds, 'second')} for {what}: make it "
            "faster, or raise --reward-seconds"
        )

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._ended()


def _read(lines: Any, replies: "queue.SimpleQueue[bytes]") -> None:
    """Puts each line into a queue, and at the end an empty one."""
    with lines:
        for line in lines:
            replies.put(line)
    replies.put(b"")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdin:
        with suppress(OSError):  # what it has not read is lost
            process.stdin.close()

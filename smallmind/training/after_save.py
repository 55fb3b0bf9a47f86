"""A command that runs after each save of a checkpoint, such as one that copies it elsewhere."""

import concurrent.futures
import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO

from smallmind.checks import InputError, check_type
from smallmind.console import activity
from smallmind.training.records import FileWarningRecord

MAX_SECONDS = 600.0  # seconds that a command may take
PATH_FIELD = "{}"  # stands for the path of the checkpoint
MAX_QUOTED = 200  # characters of its last line of output that a warning quotes


class AfterSave:
    """Runs a command for one checkpoint after the other, in a thread of its own.

    `command` is split as a shell would, but no shell runs it; the checkpoint's path replaces `{}`
    in it or, without one, is its last argument. Its output is not shown. A command that fails, does
    not exist or takes longer than `limit` seconds, and is then ended, is only a warning. InputError
    if the command is empty or a quotation in it does not end.
    """

    def __init__(self, command: str, limit: float = MAX_SECONDS) -> None:
        self.command = check_type("after_save", command, str)
        self.limit = limit
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise InputError(f"after_save={command!r}: {str(error).lower()}") from None
        if not self._arguments:
            raise InputError("after_save is empty; give a command")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "after a save")
        self._going: list[concurrent.futures.Future[FileWarningRecord | None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._lock = threading.Lock()  # of the two: no process starts after `end`

    def start(self, step: int, path: Path) -> None:
        """Runs the command for a checkpoint once it has ended for those before it."""
        with contextlib.suppress(RuntimeError):  # the program is ending
            self._going.append(self._thread.submit(self._run, step, path.absolute()))

    def news(self) -> list[FileWarningRecord]:
        """Returns the warnings about commands that have ended since the last call."""
        ended = [task for task in self._going if task.done()]
        for task in ended:
            self._going.remove(task)
        warnings = (task.result() for task in ended if not task.cancelled())
        return [warning for warning in warnings if warning]

    def wait(self) -> None:
        """Waits until the command has ended for every checkpoint. Ctrl-C ends it."""
        try:
            with activity.doing("Waiting for the command after the save"):
                while concurrent.futures.wait(self._going, activity.REFRESH).not_done:
                    activity.tick()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kills the command that is running; it is not run for later checkpoints either."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_over = True
            if self._process:
                _end(self._process)

    def _run(self, step: int, path: Path) -> FileWarningRecord | None:
        """Runs the command -> a warning if it has failed."""
        arguments = [argument.replace(PATH_FIELD, str(path)) for argument in self._arguments]
        if arguments == self._arguments:
            arguments.append(str(path))
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                with self._lock:
                    if self._is_over:
                        return None
                    # In a session of its own, or Ctrl-C would end it with the run.
                    self._process = subprocess.Popen(
                        arguments,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=errors,
                        start_new_session=True,
                    )
            except (OSError, ValueError) as error:
                reason = f"could not be run: {getattr(error, 'strerror', None) or error}"
                return self._warning(step, reason)
            try:
                status = self._process.wait(self.limit)
            except subprocess.TimeoutExpired:
                _end(self._process)
                return self._warning(step, f"was killed: it took over {self.limit:g} seconds")
            if status:
                # Not one file: programs write their output at their end, after the error.
                said = _last_line(errors) or _last_line(output)
                said = f": {said}" if said else ""
                return self._warning(step, f"failed with status {status}{said}")
        return None

    def _warning(self, step: int, reason: str) -> FileWarningRecord:
        return FileWarningRecord(
            step, f"The command after the save of step {step}, {self.command!r}, {reason}"
        )


def _last_line(file: IO[bytes]) -> str:
    """Returns the end of the last line of a file, or "" if it has none."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * MAX_QUOTED))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-MAX_QUOTED:] if lines else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and, where the system has such groups, those that it has started."""
    if process.poll() is not None:
        return
    with contextlib.suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()

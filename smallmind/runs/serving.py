"""The page and the API of a run beside a program, such as a notebook."""

import atexit
import os
import re
import subprocess
import threading
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from smallmind.checks import InputError
from smallmind.parallel.environment import python

STARTING_SECONDS, ENDING_SECONDS = 120.0, 10.0  # seconds that the server may take
PROGRAM = """
sys.stdout.reconfigure(line_buffering=True)
from smallmind.cli import main
sys.exit(main())
"""
HEIGHT = 640  # of the frame in a notebook, in pixels


class Served:
    """The page of a run at `url`, which `run.serve()` returns. A notebook shows it in a frame.

    OpenAI's API is at `url + "v1"`. The server is `smallmind serve` in a process of its own: it
    does not share this program's models, and serves the newest checkpoint also while the run
    trains. It ends with `stop`, with a `with` block, or with this program.
    """

    def __init__(self, path: Path, port: int | None = None, precision: str | None = None) -> None:
        flags = [f"--port={port or 0}", "--no-browser", "--in-notebook"]
        if precision:
            flags.append(f"--precision={precision}")
        self._process = subprocess.Popen(
            python(PROGRAM, "serve", str(path.resolve()), *flags),
            stdin=subprocess.PIPE,  # its end is that of this program, however that ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            **_apart(),
        )
        atexit.register(self.stop)
        self.url = self._announced()
        # The pipe must not fill up.
        threading.Thread(target=self._read_on, daemon=True).start()

    def __repr__(self) -> str:
        return f"<Served: {self.url}{'' if self._process.poll() is None else ', stopped'}>"

    def _repr_html_(self) -> str:
        url = escape(self.url)
        return (
            f'<iframe src="{url}" title="smallmind" width="100%" height="{HEIGHT}" '
            f'style="border: 0"></iframe><a href="{url}" target="_blank">Open in a window</a>'
        )

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server, after the answers that it is writing."""
        atexit.unregister(self.stop)
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _announced(self) -> str:
        """-> the address that the server prints. InputError if it does not start."""
        assert self._process.stdout
        timer = threading.Timer(STARTING_SECONDS, self._process.kill)
        timer.start()
        said = []
        for line in self._process.stdout:
            if found := re.search(r"http://\S+/", line):
                timer.cancel()
                return found[0]
            said.append(line.strip())
        timer.cancel()
        self._process.stdout.close()
        self.stop()
        message = " ".join(said).removeprefix("smallmind: ")
        late = f"the server did not start within {STARTING_SECONDS:.0f} seconds"
        raise InputError(message or late)

    def _read_on(self) -> None:
        assert self._process.stdout
        with self._process.stdout as stream:
            for _ in stream:
                pass


def _apart() -> dict[str, Any]:
    """Returns the arguments of a process that an interrupt of this program does not reach."""
    if os.name == "nt":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    return {"start_new_session": True}

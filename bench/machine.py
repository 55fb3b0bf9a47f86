"""The machine and the versions that figures were measured with, and programs run on it."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llvmlite.binding as llvm
import psutil

import smallmind
from bench import CPUS
from smallmind.console.live_line import LiveLine
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.threads import threading_layer, threads

ROOT = Path(__file__).parent.parent


def _cpu() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def describe() -> dict[str, object]:
    """CPU, instruction set, threads, threading layer, versions."""
    record: dict[str, object] = {
        "cpu": _cpu(),
        "llvm_cpu": llvm.get_host_cpu_name(),
        "compiled_for": os.environ.get("NUMBA_CPU_NAME", "host"),
        "instruction_set": ISA.name,
        "cores": psutil.cpu_count(logical=False),
        "threads": threads(),
        "threading_layer": threading_layer(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "smallmind": smallmind.__version__,
    }
    for package in ("numpy", "numba", "llvmlite", "torch"):
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return record


def answer_of(*arguments: str, variables: Mapping[str, str] | None = None, **rest: Any) -> Any:
    """Runs Python with these arguments in a new process -> the JSON in its last line of output.

    `variables` are added to the environment; the rest are arguments of `subprocess.run`.
    """
    output = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | (variables or {}),
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        **rest,
    ).stdout
    return json.loads(output.splitlines()[-1])


def environment(threads: int) -> dict[str, str]:
    """The environment of a process that trains with this many threads."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Each thread on its own core, whichever library starts it.
        "OMP_PROC_BIND": "spread",
        "OMP_PLACES": "cores",
    }
    if threads == 1:
        variables["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return variables


def started(
    command: Sequence[str],
    threads: int,
    variables: Mapping[str, str] = MappingProxyType({}),
    **rest: Any,
) -> subprocess.Popen[str]:
    """Starts a program on the CPUs that are measured; `rest` are arguments of Popen."""
    variables = environment(threads) | variables
    pipe = {"text": True, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=variables, **{"cwd": ROOT, **pipe, **rest})
    if CPUS:
        os.sched_setaffinity(process.pid, CPUS)
    return process


class Worker:
    """A module in a process of its own that answers commands; it ends with the `with` block.

    `variables` are added to its environment; the rest are arguments of Popen.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        threads: int,
        variables: Mapping[str, str] = MappingProxyType({}),
        **rest: Any,
    ) -> None:
        self.name = name
        command = [sys.executable, "-m", module, *arguments]
        # Ctrl-C is for this process, which ends the other.
        self.process = started(
            command, threads, variables, stdin=subprocess.PIPE, start_new_session=True, **rest
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tell(self, **command: object) -> None:
        """Sends a command, whose `answer` comes later."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `answer` says that it has ended
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}; see above")
        return json.loads(answer)

    def ask(self, **command: object) -> Any:
        self.tell(**command)
        return self.answer()


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Within the block, what is being done is shown every two seconds; in a file, by dots."""
    line, ended, start = LiveLine(sys.stdout), threading.Event(), time.monotonic()

    def show() -> None:
        dots = f"  {what} "
        while not ended.wait(2.0):
            if line.is_live:
                line.show(f"  {what}: {time.monotonic() - start:.0f} s")
            else:
                print(dots, end=".", flush=True)
                dots = ""
        if not line.is_live and not dots:
            print()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.clear()

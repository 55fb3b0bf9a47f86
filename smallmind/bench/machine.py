"""The machine and the versions that figures were measured with, and programs run on it."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from smallmind.bench import CPUS
from smallmind.console.signals import deferred
from smallmind.kernels.codegen.cpus import cores
from smallmind.settings.config import __version__

THREADS = "NUMBA_NUM_THREADS"
COUNTS = (THREADS, "OPENBLAS_NUM_THREADS")
ROOT = Path(__file__).parents[2]  # of the package, where its processes start
# Environment that makes each package use an instruction set. Without NUMBA_CPU_FEATURES, Numba
# would add the host's features to those of the named CPU.
ISAS = {
    "haswell": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "x86-64": {
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": "Prescott",
    },
    "skylake-avx512": {
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
}


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


def variables_of(threads: int | None, isa: str | None) -> dict[str, str]:
    """-> the environment of processes that measure; packages read it when they are imported."""
    count = threads or cores()
    return {**ISAS.get(isa or "", {}), **dict.fromkeys(COUNTS, str(count))}


BUSY = 0.25  # cores that other programs use, above which they disturb
LISTENING = 0.3  # seconds of watching other programs, at least
LEAST_GAIN = 0.8  # of the cores: all threads together compute at least so many times as much as one


def listen() -> Callable[[], float]:
    """Watches other programs from now on -> what returns how many cores they have kept busy.

    This process may compute meanwhile: its own time is left out.
    """
    psutil.cpu_percent()
    before, start = time.process_time(), time.perf_counter()

    def others() -> float:
        time.sleep(max(0.0, start + LISTENING - time.perf_counter()))
        share = psutil.cpu_percent() / 100
        own = (time.process_time() - before) / (time.perf_counter() - start)
        return max(0.0, share * (psutil.cpu_count() or 1) - own)

    return others


def disturbances(found: Mapping[str, Any], threads: int) -> list[str]:
    """-> what says that a machine is busy: other programs, and threads that gain too little.

    `found` has the cores that others use, and the ceilings of one and of all threads.
    """
    lines = []
    if found["others"] > BUSY:
        lines.append(f"other programs keep {found['others']:.1f} of {psutil.cpu_count()} CPUs busy")
    gain = found["multiply_add_per_second"] / found["multiply_add_per_second_on_one"]
    if gain < LEAST_GAIN * threads:
        lines.append(f"{threads} threads together compute {gain:.1f} times as much as one")
    return lines


def describe() -> dict[str, object]:
    """Returns CPU, instruction set, threads, threading layer, versions."""
    import llvmlite.binding as llvm

    from smallmind.kernels.codegen.isa import ISA
    from smallmind.kernels.codegen.threads import threading_layer, threads

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
        "smallmind": __version__,
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
        env={**os.environ, **(variables or {})},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        **rest,
    ).stdout
    return json.loads(output.splitlines()[-1])


def environment(threads: int, binds: bool = True) -> dict[str, str]:
    """-> the environment of a process with this many threads, each on a core of its own if it
    binds.

    Whichever library starts them.
    """
    names = (*COUNTS, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    variables = {**os.environ, **dict.fromkeys(names, str(threads))}
    if binds:
        variables |= {"OMP_PROC_BIND": "spread", "OMP_PLACES": "cores"}
    if threads == 1:
        variables["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return variables


def started(
    command: Sequence[str],
    threads: int,
    variables: Mapping[str, str] = MappingProxyType({}),
    binds: bool = True,
    **rest: Any,
) -> subprocess.Popen[str]:
    """Starts a program on the CPUs that are measured; `rest` are arguments of Popen."""
    rest = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, **rest}
    process = subprocess.Popen(command, env={**environment(threads, binds), **variables}, **rest)
    if CPUS:
        os.sched_setaffinity(process.pid, CPUS)
    return process


class Worker:
    """A module in a process of its own that answers commands; it ends with the `with` block.

    `variables` are added to its environment; the rest are arguments of `started`.
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
        # Ctrl-C is for this process, which ends the other: also if it comes while that one starts.
        rest |= {"stdin": subprocess.PIPE, "start_new_session": True}
        with ExitStack() as ending:
            with deferred():
                self.process = started(command, threads, variables, **rest)
                ending.push(self)
            ending.pop_all()

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
            status = self.process.wait()
            raise ChildProcessError(f"{self.name} ended with status {status}; see above")
        return json.loads(answer)

    def ask(self, **command: object) -> Any:
        self.tell(**command)
        return self.answer()


def load(others: Callable[[], float] | None = None) -> dict[str, float]:
    """-> what tells whether a machine is busy: see `disturbances`. Units: cores, 1/s.

    `others` is what `listen` has returned, if it was called before.
    """
    from smallmind.bench.ceilings import multiply_add_rate, one_thread

    busy = (others or listen())()
    with one_thread():
        alone = multiply_add_rate()
    names = "others", "multiply_add_per_second_on_one", "multiply_add_per_second"
    return dict(zip(names, (busy, alone, multiply_add_rate()), strict=True))


if __name__ == "__main__":
    from smallmind.kernels.codegen.cpus import bind_to_cores

    bind_to_cores()
    sys.stdout.write(json.dumps([describe(), load()]) + "\n")

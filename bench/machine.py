"""The machine and the versions that figures were measured with."""

import importlib.metadata
import os
import platform
from pathlib import Path

import llvmlite.binding as llvm
import psutil

import smallmind
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.threads import threading_layer, threads


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

"""The machine and the versions that figures were measured with, and programs run on it."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

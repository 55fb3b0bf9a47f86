"""The memory available to this process, on the machine and within its container."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

PROCESS = Path("/proc/self")

# The files of a control group, by file system: limits, usage, and the key in memory.stat of the
# usage that the kernel can reclaim. (Kernel documentation: cgroup-v1/memory, cgroup-v2.)
FILES = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(process: Path = PROCESS) -> int:
    """Returns the memory left to this process: the machine's free memory, limited by its container.

    `process` is its directory in /proc; if that does not exist, only the machine counts.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_by_limits(process)]))


def _left_by_limits(process: Path) -> Iterator[int]:
    """Yields the memory left below each limit of this process's control group and its parents."""
    for kind, mount, group in _groups(process):
        limits, used, idle = FILES[kind]
        for directory in (group, *group.parents):
            yield from _remaining(directory, limits, used, idle)
            if directory == mount:
                break


def _groups(process: Path) -> Iterator[tuple[str, Path, Path]]:
    """-> file system, mount point, and the directory of the process's group in it."""
    paths: dict[str, PurePosixPath] = {}
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(path)
    for line in _lines(process / "mountinfo"):
        target, _, source = line.partition(" - ")
        root, mount = target.split()[3:5]
        kind, *_, options = source.split()
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            group = paths[kind]
            # A container may see its own group as the root, but its path as it is outside.
            inside = group.is_relative_to(root) and ".." not in group.parts
            yield kind, Path(mount), Path(mount, group.relative_to(root) if inside else "")


def _remaining(directory: Path, limits: tuple[str, ...], used: str, idle: str) -> Iterator[int]:
    """Yields the memory left below each of the limits of one control group."""
    usage = _number(_lines(directory / used))
    if usage is None:
        return
    for line in _lines(directory / "memory.stat"):
        if line.startswith(idle + " "):
            usage -= int(line.split()[1])
    for name in limits:
        limit = _number(_lines(directory / name))
        if limit is not None:
            yield limit - usage


def _number(lines: list[str]) -> int | None:
    """Returns the only line as a number; None if the file is missing or says "max"."""
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []

"""Available memory, from a made-up /proc and tree of control groups."""

import psutil
import pytest

from smallmind.memory.available import available_bytes

MB = 10**6


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes files, {path: content}, and pretends that 1000 MB are free -> its /proc/self."""
    free = psutil.virtual_memory()._replace(available=1000 * MB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    def write(files):
        for path, content in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n", encoding="utf-8")
        return tmp_path / "proc"

    return write


def version2(tmp_path, groups, path="/a/b", root="/"):
    """groups: {directory: (max, high, current, inactive_file) in MB}; None: no limit."""
    files = {
        "proc/cgroup": f"0::{path}",
        "proc/mountinfo": f"1 0 0:1 {root} {tmp_path}/fs rw,nosuid shared:4 - cgroup2 none rw",
    }
    for name, (limit, high, current, inactive) in groups.items():
        files |= {
            f"fs/{name}/memory.max": "max" if limit is None else limit * MB,
            f"fs/{name}/memory.high": "max" if high is None else high * MB,
            f"fs/{name}/memory.current": current * MB,
            f"fs/{name}/memory.stat": f"active_file 7\ninactive_file {inactive * MB}",
        }
    return files


def test_without_control_groups_the_machine_sets_the_limit(machine):
    assert available_bytes(machine({})) == 1000 * MB


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({"a/b": (300, None, 120, 20)}, 200),
        ({"a/b": (300, 250, 120, 20)}, 150),  # above "high" the kernel slows the process down
        ({"a/b": (None, None, 120, 20)}, 1000),
        ({"a/b": (300, None, 120, 20), "a": (400, None, 350, 50)}, 100),  # the parent's limit
        ({"a/b": (300, None, 120, 20), ".": (150, None, 130, 0)}, 20),
        ({"a/b": (5000, None, 120, 20)}, 1000),
        ({"a/b": (100, None, 120, 0)}, 0),
    ],
)
def test_limits_of_the_group_and_its_parents_apply(machine, tmp_path, groups, free):
    assert available_bytes(machine(version2(tmp_path, groups))) == free * MB


def test_limits_outside_the_mount_are_ignored(machine, tmp_path):
    files = version2(tmp_path, {"a/b": (300, None, 100, 0), "..": (50, None, 0, 0)})
    assert available_bytes(machine(files)) == 200 * MB


@pytest.mark.parametrize(("path", "root"), [("/pod/a", "/pod/a"), ("/pod/a", "/b"), ("/../a", "/")])
def test_a_container_may_see_its_own_group_as_the_root(machine, tmp_path, path, root):
    files = version2(tmp_path, {".": (300, None, 100, 0), "pod/a": (1, None, 1, 0)}, path, root)
    assert available_bytes(machine(files)) == 200 * MB


def test_limits_of_control_groups_version_1_apply(machine, tmp_path):
    mounts = [
        f"1 0 0:1 /docker {tmp_path}/cpu rw - cgroup cgroup rw,cpu",
        f"2 0 0:2 /docker {tmp_path}/fs rw - cgroup cgroup rw,memory",
    ]
    files = {
        "proc/cgroup": "5:cpu:/docker/c\n4:memory:/docker/c\n0::/",
        "proc/mountinfo": "\n".join(mounts),
        "fs/c/memory.limit_in_bytes": 300 * MB,
        "fs/c/memory.usage_in_bytes": 150 * MB,
        "fs/c/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MB}",
        "fs/memory.limit_in_bytes": 9223372036854771712,
        "fs/memory.usage_in_bytes": 900 * MB,
        "cpu/c/memory.limit_in_bytes": 1,
        "cpu/c/memory.usage_in_bytes": 1,
    }
    assert available_bytes(machine(files)) == 180 * MB


def test_this_machine_has_memory_available():
    assert 0 < available_bytes() <= psutil.virtual_memory().total

"""Disks that fail: layers in place of durable.Files."""

import os
import signal
from pathlib import Path

import numpy as np

from smallmind.files import durable
from smallmind.training.state import RunState


def checkpoint(step, elements=500):
    """A different one for each step, with tensors of several kinds."""
    random = np.random.default_rng(step)
    tensors = {
        "weights": random.standard_normal(elements, np.float32),
        "moments/0": random.standard_normal((elements // 4, 4)),
        "scale": np.array(step % 100, np.float16),
        "empty": np.empty((0, 3), np.int32),
    }
    return RunState(step, tensors, {"best": 1 / (1 + step), "rng": [2**64 - 1 - step], "at": "ä"})


def assert_sound(found, steps):
    """Asserts that the found state equals the checkpoint of one of these steps."""
    assert found is not None and found.step in steps
    expected = checkpoint(found.step)
    assert found.state == expected.state and found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found.tensors[name], tensor)


def names(directory):
    return {path.name for path in (Path(directory) / "checkpoints").iterdir()}


class Quick(durable.Files):
    """Does not wait for the disk."""

    def fsync(self, file):
        pass

    def fsync_directory(self, path):
        pass


class Faulty(Quick):
    """Counts operations. `fault` happens before operation `at`, or halfway through it if a write.

    If `lasting`, it happens at every later operation too.
    """

    def __init__(self, at, fault, lasting=False):
        self.at, self.fault, self.lasting = at, fault, lasting
        self.count = 0

    def count_operation(self, operation, arguments):
        due = self.count == self.at or (self.lasting and self.count > self.at)
        self.count += 1
        if due:
            if operation == "write":
                file, data = arguments
                os.write(file, data[: len(data) // 2])
            if operation == "close":
                os.close(*arguments)
            self.fault()


def _counted(name):
    def operation(self, *arguments):
        self.count_operation(name, arguments)
        return getattr(Quick, name)(self, *arguments)

    return operation


for _name in [name for name in vars(durable.Files) if not name.startswith("_")]:
    setattr(Faulty, _name, _counted(_name))


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class PowerCut(BaseException):
    """Not an Exception: no program could handle it."""


class File:
    """The written bytes, and how many of them are surely on disk."""

    def __init__(self):
        self.content = b""
        self.synced = 0
        self.overwritten = b""  # its first bytes as they surely are on disk

    def after_power_loss(self, random):
        """The synced part and some pages of the rest; others are zeros or missing."""
        content = bytearray(self.content[: random.integers(self.synced, len(self.content) + 1)])
        if random.random() < 0.5:
            content[: len(self.overwritten)] = self.overwritten
        for page in range(self.synced, len(content), 512):
            if random.random() < 0.5:
                end = min(len(content), page + 512)
                content[page:end] = bytes(end - page)
        return bytes(content)


class Volatile(Quick):
    """Knows what may be left after a power loss before operation `cut`.

    Data is safe after fsync, a name after fsync of its directory: the least that POSIX guarantees.
    """

    def __init__(self, root, cut):
        self.root, self.cut = root, cut
        self.open, self.names = {}, {}  # descriptor -> File, path -> File as programs see it
        self.synced_names = {}  # path -> File, or None for a directory
        self.changes = []  # of names, not yet synced: (directory, {path: File or "gone"})

    def step(self):
        self.cut -= 1
        if self.cut < 0:
            raise PowerCut

    def create(self, path):
        self.step()
        number = super().create(path)
        self.open[number] = self.names[path] = File()
        self.changes.append((path.parent, {path: self.names[path]}))
        return number

    def write(self, file, data):
        self.step()
        self.open[file].content += bytes(data)
        return super().write(file, data)

    def overwrite(self, file, start):
        self.step()
        known = self.open[file]
        known.overwritten = known.content[: min(known.synced, len(start))]
        known.content = bytes(start) + known.content[len(start) :]
        os.pwrite(file, start, 0)

    def fsync(self, file):
        self.step()
        known = self.open[file]
        known.synced, known.overwritten = len(known.content), b""

    def close(self, file):
        super().close(file)
        self.step()

    def replace(self, source, target):
        self.step()
        super().replace(source, target)
        self.names[target] = self.names.pop(source)
        self.changes.append((target.parent, {source: "gone", target: self.names[target]}))

    def unlink(self, path):
        self.step()
        super().unlink(path)
        del self.names[path]
        self.changes.append((path.parent, {path: "gone"}))

    def make_directory(self, path):
        self.step()
        super().make_directory(path)
        self.changes.append((path.parent, {path: None}))

    def fsync_directory(self, path):
        self.step()
        for directory, change in self.changes:
            if directory == path:
                self.synced_names |= change
        self.changes = [change for change in self.changes if change[0] != path]

    def after_power_loss(self, random, target):
        """Writes one of the possible states below target."""
        left = dict(self.synced_names)
        for _, change in self.changes:
            if random.random() < 0.5:
                left |= change
        target.mkdir()
        # Directories first: files in a lost directory are lost too.
        for path, file in sorted(left.items(), key=lambda item: item[1] is not None):
            place = target / path.relative_to(self.root)
            if file is None:
                place.mkdir()
            elif file != "gone" and place.parent.is_dir():
                place.write_bytes(file.after_power_loss(random))

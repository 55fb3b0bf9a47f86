"""Power is lost before each operation of some saves; of unsynced data the disk keeps any part."""

import itertools

import numpy as np
import pytest

from smallmind.files import durable
from smallmind.training.checkpoint import newest, save
from tests.faults.disk import PowerCut, Volatile, assert_sound, checkpoint

STEPS = (10, 20, 30, 40)


def outcomes(tmp_path, monkeypatch, layer, seeds):
    """For each moment: (steps whose save has returned, the newest checkpoint found afterwards)."""
    for cut in itertools.count():
        root = tmp_path / f"run-{cut}"
        root.mkdir()
        disk, returned = layer(root, cut), [None]
        monkeypatch.setattr(durable, "files", disk)
        try:
            for step in STEPS:
                save(root, checkpoint(step), keep=1, best=step == 20)
                returned.append(step)
        except PowerCut:
            pass
        for seed in range(seeds):
            left = tmp_path / f"left-{cut}-{seed}"
            disk.after_power_loss(np.random.default_rng([cut, seed]), left)
            yield returned, newest(left)[0]
        if len(returned) > len(STEPS):
            return


@pytest.mark.parametrize("seeds", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_no_saved_checkpoint_is_lost(tmp_path, monkeypatch, seeds):
    moments = 0
    for returned, found in outcomes(tmp_path, monkeypatch, Volatile, seeds):
        moments += 1
        started = STEPS[len(returned) - 1 : len(returned)]
        if found or returned[-1]:
            assert_sound(found, {returned[-1], *started})
    assert moments > 50 * seeds


class WithoutFsync(Volatile):
    def fsync(self, file):
        self.step()


class WithoutFsyncOfDirectory(Volatile):
    def fsync_directory(self, path):
        self.step()


@pytest.mark.parametrize("layer", [WithoutFsync, WithoutFsyncOfDirectory])
def test_a_writer_that_does_not_sync_is_caught_but_never_yields_damaged_files(
    tmp_path, monkeypatch, layer
):
    lost = 0
    for returned, found in outcomes(tmp_path, monkeypatch, layer, seeds=5):
        if found:
            assert_sound(found, set(STEPS))
        lost += returned[-1] is not None and (found is None or found.step < returned[-1])
    assert lost > 10

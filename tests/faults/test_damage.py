"""Files that are cut or have flipped bits: all are detected, the previous checkpoint is used."""

import io

import numpy as np
import pytest

from smallmind import InputError
from smallmind.files import durable, safetensors
from smallmind.training.checkpoint import load, newest, save, verify
from tests.faults.disk import assert_sound, checkpoint

FLIPS = 5000


@pytest.fixture
def run(tmp_path, quick_disk):
    for step in (10, 20):
        save(tmp_path, checkpoint(step, elements=200))
    return tmp_path


def file_of(run, step):
    return run / "checkpoints" / f"step-{step:08d}.safetensors"


def assert_detected(path):
    """Also if no digest is required: damage to the digest itself is damage."""
    for read in (safetensors.read, safetensors.open_tensors):
        for strict in (True, False):
            with pytest.raises(InputError, match=r"step-00000020\.safetensors") as caught:
                read(path, strict)
            assert "\n" not in str(caught.value)


def test_a_file_cut_at_any_length_is_detected(run):
    path = file_of(run, 20)
    with open(path, "r+b") as file:
        for length in reversed(range(path.stat().st_size)):
            file.truncate(length)
            assert_detected(path)


def test_extra_bytes_at_the_end_are_detected(run):
    path = file_of(run, 20)
    path.write_bytes(path.read_bytes() + b"\0")
    assert_detected(path)


def test_damage_to_a_compressed_file_is_detected(run):
    save(run, checkpoint(20), compress=True)
    path = file_of(run, 20)
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for bit in random_bits(path, 500):
            flip(file, bit)
            assert_detected(path)
            flip(file, bit)
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert_detected(path)
    assert newest(run)[0].step == 10
    path.write_bytes(whole)
    assert_sound(newest(run)[0], {20})


def flip(file, bit):
    file.seek(bit // 8)
    (byte,) = file.read(1)
    file.seek(bit // 8)
    file.write(bytes([byte ^ 1 << bit % 8]))


def random_bits(path, number):
    """Random bits, half of them from the whole file, half from its header."""
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    random = np.random.default_rng(0)
    for size in (path.stat().st_size, header):
        yield from map(int, random.integers(8 * size, size=number // 2))


def test_random_bit_flips_are_detected(run):
    path = file_of(run, 20)
    with open(path, "r+b", buffering=0) as file:
        for bit in random_bits(path, FLIPS):
            flip(file, bit)
            for read in (safetensors.read, safetensors.open_tensors, load):
                with pytest.raises(InputError):
                    read(path)
            flip(file, bit)
    load(path)


def test_the_previous_checkpoint_is_used_and_the_damaged_file_named(run):
    path = file_of(run, 20)
    with open(path, "r+b") as file:
        flip(file, 8 * path.stat().st_size - 1)
    found, skipped = newest(run)
    assert found.step == 10
    assert [where for where, _ in skipped] == [path]
    assert str(path) in skipped[0][1] and "does not match its SHA-256" in skipped[0][1]
    assert [(where.name, bool(fault)) for where, fault in verify(run)] == [
        ("step-00000020.safetensors", True),
        ("step-00000010.safetensors", False),
    ]


def test_the_best_checkpoint_is_used_if_it_is_newer_than_the_other_sound_ones(run):
    save(run, checkpoint(30), best=True)
    for step in (30, 20):
        file_of(run, step).write_bytes(b"")
    found, skipped = newest(run)
    assert_sound(found, {30})
    assert [path.name[5:13] for path, _ in skipped] == ["00000030", "00000020"]
    file_of(run, 30).unlink()
    save(run, checkpoint(40))
    assert_sound(newest(run)[0], {40})


def test_a_renamed_checkpoint_is_skipped(run):
    file_of(run, 20).rename(file_of(run, 99))
    found, skipped = newest(run)
    assert found.step == 10
    assert "does not hold the checkpoint that its name promises" in skipped[0][1]


def test_a_file_changed_while_it_is_read_is_refused(run, monkeypatch):
    path = file_of(run, 20)
    foreign = run / "foreign"
    content = bytearray(path.read_bytes())
    foreign.write_bytes(content.replace(b"smallmind.sha256", b"someother.sha256"))

    class Changing(io.BufferedReader):
        """A file to which another program appends whenever a tensor is read."""

        def readinto(self, buffer):
            with open(foreign, "ab") as other:
                other.write(b"x")
            return super().readinto(buffer)

    safetensors.read(foreign)
    monkeypatch.setattr(durable, "open_regular", lambda path, **_: Changing(io.FileIO(path)))
    with pytest.raises(InputError, match="changed while it was read"):
        safetensors.read(foreign)

import errno
import sys
import threading
import tracemalloc

import numpy as np
import pytest

from smallmind import InputError
from smallmind.files import safetensors
from smallmind.training import checkpoint as module
from smallmind.training.checkpoint import BackgroundSaver, load, newest, save, verify
from smallmind.training.state import RunState, Snapshot
from tests.faults.disk import assert_sound, checkpoint, names
from tests.programs import PATIENCE, finished

pytestmark = pytest.mark.usefixtures("quick_disk")


def step_file(step):
    return f"step-{step:08}.safetensors"


def saved_in_background(directory, *states):
    """Saves states one after the other -> the newest checkpoint."""
    with BackgroundSaver(directory) as saver:
        for state in states:
            saver.save(state)
    return newest(directory)[0]


def test_a_saved_checkpoint_is_found(tmp_path):
    assert newest(tmp_path) == (None, []) and list(verify(tmp_path)) == []
    save(tmp_path, checkpoint(7))
    found, skipped = newest(tmp_path)
    assert_sound(found, {7})
    assert not skipped
    assert_sound(load(tmp_path / "checkpoints" / "step-00000007.safetensors"), {7})


def test_a_compressed_checkpoint_gives_back_the_same_bits(tmp_path):
    random = np.random.default_rng(1)
    tensors = {
        **checkpoint(7).tensors,
        "model.big": random.standard_normal((300, 40), np.float32),
        "zeros": np.zeros(100_000, np.float32),
        "bytes": np.arange(256, dtype=np.uint8),
        "scalar": np.array(-0.0, np.float32),
    }
    tokenizer = "x" * 300_000  # long enough to be a tensor of its own
    state = RunState(7, tensors, {"loss": 0.1, "tokenizer": tokenizer})
    path = tmp_path / "checkpoints" / step_file(7)
    sizes = []
    for compress in (False, True):
        save(tmp_path, state, best=True, compress=compress)
        sizes.append(path.stat().st_size)
        for file in (path, path.with_name("best.safetensors")):
            found = load(file)
            assert (found.step, found.state) == (7, state.state)
            assert list(found.tensors) == list(tensors)
            for name, tensor in tensors.items():
                read = found.tensors[name]
                assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
                assert read.tobytes() == tensor.tobytes()
        assert module.peek(tmp_path).state == state.state
        assert [fault for _, fault in verify(tmp_path)] == [None, None]
    assert sizes[1] < sizes[0] - 0.9 * 400_000


def test_compressed_checkpoints_are_reported_with_size_and_seconds(tmp_path):
    saver = BackgroundSaver(tmp_path, compress=True)
    saver.save(checkpoint(1))
    saver.save(checkpoint(2))
    first, second = saver.news(wait=True)
    assert (first.step, second.step) == (1, 2) and saver.news() == []
    assert second.saved_bytes == (tmp_path / "checkpoints" / step_file(2)).stat().st_size
    assert second.uncompressed_bytes == sum(x.nbytes for x in checkpoint(2).tensors.values())
    assert second.save_seconds >= 0
    saver.close()
    plain = BackgroundSaver(tmp_path)
    plain.save(checkpoint(3))
    assert plain.news(wait=True) == []


def test_state_is_restored_bit_for_bit(tmp_path):
    state = {"loss": 0.1 + 0.2, "tiny": 5e-324, "big": 2**127 - 1, "none": None}
    state["text"] = "ä\0\U0001f600"
    save(tmp_path, RunState(0, {}, state))
    assert newest(tmp_path)[0].state == state
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            save(tmp_path, RunState(0, {}, {"loss": bad}))


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 8):
        save(tmp_path, checkpoint(step), keep=3, best=step in (2, 4))
    kept = [*map(step_file, (7, 6, 5)), "best.safetensors"]
    assert names(tmp_path) == set(kept)
    assert_sound(load(tmp_path / "checkpoints" / "best.safetensors"), {4})
    assert [(path.name, fault) for path, fault in verify(tmp_path)] == [(x, None) for x in kept]
    save(tmp_path, checkpoint(8), keep=1)
    assert names(tmp_path) == {step_file(8), "best.safetensors"}


def test_a_run_resumed_from_an_earlier_step_removes_later_ones(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, checkpoint(step))
    (tmp_path / "checkpoints" / step_file(30)).write_bytes(b"damaged")
    assert_sound(newest(tmp_path)[0], {20})
    save(tmp_path, checkpoint(25), keep=1)
    assert names(tmp_path) == {step_file(25)}


def test_other_files_are_left_alone(tmp_path):
    save(tmp_path, checkpoint(1))
    others = {"step-1.safetensors", "step-000000001.safetensors", "note.txt", f"x{step_file(1)}"}
    for name in others:
        (tmp_path / "checkpoints" / name).write_text("mine")
    save(tmp_path, checkpoint(2), keep=1)
    assert names(tmp_path) == others | {step_file(2)}
    assert newest(tmp_path)[1] == []


def test_many_steps_sort_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, checkpoint(step))
    assert newest(tmp_path)[0].step == 100_000_000


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("x")
    with pytest.raises(InputError, match="cannot read"):
        newest(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        save(tmp_path, checkpoint(1))


def test_a_save_writes_the_state_at_the_time_of_the_call(tmp_path):
    now = RunState(1, {"w": np.ones((3, 4), np.float32).T}, {"list": [1]})
    saver = BackgroundSaver(tmp_path)
    saver.save(now)
    now.tensors["w"][...] = 2
    now.state["list"].append(2)
    saver.close()
    found, _ = newest(tmp_path)
    np.testing.assert_array_equal(found.tensors["w"], np.ones((4, 3)))
    assert found.state == {"list": [1]}


def test_a_snapshot_is_written_without_a_copy(tmp_path):
    snapshot = Snapshot(1, {"w": np.ones(1_000_000, np.float32)}, {})
    saver = BackgroundSaver(tmp_path)
    tracemalloc.start()
    try:
        saver.save(snapshot)
        saver.wait()
        assert tracemalloc.get_traced_memory()[1] < snapshot.tensors["w"].nbytes / 2
    finally:
        tracemalloc.stop()
    assert newest(tmp_path)[0].tensors["w"].all()


def test_one_save_at_a_time_and_the_next_one_waits(tmp_path, monkeypatch):
    running, proceed, order = threading.Event(), threading.Event(), []
    saving = module.save

    def slow(directory, snapshot, keep, best):
        order.append(("begins", snapshot.step))
        running.set()
        assert proceed.wait(10)
        saving(directory, snapshot, keep, best)
        order.append(("ends", snapshot.step))

    monkeypatch.setattr(module, "save", slow)
    saver = BackgroundSaver(tmp_path, keep=9)
    saver.save(checkpoint(1))
    assert running.wait(10)  # the call has returned, the save is running
    threading.Timer(0.05, proceed.set).start()
    saver.save(checkpoint(2))
    assert order[:2] == [("begins", 1), ("ends", 1)]
    saver.close()
    assert order == [("begins", 1), ("ends", 1), ("begins", 2), ("ends", 2)]
    sound = [path.name for path, fault in verify(tmp_path) if not fault]
    assert sound == [step_file(2), step_file(1)]


def test_a_save_allocates_nothing_after_the_first(tmp_path):
    big = np.zeros(2_000_000, np.float32)
    saver = BackgroundSaver(tmp_path)
    saver.save(RunState(1, {"big": big}, {}))
    saver.wait()
    tracemalloc.start()
    try:
        for step in (2, 3):
            saver.save(RunState(step, {"big": big}, {}))
            saver.wait()
        assert tracemalloc.get_traced_memory()[1] < big.nbytes / 10
    finally:
        tracemalloc.stop()


def test_tensors_may_change_shape_or_disappear(tmp_path):
    first = RunState(1, {"a": np.zeros(3), "b": np.zeros(2)}, {})
    second = RunState(2, {"a": np.ones((2, 2), np.float32)}, {})
    found = saved_in_background(tmp_path, first, second)
    assert found.tensors.keys() == {"a"} and found.tensors["a"].shape == (2, 2)


def test_an_interrupted_snapshot_is_never_written(tmp_path, monkeypatch):
    saver = BackgroundSaver(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "disk full")

    def interrupted(copy, tensor):
        copy[:] = 0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "save", full)
        saver.save(checkpoint(1))  # stays to be tried again
        patch.setattr(np, "copyto", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.save(checkpoint(2))
    with pytest.raises(OSError, match="disk full"):
        saver.close()
    assert newest(tmp_path) == (None, [])
    saver.save(checkpoint(3))
    saver.close()
    assert_sound(newest(tmp_path)[0], {3})
    assert names(tmp_path) == {"step-00000003.safetensors"}


def test_a_thread_that_never_started_is_not_a_deadlock(tmp_path, monkeypatch):
    def interrupted(thread):
        monkeypatch.undo()  # those of the next save start
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    saver = BackgroundSaver(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        saver.save(checkpoint(1))
    saver.close()
    assert_sound(newest(tmp_path)[0], {1})


EXIT = """
import sys
from smallmind.training.checkpoint import BackgroundSaver
from tests.faults.disk import checkpoint

saver = BackgroundSaver(sys.argv[1])
for step in (1, 2):
    saver.save(checkpoint(step))
if sys.argv[2] == "interrupt":
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("end", ["plain", "interrupt"])
def test_the_interpreter_ends_after_the_save(tmp_path, end):
    finished([sys.executable, "-c", EXIT, str(tmp_path), end], timeout=PATIENCE)
    assert_sound(newest(tmp_path)[0], {2})


def test_other_errors_in_the_thread_are_raised_too(tmp_path):
    with pytest.raises(InputError, match="bad is complex64"):
        saved_in_background(tmp_path, RunState(1, {"bad": np.zeros(1, np.complex64)}, {}))


def test_bfloat16_is_saved_bit_for_bit(tmp_path):
    bits = np.arange(10, dtype=np.uint16)
    state = RunState(1, {"weights": bits.view(safetensors.BFLOAT16)}, {})
    found = saved_in_background(tmp_path, state).tensors["weights"]
    np.testing.assert_array_equal(found.view(np.uint16), bits)

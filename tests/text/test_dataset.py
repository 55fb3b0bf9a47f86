"""Reading texts, and drawing windows of them."""

import numpy as np
import pytest

from smallmind import InputError
from smallmind.randomness import hash64, hash64_each
from smallmind.settings.config import TrainingConfig
from smallmind.settings.rules import Choices
from smallmind.text import samplers
from smallmind.text.dataset import Batch, Dataset, random_starts
from smallmind.text.samplers import (
    Epochs,
    RandomWindows,
    ShuffledWindows,
    draw,
    make_sampler,
)
from tests.programs import refusal

TOKENS = np.arange(1000, dtype=np.int32)


def test_the_last_tenth_is_held_out_and_never_drawn():
    dataset = Dataset(TOKENS, block_size=16, batch_size=8, seed=1)
    assert dataset.train.tolist() == list(range(900))
    assert dataset.held_out.tolist() == list(range(900, 1000))
    drawn = [draw(RandomWindows(dataset), number) for number in range(1000)]
    assert max(batch.targets.max() for batch in drawn) == 899
    assert min(batch.ids.min() for batch in drawn) == 0
    for number in range(50):
        assert dataset.evaluation_batch("held_out", number).ids.min() >= 900
        assert dataset.evaluation_batch("train", number).targets.max() < 900


def test_targets_are_the_tokens_that_follow():
    dataset = Dataset(TOKENS, block_size=16, batch_size=8, seed=1)
    ids, targets, starts = draw(RandomWindows(dataset), 3)[:3]
    assert ids.shape == targets.shape == (8, 16)
    assert ids.dtype == targets.dtype == np.int32
    assert ids.flags.c_contiguous and targets.flags.c_contiguous
    np.testing.assert_array_equal(targets, ids + 1)
    np.testing.assert_array_equal(np.diff(ids, axis=1), 1)
    np.testing.assert_array_equal(ids[:, 0], starts)


def test_windows_in_memory_are_those_of_any_other_tokens():
    dataset = Dataset(TOKENS, block_size=16, batch_size=8, seed=1)
    for starts in ([0, 883, 5, 5], [7], []):
        batch = dataset.windows(np.array(starts, np.int64))
        # Not contiguous: taken window by window.
        spread = Dataset(TOKENS.repeat(2)[::2], block_size=16, batch_size=8, seed=1)
        np.testing.assert_array_equal(batch.ids, spread.windows(np.array(starts)).ids)
        np.testing.assert_array_equal(batch.targets, spread.windows(np.array(starts)).targets)
    with pytest.raises(IndexError):
        dataset.windows(np.array([884]))


def test_starts_are_hashes_of_the_key_and_the_row():
    for key in ((0, 0, 0), (2**63 - 1, 2, 10**9), ()):
        hashes = [hash64(*key, row) for row in range(100)]
        assert hash64_each(key, np.arange(100)).tolist() == hashes
        starts = random_starts(key, 100, 12345, stride=7)
        assert starts.tolist() == [x % 1764 * 7 for x in hashes]


def test_windows_begin_at_multiples_of_a_stride():
    sampler = RandomWindows(Dataset(TOKENS, 16, 8, seed=1), stride=16)
    starts = {int(start) for number in range(200) for start in sampler.starts(number)}
    assert starts == set(range(0, 900 - 16, 16))


@pytest.mark.parametrize("most", [0, samplers.MAX_SHUFFLED])
@pytest.mark.parametrize(("T", "B", "stride"), [(16, 8, 1), (7, 300, 1), (16, 5, 16), (450, 2, 1)])
def test_shuffled_windows_are_drawn_once_in_a_pass(monkeypatch, most, T, B, stride):
    monkeypatch.setattr(samplers, "MAX_SHUFFLED", most)
    data = Dataset(TOKENS, T, B, seed=1)
    sampler = ShuffledWindows(data, stride=stride)
    W, batches = sampler.windows, -(-4 * sampler.windows // B)
    drawn = [sampler.starts(number) for number in range(batches)]
    assert all(len(starts) == B for starts in drawn)
    passes = np.concatenate(drawn)[: 4 * W].reshape(4, W)
    assert passes.min() >= 0 and passes.max() + T < len(data.train)
    for starts in passes:  # side by side, whatever their order
        np.testing.assert_array_equal(np.diff(np.sort(starts)), T)
    assert not (passes % stride).any()
    if W > 2:
        assert len({tuple(starts.argsort()) for starts in passes}) == 4
    if stride == 1:
        assert len({starts.min() for starts in passes}) > 1
    again = ShuffledWindows(data, stride=stride).starts(batches - 1)  # depends on nothing before it
    np.testing.assert_array_equal(again, drawn[-1])


def test_the_settings_say_which_windows_make_a_batch():
    data = Dataset(TOKENS, 16, 8, seed=1)
    kinds = {"random": RandomWindows, "shuffled": ShuffledWindows}
    for sampling, kind in kinds.items():
        config = TrainingConfig(sampling=sampling, grad_accum_steps=3)
        sampler = make_sampler(data, config, stride=2)
        assert (type(sampler), sampler.batches, sampler.stride) == (kind, 3, 2)
    assert type(make_sampler(data, TrainingConfig(epochs=2))) is Epochs
    assert Choices({}).fields["sampling"] == "shuffled"
    assert "sampling" not in Choices({}, recipe="gpt2").fields


def test_a_batch_can_be_drawn_into_given_arrays():
    dataset = Dataset(TOKENS, 16, 8, seed=1)
    out = Batch(*np.zeros((2, 9, 16), np.int32), np.empty(0))
    batch = draw(RandomWindows(dataset), 3, out)
    assert batch.ids.base is out.ids.base and batch.ids.shape == (8, 16)
    np.testing.assert_array_equal(out.ids[:8], draw(RandomWindows(dataset), 3).ids)
    assert not out.ids[8].any()


def test_a_batch_depends_only_on_seed_and_number():
    def dataset(seed):
        return Dataset(TOKENS, 16, 8, seed)

    def ids(seed, number):
        return draw(RandomWindows(dataset(seed)), number).ids

    first = ids(1, 5)
    other = dataset(1)
    draw(RandomWindows(other), 4)
    other.evaluation_batch("train", 5)
    np.testing.assert_array_equal(draw(RandomWindows(other), 5).ids, first)
    assert (ids(1, 6) != first).any()
    assert (ids(2, 5) != first).any()
    assert (dataset(1).evaluation_batch("train", 5).ids != first).any()


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_a_text_of_the_length_in_the_message_is_long_enough(block_size):
    message = refusal(Dataset, TOKENS[: max(3, block_size - 1)], block_size, 8, 1)
    needed = int(message.split("needs at least ")[1].split()[0])
    draw(RandomWindows(Dataset(TOKENS[:needed], block_size, 8, 1)), 0)
    with pytest.raises(InputError):
        Dataset(TOKENS[: needed - 1], block_size, 8, 1)


def test_a_short_held_out_part_is_evaluated_in_shorter_windows():
    dataset = Dataset(TOKENS[:100], block_size=64, batch_size=2, seed=1)
    assert dataset.evaluation_batch("held_out", 0).ids.shape == (2, 9)

import numpy as np
import pytest

from smallmind import InputError
from smallmind.text.dataset import Dataset, read_text

TOKENS = np.arange(1000, dtype=np.int32)


def test_the_last_tenth_is_held_out_and_never_drawn():
    dataset = Dataset(TOKENS, block_size=16, batch_size=8, seed=1)
    assert dataset.train.tolist() == list(range(900))
    assert dataset.held_out.tolist() == list(range(900, 1000))
    drawn = [dataset.batch(number) for number in range(1000)]
    assert max(targets.max() for _, targets in drawn) == 899
    assert min(ids.min() for ids, _ in drawn) == 0
    for number in range(50):
        assert dataset.evaluation_batch("held_out", number)[0].min() >= 900
        assert dataset.evaluation_batch("train", number)[1].max() < 900


def test_batches_are_windows_and_the_token_that_follows():
    ids, targets = Dataset(TOKENS, block_size=16, batch_size=8, seed=1).batch(3)
    assert ids.shape == targets.shape == (8, 16)
    assert ids.dtype == targets.dtype == np.int32
    assert ids.flags.c_contiguous and targets.flags.c_contiguous
    np.testing.assert_array_equal(targets, ids + 1)
    np.testing.assert_array_equal(np.diff(ids, axis=1), 1)


def test_a_batch_follows_from_seed_and_number():
    def dataset(seed):
        return Dataset(TOKENS, 16, 8, seed)

    first = dataset(1).batch(5)[0]
    other = dataset(1)
    other.batch(4)
    other.evaluation_batch("train", 5)
    np.testing.assert_array_equal(other.batch(5)[0], first)
    assert (dataset(1).batch(6)[0] != first).any()
    assert (dataset(2).batch(5)[0] != first).any()
    assert (dataset(1).evaluation_batch("train", 5)[0] != first).any()


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_the_length_that_the_message_asks_for_is_enough(block_size):
    with pytest.raises(InputError, match="needs at least") as error:
        Dataset(TOKENS[: max(3, block_size - 1)], block_size, 8, 1)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    Dataset(TOKENS[:needed], block_size, 8, 1).batch(0)
    with pytest.raises(InputError):
        Dataset(TOKENS[: needed - 1], block_size, 8, 1)


def test_a_short_held_out_part_is_evaluated_in_shorter_windows():
    dataset = Dataset(TOKENS[:100], block_size=64, batch_size=2, seed=1)
    assert dataset.evaluation_batch("held_out", 0)[0].shape == (2, 9)


def test_text_is_utf8_with_or_without_a_mark(tmp_path):
    for data in ("häß\r\n".encode(), "häß\r\n".encode("utf-8-sig")):
        (tmp_path / "text").write_bytes(data)
        assert read_text(str(tmp_path / "text")) == "häß\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"abc\xffdef", "not UTF-8: byte 0xff at offset 3"), (b"", "is empty")],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, data, message):
    (tmp_path / "text").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_text(str(tmp_path / "text"))


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_text(str(tmp_path / "none"))
    with pytest.raises(InputError, match="is a directory"):
        read_text(str(tmp_path))

"""The safetensors format: round trips, the safetensors package, digests, damage."""

import functools
import hashlib
import json
import os
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy as package
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from smallmind import InputError
from smallmind.files import safetensors
from tests.peaks import traced
from tests.programs import refuses

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.c": np.array([1.5, -2], np.float16),
    "scalar": np.array(3.0),
    "empty": np.zeros((0, 4), np.int32),
}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(actual[name], value)


def save_theirs(path, tensors, metadata):
    package.save_file(tensors, path, metadata)


@pytest.mark.parametrize("write", [safetensors.write, save_theirs], ids=["ours", "theirs"])
def test_written_tensors_are_read_here_and_by_the_safetensors_package(tmp_path, write):
    write(tmp_path / "file", TENSORS, {"note": "häß"})
    tensors, metadata = safetensors.read(tmp_path / "file")
    assert_same(tensors, TENSORS)
    assert metadata == {"note": "häß"}
    assert_same(package.load_file(tmp_path / "file"), TENSORS)
    tensors["a"] += 1  # they are writable
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def file_of(header, data):
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def test_the_digest_is_that_of_the_file_with_its_digits_as_zeros(tmp_path):
    path = tmp_path / "file"
    safetensors.write(path, TENSORS, {"note": "x"})
    with package.safe_open(path, "numpy") as file:
        digits = file.metadata()["smallmind.sha256"]
    blank = path.read_bytes().replace(digits.encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == digits
    assert len(blank) % 8 == sum(tensor.nbytes for tensor in TENSORS.values()) % 8


def test_a_digest_can_be_required(tmp_path):
    safetensors.write(tmp_path / "ours", TENSORS, {})
    package.save_file(TENSORS, tmp_path / "theirs")
    assert_same(safetensors.read(tmp_path / "ours", strict=True)[0], TENSORS)
    refuses("has no SHA-256 of its contents", safetensors.read, tmp_path / "theirs", strict=True)


@pytest.mark.parametrize("name", ["smallmind.sha256", "smallmind.sha256.of"])
def test_names_of_the_digest_are_reserved(tmp_path, name):
    refuses("reserved names", safetensors.write, tmp_path / "file", {}, {name: "x"})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"__metadata__": np.zeros(1)}, {}, "reserved names"),
        ({"x": np.zeros(1, np.uint16)}, {}, "x is uint16, which the format lacks"),
        ({}, {"x": 3}, "metadata must be strings"),
        ({"x" * safetensors.MAX_HEADER: np.zeros(1)}, {}, "at most 3,000,000 fit"),
        ({}, {"x": "x" * (safetensors.MAX_TEXT + 1)}, "x takes 33,554,433 bytes; at most"),
        ({"smallmind.text.x": np.zeros(1)}, {}, "names that begin with smallmind.text. are reserv"),
    ],
)
def test_tensors_that_could_not_be_read_are_not_written(tmp_path, tensors, metadata, message):
    refuses(message, safetensors.write, tmp_path / "file", tensors, metadata)
    assert not list(tmp_path.iterdir())


LONG = {
    "note": "häß",
    "long": "\u0120\U0001f600" * safetensors.SHORT_TEXT,
    "half": "\ud800" * 2**18,
}


def test_long_texts_of_the_metadata_are_kept_as_bytes_behind_the_tensors(tmp_path):
    path = tmp_path / "file"
    safetensors.write(path, TENSORS, LONG)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 1000
    tensors, metadata = safetensors.read(path, strict=True)
    assert_same(tensors, TENSORS)
    opened, same = safetensors.open_tensors(path)
    assert_same(read_stored(opened), TENSORS)
    assert metadata == same == safetensors.read_metadata(path) == LONG
    with safetensors.streaming(path) as (streamed, same):
        assert same == LONG
        assert_same(read_stored(streamed), TENSORS)
    theirs = package.load_file(path)
    assert theirs.pop("smallmind.text.long").tobytes().decode() == LONG["long"]
    assert_same({name: theirs[name] for name in TENSORS}, TENSORS)
    assert list(theirs) == [*TENSORS, "smallmind.text.half"]


@pytest.mark.parametrize("read", [(), ("b",), ("a", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("size", [7, 5000, 200_000])  # within what is buffered, and beyond
def test_reading_texts_and_rows_does_not_move_what_the_digest_reads(tmp_path, size, read):
    path = tmp_path / "file"
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=(3, size)).astype(np.float32) for name in "abc"}
    safetensors.write(path, tensors, LONG)

    def stream():
        with safetensors.streaming(path) as (stored, metadata):
            for name in read:
                rows = np.empty((3, size), np.float32)
                for row in range(3):
                    stored[name].read_rows(row, rows[row : row + 1])
                np.testing.assert_array_equal(rows, tensors[name])
        return metadata

    assert stream() == LONG
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of a text
    path.write_bytes(content)
    with pytest.raises(InputError, match="does not match its SHA-256"):
        stream()


@pytest.mark.parametrize(
    ("name", "described", "data"),
    [
        ("smallmind.text.x", ("F32", (1,)), b"abcd"),
        ("smallmind.text.x", ("U8", (2, 2)), b"abcd"),
        ("smallmind.text.x", ("U8", (4,)), b"ab\xffd"),
        ("smallmind.text.x", ("U8", (safetensors.MAX_TEXT + 1,)), bytes(safetensors.MAX_TEXT + 1)),
        ("smallmind.text.taken", ("U8", (4,)), b"abcd"),
    ],
)
def test_texts_that_are_none_are_refused(tmp_path, name, described, data):
    header = {"__metadata__": {"taken": "x"}, name: entry(*described, (0, len(data)))}
    (tmp_path / "file").write_bytes(file_of(header, data))
    opened = functools.partial(safetensors.open_tensors, strict=False)
    for read in (safetensors.read, opened, safetensors.read_metadata):
        refuses("is not a valid safetensors file", read, tmp_path / "file")


def test_bfloat16_has_its_own_dtype(tmp_path):
    bits = np.array([[0x3F80, 0xC000], [0x7F80, 1]], np.uint16)  # 1, -2, infinity, the smallest
    safetensors.write(tmp_path / "file", {"x": bits.view(safetensors.BFLOAT16)}, {})
    with open(tmp_path / "file", "rb") as file:
        (_, theirs), *_ = deserialize(file.read())
    assert (theirs["dtype"], theirs["shape"]) == ("BF16", [2, 2])
    assert bytes(theirs["data"]) == bits.tobytes()
    read = safetensors.read(tmp_path / "file")[0]["x"]
    assert read.dtype == safetensors.BFLOAT16
    np.testing.assert_array_equal(read.view(np.uint16), bits)
    with pytest.raises(TypeError):
        read + read  # not mistaken for integers


def test_tensors_are_returned_in_the_order_of_their_offsets(tmp_path):
    header = {
        "second": entry("U8", (2,), (4, 6)),
        "none": entry("U8", (0,), (4, 4)),
        "first": entry("F32", (), (0, 4)),
    }
    (tmp_path / "file").write_bytes(file_of(header, np.float32(1.5).tobytes() + b"ab"))
    tensors, _ = safetensors.read(tmp_path / "file")
    assert list(tensors) == ["first", "none", "second"]
    assert tensors["first"] == 1.5 and tensors["second"].tobytes() == b"ab"


def test_reading_needs_no_more_memory_than_the_tensors(tmp_path):
    big = np.ones(2_000_000, np.float32)
    safetensors.write(tmp_path / "file", {"a": big, "b": big}, {})
    with traced():
        tensors, _ = safetensors.read(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 2.1 * big.nbytes
        del tensors["a"]  # each is a separate array
        assert tracemalloc.get_traced_memory()[0] < 1.1 * big.nbytes


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', "[-Infinity]", "[1e999]", '{"a": 1, "a": 1}', "[" * 10**5]
)
def test_invalid_json_is_refused(text):
    with pytest.raises(ValueError):
        safetensors.from_json(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_json_lacks_are_not_written(value):
    with pytest.raises(ValueError):
        safetensors.to_json({"a": value})


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    for content in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(content)
        try:
            safetensors.read(path)
        except InputError as error:
            assert "\n" not in str(error)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    safetensors.write(path, TENSORS, {})
    before = path.read_bytes()
    refuses("bad is complex64", safetensors.write, path, {"bad": np.zeros(3, np.complex64)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def read_stored(tensors):
    """All rows of the tensors that open_tensors returned."""
    found = {name: np.empty(x.shape, x.dtype) for name, x in tensors.items()}
    for name, array in found.items():
        if array.size:
            tensors[name].read_rows(0, array.reshape(1) if array.ndim == 0 else array)
    return found


def test_an_open_file_holds_what_was_written(tmp_path):
    safetensors.write(tmp_path / "file", TENSORS, {"note": "häß"})
    tensors, metadata = safetensors.open_tensors(tmp_path / "file")
    assert_same(read_stored(tensors), TENSORS)
    assert metadata == {"note": "häß"} == safetensors.read_metadata(tmp_path / "file")
    # A reader that has opened a file keeps it after it is replaced.
    safetensors.write(tmp_path / "file", {}, {})
    assert_same(read_stored(tensors), TENSORS)


def test_opening_takes_no_memory(tmp_path):
    path = tmp_path / "large"
    safetensors.write(path, {"x": np.arange(2_000_000, dtype=np.float32).reshape(-1, 2)}, {})
    with traced():
        tensors, _ = safetensors.open_tensors(path)
        rows = np.empty((2, 2), np.float32)
        tensors["x"].read_rows(500_000, rows)
        _, peak = tracemalloc.get_traced_memory()
    assert peak < 200_000 and rows.tolist() == [[1_000_000, 1_000_001], [1_000_002, 1_000_003]]


def test_a_file_truncated_while_it_is_open_is_an_error(tmp_path):
    """A mapping would end the process with SIGBUS."""
    path = tmp_path / "file"
    safetensors.write(path, {"x": np.ones((10_000, 4), np.float32)}, {})
    tensors, _ = safetensors.open_tensors(path)
    os.truncate(path, 1000)
    with pytest.raises(InputError, match="was truncated while it was read"):
        tensors["x"].read_rows(9_000, np.empty((10, 4), np.float32))

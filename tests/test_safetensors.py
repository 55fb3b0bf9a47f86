import json

import numpy as np
import pytest
import safetensors.numpy as package
from hypothesis import given
from hypothesis import strategies as st

from smallmind import InputError, safetensors

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


def test_what_is_written_is_read(tmp_path):
    safetensors.write(tmp_path / "file", TENSORS, {"note": "häß"})
    tensors, metadata = safetensors.read(tmp_path / "file")
    assert_same(tensors, TENSORS)
    assert metadata == {"note": "häß"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_safetensors_package_reads_it(tmp_path):
    safetensors.write(tmp_path / "file", TENSORS, {"note": "x"})
    assert_same(package.load_file(tmp_path / "file"), TENSORS)


def test_it_reads_what_the_safetensors_package_writes(tmp_path):
    package.save_file(TENSORS, tmp_path / "file", {"note": "x"})
    tensors, metadata = safetensors.read(tmp_path / "file")
    assert_same(tensors, TENSORS)
    assert metadata == {"note": "x"}


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "file"
    safetensors.write(path, TENSORS, {})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            safetensors.read(path)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        {"x": entry(dtype="F99")},
        {"x": entry(shape=(2,))},
        {"x": entry(shape=(-1,))},
        {"x": entry(shape=(1.0,))},
        {"x": entry(offsets=(0, 4000))},
        {"x": entry(offsets=(4, 0))},
        {"x": entry(), "y": entry()},
        {"x": 3},
        {"x": {}},
        {},
        [],
        3,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    encoded = json.dumps(header).encode()
    data = len(encoded).to_bytes(8, "little") + encoded + b"\0" * 4
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(InputError):
        safetensors.read(tmp_path / "file")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    for content in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(content)
        try:
            safetensors.read(path)
        except InputError as error:
            assert "\n" not in str(error)


def test_deeply_nested_json_is_refused(tmp_path):
    encoded = b"[" * 100_000
    (tmp_path / "file").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with pytest.raises(InputError):
        safetensors.read(tmp_path / "file")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    safetensors.write(path, TENSORS, {})
    before = path.read_bytes()
    with pytest.raises(KeyError):
        safetensors.write(path, {"bad": np.zeros(3, np.complex64)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]

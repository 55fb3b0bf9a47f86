"""Malicious and malformed files: refused with one kind of error, in little time and memory."""

import bz2
import gzip
import io
import json
import os
import pickle
import socket
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import InputError
from smallmind.files import safetensors
from smallmind.training.checkpoint import load, newest, save
from smallmind.training.state import RunState
from tests.faults.disk import checkpoint
from tests.faults.runs import status, train


def file_of(header, data=b"\0" * 4, length=None):
    """A file from a header, encoded as JSON unless it is bytes, and the bytes of tensors."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(encoded) if length is None else length
    return length.to_bytes(8, "little") + encoded + data


def tensor(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def archive(name, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


def npz():
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


MOST = safetensors.MAX_HEADER


def packed(kind, content=b"", mark="1", more=b"", cut=0):
    """A file with a tensor that is said to be compressed."""
    zipped = zlib.compress(content)
    data = kind + zipped[: max(0, len(zipped) - cut)] + more
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    return file_of({"__metadata__": {"smallmind.compressed": mark}, "x": entry}, data)


ONE = json.dumps(tensor())
CONTENTS = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "length of 2**64 - 1": file_of({}, length=2**64 - 1),
    "length over the end": file_of({}, b"", length=3),
    "length without header": (2**32).to_bytes(8, "little"),
    "length 0": bytes(8),
    "header over the limit": file_of(b" " * (MOST + 1)),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "UTF-16": file_of("{}".encode("utf-16")),
    "mark of UTF-8": file_of(b"\xef\xbb\xbf{}"),
    "not JSON": file_of(b"{'x': 1}"),
    "two JSON values": file_of(b"{} {}"),
    "a list": file_of(b"[]"),
    "a number": file_of(3),
    "a table without a tensor": file_of({"x": {}}),
    "NaN": file_of(b'{"x": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}'),
    "Infinity": file_of(b'{"__metadata__": {"x": -Infinity}}'),
    "1e999": file_of(b'{"__metadata__": {"x": 1e999}}'),
    "digits": file_of(b'{"x": ' + b"1" * 100_000 + b"}"),
    "the same tensor twice": file_of(f'{{"x": {ONE}, "x": {ONE}}}'.encode()),
    "the same key twice": file_of(b'{"x": {"dtype": "F32", "dtype": "I32"}}'),
    "metadata twice": file_of(b'{"__metadata__": {}, "__metadata__": {}}', b""),
    "deep lists": file_of(b"[" * MOST),
    "deep tables": file_of(b'{"a":' * (MOST // 5)),
    "deep shape": file_of(b'{"x": {"shape": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
    "many lists": file_of(b"[" + b"[]," * (MOST // 3 - 1) + b"0]"),
    "many tables": file_of(b"[" + b"{}," * (MOST // 3 - 1) + b"0]"),
    "many numbers": file_of(b'{"a":[' + b"1.5," * (MOST // 4 - 3) + b"0]}"),
    "metadata is a list": file_of({"__metadata__": [], "x": tensor()}),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "x": tensor()}),
    "metadata of null": file_of({"__metadata__": {"a": None}, "x": tensor()}),
    "metadata of tables": file_of({"__metadata__": {"a": {}}, "x": tensor()}),
    "no digest behind its mark": file_of({"__metadata__": {safetensors.DIGEST_OF: "x"}}, b""),
    "wrong digest": file_of({"__metadata__": {safetensors.DIGEST: "0" * 64}, "x": tensor()}),
    "digest no text": file_of({"__metadata__": {safetensors.DIGEST: "\ud800"}, "x": tensor()}),
    "name no text": file_of({"\ud800\n\x1b[2J": 1, "x": tensor()}),
    "long name": file_of({"x" * 100_000: 1}),
    "unknown dtype": file_of({"x": tensor("F99")}),
    "a dtype of NumPy's": file_of({"x": tensor("O")}),
    "dtype is a list": file_of({"x": tensor([])}),
    "dtype missing": file_of({"x": {"shape": [1], "data_offsets": [0, 4]}}),
    "more than a tensor has": file_of({"x": tensor(more=1)}),
    "a number as tensor": file_of({"x": 3}),
    "null as tensor": file_of({"x": None}),
    "negative size": file_of({"x": tensor(shape=(-1,))}),
    "two negative sizes": file_of({"x": tensor(shape=(-1, -1))}),
    "true as size": file_of({"x": tensor(shape=(True,))}),
    "float as size": file_of({"x": tensor(shape=(1.0,))}),
    "text as size": file_of({"x": tensor(shape=("1",))}),
    "shape is text": file_of({"x": tensor(shape="1")}),
    "shape is a number": file_of({"x": tensor(shape=1)}),
    "size of 2**64 + 1": file_of({"x": tensor(shape=(2**64 + 1,))}),
    "product of 2**64": file_of({"x": tensor(shape=(2**32, 2**32), offsets=(0, 0))}, b""),
    "bytes that are 2**64": file_of({"x": tensor(shape=(2**62,), offsets=(0, 0))}, b""),
    "empty beyond all bounds": file_of({"x": tensor(shape=(0, 2**62, 2**62), offsets=(0, 0))}, b""),
    "too many dimensions": file_of({"x": tensor(shape=(1,) * 33)}),
    "very many dimensions": file_of({"x": tensor(shape=(0,) * 100_000, offsets=(0, 0))}, b""),
    "shape over the file": file_of({"x": tensor(shape=(10**12,), offsets=(0, 4 * 10**12))}),
    "offsets over the file": file_of({"x": tensor(shape=(2,), offsets=(0, 8))}),
    "offsets do not fit the shape": file_of({"x": tensor(shape=(2,))}),
    "offsets backwards": file_of({"x": tensor(offsets=(4, 0))}),
    "negative offsets": file_of({"x": tensor(offsets=(-4, 0))}),
    "true as offset": file_of({"x": tensor("U8", offsets=(False, True))}, b"0"),
    "float as offset": file_of({"x": tensor(offsets=(0.0, 4.0))}),
    "one offset": file_of({"x": tensor(offsets=(4,))}),
    "three offsets": file_of({"x": tensor(offsets=(0, 4, 4))}),
    "overlap": file_of({"x": tensor(), "y": tensor()}),
    "part of an overlap": file_of({"x": tensor(), "y": tensor(offsets=(2, 6))}, bytes(6)),
    "gap at the start": file_of({"x": tensor(offsets=(4, 8))}, bytes(8)),
    "gap between": file_of({"x": tensor(), "y": tensor(offsets=(8, 12))}, bytes(12)),
    "gap at the end": file_of({"x": tensor()}, bytes(8)),
    "bytes without tensor": file_of({}),
    "compressed in another format": packed(b"", mark="2"),
    "compressed without type": packed(b"\n"),
    "compressed without an end of the type": packed(b"[" * 10_000),
    "compressed, unknown type": packed(b'["F99", [1]]\n', bytes(4)),
    "compressed, type is a list": packed(b'[["F32"], [1]]\n', bytes(4)),
    "compressed, true as size": packed(b'["F32", [true]]\n', bytes(4)),
    "compressed, negative size": packed(b'["F32", [-1]]\n', bytes(4)),
    "compressed, too many dimensions": packed(b'["F32", [%s1]]\n' % (b"1," * 99), bytes(4)),
    "compressed, empty beyond all bounds": packed(b'["F32", [0, %d, %d]]\n' % (2**62, 2**62)),
    "compressed, less than its shape": packed(b'["F32", [2]]\n', bytes(4)),
    "compressed, more than its shape": packed(b'["F32", [1]]\n', bytes(5)),
    "compressed, far more than its shape": packed(b'["F32", [1]]\n', bytes(10**8)),
    "compressed, shape over the file": packed(b'["F32", [%d]]\n' % 10**12, bytes(4)),
    "compressed, then more": packed(b'["F32", [1]]\n', bytes(4), more=b"x"),
    "compressed, cut off": packed(b'["F32", [1]]\n', bytes(4), cut=3),
    "compressed, no zlib": packed(b'["F32", [1]]\n', bytes(4), cut=99, more=b"no zlib"),
    "pickle": pickle.dumps({"x": os.getcwd}),
    "pickle of protocol 0": pickle.dumps([1, 2, 3], protocol=0),
    "npz": npz(),
    "zip": archive("x", b"y" * 1000),
    "gzip": gzip.compress(file_of({"x": tensor()})),
    "bzip2": bz2.compress(file_of({"x": tensor()})),
    "script": b"#!/bin/sh\necho hostile\n" * 10,
}


def assert_refused(path, reading=safetensors.read):
    with pytest.raises(InputError) as caught:
        reading(path)
    message = str(caught.value)
    assert str(path) in message and message.isprintable() and len(message) < len(str(path)) + 300


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_malformed_content_is_refused(tmp_path, content):
    path = tmp_path / "step-00000001.safetensors"
    path.write_bytes(content)
    assert_refused(path)
    assert_refused(path, load)


@pytest.mark.parametrize(
    "name",
    [
        "many tables",
        "deep tables",
        "length of 2**64 - 1",
        "shape over the file",
        "very many dimensions",
    ],
)
def test_refusing_takes_little_memory(tmp_path, name):
    path = tmp_path / "file"
    path.write_bytes(CONTENTS[name])
    tracemalloc.start()
    try:
        assert_refused(path)
        assert tracemalloc.get_traced_memory()[1] < 40 * MOST
    finally:
        tracemalloc.stop()


def test_a_huge_sparse_file_is_refused(tmp_path):
    path = tmp_path / "file"
    size = 2**42
    path.write_bytes(file_of({"x": tensor("U8", (size,), (0, size))}, b""))
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("the file system holds no such file")
    assert_refused(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_anything_but_a_regular_file_is_refused_without_waiting(tmp_path):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        for path in (tmp_path / "directory", tmp_path / "pipe", tmp_path / "s"):
            assert_refused(path)
    for device in ("/dev/zero", "/dev/null", "/dev/tty"):
        assert_refused(device)
    assert_refused(tmp_path / "missing")
    assert_refused(tmp_path / "directory" / "missing")
    with pytest.raises(InputError):
        safetensors.read(tmp_path / "nul\0")


HARM = ["pickle", "npz", "length of 2**64 - 1", "deep tables", "NaN", "overlap", "no such file"]


@pytest.mark.parametrize("name", HARM)
def test_commands_refuse_malformed_files_and_write_nothing(tmp_path, capsys, name):
    assert train(tmp_path, "--steps", "3") == 0
    run = tmp_path / "run"
    for path in (run / "model.safetensors", *(run / "checkpoints").iterdir()):
        path.unlink()
        if name in CONTENTS:
            path.write_bytes(CONTENTS[name])
        else:
            path.symlink_to(tmp_path / "missing")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for arguments in (["train", "--resume", run], ["generate", run], ["evaluate", run]):
        capsys.readouterr()
        assert status(*arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and len(error.replace(str(tmp_path), "")) < 400
    assert status("verify", run) == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("state", [{}, {"progress": 3}, {"progress": {}}, {"progress": None}])
def test_an_incomplete_state_is_refused(tmp_path, capsys, state):
    assert train(tmp_path, "--steps", "3") == 0
    run = tmp_path / "run"
    tensors = newest(run)[0].tensors
    save(run, RunState(2, tensors, state), keep=1, best=True)
    capsys.readouterr()
    assert status("train", "--resume", run) == 2
    assert capsys.readouterr().err.startswith("smallmind: the checkpoint of step 2 ")
    assert status("verify", run) == 0  # both are of the same step: nothing to retrain


def test_links_are_followed_only_if_named_explicitly(tmp_path):
    save(tmp_path, checkpoint(1))
    path = tmp_path / "checkpoints" / "step-00000001.safetensors"
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert safetensors.read(path)[0]  # a link named explicitly is followed
    found, skipped = newest(tmp_path)
    assert found is None and "a symbolic link is in its place" in skipped[0][1]
    # A save never writes through a link.
    before = elsewhere.read_bytes()
    save(tmp_path, checkpoint(1))
    assert elsewhere.read_bytes() == before and not path.is_symlink()
    for target in ("/dev/zero", "loop", tmp_path / "missing", "/proc/self/mem"):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to(target)
        assert_refused(tmp_path / "loop")


def test_a_link_to_the_checkpoints_of_another_run_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", checkpoint(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    for use in (newest, lambda directory: save(directory, checkpoint(9), keep=1)):
        with pytest.raises(InputError, match="is a symbolic link"):
            use(tmp_path / "run")
    assert newest(tmp_path / "other")[0].step == 1


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "smallmind checkpoint 2", "step": "1", "state": "{}"},
        {"format": "smallmind checkpoint 1", "state": "{}"},
        {"format": "smallmind checkpoint 1", "step": "1"},
        {"format": "smallmind checkpoint 1", "step": "2", "state": "{}"},
        {"format": "smallmind checkpoint 1", "step": "-1", "state": "{}"},
        {"format": "smallmind checkpoint 1", "step": "1.0", "state": "{}"},
        {"format": "smallmind checkpoint 1", "step": "9" * 5000, "state": "{}"},
        {"format": "smallmind checkpoint 1", "step": "1", "state": "[]"},
        {"format": "smallmind checkpoint 1", "step": "1", "state": '{"a": NaN}'},
        {"format": "smallmind checkpoint 1", "step": "1", "state": '{"a": 1, "a": 2}'},
        {"format": "smallmind checkpoint 1", "step": "1", "state": "[" * 100_000},
    ],
)
def test_a_sound_file_that_is_not_a_checkpoint_is_refused(tmp_path, metadata):
    path = tmp_path / "step-00000001.safetensors"
    safetensors.write(path, {}, metadata)
    assert_refused(path, load)


numbers = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31, 2**63, 2**64, 2**100]), st.booleans(), st.floats()
)
anything = st.recursive(
    st.one_of(st.none(), numbers, st.text(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
tensors = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from([*safetensors.DTYPES, "F99"]), anything),
        "shape": st.one_of(st.lists(numbers, max_size=3), anything),
        "data_offsets": st.one_of(st.tuples(numbers, numbers), anything),
    }
)
headers = st.one_of(
    st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), tensors | anything, max_size=3),
    anything,
)


def read_or_refuse(path, content):
    path.write_bytes(content)
    try:
        found, _ = safetensors.read(path)
    except InputError as error:
        assert str(error).replace(str(path), "").isprintable()
    else:
        assert sum(array.nbytes for array in found.values()) <= len(content)


def check_headers(path, header, data):
    read_or_refuse(path, file_of(header, data))


def check_changes(path, places, values):
    content = bytearray(
        file_of({"__metadata__": {"a": "b"}, "x": tensor(), "y": tensor("U8", (0, 2), (4, 4))})
    )
    for place, value in zip(places, values, strict=True):
        content[place % len(content)] = value
    read_or_refuse(path, bytes(content))


changes = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 500), min_size=n, max_size=n),
        st.lists(st.integers(0, 255), min_size=n, max_size=n),
    )
)


@pytest.mark.parametrize("examples", [300, pytest.param(100_000, marks=pytest.mark.slow)])
def test_any_header_and_any_changed_file_is_read_or_refused(tmp_path, examples):
    @settings(max_examples=examples, deadline=None)
    @given(header=headers, data=st.binary(max_size=16), change=changes)
    def check(header, data, change):
        check_headers(tmp_path / "header", header, data)
        check_changes(tmp_path / "change", *change)

    check()

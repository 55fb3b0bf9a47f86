"""The container against bytes written by hand, and blocks of integers against arithmetic."""

import struct

import numpy as np
import pytest

from smallmind import InputError
from smallmind.exchange import gguf_file
from smallmind.exchange.gguf_tokenizer import metadata_of, tokenizer_of
from smallmind.exchange.tensors import encode
from smallmind.kernels.number_types import BLOCK, to_float32
from smallmind.parts import NUMBER_TYPES
from tests.exchange.models import tokenizer_of as tokenizer_of_kind
from tests.programs import refusal, refuses


def text(content):
    return struct.pack("<Q", len(content)) + content


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 2, 5)
KEYS = (
    text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    + text(b"a.count") + struct.pack("<II", 4, 7)
    + text(b"a.share") + struct.pack("<If", 6, 0.5)
    + text(b"a.flag") + struct.pack("<IB", 7, 1)
    + text(b"a.names") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text("ü".encode())
)  # fmt: skip
TENSORS = (
    text(b"m.weight") + struct.pack("<IQQIQ", 2, 3, 2, 0, 0)
    + text(b"v.bias") + struct.pack("<IQIQ", 1, 2, 1, 32)
)  # fmt: skip
METADATA = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.share": 0.5,
    "a.flag": True,
    "a.names": ["x", "ü"],
}
START = HEAD + KEYS + TENSORS
DATA = struct.pack("<6f", *range(6)) + bytes(8) + struct.pack("<2e", 1.5, -2) + bytes(28)
FILE = START + bytes(-len(START) % 32) + DATA


def written(name, values, kind):
    return gguf_file.TensorToWrite(name, values.shape, NUMBER_TYPES[kind], lambda: values)


def test_the_bytes_are_those_of_the_specification(tmp_path):
    metadata = METADATA | {"a.count": np.uint32(7), "a.share": np.float32(0.5)}
    tensors = [
        written("m.weight", np.arange(6, dtype=np.float32).reshape(2, 3), "f32"),
        written("v.bias", np.array([1.5, -2], np.float32), "f16"),
    ]
    gguf_file.write(tmp_path / "file", metadata, tensors)
    assert (tmp_path / "file").read_bytes() == FILE


def test_a_file_written_by_hand_is_read(tmp_path):
    (tmp_path / "file").write_bytes(FILE)
    metadata, tensors = gguf_file.read(tmp_path / "file")
    assert metadata == METADATA
    assert {name: tensor.values().tolist() for name, tensor in tensors.items()} == {
        "m.weight": [[0, 1, 2], [3, 4, 5]],
        "v.bias": [1.5, -2],
    }


def test_the_other_types_of_values_are_read(tmp_path):
    values = [(0, "B", 255), (1, "b", -1), (2, "H", 65535), (3, "h", -5), (5, "i", -7)]
    values += [(10, "Q", 2**64 - 1), (11, "q", -(2**63)), (12, "d", 0.1)]
    keys = b"".join(text(c.encode()) + struct.pack(f"<I{c}", n, value) for n, c, value in values)
    keys += text(b"list") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)
    head = b"GGUF" + struct.pack("<IQQ", 2, 0, len(values) + 1)
    (tmp_path / "file").write_bytes(head + keys)
    metadata, _ = gguf_file.read(tmp_path / "file")
    assert metadata.pop("list").tolist() == [1, -2, 3]
    assert metadata == {code: value for _, code, value in values}


def test_another_alignment_is_read(tmp_path):
    keys = text(b"general.alignment") + struct.pack("<II", 4, 64)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + keys
    head += text(b"a") + struct.pack("<IQIQ", 1, 1, 0, 0)
    head += text(b"b") + struct.pack("<IQIQ", 1, 1, 0, 64)
    head += bytes(-len(head) % 64)
    data = struct.pack("<f", 1) + bytes(60) + struct.pack("<f", 2)
    (tmp_path / "file").write_bytes(head + data)
    _, tensors = gguf_file.read(tmp_path / "file")
    assert [tensor.values().tolist() for tensor in tensors.values()] == [[1], [2]]


def blocks(kind, *rows):
    """Rows that begin like these -> their blocks, one a row, as bytes; the values they stand for"""
    values = np.zeros((len(rows), BLOCK), np.float32)
    for row, given in zip(values, rows, strict=True):
        row[: len(given)] = given
    stored = encode(values, NUMBER_TYPES[kind])
    return stored.view(np.uint8).reshape(len(rows), -1), to_float32(stored)


def test_blocks_of_8_bits_hold_a_scale_and_rounded_multiples_of_it():
    stored, found = blocks("q8_0", [127, -127, 0.5, -1.5, 2.4], [1e-30], [])
    assert stored.shape == (3, 34)
    assert stored[:, :2].copy().view("<f2").tolist() == [[1], [0], [0]]
    assert stored[0, 2:8].view(np.int8).tolist() == [127, -127, 1, -2, 2, 0]
    assert found[0, :5].tolist() == [127, -127, 1, -2, 2] and not found[1:].any()


def test_blocks_of_4_bits_hold_a_scale_and_pairs_of_integers():
    """The first half in the low bits, the second in the high ones; 8 stands for 0."""
    first = [-4, 3.5, 0.3, -0.2, *12 * [0], 1, -1.3]
    stored, found = blocks("q4_0", first, [2.0], [])
    assert stored.shape == (3, 18)
    assert stored[:, :2].copy().view("<f2").tolist() == [[0.5], [-0.25], [0]]
    assert stored[0, 2:7].tolist() == [0xA0, 0x5F, 0x89, 0x88, 0x88]
    assert stored[1, 2:4].tolist() == [0x80, 0x88]
    assert found[0, :5].tolist() == [-4, 3.5, 0.5, 0, 0]
    assert found[0, 16:19].tolist() == [1, -1.5, 0]
    assert found[1].tolist() == [2.0] + 31 * [0] and not found[2].any()


def test_blocks_of_5_bits_hold_the_highest_bits_apart():
    stored, found = blocks("q5_0", [-16, 15, 0.3, -0.7, *12 * [0], 1, -1.3], [])
    assert stored.shape == (2, 22)
    assert stored[:, :2].copy().view("<f2").tolist() == [[1], [0]]
    high = int.from_bytes(stored[0, 2:6].tobytes(), "little")
    assert high == 2**32 - 1 - 0b1001 - (1 << 17)  # 16 stands for 0
    assert stored[0, 6:11].tolist() == [0x10, 0xFF, 0x00, 0x0F, 0x00]
    assert found[0, :5].tolist() == [-16, 15, 0, -1, 0] and found[0, 16:19].tolist() == [1, -1, 0]
    assert not found[1].any()


def test_a_byte_that_is_not_escaped_is_itself():
    """As other programs write RWKV's tokens: \\t for a tab, \\\\ for a backslash."""
    metadata = metadata_of(tokenizer_of_kind("byte"))
    tokens = [chr(i) if 32 <= i < 127 else f"\\x{i:02x}" for i in range(256)]
    tokens[9], tokens[10], tokens[13], tokens[92] = "\\t", "\\n", "\\r", "\\\\"
    assert tokenizer_of({**metadata, "tokenizer.ggml.tokens": tokens}).kind == "byte"


def test_bpe_says_which_token_ends_a_text():
    """Unless told otherwise, llama.cpp ends texts at token 11."""
    tokenizer = tokenizer_of_kind("bpe")
    metadata = metadata_of(tokenizer)
    end = tokenizer.special["<|endoftext|>"]
    for key in ("bos_token_id", "eos_token_id"):
        assert metadata[f"tokenizer.ggml.{key}"] == end
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1] * end + [3]
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def edited(position, code, value, content=FILE):
    data = bytearray(content)
    struct.pack_into(f"<{code}", data, position, value)
    return bytes(data)


FIRST = len(HEAD + KEYS) + 8 + len(b"m.weight")  # the number of dimensions of the first tensor


def aligned(alignment):
    keys = KEYS.replace(text(b"a.count"), text(b"general.alignment"))
    keys = keys.replace(struct.pack("<II", 4, 7), struct.pack("<II", 4, alignment))
    start = HEAD + keys + TENSORS
    return start + bytes(-len(start) % 32) + DATA


HOSTILE = {
    "nothing": b"",
    "another magic": b"GGML" + FILE[4:],
    "version 1": edited(4, "I", 1),
    "version 4": edited(4, "I", 4),
    "big-endian": edited(4, "I", 3 << 24),
    "too many tensors": edited(8, "Q", 2**40),
    "more tensors than there are": edited(8, "Q", 3),
    "too many keys": edited(16, "Q", 2**64 - 1),
    "more keys than there are": edited(16, "Q", 6),
    "a key of 2**63 bytes": edited(24, "Q", 2**63),
    "a key that is not text": FILE.replace(b"general.architecture", b"general.\xff\xfechitecture"),
    "a key twice": FILE.replace(b"a.count", b"a.share"),
    "a value of no type": edited(24 + 28, "I", 13),
    "a bool of 2": FILE.replace(struct.pack("<IB", 7, 1), struct.pack("<IB", 7, 2)),
    "an array of arrays": FILE.replace(struct.pack("<IIQ", 9, 8, 2), struct.pack("<IIQ", 9, 9, 2)),
    "an array of 2**60": FILE.replace(
        struct.pack("<IIQ", 9, 8, 2), struct.pack("<IIQ", 9, 8, 2**60)
    ),
    "no dimensions": edited(FIRST, "I", 0),
    "many dimensions": edited(FIRST, "I", 2**31),
    "a size of 0": edited(FIRST + 4, "Q", 0),
    "a size of 2**63": edited(FIRST + 4, "Q", 2**63),
    "a size over the file": edited(FIRST + 4, "Q", 2**40),
    "a type that is not read": edited(FIRST + 20, "I", 16),
    "an unknown type": edited(FIRST + 20, "I", 2**32 - 1),
    "blocks of 4 bits that do not fit": edited(FIRST + 20, "I", 2),
    "blocks of 5 bits that do not fit": edited(FIRST + 20, "I", 6),
    "blocks of 8 bits that do not fit": edited(FIRST + 20, "I", 8),
    "blocks of 256 that do not fit": edited(FIRST + 20, "I", 12),
    "sizes whose product has 190 bits": edited(
        FIRST + 4, "Q", 2**47, edited(FIRST + 12, "Q", 2**47)
    ),
    "an alignment of 0": aligned(0),
    "an alignment of 12": aligned(12),
    "an alignment of 2**31": aligned(2**31),
    "a larger alignment than the tensors have": aligned(64),
    "an offset that is not aligned": edited(len(START) - 8, "Q", 24),
    "an offset over the file": edited(len(START) - 8, "Q", 2**62),
    "an overlap": edited(len(START) - 8, "Q", 0),
    "a tensor twice": FILE.replace(b"v.bias", b"m.bias").replace(
        text(b"m.weight"), text(b"m.bias")
    ),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_malformed_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    message = refusal(gguf_file.read, path)
    assert message.startswith(str(path)) and message.isprintable()
    assert len(message) < len(str(path)) + 300


@pytest.mark.parametrize(("number", "name"), [(18, "iq3_xxs"), (39, "mxfp4"), (4, "4"), (99, "99")])
def test_a_type_that_is_not_read_is_named_with_what_to_do(tmp_path, number, name):
    (tmp_path / "file").write_bytes(edited(FIRST + 20, "I", number))
    message = refusal(gguf_file.read, tmp_path / "file")
    assert f"the tensor 'm.weight' is of type {name}, which is not supported; use" in message
    assert f"with tensors in any of {', '.join(NUMBER_TYPES)}" in message


def test_a_file_truncated_anywhere_is_refused(tmp_path):
    path = tmp_path / "file.gguf"
    for length in range(len(FILE) - 28):  # the last padding may be missing
        path.write_bytes(FILE[:length])
        refusal(gguf_file.read, path)


def test_a_file_truncated_after_it_was_opened_is_an_error(tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(FILE)
    _, tensors = gguf_file.read(path)
    path.write_bytes(FILE[:-40])
    refuses("was truncated while it was read", lambda: [x.values() for x in tensors.values()])


def every_type():
    """A file with a tensor of each type."""
    types = NUMBER_TYPES.values()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(types), 2)
    head += text(b"a.names") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text(b"y")
    head += text(b"general.alignment") + struct.pack("<II", 4, 32)
    data = b""
    for kind in types:
        head += text(kind.name.encode()) + struct.pack("<IQQIQ", 2, 256, 2, kind.gguf, len(data))
        data += bytes(kind.size((2, 256)))
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32), data


CHANGES = {
    "lowest bit": lambda byte: byte ^ 1,
    "highest bit": lambda byte: byte ^ 0x80,
    "all bits": lambda byte: 255 - byte,
    "a number more": lambda byte: (byte + 1) % 256,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_changed_byte_is_read_or_refused(tmp_path, change):
    """In the head two of them at every place, in the blocks at some: never any other error."""
    head, data = every_type()
    first = [*CHANGES.values()].index(change) // 2
    path = tmp_path / "file.gguf"
    outcomes = set()
    for place in [*range(first, len(head), 2), *range(len(head), len(head) + len(data), 33)]:
        content = bytearray(head + data)
        content[place] = change(content[place])
        path.write_bytes(content)
        try:
            for name, tensor in gguf_file.read(path)[1].items():
                list(tensor.pieces(name))
            outcomes.add("read")
        except InputError as error:
            assert str(error).isprintable() and len(str(error)) < len(str(path)) + 300
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_file_of_every_type_truncated_anywhere_is_refused(tmp_path):
    head, data = every_type()
    path = tmp_path / "file.gguf"
    path.write_bytes(head + data)
    assert len(gguf_file.read(path)[1]) == len(NUMBER_TYPES)
    for length in [*range(len(head)), *range(len(head), len(head) + len(data) - 31, 41)]:
        path.write_bytes((head + data)[:length])
        refusal(gguf_file.read, path)


def test_a_string_of_2_to_the_60_bytes_is_refused(tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(FILE.replace(text(b"x"), struct.pack("<Q", 2**60) + b"x"))
    assert "ends within a string of 1,152,921,504,606,846,976 bytes" in refusal(
        gguf_file.read, path
    )

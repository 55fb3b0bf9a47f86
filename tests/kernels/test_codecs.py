"""Blocks of GGUF's types against their definitions, number by number, and against gguf."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.kernels import codecs, compiled, reference
from smallmind.kernels.number_types import DTYPES, is_finite, kind_of, round_to, to_float32
from smallmind.nn.loading import Stored
from smallmind.parts import NUMBER_TYPES, types_for
from tests.programs import refuses

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCKS = [name for name, kind in NUMBER_TYPES.items() if kind.block > 1]
SCALES = [
    (name, field) for name in BLOCKS for field in DTYPES[name].names if DTYPES[name][field] == "e"
]
# The bits of float16: zeros, the smallest and largest subnormal ones, one, the largest.
EDGES = st.sampled_from([0, 0x8000, 1, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF])
FINITE = EDGES | st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7C00 != 0x7C00)


def nibble(q, i, run):
    return q[i // (2 * run) * run + i % run] >> i // run % 2 * 4 & 15


def pair(q, i):
    return q[i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3


def bit(high, i):
    return high[i % 32] >> i // 32 & 1


def word(high):
    return int.from_bytes(high, "little")


def q3_scale(b, g):
    return (b[g % 8] >> g // 8 * 4 & 15 | (b[8 + g % 4] >> g // 4 * 2 & 3) << 4) - 32


def six_bits(b, g):
    """The scale and the minimum of group g of a block of q4_K or q5_K."""
    if g < 4:
        return b[g] & 63, b[g + 4] & 63
    return b[g + 4] & 15 | b[g - 4] >> 6 << 4, b[g + 4] >> 4 | b[g] >> 6 << 4


# The fields of a block (scales s, q, high bits h), i -> value i as an integer, the integers that
# multiply the scale and the minimum; as in dequantize_row_* of ggml.
DEFINITIONS = {
    "q8_0": lambda i, q: (q[i], 1, 0),
    "q4_0": lambda i, q: (nibble(q, i, 16) - 8, 1, 0),
    "q4_1": lambda i, q: (nibble(q, i, 16), 1, -1),
    "q5_0": lambda i, q, h: ((nibble(q, i, 16) | (word(h) >> i & 1) << 4) - 16, 1, 0),
    "q5_1": lambda i, q, h: (nibble(q, i, 16) | (word(h) >> i & 1) << 4, 1, -1),
    "q2_K": lambda i, q, s: (pair(q, i), s[i // 16] & 15, s[i // 16] >> 4),
    "q3_K": lambda i, q, s, h: (pair(q, i) + 4 * bit(h, i) - 4, q3_scale(s, i // 16), 0),
    "q4_K": lambda i, q, s: (nibble(q, i, 32), *six_bits(s, i // 32)),
    "q5_K": lambda i, q, s, h: (nibble(q, i, 32) | bit(h, i) << 4, *six_bits(s, i // 32)),
    "q6_K": lambda i, q, s, h: ((nibble(q, i, 64) | pair(h, i) << 4) - 32, s[i // 16], 0),
    "iq4_nl": lambda i, q: (IQ4[nibble(q, i, 16)], 1, 0),
    "iq4_xs": lambda i, q, s, h: (
        IQ4[nibble(q, i, 16)],
        (nibble(s, i // 32, 1) | (word(h) >> i // 32 * 2 & 3) << 4) - 32,
        0,
    ),
}
LETTERS = {"q": "q", "index": "q", "scales": "s", "high": "h"}


def defined(name, block):
    """The bytes of a block -> its values, computed in float32, number by number."""
    integers, floats, start = {}, {}, 0
    for field, code in NUMBER_TYPES[name].fields:
        part = block[start : start + struct.calcsize("<" + code)]
        start += len(part)
        if code == "e":
            floats[field] = np.frombuffer(part, np.float16)[0].astype(np.float32)
        else:
            integers[LETTERS[field]] = np.frombuffer(part, code[-1]).tolist()
    values = []
    for i in range(NUMBER_TYPES[name].block):
        q, s, m = map(np.float32, DEFINITIONS[name](i, **integers))
        value = floats["scale"] * s * q
        values.append(value - floats["min"] * m if "min" in floats else value)
    return np.array(values)


@st.composite
def stored(draw, name):
    """Blocks of any bytes, with scales that are finite."""
    n = draw(st.integers(1, 3))
    size = n * DTYPES[name].itemsize
    blocks = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), DTYPES[name]).copy()
    for field in DTYPES[name].names:
        if (name, field) in SCALES:
            bits = draw(st.lists(FINITE, min_size=n, max_size=n))
            blocks[field] = np.array(bits, np.uint16).view(np.float16)
    return blocks


def assert_same_bits(found, wanted):
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("name", BLOCKS)
@given(data=st.data())
def test_each_value_is_what_its_type_defines(name, data):
    blocks = data.draw(stored(name))
    found = to_float32(blocks).reshape(len(blocks), -1)
    assert is_finite(blocks) and np.isfinite(found).all()
    for block, values in zip(blocks, found, strict=True):
        assert_same_bits(values, defined(name, block.tobytes()))


@pytest.mark.interop
@pytest.mark.parametrize("name", NUMBER_TYPES)
@given(data=st.data())
def test_each_value_is_that_of_the_gguf_package(name, data):
    gguf = pytest.importorskip("gguf")
    if NUMBER_TYPES[name].block > 1:
        array = data.draw(stored(name))
    else:
        array = np.frombuffer(data.draw(st.binary(min_size=64, max_size=64)), DTYPES[name])
    kind = gguf.GGMLQuantizationType[name.upper()]
    wanted = gguf.quants.dequantize(array.view(np.uint8), kind)
    np.testing.assert_array_equal(to_float32(array), wanted)
    if is_finite(array):
        assert_same_bits(to_float32(array), wanted)


@pytest.mark.parametrize("name", BLOCKS)
def test_many_blocks_are_read_as_each_alone(name):
    """They are converted some at a time."""
    kind = NUMBER_TYPES[name]
    random = np.random.default_rng(3)
    rows = 3 * 2**16 // kind.block // 2 + 1
    blocks = random.integers(0, 60, (rows, 2 * kind.nbytes), np.uint8).view(DTYPES[name])
    found = to_float32(blocks)
    assert found.shape == (rows, 2 * kind.block)
    for row in (0, rows // 3, rows - 1):
        assert_same_bits(found[row], to_float32(blocks[row]))
    if "store" in kind.uses:
        again = round_to(found, blocks.dtype)
        np.testing.assert_array_equal(again[-1], round_to(found[-1:], blocks.dtype)[0])


TIES = np.where(np.arange(64) % 3, 1, -1).astype(np.float32)


@pytest.mark.parametrize(("dtype", "width"), [(np.int8, 32), (np.uint8, 16)])
@pytest.mark.parametrize("n", [1, 2, 3, 129])
@pytest.mark.parametrize("scale", [0, -0.0, 1, 1e30, 1e-38, 1e-44])
def test_the_kernel_rounds_as_the_plain_twin_does(n, scale, dtype, width):
    """The first of several values of one magnitude decides; what float16 cannot hold is zero."""
    random = np.random.default_rng(n)
    ties = random.permuted(TIES.reshape(2, 32), axis=1)
    for values in (random.normal(size=(n, 32)), np.round(2 * random.normal(size=(n, 32))), ties):
        x = np.asarray(values, np.float32) * np.float32(scale)
        found, wanted = (
            (np.full(len(x), np.nan, np.float32), np.full((len(x), width), 99, dtype))
            for _ in range(2)
        )
        compiled.quantise(*found, x)
        with np.errstate(divide="ignore", over="ignore"):
            reference.quantise(*wanted, x)
        assert_same_bits(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("n", [1, 2, 3, 129])
def test_the_kernel_reads_as_the_plain_twin_does(name, n):
    random, kind = np.random.default_rng(n), NUMBER_TYPES[name]
    blocks = random.integers(0, 256, (n, kind.nbytes), np.uint8).view(DTYPES[name])[:, 0]
    for field in DTYPES[name].names:
        if DTYPES[name][field] == "e":
            blocks[field] = random.normal(size=n)
    found, parts = np.full((n, kind.block), np.nan, np.float32), codecs.parts_of(blocks, kind)
    compiled.dequantise(found, *parts)
    wanted = np.full_like(found, np.nan)
    reference.dequantise(wanted, *parts)
    assert_same_bits(found, wanted)
    assert_same_bits(found, to_float32(blocks[:, None]))


def test_every_type_has_an_array_of_its_own():
    """Arrays know their type by the names of their fields."""
    assert [kind_of(DTYPES[name]).name for name in NUMBER_TYPES] == [*NUMBER_TYPES]


@pytest.mark.parametrize(("name", "field"), SCALES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(name, field, value):
    blocks = np.zeros((3, 2), DTYPES[name])
    kept = Stored((3, 2 * NUMBER_TYPES[name].block), *Stored.of(blocks)[1:])
    assert len(list(kept.pieces("w"))) == 1
    blocks[field][2, 1] = value
    refuses(f"w is not finite {name}", list, kept.pieces("w"))


@pytest.mark.interop
@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
@given(data=st.data())
def test_blocks_with_a_minimum_are_those_of_the_gguf_package(name, data):
    """For weights of any size; those below 1e-30 are multiples of a scale of zero anyway."""
    gguf = pytest.importorskip("gguf")
    numbers = st.floats(-6e4, 6e4, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
    values = np.array(data.draw(st.lists(numbers, min_size=32, max_size=32)), np.float32)
    ours = round_to(values, DTYPES[name])
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(ours.view(np.uint8), theirs)


@pytest.mark.parametrize(
    ("name", "most"), [(kind.name, 2 ** int(kind.name[1]) - 1) for kind in types_for("store")
                       if "min" in kind.item]
)  # fmt: skip
def test_a_block_with_a_minimum_reaches_from_it_to_the_maximum(name, most):
    values = np.linspace(-1, most - 1, 32, dtype=np.float32)
    block = round_to(values, DTYPES[name])
    assert block["scale"][0] == 1 and block["min"][0] == -1
    np.testing.assert_array_equal(to_float32(block), np.trunc(values + 1.5) - 1)
    assert not to_float32(round_to(np.zeros(32, np.float32), DTYPES[name])).any()

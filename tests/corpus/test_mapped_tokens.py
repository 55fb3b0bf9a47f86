"""Tokens in files are sliced like an array of them all, and memory does not grow with them."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.memory.tracker import MIB
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import Epochs, RandomWindows, draw
from tests.corpus.files import IDS, LLAMA3, llm_c, plain, tokens_of
from tests.programs import output_of

FORMATS = [llm_c, lambda path, ids: llm_c(path, ids, LLAMA3), plain]
BOUND = st.none() | st.integers(-90, 90)


@st.composite
def files(draw):
    """Lists of ids, each with a format of its own; not all of one type."""
    contents = draw(st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=20), max_size=6))
    return [(ids, draw(st.sampled_from(FORMATS))) for ids in contents]


@settings(deadline=None)
@given(files(), st.lists(st.tuples(BOUND, BOUND), max_size=8), BOUND, BOUND, st.integers(1, 30))
def test_any_slice_of_any_files_is_that_of_the_array(contents, slices, first, last, size):
    with tempfile.TemporaryDirectory() as folder:
        paths = [write(Path(folder) / f"{i}.bin", ids) for i, (ids, write) in enumerate(contents)]
        tokens = tokens_of(*paths)
        array = np.array([i for ids, _ in contents for i in ids], np.int32)
        for found, expected in (tokens, array), (tokens.part(first, last), array[first:last]):
            assert len(found) == len(expected)
            for start, stop in [*slices, (None, None)]:
                window = found[start:stop]
                assert window.dtype == np.int32
                np.testing.assert_array_equal(window, expected[start:stop])
            assert [found[i] for i in range(-len(found), len(found))] == expected.tolist() * 2
            for outside in (len(found), -len(found) - 1):
                with pytest.raises(IndexError):
                    found[outside]
            chunks = [found[start : start + size] for start in range(0, len(found), size)]
            assert [i for chunk in chunks for i in chunk.tolist()] == expected.tolist()
            inner = found.part(first, last).part(last, first)
            np.testing.assert_array_equal(inner[:], expected[first:last][last:first])


def test_a_slice_is_an_array_of_its_own_and_an_element_an_int(tmp_path):
    tokens = tokens_of(llm_c(tmp_path / "a.bin", IDS))
    tokens[:10][:] = 5
    np.testing.assert_array_equal(tokens[np.int64(0) : np.int64(10)], IDS[:10])
    assert type(tokens[np.int32(-1)]) is int
    assert repr(tokens) == "<MappedTokens: 1,000 tokens in 1 file>"


def test_files_are_not_loaded_whole_by_mistake(tmp_path):
    tokens = tokens_of(llm_c(tmp_path / "a.bin", IDS))
    for load in np.array, np.asarray, np.ascontiguousarray:
        with pytest.raises(TypeError, match="take slices"):
            load(tokens)
    with pytest.raises(TypeError, match="indexed by an integer or a slice, not ndarray"):
        tokens[np.arange(3)]
    with pytest.raises(TypeError, match="not float"):
        tokens[0.5]
    with pytest.raises(ValueError, match="step 1, not -1"):
        tokens[::-1]


@pytest.mark.parametrize("sampler", [RandomWindows, Epochs])
def test_a_dataset_of_files_has_the_batches_of_an_array(tmp_path, sampler):
    borders = [0, 1, 17, 400, 401, 1000]
    paths = [
        FORMATS[i % 3](tmp_path / f"{i}.bin", IDS[borders[i] : borders[i + 1]]) for i in range(5)
    ]
    expected = Dataset(IDS, block_size=16, batch_size=3, seed=4)
    tokens = tokens_of(*paths)
    found = Dataset(tokens.part(stop=900), 16, batch_size=3, seed=4, held_out=tokens.part(900))
    assert found.held_out_batches == expected.held_out_batches and repr(found) == repr(expected)
    batches = [
        (draw(sampler(found, 2, stride=3), i), draw(sampler(expected, 2, stride=3), i))
        for i in range(100)
    ]
    for part in "train", "held_out":
        batches += [
            (found.evaluation_batch(part, i), expected.evaluation_batch(part, i)) for i in range(20)
        ]
    for one, other in batches:
        for array, wanted in zip(one[:3], other[:3], strict=True):
            assert array.dtype == wanted.dtype and array.tobytes() == wanted.tobytes()


WINDOWS = """
import sys
import numpy as np
from smallmind.corpus.token_files import MappedTokens, TokenFile, check_vocabulary
from smallmind.memory.tracker import peak_resident_bytes

tokens = MappedTokens([TokenFile(sys.argv[1])])
random = np.random.default_rng(1)
for start in random.integers(0, len(tokens) - 1024, 20_000):
    tokens[start : start + 1024]
check_vocabulary(tokens, 50257)
print(peak_resident_bytes())
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for size in 1_000_000, 200_000_000:
        path = tmp_path / str(size) / "tokens.bin"
        path.parent.mkdir()
        with open(path, "wb") as file:
            file.truncate(size)
        (path.parent / "meta.json").write_text(json.dumps({"dtype": "uint16"}))
        peaks.append(int(output_of(WINDOWS, str(path))))
    assert peaks[1] < peaks[0] + 20 * MIB

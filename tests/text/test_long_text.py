"""Reading and encoding a long text takes the memory that the estimate counts, and no more."""

import tracemalloc

import numpy as np
import pytest

from smallmind.forecast.memory import TextSize
from smallmind.runs import source
from smallmind.settings.config import RunConfig
from smallmind.text import byte_tokenizer, char_tokenizer
from smallmind.text.tokenizer import Tokenizer
from tests.peaks import traced

LINES = {
    "ASCII": "the cat sat on the mat. the dog sat on the log.\n",
    "Hebrew": "החתול ישב על השטיח והכלב ישב על הקורה.\n",
    "emoji": "the cat sat on the mat. 🐈 the dog sat on the log. 🐕\n",
}


@pytest.fixture
def small_chunks(monkeypatch):
    for module in (source, byte_tokenizer, char_tokenizer):
        monkeypatch.setattr(module, "CHUNK", 1 << 10)


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize("name", LINES)
def test_the_peak_is_the_text_and_its_tokens(kind, name, tmp_path, small_chunks):
    file = tmp_path / "long.txt"
    file.write_text(LINES[name] * 60_000, encoding="utf-8")
    Tokenizer("warm", kind).decode(Tokenizer("warm", kind).encode("warm"))
    with traced():
        read = source.read_source(file)
        tokenizer = Tokenizer(read.text, kind)
        data = read.dataset(tokenizer, 64, RunConfig())
        assert read.sha256
        assert data.spelled(data.held_out).characters > 0
        peak = tracemalloc.get_traced_memory()[1]
    counted = TextSize.of(read.nbytes, data).in_memory
    # The held-out tenth while it is decoded, and the table of a vocabulary with emoji; Python
    # decodes a file of wide characters into a larger array, which it then shrinks.
    assert peak <= (1.25 if name == "Hebrew" else 1.1) * counted + 600_000


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_chunks_change_neither_tokens_nor_text(kind, small_chunks):
    text = "".join(LINES.values()) * 200
    tokenizer = Tokenizer(text, kind)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and tokenizer.decode(ids) == text
    assert "".join(tokenizer.stream(ids)) == text == tokenizer.decode(ids.tolist())
    if kind == "byte":
        assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode([]) == ""

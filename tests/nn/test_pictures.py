"""`smallmind.show`: attention and activations as tables and as a picture."""

from xml.etree import ElementTree

import numpy as np
import pytest

import smallmind
from smallmind.nn.inspection import Inspection
from smallmind.nn.pictures import MAX_HEADS, MAX_POSITIONS
from tests.programs import CATS, refuses

SVG = "{http://www.w3.org/2000/svg}"


def inspected(T=6, heads=2, layers=1):
    """An inspection whose head 0 looks at the query itself, and head 1 at the first key."""
    attention = np.zeros((layers, 1, heads, T, T))
    attention[:, :, 0] = np.eye(T)
    attention[:, :, 1:, :, 0] = 1
    ids = np.arange(T)[None]
    activations = {"embedding": np.ones((1, T, 3)), "query": np.full((1, 2, T, 4), 2.0)}
    return Inspection(ids, np.zeros((1, T, 9)), attention, activations)


def told(pictures):
    """-> what the cells of a picture say under the pointer."""
    return [title.text for title in ElementTree.fromstring(pictures.svg).iter(f"{SVG}title")]


def test_a_terminal_shows_tables_and_a_notebook_a_picture():
    shown = smallmind.show(inspected())
    lines = [line.split() for line in repr(shown).splitlines()]
    assert ["0.0", "100%", "0%", "0%", "0.0", "0.00"] in lines
    assert ["0.1", "17%", "20%", "100%", "2.5", "0.00"] in lines
    assert "Inspection of 1 x 6 tokens" in repr(shown)
    assert shown._repr_svg_() == str(shown.svg) and not hasattr(shown, "_repr_html_")
    cells = told(shown)
    assert "query 3, key 3: 1.000" in cells and "query 5, key 0: 1.000" in cells
    assert "layer embedding, token 0: 1.000" in cells and "layer query, token 5: 2.000" in cells


def test_tokens_are_named_by_the_tokenizer():
    tokenizer = smallmind.Tokenizer(CATS)
    model = smallmind.TransformerModel(tokenizer.vocab_size, 8, 8, 1, 2, dropout=0, backend="numpy")
    ids = tokenizer.encode("the")[None]
    cells = told(smallmind.show(model.inspect(ids), tokenizer))
    assert any(cell.startswith("query 1 'h', key 0 't': ") for cell in cells if cell)


def test_long_windows_and_many_heads_are_drawn_in_part():
    cells = told(smallmind.show(inspected(T=3 * MAX_POSITIONS, heads=2, layers=MAX_HEADS)))
    queries = {cell.partition(",")[0] for cell in cells if cell and cell.startswith("query")}
    assert len(queries) == MAX_POSITIONS
    assert sum(cell == "query 0, key 0: 1.000" for cell in cells) == MAX_HEADS


@pytest.mark.parametrize("batch", [-1, 1])
def test_a_sequence_that_is_not_there_is_refused(batch):
    refuses(
        f"batch={batch} must be at least 0 and below 1", smallmind.show, inspected(), batch=batch
    )

"""Pictures of what `TransformerModel.inspect` has found: attention and activations."""

import re
from collections.abc import Sequence

import numpy as np

from smallmind.charts.heat_map import heat_map
from smallmind.charts.svg import Svg
from smallmind.checks import InputError, check_type
from smallmind.console.table import Table
from smallmind.nn.inspection import Inspection
from smallmind.text.tokenizer import Tokenizer

MAX_POSITIONS = 32  # of a picture in each direction: of more, each cell is the largest of several
MAX_HEADS = 32  # that are drawn
MAX_LAYERS = 40  # in one map: more would have no room for their names
HEADS_PER_ROW = 4
WIDTH, GAP, TITLE = 1000, 16, 20  # pixels
SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')


class Pictures:
    """The result of `show`: tables in a terminal, SVG in a notebook; `svg` is that for a file."""

    def __init__(self, svg: Svg, tables: Sequence[Table]) -> None:
        self.svg = svg
        self.tables = tables

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self.tables))

    def _repr_svg_(self) -> str:
        return str(self.svg)


def show(inspection: Inspection, tokenizer: Tokenizer | None = None, batch: int = 0) -> Pictures:
    """Draws one sequence of an inspection: the attention of every head, and the activations.

    As `smallmind.show(model.inspect(ids), tokenizer)`; the tokenizer names the tokens. Of attention
    a row is a query, dark where it looks; of activations it is a layer, dark where the root mean
    square of its channels is large. InputError for a sequence that the inspection does not have.
    """
    check_type("inspection", inspection, Inspection)
    if not 0 <= check_type("batch", batch, int) < len(inspection.ids):
        raise InputError(f"batch={batch} must be at least 0 and below {len(inspection.ids)}")
    ids = inspection.ids[batch].tolist()
    names = list(map(str, range(len(ids))))
    if tokenizer is not None:
        texts = (tokenizer.token_bytes(id).decode("utf-8", "replace") for id in ids)
        names = [f"{number} {text!r}" for number, text in enumerate(texts)]
    attention = inspection.attention[:, batch]  # (L, H, T, T)
    sizes = {
        name: np.sqrt(np.square(_by_token(value[batch]), dtype=np.float64).mean(axis=-1))
        for name, value in inspection.activations.items()
    }
    tables = [_attention_table(attention), inspection.table()]
    return Pictures(_drawn(attention, sizes, names), tables)


def _by_token(value: np.ndarray) -> np.ndarray:
    """(T, C), or heads (H, T, D) -> (T, channels)."""
    return value if value.ndim == 2 else value.transpose(1, 0, 2).reshape(value.shape[1], -1)


def _attention_table(p: np.ndarray) -> Table:
    """p (L, H, T, T) -> for each head the mean share and distance of what its queries look at."""
    T = p.shape[-1]
    distances = np.arange(T)[:, None] - np.arange(T)
    rows = []
    for layer, head in np.ndindex(p.shape[:2]):
        one = p[layer, head]
        own, first = np.diagonal(one).mean(), one[1:, 0].mean() if T > 1 else 1.0
        before = np.diagonal(one, -1).mean() if T > 1 else 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = abs(np.where(one > 0, one * np.log(one), 0).sum(axis=-1).mean())
        distance = (one * distances).sum(axis=-1).mean()
        shares = [f"{share:.0%}" for share in (own, before, first)]
        rows.append([f"{layer}.{head}", *shares, f"{distance:.1f}", f"{entropy:.2f}"])
    heads = ["layer.head", "itself", "previous", "first", "distance", "entropy"]
    return Table("Attention, mean over queries: where each head looks", rows, heads)


def _drawn(attention: np.ndarray, sizes: dict[str, np.ndarray], names: list[str]) -> Svg:
    """Returns one picture: a map of each head, in rows, above one of the activations."""
    L, H, T, _ = attention.shape
    step = -(-T // MAX_POSITIONS)
    starts = range(0, T, step)
    marks = [names[start] for start in starts]
    parts: list[str] = []
    side = (WIDTH - GAP * (HEADS_PER_ROW - 1)) // HEADS_PER_ROW
    top, high = 0.0, 0.0
    for place, (layer, head) in enumerate(list(np.ndindex(L, H))[:MAX_HEADS]):
        column = place % HEADS_PER_ROW
        if place and not column:
            top += TITLE + high + GAP
        largest = np.maximum.reduceat(attention[layer, head], starts, axis=0)
        largest = np.maximum.reduceat(largest, starts, axis=1)
        svg = heat_map("", largest.tolist(), marks, marks, ("query", "key"))
        placed, high = _placed(svg, column * (side + GAP), top + TITLE, side)
        title = f"Layer {layer}, head {head}"
        parts += [_title(column * (side + GAP), top, title), placed]
    top += TITLE + high + GAP
    parts.append(_title(0, top, "Activations: root mean square of the channels of each token"))
    layers = list(sizes)
    for start in range(0, len(layers), MAX_LAYERS):
        some = layers[start : start + MAX_LAYERS]
        means = [np.maximum.reduceat(sizes[name], starts).tolist() for name in some]
        svg = heat_map("", means, some, marks, ("layer", "token"))
        placed, high = _placed(svg, 0, top + TITLE, WIDTH)
        parts.append(placed)
        top += TITLE + high
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" '
        f'height="{top:.0f}" viewBox="0 0 {WIDTH} {top:.0f}" font-family="sans-serif">'
        f'<title>Attention and activations</title><rect width="{WIDTH}" height="{top:.0f}" '
        f'fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _title(x: float, y: float, text: str) -> str:
    return f'<text x="{x + 2:.0f}" y="{y + 15:.0f}" font-size="14" fill="#1d2433">{text}</text>'


def _placed(svg: str, x: float, y: float, width: float) -> tuple[str, float]:
    """-> a picture at a place in another one, as wide as that allows, and its height there."""
    found = SIZE.search(svg)
    assert found
    wide, high = map(float, found.groups())
    share = min(1.0, width / wide)
    size = f'x="{x:.0f}" y="{y:.0f}" width="{wide * share:.1f}" height="{high * share:.1f}"'
    return svg[: found.start()] + size + svg[found.end() :], high * share

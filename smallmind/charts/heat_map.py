"""Heat maps: a table of numbers as shades, for attention, masks, gradients and derivatives."""

from collections.abc import Sequence

from smallmind.charts.axis import format_tick
from smallmind.charts.svg import Svg
from smallmind.console.table import escape

MAX_CELLS = 128  # in each direction: more are not seen
SIDE = 560  # the pixels of the longer side
MARGIN = 20  # above the cells, for the title
LETTER = 8  # the pixels of a letter of a name
SMALLEST_NAMED = 12  # the pixels of cells down to which rows and columns have their names
POSITIVE, NEGATIVE = "#1b3a6b", "#b3390b"


def heat_map(
    title: str,
    values: Sequence[Sequence[float]],
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    kinds: tuple[str, str] = ("row", "column"),
) -> Svg:
    """-> a picture of values (R, C): dark blue is the largest size, orange below zero.

    The shade is the square root of a number's share of the largest one, so that small ones show.
    `rows` and `columns` are names, `kinds` say what they are of; each cell tells its number under
    the pointer. Of tables above MAX_CELLS, each cell is the largest of several numbers.
    """
    R, C = len(values), len(values[0])
    rows = rows or [str(row) for row in range(R)]
    columns = columns or [str(column) for column in range(C)]
    step = -(-max(R, C) // MAX_CELLS)
    side = max(2, SIDE // -(-max(R, C) // step))
    has_names = step == 1 and side >= SMALLEST_NAMED
    is_upright = max(map(len, columns)) * LETTER <= side
    left = LETTER * max(map(len, rows)) + 8 if has_names else 0
    above = MARGIN if is_upright else LETTER * max(map(len, columns)) + 8
    top = MARGIN + (above if has_names else 0)
    most = max((abs(number) for row in values for number in row), default=0.0) or 1.0
    parts = []
    for row in range(0, R, step):
        for column in range(0, C, step):
            number, query, key = max(
                (
                    (values[r][c], r, c)
                    for r in range(row, min(R, row + step))
                    for c in range(column, min(C, column + step))
                ),
                key=lambda cell: abs(cell[0]),
            )
            if not number:
                continue
            said = f"{kinds[0]} {rows[query]}, {kinds[1]} {columns[key]}: {number:.3f}"
            parts.append(
                f'<rect x="{left + column // step * side}" y="{top + row // step * side}" '
                f'width="{side}" height="{side}" fill="{POSITIVE if number > 0 else NEGATIVE}" '
                f'fill-opacity="{abs(number / most) ** 0.5:.2f}">'
                f"<title>{escape(said)}</title></rect>"
            )
    width, height = side * -(-C // step), side * -(-R // step)
    if has_names:
        middle = side / 2
        for row, name in enumerate(rows):
            y = top + row * side + middle + 4
            parts.append(_text(left - 4, y, name, "end"))
        for column, name in enumerate(columns):
            x = left + column * side + middle
            if is_upright:
                parts.append(_text(x, top - 6, name, "middle"))
            else:
                turned = f' transform="rotate(-90 {x + 4:.1f} {top - 6})"'
                parts.append(_text(x + 4, top - 6, name, "start", turned))
    whole = max(left + width + 2, 8 * len(title)), top + height + MARGIN
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{whole[0]}" '
        f'height="{whole[1]}" viewBox="0 0 {whole[0]} {whole[1]}" font-family="sans-serif" '
        f'font-size="13"><title>{escape(title)}</title>'
        f'<rect width="{whole[0]}" height="{whole[1]}" fill="#ffffff"/>'  # on dark pages too
        f'<text x="2" y="14" fill="#1d2433">{escape(title)}</text>'
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
        f'stroke="#999999"/>{"".join(parts)}'
        + _text(left, whole[1] - 5, f"darkest: {format_tick(float(f'{most:.3g}'))}", "start")
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str, attributes: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#5d6779"{attributes}>'
        f"{escape(text)}</text>"
    )

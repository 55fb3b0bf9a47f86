"""Where the words of a text end, by the patterns of GPT-2, GPT-4 and those made from them.

A word is what no merge reaches beyond: letters with the space before them, numbers, other
characters, white space. Texts are UTF-8, and positions are those of bytes.
"""

from typing import NamedTuple

import numpy as np

from smallmind.kernels.bpe.characters import LETTER, NEWLINE, NUMBER, OTHER, SPACE
from smallmind.kernels.codegen.jit import called_jit, inline_jit, short_jit

BLANK, APOSTROPHE = b" '"
S, T, M, D, R, V, E, L = b"stmdrvel"
END = 255  # the class of what follows the text


class Pattern(NamedTuple):
    """A way to split a text into words."""

    is_gpt4: bool  # else GPT-2's
    digits: int  # the most in a word; 0: any number of them, after a space too


PATTERNS = {
    "gpt2": Pattern(False, 0),
    "gpt2-digits": Pattern(False, 1),
    "gpt4": Pattern(True, 3),
    "gpt4-digits": Pattern(True, 1),
}


@inline_jit
def _length(first):
    """Returns the bytes of a character that begins with this one."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


@inline_jit
def _class_at(data, i, stop, classes):
    """Returns the class of the character at i, END if there is none."""
    if i >= stop:
        return np.uint8(END)
    first = np.int64(data[i])
    if first < 0x80:
        return classes[first]
    if first < 0xE0:
        return classes[(first & 0x1F) << 6 | data[i + 1] & 0x3F]
    if first < 0xF0:
        middle = np.int64(data[i + 1] & 0x3F) << 6
        return classes[(first & 0xF) << 12 | middle | data[i + 2] & 0x3F]
    middle = np.int64(data[i + 1] & 0x3F) << 12 | np.int64(data[i + 2] & 0x3F) << 6
    return classes[(first & 0x7) << 18 | middle | data[i + 3] & 0x3F]


@inline_jit
def _after(data, i):
    """Returns where the character after the one at i begins."""
    return i + _length(data[i])


@short_jit
def _run(data, i, stop, classes, kind, most):
    """Returns where a run of at most so many characters of this class, which begins at i, ends."""
    while most > 0 and _class_at(data, i, stop, classes) == kind:
        i = _after(data, i)
        most -= 1
    return i


@inline_jit
def _contraction(data, i, stop, ignores_case):
    """Returns where the 's, 't, 're, 've, 'm, 'll or 'd at i ends; i if there is none."""
    if i + 1 >= stop or data[i] != APOSTROPHE:
        return i
    fold = np.uint8(0x20 if ignores_case else 0)  # makes letters lower case
    first = data[i + 1] | fold
    if first in (S, T, M, D):
        return i + 2
    if i + 2 >= stop:
        return i
    if ignores_case and data[i + 1] == 0xC5 and data[i + 2] == 0xBF:  # a long s
        return i + 3
    second = data[i + 2] | fold
    if second == E and (first in (R, V)):
        return i + 3
    return i + 3 if first == L and second == L else i


@short_jit
def _white_space_end(data, i, stop, classes, ends_lines):
    """Returns where the white space at i ends: its last character belongs to what follows.

    With ends_lines after its last newline, if it has one.
    """
    line_end = last = i
    end = i
    kind = _class_at(data, end, stop, classes)
    while kind in (SPACE, NEWLINE):
        last, end = end, _after(data, end)
        if kind == NEWLINE:
            line_end = end
        kind = _class_at(data, end, stop, classes)
    if ends_lines and line_end > i:
        return line_end
    return last if kind != END and last > i else end


@short_jit
def _gpt2_end(data, i, stop, classes):
    """Matches 's|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|white space."""
    end = _contraction(data, i, stop, False)
    if end > i:
        return end
    start = i + 1 if data[i] == BLANK else i
    kind = _class_at(data, start, stop, classes)
    if kind in (LETTER, NUMBER, OTHER):
        return _run(data, start, stop, classes, kind, stop)
    return _white_space_end(data, i, stop, classes, False)


@short_jit
def _number_end(data, i, stop, classes):
    """-> where the number at i, or all white space before a number, ends; i if there is neither."""
    end, kind = i, _class_at(data, i, stop, classes)
    if kind == NUMBER:
        return _after(data, i)
    while kind in (SPACE, NEWLINE):
        end = _after(data, end)
        kind = _class_at(data, end, stop, classes)
    return end if kind == NUMBER else i


@short_jit
def _gpt4_end(data, i, stop, classes, digits):
    """Matches contractions, letters after one character, up to `digits` numbers, others, ..."""
    end = _contraction(data, i, stop, True)
    if end > i:
        return end
    kind = _class_at(data, i, stop, classes)
    if kind == NUMBER:
        return _run(data, i, stop, classes, NUMBER, digits)
    start = i if kind in (LETTER, NEWLINE) else _after(data, i)
    if _class_at(data, start, stop, classes) == LETTER:
        return _run(data, start, stop, classes, LETTER, stop)
    start = i + 1 if data[i] == BLANK else i
    if _class_at(data, start, stop, classes) == OTHER:
        end = _run(data, start, stop, classes, OTHER, stop)
        return _run(data, end, stop, classes, NEWLINE, stop)
    return _white_space_end(data, i, stop, classes, True)


@inline_jit
def word_end(data, i, stop, classes, pattern):
    """data (n,) uint8, valid UTF-8 -> where the word that begins at i < stop ends.

    classes: `character_classes()`; pattern: a Pattern. The text ends at stop.
    """
    if pattern.is_gpt4:
        return _gpt4_end(data, i, stop, classes, pattern.digits)
    if pattern.digits:  # what is between numbers is split as a text of its own
        end = _number_end(data, i, stop, classes)
        if end > i:
            return end
    return _gpt2_end(data, i, stop, classes)


@called_jit
def split(ends, data, classes, pattern):
    """data (n,) uint8, valid UTF-8 -> ends (n,) int64 of its words, and how many. Writes ends."""
    i = count = 0
    while i < len(data):
        i = word_end(data, i, len(data), classes, pattern)
        ends[count] = i
        count += 1
    return count

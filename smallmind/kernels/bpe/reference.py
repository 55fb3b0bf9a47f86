"""Byte-pair encoding in plain Python: what the compiled kernels compute, short and slow.

The patterns are regular expressions here, in which \\p{L}, \\p{N} and \\s are the letters, numbers
and white space of `characters`.
"""

import functools
import itertools
import re
from collections import Counter

from smallmind.kernels.bpe.characters import LETTERS, NEWLINES, NUMBERS, WHITE_SPACE

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Text between numbers is split on its own.
GPT2_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
GPT4 = (
    r"'(?:[sS\u017fdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


@functools.cache
def expression(pattern: str) -> re.Pattern[str]:
    """A pattern that names classes of Unicode -> the regular expression."""

    def inside(ranges: str) -> str:
        ends = (part.split("-") for part in ranges.split())
        return "".join("-".join(f"\\U{int(end, 16):08x}" for end in pair) for pair in ends)

    letters, numbers, spaces = map(inside, (LETTERS, NUMBERS, f"{WHITE_SPACE} {NEWLINES}"))
    pattern = re.sub(
        r"\[[^]]*\]", lambda found: _within(found[0], letters, numbers, spaces), pattern
    )
    pattern = pattern.replace(r"\p{L}", f"[{letters}]").replace(r"\p{N}", f"[{numbers}]")
    return re.compile(pattern.replace(r"\s", f"[{spaces}]").replace(r"\S", f"[^{spaces}]"))


def _within(brackets: str, letters: str, numbers: str, spaces: str) -> str:
    """Replaces the classes within brackets."""
    named = {r"\p{L}": letters, r"\p{N}": numbers, r"\s": spaces}
    for name, characters in named.items():
        brackets = brackets.replace(name, characters)
    return brackets


def split(text: str, pattern: str) -> list[bytes]:
    """A text -> its words."""
    return [word.encode() for word in expression(pattern).findall(text)]


def learn(texts: list[str], pattern: str, of_bytes: list[int], count: int) -> list[tuple[int, int]]:
    """-> at most `count` merges; their tokens are 256, 257, ...; of_bytes those of the bytes."""
    counts = Counter(word for text in texts for word in split(text, pattern))
    words = {word: [of_bytes[byte] for byte in word] for word in counts}
    merges: list[tuple[int, int]] = []
    while len(merges) < count:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, tokens in words.items():
            for pair in itertools.pairwise(tokens):
                pairs[pair] += counts[word]
        if not pairs or max(pairs.values()) < 2:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        words = {word: merged(tokens, best, 256 + len(merges)) for word, tokens in words.items()}
        merges.append(best)
    return merges


def merged(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Puts `new` in place of each occurrence of a pair of tokens, from the left."""
    result: list[int] = []
    i = 0
    while i < len(tokens):
        found = tuple(tokens[i : i + 2]) == pair
        result.append(new if found else tokens[i])
        i += 2 if found else 1
    return result


def encode(
    text: str,
    pattern: str,
    of_bytes: list[int],
    merges: dict[tuple[int, int], tuple[int, int]],
    whole: dict[bytes, int],
) -> list[int]:
    """A text -> its tokens. merges: pair -> how early it is merged, and the token it becomes.

    whole: words that are a token whatever the merges.
    """
    ids: list[int] = []
    for word in split(text, pattern):
        if word in whole:
            ids.append(whole[word])
            continue
        tokens = [of_bytes[byte] for byte in word]
        while possible := merges.keys() & set(itertools.pairwise(tokens)):
            pair = min(possible, key=lambda pair: merges[pair][0])
            tokens = merged(tokens, pair, merges[pair][1])
        ids += tokens
    return ids

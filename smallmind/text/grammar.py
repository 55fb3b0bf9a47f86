"""Probabilistic grammars, from which texts are sampled at random."""

import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True)
class Slot:
    """`{slot}` writes what the slot holds; `{Slot}` writes it with a capital first letter."""

    name: str
    capital: bool

    def text(self, slots: Mapping[str, str]) -> str:
        """The values of the slots -> the text to write."""
        value = slots[self.name]
        return value.capitalize() if self.capital else value


@dataclass(frozen=True)
class Reference:
    """`<rule>` expands a rule; `<rule {slot}>` the rule whose last word is what the slot holds."""

    rule: str
    slot: str | None

    def name(self, slots: Mapping[str, str]) -> str:
        """The values of the slots -> the name of the rule to expand."""
        return self.rule if self.slot is None else f"{self.rule} {slots[self.slot]}"


@dataclass(frozen=True)
class Assignment:
    """`{slot=value}` expands the value, keeps its text in the slot and writes nothing."""

    slot: str
    value: "Symbols"


Symbol = str | Slot | Reference | Assignment
Symbols = tuple[Symbol, ...]


@dataclass(frozen=True)
class Production:
    """The alternatives of a rule, their probabilities and, to draw one, the cumulative sums."""

    alternatives: tuple[Symbols, ...]
    probabilities: tuple[float, ...]
    thresholds: tuple[float, ...]

    def choices(self) -> Iterator[tuple[Symbols, float]]:
        """Yields each alternative with its probability."""
        return zip(self.alternatives, self.probabilities, strict=True)


def parse_symbols(template: str) -> Symbols:
    """The text of one alternative -> its symbols. ValueError if it is malformed."""
    symbols: list[Symbol] = []
    for token in re.findall(r"<[^<>]*>|\{(?:[^{}]|\{\w+\})*\}|[^<>{}]+|.", template):
        if reference := re.fullmatch(r"<(\w+(?: \w+)*)(?: \{(\w+)\})?>", token):
            symbols.append(Reference(reference[1], reference[2]))
        elif assignment := re.fullmatch(r"\{([a-z]+)=(.+)\}", token):
            symbols.append(Assignment(assignment[1], parse_symbols(assignment[2])))
        elif slot := re.fullmatch(r"\{(\w+)\}", token):
            symbols.append(Slot(slot[1].lower(), slot[1][0].isupper()))
        elif token[0] in "<>{}":
            raise ValueError(f"malformed {token!r} in {template!r}")
        else:
            symbols.append(token)
    return tuple(symbols)


def parse_rule(body: str) -> Production:
    """The text after `name:` -> the rule. ValueError if it is malformed."""
    weights, alternatives = [], []
    for alternative in re.sub(r"\s+", " ", body).split("|"):
        weighted = re.fullmatch(r"(?:(\d+) \* )?(.+)", alternative.strip())
        if weighted is None:
            raise ValueError(f"empty alternative in {body!r}")
        weights.append(int(weighted[1] or 1))
        # Spaces beside a line break come from the layout of the rules and are not in the text.
        alternatives.append(parse_symbols(re.sub(r" ?\\n ?", "\n", weighted[2])))
    probabilities = tuple(weight / sum(weights) for weight in weights)
    # Without the last sum, which rounding may leave below a number drawn.
    thresholds = tuple(accumulate(probabilities))[:-1]
    return Production(tuple(alternatives), probabilities, thresholds)


class Grammar:
    """A probabilistic context-free grammar with slots, which make later choices fit earlier ones.

    Takes the rules as text; the first is the start. A rule is `name: alternative | alternative`
    and may continue on indented lines. Alternatives are equally likely unless one begins with a
    weight, as in `3 * text`. In an alternative

    - `<rule>` expands a rule, and `<rule {slot}>` the rule named by `rule` and the slot's value;
    - `{slot=value}` expands the value (text and `<rule>`s) into a slot without writing it;
    - `{slot}` writes the slot, `{Slot}` with a capital; this is not a choice and has no entropy;
    - a backslash followed by n is a line break; all else but | is literal.

    ValueError if a rule is malformed.
    """

    def __init__(self, rules: str) -> None:
        self._rules: dict[str, Production] = {}
        for line in re.sub(r"\n[ \t]+", " ", rules.strip()).splitlines():
            if line:
                name, colon, body = line.partition(": ")
                if not colon or name in self._rules:
                    raise ValueError(f"not a rule, or a second one of this name: {line!r}")
                self._rules[name] = parse_rule(body)
        self._start: Symbols = (Reference(next(iter(self._rules)), None),)

    def sample(self, random: Random) -> str:
        """Derives a text by `random.random()`, whose stream is the same in every Python."""
        pieces: list[str] = []
        self._write(self._start, {}, random, pieces)
        return "".join(pieces)

    def words(self, rule: str) -> tuple[str, ...]:
        """Returns the alternatives of a rule that are plain text."""
        return tuple(
            symbols[0]
            for symbols, _ in self._rules[rule].choices()
            if len(symbols) == 1 and isinstance(symbols[0], str)
        )

    def _write(
        self, symbols: Symbols, slots: dict[str, str], random: Random, pieces: list[str]
    ) -> None:
        for symbol in symbols:
            if isinstance(symbol, str):
                pieces.append(symbol)
            elif isinstance(symbol, Reference):
                rule = self._rules[symbol.name(slots)]
                drawn = rule.alternatives[bisect(rule.thresholds, random.random())]
                self._write(drawn, slots, random, pieces)
            elif isinstance(symbol, Slot):
                pieces.append(symbol.text(slots))
            else:
                value: list[str] = []
                self._write(symbol.value, slots, random, value)
                slots[symbol.slot] = "".join(value)

"""Probabilistic grammars: texts are sampled at random, and the entropy is known exactly."""

import math
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random
from typing import NamedTuple


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

# The slots that matter at some place, sorted by name so that equal states compare equal.
State = tuple[tuple[str, str], ...]
Distribution = dict[State, float]

# The slots at one place in a story: the names of some slots -> their joint distribution. It sums to
# the probability of reaching that place.
Marginals = Callable[[frozenset[str]], Distribution]


@dataclass(frozen=True)
class Rule:
    """The alternatives of a rule, their probabilities and, to draw one, the cumulative sums."""

    alternatives: tuple[Symbols, ...]
    probabilities: tuple[float, ...]
    thresholds: tuple[float, ...]

    def choices(self) -> Iterator[tuple[Symbols, float]]:
        """Yields each alternative with its probability."""
        return zip(self.alternatives, self.probabilities, strict=True)


class Effect(NamedTuple):
    """The slots that symbols read before they set them, and the slots that they set."""

    reads: frozenset[str]
    sets: frozenset[str]


class Measure(NamedTuple):
    """The entropy in nats and the expected length in characters of what symbols derive."""

    entropy: float
    length: float


def parse_symbols(template: str) -> Symbols:
    """The text of one alternative -> its symbols. ValueError if it is malformed.

    Outside `<...>` and `{...}`, text is literal.
    """
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


def parse_rule(body: str) -> Rule:
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
    return Rule(tuple(alternatives), probabilities, thresholds)


class Grammar:
    """A probabilistic context-free grammar with slots, which make later choices fit earlier ones.

    Takes the rules as text; the first is the start. A rule is `name: alternative | alternative`
    and may continue on indented lines. Alternatives are equally likely unless one begins with a
    weight, as in `3 * text`. In an alternative

    - `<rule>` expands a rule, and `<rule {slot}>` the rule named by `rule` and the slot's value;
    - `{slot=value}` expands the value (text and `<rule>`s) into a slot without writing it;
    - `{slot}` writes the slot, `{Slot}` with a capital; this is not a choice and has no entropy;
    - a backslash followed by n is a line break; all else but | is literal.

    ValueError if a rule is malformed, missing, contains itself, or sets a slot in only some of its
    alternatives (a later use could then find it empty), or if a slot is read before it is set. The
    methods raise KeyError if `<rule {slot}>` meets a value that no rule is named after.
    """

    def __init__(self, rules: str) -> None:
        self._rules: dict[str, Rule] = {}
        for line in re.sub(r"\n[ \t]+", " ", rules.strip()).splitlines():
            if line:
                name, colon, body = line.partition(": ")
                if not colon or name in self._rules:
                    raise ValueError(f"not a rule, or a second one of this name: {line!r}")
                self._rules[name] = parse_rule(body)
        self._start: Symbols = (Reference(next(iter(self._rules)), None),)
        self._effects: dict[Symbol, Effect | None] = {}
        self._measures: dict[Symbol, Measure] = {}
        if unset := self._effect(self._start).reads:
            raise ValueError(f"slots read before they are set: {sorted(unset)}")

    def sample(self, random: Random) -> str:
        """A source of random numbers -> the text of one derivation.

        Uses only `random.random()`: unlike `choice`, its stream is the same in all versions of
        Python.
        """
        pieces: list[str] = []
        self._write(self._start, {}, random, pieces)
        return "".join(pieces)

    def entropy(self) -> float:
        """The exact entropy of one derivation, in nats.

        By the chain rule (Cover & Thomas, Elements of Information Theory, theorem 2.2.1) it is
        the sum over all choices of the expected entropy of the choice given those before it. It
        is the entropy of the text if no text has two derivations.
        """
        return self._measure(self._start, no_slots).entropy

    def expected_length(self) -> float:
        """The exact expected number of characters of one derivation."""
        return self._measure(self._start, no_slots).length

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

    def _effect(self, symbols: Symbols) -> Effect:
        """symbols -> the slots that they read before setting them, and those that they set."""
        reads: set[str] = set()
        sets: set[str] = set()
        for symbol in symbols:
            effect = self._effect_of(symbol)
            reads |= effect.reads - sets
            sets |= effect.sets
        return Effect(frozenset(reads), frozenset(sets))

    def _effect_of(self, symbol: Symbol) -> Effect:
        if symbol not in self._effects:
            self._effects[symbol] = None
            self._effects[symbol] = self._find_effect(symbol)
        effect = self._effects[symbol]
        if effect is None:
            raise ValueError(f"{symbol} contains itself")
        return effect

    def _find_effect(self, symbol: Symbol) -> Effect:
        if isinstance(symbol, str):
            return Effect(frozenset(), frozenset())
        if isinstance(symbol, Slot):
            return Effect(frozenset({symbol.name}), frozenset())
        if isinstance(symbol, Assignment):
            value = self._effect(symbol.value)
            if value.sets:
                raise ValueError(f"the value of {symbol.slot!r} sets {sorted(value.sets)}")
            return Effect(value.reads, frozenset({symbol.slot}))
        if symbol.slot is None:
            rules = [rule for name, rule in self._rules.items() if name == symbol.rule]
        else:
            family = f"{symbol.rule} "
            rules = [rule for name, rule in self._rules.items() if name.startswith(family)]
        effects = [self._effect(symbols) for rule in rules for symbols in rule.alternatives]
        if len({effect.sets for effect in effects}) != 1:
            raise ValueError(f"no rule for {symbol}, or it does not always set the same slots")
        reads = {symbol.slot} if symbol.slot else set()
        reads = reads.union(*(effect.reads for effect in effects))
        return Effect(frozenset(reads), effects[0].sets)

    def _measure(self, symbols: Symbols, slots: Marginals) -> Measure:
        """symbols and the slots before them -> their entropy and length.

        Expectations add up even if choices depend on each other, so each symbol needs only the
        distribution of the slots that it reads itself, never that of all slots at once.
        """
        entropy = length = 0.0
        for symbol in symbols:
            inner = self._measure_symbol(symbol, slots)
            entropy += inner.entropy
            length += inner.length
            slots = self._after(symbol, slots)
        return Measure(entropy, length)

    def _measure_symbol(self, symbol: Symbol, slots: Marginals) -> Measure:
        reads = self._effect_of(symbol).reads
        if reads:
            return self._compute_measure(symbol, slots)
        if symbol not in self._measures:
            self._measures[symbol] = self._compute_measure(symbol, no_slots)
        reached = sum(slots(reads).values())
        entropy, length = self._measures[symbol]
        return Measure(reached * entropy, reached * length)

    def _compute_measure(self, symbol: Symbol, slots: Marginals) -> Measure:
        if isinstance(symbol, str):
            return Measure(0.0, len(symbol))
        if isinstance(symbol, Slot):
            states = slots(frozenset({symbol.name}))
            return Measure(0.0, sum(p * len(symbol.text(dict(s))) for s, p in states.items()))
        if isinstance(symbol, Assignment):
            return Measure(self._measure(symbol.value, slots).entropy, 0.0)
        entropy = length = 0.0
        for symbols, probability, chosen in self._choices(symbol, slots):
            inner = self._measure(symbols, chosen)
            reached = sum(chosen(frozenset()).values())
            entropy += probability * (inner.entropy - reached * math.log(probability))
            length += probability * inner.length
        return Measure(entropy, length)

    def _choices(
        self, reference: Reference, slots: Marginals
    ) -> Iterator[tuple[Symbols, float, Marginals]]:
        """A reference and the slots before it -> all alternatives that it can expand to.

        Yields each with its probability given that its rule is reached, and with the slots then.
        """
        reads = frozenset({reference.slot} if reference.slot else ())
        for state in slots(reads):
            chosen = condition(slots, state) if state else slots
            for symbols, probability in self._rules[reference.name(dict(state))].choices():
                yield symbols, probability, chosen

    def _after(self, symbol: Symbol, slots: Marginals) -> Marginals:
        """A symbol and the slots before it -> the slots after it."""
        reads, sets = self._effect_of(symbol)
        if not sets:
            return slots

        @cache
        def after(wanted: frozenset[str]) -> Distribution:
            if not sets & wanted:
                return slots(wanted)
            weighted: list[tuple[State, float]] = []
            if isinstance(symbol, Assignment):
                for state, weight in slots(reads | (wanted - sets)).items():
                    for value, probability in self._texts(symbol.value, dict(state)):
                        outcome = restrict({**dict(state), symbol.slot: value}, wanted)
                        weighted.append((outcome, weight * probability))
            elif isinstance(symbol, Reference):
                for symbols, probability, last in self._choices(symbol, slots):
                    for inner in symbols:
                        last = self._after(inner, last)
                    weighted += [(state, probability * p) for state, p in last(wanted).items()]
            return add_up(weighted)

        return after

    def _texts(self, symbols: Symbols, slots: Mapping[str, str]) -> list[tuple[str, float]]:
        """Symbols that set no slots -> the text and probability of each derivation."""
        texts = [("", 1.0)]
        for symbol in symbols:
            if isinstance(symbol, Reference):
                rule = self._rules[symbol.name(slots)]
                ends = [
                    (text, share * probability)
                    for symbols, share in rule.choices()
                    for text, probability in self._texts(symbols, slots)
                ]
            elif isinstance(symbol, Slot):
                ends = [(symbol.text(slots), 1.0)]
            elif isinstance(symbol, str):
                ends = [(symbol, 1.0)]
            texts = [(text + end, p * q) for text, p in texts for end, q in ends]
        return texts


def restrict(slots: Mapping[str, str], wanted: frozenset[str]) -> State:
    """Slots and the names of some -> those, sorted by name."""
    return tuple((name, slots[name]) for name in sorted(wanted))


def no_slots(wanted: frozenset[str]) -> Distribution:
    """The slots at the start, where none is set: with certainty the empty state."""
    return {restrict({}, wanted): 1.0}


def condition(slots: Marginals, event: State) -> Marginals:
    """Slots and values of some -> the slots where these hold; sums to how likely that is."""

    @cache
    def where(wanted: frozenset[str]) -> Distribution:
        states = slots(wanted.union(dict(event))).items()
        return add_up((restrict(dict(s), wanted), p) for s, p in states if set(event) <= set(s))

    return where


def add_up(weighted: Iterable[tuple[State, float]]) -> Distribution:
    """States with probabilities, some repeated -> the total probability of each."""
    distribution: Distribution = {}
    for state, probability in weighted:
        distribution[state] = distribution.get(state, 0.0) + probability
    return distribution

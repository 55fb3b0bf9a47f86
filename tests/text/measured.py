"""The exact entropy of a grammar, the derivations of a text, and the proof of whole rules."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from smallmind.text.grammar import Assignment, Grammar, Reference, Slot, Symbol, Symbols

# The slots that matter at some place, sorted by name so that equal states compare equal.
State = tuple[tuple[str, str], ...]
Distribution = dict[State, float]

# The slots at one place in a story: the names of some slots -> their joint distribution. It sums to
# the probability of reaching that place.
Marginals = Callable[[frozenset[str]], Distribution]


class Effect(NamedTuple):
    """The slots that symbols read before they set them, and the slots that they set."""

    reads: frozenset[str]
    sets: frozenset[str]


class Measure(NamedTuple):
    """The entropy in nats and the expected length in characters of what symbols derive."""

    entropy: float
    length: float


class Match(NamedTuple):
    """One derivation of the text up to `end`, with the slots it set and its log-probability."""

    end: int
    slots: Mapping[str, str]
    log_probability: float


class Measured(Grammar):
    """A grammar that knows the entropy, the expected length and the derivations of its texts.

    ValueError if a rule is missing, contains itself, or sets a slot in only some of its
    alternatives (a later use could then find it empty), or if a slot is read before it is set. The
    methods raise KeyError if `<rule {slot}>` meets a value that no rule is named after.
    """

    def __init__(self, rules: str) -> None:
        super().__init__(rules)
        self._effects: dict[Symbol, Effect | None] = {}
        self._measures: dict[Symbol, Measure] = {}
        if unset := self._effect(self._start).reads:
            raise ValueError(f"slots read before they are set: {sorted(unset)}")

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

    def derivations(self, text: str) -> int:
        """text -> the number of derivations that give exactly this text.

        The grammar is unambiguous if this is 1 for every text that it can write.
        """
        return len(self._derive(text))

    def log_probability(self, text: str) -> float:
        """text -> its log-probability in nats, minus infinity if it has no derivation."""
        total = math.fsum(math.exp(match.log_probability) for match in self._derive(text))
        return math.log(total) if total else -math.inf

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

    def _derive(self, text: str) -> list[Match]:
        matches = self._match(self._start, text, Match(0, {}, 0.0))
        return [match for match in matches if match.end == len(text)]

    def _match(self, symbols: Symbols, text: str, match: Match) -> list[Match]:
        """Symbols and a match of everything before them -> every way to extend it by them."""
        matches = [match]
        for symbol in symbols:
            matches = [longer for match in matches for longer in self._extend(symbol, text, match)]
        return matches

    def _extend(self, symbol: Symbol, text: str, match: Match) -> list[Match]:
        end, slots, log_probability = match
        if isinstance(symbol, Reference):
            rule = self._rules[symbol.name(slots)]
            return [
                longer
                for symbols, probability in rule.choices()
                for longer in self._match(
                    symbols, text, Match(end, slots, log_probability + math.log(probability))
                )
            ]
        if isinstance(symbol, Assignment):
            return [
                Match(end, {**slots, symbol.slot: value}, log_probability + math.log(probability))
                for value, probability in self._texts(symbol.value, slots)
            ]
        written = symbol.text(slots) if isinstance(symbol, Slot) else symbol
        if not text.startswith(written, end):
            return []
        return [Match(end + len(written), slots, log_probability)]


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

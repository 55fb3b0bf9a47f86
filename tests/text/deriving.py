"""Derives texts from a grammar: the plain proof that what it samples is what it says."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from smallmind.text.grammar import Assignment, Reference, Slot, Symbol, Symbols
from tests.text.measured import Measured


class Match(NamedTuple):
    """One derivation of the text up to `end`, with the slots it set and its log-probability."""

    end: int
    slots: Mapping[str, str]
    log_probability: float


class Deriving(Measured):
    """A grammar that also finds every derivation of a text."""

    def derivations(self, text: str) -> int:
        """text -> the number of derivations that give exactly this text.

        The grammar is unambiguous if this is 1 for every text that it can write.
        """
        return len(self._derive(text))

    def log_probability(self, text: str) -> float:
        """text -> its log-probability in nats, minus infinity if it has no derivation."""
        total = math.fsum(math.exp(match.log_probability) for match in self._derive(text))
        return math.log(total) if total else -math.inf

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

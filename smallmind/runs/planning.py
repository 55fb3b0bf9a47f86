"""Short trials on a text, and what they tell of longer runs: the best size and its loss."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smallmind.checks import InputError
from smallmind.runs import budget, trials
from smallmind.runs.budget import CHOSEN, LEARNING, OPERATIONS, Size, Speed, best, sizes_for
from smallmind.runs.creating import prepare, resolve_settings, with_tokenizer
from smallmind.runs.files import RUNS, Text
from smallmind.runs.scaling import Law, law_of
from smallmind.runs.source import TOKENS
from smallmind.runs.trials import Kept, Trial
from smallmind.settings.presets import RECIPES
from smallmind.settings.settings import Settings
from smallmind.settings.sources import ALTERNATIVES, Choices, flag_of
from smallmind.text.dataset import HELD_OUT

LENGTHS = (0.1, 0.32, 1.0)  # of trials, as shares of the longest
WIDTH = 2.5  # smaller and larger than the best size so far are the other trials of a length
SIZES = (1 / WIDTH, 1.0, WIDTH)
COUNT = len(LENGTHS) * len(SIZES)  # trials
ALIKE = 1.3  # a trial within this factor of another tells nothing new
MIN_STEPS = 200  # of a trial: shorter ones follow no law


class Planned(NamedTuple):
    """A trial before it is made."""

    number: int
    size: Size
    settings: Settings


class Planner:
    """Plans runs on a text: makes trials, and tells what to expect of longer runs.

    The choices say how to learn, but neither the size of the model nor the time. InputError if the
    text cannot be read, or for choices that name them.
    """

    def __init__(self, choices: Choices, text: Text = None, folder: str | Path = RUNS) -> None:
        _check(choices)
        self.folder = Path(folder)
        self.prepared = prepare(choices, text, self.folder / TOKENS)
        settings, source = self.prepared.settings, self.prepared.source
        self.choices = choices.having(tokenizer=settings.run.tokenizer)
        if source.is_chat:
            raise InputError("a plan is for texts; conversations are learned in epochs")
        self.unique = len(self.prepared.data.train)  # tokens
        self.kept = Kept(self.folder, source.sha256, settings)
        of_runs = trials.of_runs(self.folder, source.sha256, settings, self.unique)
        self.runs = len(of_runs)
        self.outcomes = [*(trial.outcome for trial in self.kept.trials()), *of_runs]
        self._speeds: dict[float, float] = {}
        self._timed: Speed | None = None

    @property
    def law(self) -> Law:
        """The law of the text, after the outcomes so far."""
        return law_of(self.outcomes)

    def sizes(self, minutes: float) -> list[Size]:
        """Each size of the model, as it would be trained in this time, from the smallest on."""
        text = self.unique / (1 - HELD_OUT)
        given = self.choices.given
        fields = self.choices.fields | {"vocab_size": self.prepared.tokenizer.vocab_size}
        return sizes_for(given, fields, text, 60 * minutes, self._speed, self.law)

    def settings(self, size: Size, **fields: object) -> Settings:
        """The resolved settings of a run of this size."""
        source, tokenizer = self.prepared.source, self.prepared.tokenizer
        settings = with_tokenizer(self.choices.having(**size.fields, **fields).settings(), source)
        data = source.dataset(tokenizer, settings.model.block_size, settings.run)
        return resolve_settings(settings, data, tokenizer)

    def planned(self, minutes: float) -> Iterator[Planned]:
        """The trials that are still to be made, of so many minutes in all.

        Each follows from the outcomes until then: `make` it before the next.
        """
        longest = minutes / sum(length * len(SIZES) for length in LENGTHS)
        number = 0
        for length in LENGTHS:
            for scale in SIZES:
                number += 1
                # Trials do nothing but learn.
                candidates = self.sizes(length * longest / LEARNING)
                wanted = scale * best(candidates).parameters
                size = min(candidates, key=lambda size: abs(math.log(size.parameters / wanted)))
                settings = self.settings(size)
                batch = settings.run.batch_size * settings.model.block_size
                if (steps := round(size.tokens / batch)) < MIN_STEPS:
                    continue
                settings = self.settings(size, steps=steps)
                if not self._is_known(trials.outcome_of(settings, self.unique, 1.0)):
                    yield Planned(number, size, settings)

    def make(self, planned: Planned) -> Trial:
        """Makes a trial and keeps it. OSError if the disk refuses it."""
        trial = trials.train(planned.settings, self.prepared.source, self.prepared.tokenizer)
        self.outcomes.append(trial.outcome)
        N, tokens = trial.outcome.parameters, trial.outcome.tokens
        self._speeds[N] = OPERATIONS * N * tokens / trial.seconds
        self.kept.add(trial)
        return trial

    def _is_known(self, outcome: trials.Outcome) -> bool:
        def are_alike(x: float, y: float) -> bool:
            return max(x, y) < ALIKE * min(x, y)

        return any(
            are_alike(other.parameters, outcome.parameters)
            and are_alike(other.tokens, outcome.tokens)
            for other in self.outcomes
        )

    def _speed(self, parameters: int) -> float:
        """Operations per second: that of the trial of the nearest size, or what has been timed."""
        if self._timed is None:
            self._timed = budget.speed_of(self.choices, math.inf)
        timed = self._timed(parameters)
        if not self._speeds:
            return timed
        nearest = min(self._speeds, key=lambda size: abs(math.log(size / parameters)))
        return self._speeds[nearest] * timed / self._timed(int(nearest))


def _check(choices: Choices) -> None:
    """InputError for choices that a plan cannot follow."""
    given, recipe = choices.given, choices.recipe
    if given.get("init_from"):
        raise InputError("a plan is for new models: leave out --init-from")
    if recipe is None or not RECIPES[recipe].fits:
        raise InputError(f"the recipe {recipe} does not choose a size; plan with another --recipe")
    if all(name in given for name in CHOSEN):
        raise InputError("all that follows from the time is given: leave out the size of the model")
    if lengths := [name for name in ALTERNATIVES["length of the run"] if given.get(name)]:
        raise InputError(f"a plan is for runs of some minutes: leave out {flag_of(lengths[0])}")

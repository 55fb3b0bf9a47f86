"""Short trials on a text, and what they tell of longer runs: the best size and its loss."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smallmind.checks import InputError
from smallmind.forecast import budget
from smallmind.forecast.budget import STEPS_SHARE, Cost, Costs, Size, best, tokens_per_step
from smallmind.forecast.law import Law, Trial
from smallmind.parallel.environment import launched
from smallmind.runs import trials
from smallmind.runs.creating import history_of, prepare, settle
from smallmind.runs.files import RUNS, Text
from smallmind.runs.source import TOKENS
from smallmind.runs.trials import MIN_STEPS, PLAIN
from smallmind.settings.presets import RECIPES
from smallmind.settings.rules import FITTED_FIELDS, Choices
from smallmind.settings.settings import Settings
from smallmind.settings.sources import ALTERNATIVES, flag_of, flags_of
from smallmind.text.dataset import HELD_OUT

LENGTHS = (0.1, 0.32, 1.0)  # of trials, as shares of the longest
# Sizes of trials, as shares of the best one so far; the last is that of runs ten times as long.
SIZES = (0.4, 1.0, 3.2)
MAX_TRIALS = len(LENGTHS) * len(SIZES)
ALIKE_FACTOR = 1.3  # a trial within this factor of another adds nothing


class Planned(NamedTuple):
    """A trial before it is made."""

    number: int
    size: Size
    settings: Settings


class Planner:
    """Plans runs on a text: makes trials, and tells what to expect of longer runs.

    The choices say how to learn, but neither the size of the model nor the time; `folder` is that
    of runs. InputError if the text cannot be read, or for choices that name them.
    """

    def __init__(self, choices: Choices, text: Text = None, folder: str | Path = RUNS) -> None:
        _check(choices)
        self.prepared = prepare(choices, text, Path(folder) / TOKENS)
        source, tokenizer = self.prepared.source, self.prepared.tokenizer
        if source.is_chat:
            raise InputError(
                "plans are for plain text: `smallmind train` chooses the epochs for "
                "conversations; --no-chat reads them as plain text"
            )
        run = self.prepared.settings.run
        self.choices = choices.having(tokenizer=run.tokenizer, mask_documents=run.mask_documents)
        self.unique = len(self.prepared.data.train)  # tokens
        folders = Path(folder), Path(RUNS)
        self.history = history_of(self.choices, source, tokenizer, folders, self.unique)
        of_runs = self.history.runs()
        self.runs = len(of_runs)
        self.outcomes = [*self.history.outcomes(), *of_runs]
        self.unkept: OSError | None = None  # why the last trial could not be kept
        self._timed = self.history.timed()
        self._costs: Costs | None = None

    def law(self, minutes: float) -> Law:
        """Returns the law of the text for runs of this time, after the outcomes so far."""
        return budget.law_for(self.outcomes, 60 * minutes, self._cost)

    def sizes(self, minutes: float) -> list[Size]:
        """-> each size of the model, as it would be trained in this time, from the smallest on."""
        text = self.unique / (1 - HELD_OUT)
        chosen = self.choices.chosen
        fields = self.choices.fields | {"vocab_size": self.prepared.tokenizer.vocab_size}
        return budget.sizes_for(chosen, fields, text, 60 * minutes, self._cost, self.law(minutes))

    def settings(self, size: Size, **fields: object) -> Settings:
        """Returns the resolved settings of a run of this size."""
        return settle(self.choices.having(**size.fields, **fields), self.prepared.facts)

    def planned(self, minutes: float) -> Iterator[Planned]:
        """Yields the trials that are still to be made, of so many minutes in all.

        Each follows from the outcomes until then: `make` it before the next.
        """
        longest = minutes / sum(length * len(SIZES) for length in LENGTHS)
        number = 0
        for length, scale in itertools.product(LENGTHS if minutes else (), SIZES):
            candidates = self.sizes(length * longest / STEPS_SHARE)  # trials do nothing but learn
            wanted = scale * best(candidates).parameters
            size = min(candidates, key=lambda size: abs(math.log(size.parameters / wanted)))
            steps = round(size.tokens / tokens_per_step(self.settings(size).fields))
            if steps < MIN_STEPS:
                continue
            settings = self.settings(size, steps=steps)
            if not self._is_known(trials.outcome_of(settings, self.unique, 1.0)):
                number += 1
                yield Planned(number, size, settings)

    def make(self, planned: Planned) -> Trial:
        """Makes a trial and keeps it, if the disk does; else `unkept` says why not."""
        trial = trials.train(planned.settings, self.prepared.source, self.prepared.tokenizer)
        self.outcomes.append(trial.outcome)
        self._timed.append(trial)
        try:
            self.history.add(trial)
        except OSError as error:
            self.unkept = error
        return trial

    def _is_known(self, outcome: trials.Outcome) -> bool:
        def are_alike(other: trials.Outcome) -> bool:
            pairs = list(zip(other[:2], outcome[:2], strict=True))  # parameters, tokens
            return all(max(pair) < ALIKE_FACTOR * min(pair) for pair in pairs)

        return any(map(are_alike, self.outcomes))

    def _cost(self, parameters: int) -> Cost:
        """Returns the cost as timed, and corrected by the trials where there are some."""
        if self._costs is None:
            self._costs = budget.costs_of(self.choices, math.inf)
        return budget.corrected(self._costs, self._timed)(parameters)


def _check(choices: Choices) -> None:
    """Raises InputError for choices that a plan cannot follow."""
    chosen, recipe, fields = choices.chosen, choices.recipe, choices.fields
    if recipe is None:
        raise InputError("a plan chooses the size of the model: leave out the config.json of a run")
    if launched():
        raise InputError("plans use one process: start without mpiexec")
    if chosen.get("init_from"):
        raise InputError("plans are for new models: leave out --init-from")
    if not RECIPES[recipe].adapts:
        raise InputError(f"the recipe {recipe} does not choose a size; plan with another --recipe")
    if all(name in chosen for name in FITTED_FIELDS):
        raise InputError("there is nothing left to choose: leave out the size of the model")
    if lengths := [name for name in ALTERNATIVES["length of the run"] if chosen.get(name)]:
        raise InputError(
            f"plans are for runs with --minutes: leave out {flag_of(lengths[0])}, or the preset "
            "or file that sets it"
        )
    plateau = ["schedule"] if fields.get("schedule") == "plateau" else []
    for name in (*PLAIN, *plateau):
        if fields.get(name):
            raise InputError(f"plans do not support {flags_of({name: fields[name]})}")

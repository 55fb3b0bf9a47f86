"""Decides whether a run fits in memory, and what to change if it does not."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smallmind.settings.config import CheckpointStrategy, Precision
from smallmind.settings.settings import Settings
from smallmind.training.memory_estimate import (
    MemoryEstimate,
    Program,
    Teacher,
    TextSize,
    estimate,
    largest_batch,
)

FLOAT16_SETTINGS: dict[str, Any] = {"precision": Precision.FLOAT16.value}
RECOMPUTE: dict[str, Any] = {
    "use_gradient_checkpointing": True,
    "checkpoint_strategy": CheckpointStrategy.EVERY_LAYER.value,
}


@dataclass(frozen=True)
class Change:
    """New values for fields of the configs, and the bytes that the run would then take."""

    settings: dict[str, Any]
    total: int


@dataclass(frozen=True)
class Plan:
    """A training run before it starts; its precision is not AUTO."""

    settings: Settings
    teacher: Teacher | None = None
    text: TextSize | None = None
    program: Program | None = None  # None: a typical one

    @property
    def estimate(self) -> MemoryEstimate:
        """The memory that it takes."""
        model, training, run = self.settings.model, self.settings.training, self.settings.run
        return estimate(model, training, run.batch_size, **self._circumstances)

    @property
    def held(self) -> int:
        """The part of it that this process holds already, where that was measured."""
        held = self.program.resident if self.program else 0
        return held + (self.text.in_memory if held and self.text else 0)

    def largest_batch(self, memory: int) -> int:
        """The largest batch that fits in memory if it goes through the model at once; 0: none."""
        model, training = self.settings.model, self.settings.training
        return largest_batch(model, training, memory, **self._circumstances)

    @property
    def _circumstances(self) -> dict[str, Any]:
        """The circumstances of an estimate besides model, training and batch."""
        run = self.settings.run
        return {
            "threads": run.threads or 1,
            "teacher": self.teacher,
            "text": self.text,
            "backend": run.backend,
            "timed": run.minutes is not None,
            "program": self.program,
        }

    def changed(self, **settings: Any) -> "Plan":
        """The plan with new values for these fields."""
        return dataclasses.replace(self, settings=self.settings.replace(**settings))

    def change(self, **settings: Any) -> Change:
        """The change to these settings, with the memory that it leads to."""
        return Change(settings, self.changed(**settings).estimate.total)

    def max_micro_batch(self, memory: int) -> int:
        """The largest micro-batch of this batch that fits in memory; 0: not even one sequence.

        Considers the sizes that split the batch into equal parts, apart from a smaller last one: a
        pool keeps arrays for each size.
        """
        batch = self.settings.run.batch_size
        sizes = {math.ceil(batch / passes) for passes in range(1, batch + 1)}
        changes = (self.change(micro_batch_size=size) for size in sorted(sizes, reverse=True))
        fitting = (change for change in changes if change.total <= memory)
        return next((change.settings["micro_batch_size"] for change in fitting), 0)

    def changes_to_fit(self, memory: int) -> list[Change]:
        """Changes that make the run fit, or bring it closer; the least costly one comes first."""
        largest = self.max_micro_batch(memory)
        if largest:
            return [self.change(micro_batch_size=largest)]
        changes = [self.change(micro_batch_size=1, **settings) for settings in self._savings()]
        for name, multiple in (("block_size", 1), ("n_embd", self.settings.model.n_head)):
            smaller = (
                self.change(micro_batch_size=1, **{name: n})
                for n in self._halved_sizes(name, multiple)
            )
            changes += [change for change in smaller if change.total <= memory][:1]
        return changes

    def _savings(self) -> list[dict[str, Any]]:
        """Settings that save memory and are not used yet: 16 bits, recompute, both."""
        training, backend = self.settings.training, self.settings.run.backend
        may_halve = training.requested_precision == Precision.FLOAT32 and backend == "numba"
        settings = [FLOAT16_SETTINGS] if may_halve else []
        if training.recompute != CheckpointStrategy.EVERY_LAYER:
            settings.append(RECOMPUTE)
            settings += [{**FLOAT16_SETTINGS, **RECOMPUTE}] if may_halve else []
        return settings

    def _halved_sizes(self, name: str, multiple: int) -> Iterator[int]:
        """A size of the model, halved again and again and rounded down to a multiple."""
        size = getattr(self.settings.model, name)
        while size >= 2 * multiple:
            size = size // 2 // multiple * multiple
            yield size

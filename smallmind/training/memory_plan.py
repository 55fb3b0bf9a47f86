"""Whether a run fits in memory, and what to change where it does not."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smallmind.config import CheckpointStrategy, ModelConfig, Precision, RunConfig, TrainingConfig
from smallmind.training.memory_estimate import MemoryEstimate, Teacher, estimate

FLOAT16_SETTINGS: dict[str, Any] = {"precision": Precision.FLOAT16.value}
NO_SNAPSHOT: dict[str, Any] = {"max_rollbacks": 0}
RECOMPUTE: dict[str, Any] = {
    "use_gradient_checkpointing": True,
    "checkpoint_strategy": CheckpointStrategy.EVERY_LAYER.value,
}


@dataclass(frozen=True)
class Way:
    """Fields of the configs that change, and the bytes that the run then takes."""

    settings: dict[str, Any]
    total: int


@dataclass(frozen=True)
class Plan:
    """A run of training as it would be started; its precision is not AUTO."""

    model: ModelConfig
    training: TrainingConfig
    run: RunConfig
    teacher: Teacher | None = None

    @property
    def estimate(self) -> MemoryEstimate:
        threads = self.run.threads or 1
        return estimate(self.model, self.training, self.run.batch_size, threads, self.teacher)

    def changed(self, **settings: Any) -> "Plan":
        """The same with other values of these fields, whichever of the configs has them."""

        def replaced(config: Any) -> Any:
            names = {field.name for field in dataclasses.fields(config)} & settings.keys()
            return dataclasses.replace(config, **{name: settings[name] for name in names})

        model, training, run = map(replaced, (self.model, self.training, self.run))
        return Plan(model, training, run, self.teacher)

    def way(self, **settings: Any) -> Way:
        """The change to these settings."""
        return Way(settings, self.changed(**settings).estimate.total)

    def most_at_once(self, memory: int) -> int:
        """The most windows of a batch that fit in memory at once; 0: not even one does.

        Of the numbers that share the batch out evenly: a pool keeps arrays for each size of group.
        """
        batch = self.run.batch_size
        sizes = {math.ceil(batch / passes) for passes in range(1, batch + 1)}
        ways = (self.way(micro_batch_size=size) for size in sorted(sizes, reverse=True))
        return next((way.settings["micro_batch_size"] for way in ways if way.total <= memory), 0)

    def ways_to_fit(self, memory: int) -> list[Way]:
        """What makes the run fit, or comes closer to it: that which costs the least comes first."""
        most = self.most_at_once(memory)
        if most:
            return [self.way(micro_batch_size=most)]
        ways = [self.way(micro_batch_size=1, **change) for change in self._frugal()]
        for name, multiple in (("block_size", 1), ("n_embd", self.model.n_head)):
            tried = (
                self.way(micro_batch_size=1, **{name: n})
                for n in self._halved_sizes(name, multiple)
            )
            ways += [way for way in tried if way.total <= memory][:1]
        return ways

    def _frugal(self) -> list[dict[str, Any]]:
        """No snapshot; storage in 16 bits, recompute, both: what the run does not do yet."""
        whole = (
            self.training.requested_precision == Precision.FLOAT32 and self.run.backend == "numba"
        )
        changes = [NO_SNAPSHOT] if self.training.max_rollbacks else []
        changes += [FLOAT16_SETTINGS] if whole else []
        if self.training.recompute != CheckpointStrategy.EVERY_LAYER:
            changes += [RECOMPUTE, {**FLOAT16_SETTINGS, **RECOMPUTE}] if whole else [RECOMPUTE]
        return changes

    def _halved_sizes(self, name: str, multiple: int) -> Iterator[int]:
        """A size of the model halved again and again, down to a multiple and in steps of it."""
        size = getattr(self.model, name)
        while size >= 2 * multiple:
            size = size // 2 // multiple * multiple
            yield size

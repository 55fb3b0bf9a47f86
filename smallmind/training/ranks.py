"""The processes of a training: what they do together besides adding gradients and updating."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from smallmind.checks import InputError
from smallmind.losses.loss import Loss
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import Optimizer, make_optimizer
from smallmind.parallel.gradient_sum import GradientSum, adding
from smallmind.parallel.group import ALONE, Group
from smallmind.parallel.shards import check_size
from smallmind.settings.config import TrainingConfig
from smallmind.training.evaluation import Batches, Evaluation

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ranks:
    """The processes of a training, seen from one of them. Nothing else of it knows their group."""

    def __init__(self, group: Group = ALONE, check_stop: Callable[[], object] = lambda: None):
        self._group, self._check_stop = group, check_stop
        self.rank, self.size, self.is_first = group.rank, group.size, group.is_first

    def together(self, compute: Callable[[], Result]) -> list[Result]:
        """All of them compute something, or none -> the results of all."""
        return self._group.together(compute)

    def check(self, config: TrainingConfig, loss: Loss) -> None:
        """Raises InputError if a run cannot have so many processes."""
        check_size(self.size, config.shards)
        if self.size > 1 and loss.one_process:
            raise InputError(loss.one_process)
        if self.size > 1 and config.products == "blas":
            raise InputError(
                "products='blas' is for one process: with several, the bits of the results must "
                "not depend on the machine; use products='numba'"
            )

    def optimizer(self, model: TransformerModel, config: TrainingConfig) -> Optimizer:
        """Makes the optimizer of a run, whose moments they may divide among them."""
        return make_optimizer(model, config, self._group)

    def adding(
        self, model: TransformerModel, config: TrainingConfig
    ) -> AbstractContextManager[GradientSum]:
        """Within the block, adds up the gradients of all of them."""
        return adding(model, config.shards, config.rounds_sums, self._group)

    def divide(self, items: Sequence[Item], compute: Callable[[Item], Result]) -> list[Result]:
        """Computes the result of each item, each on one of them, unless that is stopped."""

        def checked(item: Item) -> Result:
            self._check_stop()
            return compute(item)

        return self._group.divide(items, checked)

    def evaluate(self, *evaluations: Batches) -> list[Evaluation]:
        """Divides the batches of several evaluations at once."""
        items = [(each, item) for each in evaluations for item in each.items]

        def compute(item: tuple[Batches, Any]) -> Any:
            return item[0].compute(item[1])

        results = iter(self.divide(items, compute))
        return [each.total([next(results) for _ in each.items]) for each in evaluations]

"""The base class of all losses, and an outline of one before it is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from smallmind import parts
from smallmind.losses.temperature import Temperature
from smallmind.nn.backend import Backend
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.settings.config import ModelConfig, TrainingConfig
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.tokenizer import Tokenizer


class Loss:
    """A loss of a model on batches of its data. Subclasses say which, in `loss_and_gradients`.

    A run treats all of them alike. `Training` prepares it for a model and data, and the steps call
    `loss_and_gradients` for each shard of each batch. A loss may have a `parameter`: the processes
    of a run add up its gradient, and its `step` follows each update of the model. Checkpoints keep
    the state of that and the `settings`, which never change. Evaluations call `evaluated` and
    `compared`, the preflight `first_loss`, estimates `outlined` and `preparation`.

    One with flags has a frozen dataclass of settings, named in `parts.LOSS_SETTINGS`, whose file
    must not import NumPy. It has a mapping `models` from roles to the paths of models that the loss
    needs, and four class variables: `chosen_by`, the field that is not None in a run with this
    loss; `paths`, the fields that are paths, and `creates`, those of files that it writes if they
    are missing; `records`, the names of its numbers in the metrics -> their title in a report, and
    their format.
    """

    name: ClassVar[str] = ""  # in messages
    differs: ClassVar[str] = "another loss"  # what a checkpoint with other settings was saved with
    unrecorded: ClassVar[str] = ""  # why its passes cannot be repeated from a recording
    sequences: ClassVar[int] = 1  # that the model sees of each window of the data, side by side
    forward_passes: ClassVar[int] = 1  # over each of them in a step
    parameter: Temperature | None = None  # of the loss itself
    models: Sequence[
        TransformerModel
    ] = ()  # that compute in each pass, besides the one that learns
    stride: int = 1  # windows start at multiples of this
    first_is_known: ClassVar[bool] = False  # `first_loss` is that of trained weights too
    one_process: str = ""  # why a run cannot have several processes, and what to do
    comparing: str = ""  # names a comparison of `sums` of held-out batches, if there is one
    compared_batches: ClassVar[int | None] = 4  # at most; None: all that are evaluated
    unit: str = "token"  # its mean is over them

    @property
    def digest(self) -> str | None:
        """The digest of what the loss depends on besides its settings: models."""
        return None

    def terms(self, T: int) -> int:
        """Counts what the loss of a window of T tokens is the mean of."""
        return T

    @classmethod
    def of(cls, models: Sequence[TransformerModel], _config: Any) -> Self:
        """Builds the loss that its settings describe, with the models that these name."""
        return cls(*models)

    def dataset(self, _tokenizer: Tokenizer, _batch_size: int, _seed: int) -> Dataset | None:
        """Returns the data of a loss that has some of its own, else None."""
        return None

    def check(self, model: ModelConfig, block_size: int) -> None:
        """Raises InputError if a model cannot learn by this loss from windows of this size."""

    def prepare(self, model: TransformerModel, data: Dataset) -> None:
        """Reads or creates what the steps need. InputError if that does not fit model and data."""
        self.check(model.config, data.block_size)

    def begin(self, config: TrainingConfig) -> None:
        """Begins a run: nothing of an earlier one counts."""

    def begin_step(
        self,
        model: TransformerModel,
        step: int,
        starts: Callable[[int], np.ndarray],
        check_stop: Callable[[], object],
    ) -> None:
        """Makes what a step needs before its first pass.

        `starts` tells where the windows of any step begin, and `check_stop` may raise Stopped.
        """

    def seen(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and targets (B, T) of a batch as the model sees them."""
        return batch.ids, batch.targets

    def loss_and_gradients(
        self,
        model: TransformerModel,
        batch: Batch,
        scale: float = 1.0,
        share: float = 1.0,
        at: Pass | None = None,
    ) -> float:
        """Computes the mean loss of a batch; adds scale times its gradient to those of the model.

        `share` is the batch's share of the step's windows, which scale already includes.
        """
        raise NotImplementedError

    # Checkpoints keep them.

    def settings(self) -> dict[str, Any] | None:
        """Returns what a resumed run must share with the run that it resumes, JSON-able."""
        return None

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the arrays that belong to it, by name."""
        return {}

    def load_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Restores what `tensors` returned."""

    # Evaluations and checks.

    def evaluated(
        self, model: TransformerModel, batch: Batch
    ) -> tuple[list[float], int, int, np.ndarray]:
        """Evaluates a batch whose targets have weights, without dropout: on its learned targets.

        -> sums of losses, whose sum is that of all predictions; how many these are, and how many of
        them right; the predicted tokens, whose text is counted.
        """
        right = np.empty(batch.targets.shape, np.bool_)
        assert batch.weights is not None
        losses = model.losses(batch.ids, batch.targets, right, batch.firsts, batch.weights)
        learned = batch.weights > 0
        sums = [
            float(row[is_learned].sum(dtype=np.float64))
            for row, is_learned in zip(losses, learned, strict=True)
        ]
        predictions, correct = int(learned.sum()), int(right[learned].sum())
        return sums, predictions, correct, batch.targets[learned]

    def sums(self, model: TransformerModel, batch: Batch) -> list[float]:
        """Returns what a held-out batch adds to a comparison at an evaluation."""
        raise NotImplementedError

    def compared(self, sums: Sequence[Sequence[float]]) -> tuple[str, Mapping[str, float], str]:
        """The sums of held-out batches -> kind of the record, numbers for it, a line for people."""
        raise NotImplementedError

    def sampled(self) -> tuple[str, Mapping[str, float], str] | None:
        """Returns what the last step has sampled, as `compared`; None if it does not."""
        return None

    def first_loss(self, model: TransformerModel, batch: Batch) -> tuple[float, float, str]:
        """Computes what an untrained model loses on a batch, the slack, and the formula as text."""
        raise NotImplementedError

    # Memory, from an `Outline`.

    def outlined(self, config: ModelConfig) -> None:
        """Does without data and files: afterwards passes of a model compute nothing real."""

    def widths(self, T: int) -> Sequence[int]:
        """Returns how many tokens of windows of T a pass may take: it may leave out the others."""
        return (T,)

    def rehearsal(self, _model: TransformerModel, _tokenizer: Tokenizer) -> "Loss":
        """Returns a loss of this kind with what it needs to learn from some text of letters."""
        return self

    def sampling_bytes(self, _config: ModelConfig, _T: int, _trained: int) -> int:
        """Counts the bytes that steps take to write answers of windows of T, if they do.

        `trained` is the size of the weights that are trained.
        """
        return 0

    def preparation(self, _backend: Backend) -> int:
        """Counts the bytes that `prepare` takes besides weights. Before `outlined`."""
        return 0

    # Words.

    def rows(self) -> list[list[str]]:
        """Returns names and values for the description of a run."""
        return []

    def last_words(self) -> list[str]:
        """Returns lines at the end of a training."""
        return []


@dataclass(frozen=True)
class Outline:
    """A loss of which only shapes are known: enough to count its memory and to rehearse it."""

    kind: str = "cross-entropy"  # in parts.LOSSES
    models: tuple[ModelConfig, ...] = ()
    config: Any = None

    def build(self, backend: Backend | str) -> Loss:
        """Builds the loss with models whose weights mean nothing."""
        models = [TransformerModel(model, backend=backend) for model in self.models]
        loss: Loss = parts.load(parts.LOSSES, self.kind).of(models, self.config)
        return loss


CROSS_ENTROPY = Outline()

"""The loss of a model in several precisions: what fewer bits per weight cost."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from smallmind import parts
from smallmind.checks import from_json, number, whole
from smallmind.console.table import Table, Tabular, format_bytes
from smallmind.exchange.stored import StoredModel
from smallmind.files import durable
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.files import PRECISIONS
from smallmind.settings.config import Precision
from smallmind.training.evaluation import Evaluation

COMPARED = tuple(kind.precision for kind in parts.types_for("compare"))
FORMAT = "smallmind precisions 1"


@dataclasses.dataclass(frozen=True)
class PrecisionLoss:
    """Mean loss in nats over `tokens` with weights stored in a precision, and their bytes."""

    precision: str
    loss: float
    tokens: int
    nbytes: int

    @classmethod
    def of(cls, model: TransformerModel, evaluation: Evaluation) -> "PrecisionLoss":
        """Returns the loss of a model that was evaluated in the precision that it has."""
        nbytes = sum(array.nbytes for array in model.flat.arrays)
        return cls(model.precision.value, evaluation.loss, evaluation.tokens, nbytes)


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionTable(Tabular):
    """The losses of a model, such as "the final model, step 250", on the same text."""

    model: str
    losses: tuple[PrecisionLoss, ...]

    def table(self) -> Table:
        """Lists by precision the loss, how much above float32 that is, the bytes of weights."""
        exact = [each.loss for each in self.losses if each.precision == Precision.FLOAT32]
        rows = [
            [
                each.precision,
                f"{each.loss:.4f}",
                *(f"{each.loss - loss:+.4f}" for loss in exact[:1]),
                format_bytes(each.nbytes),
            ]
            for each in self.losses
        ]
        heads = ("precision", "loss", *(["over float32"] if exact else []), "weights")
        return Table("Loss by precision", rows, heads)

    def save(self, run: Path) -> None:
        """Keeps the table in the directory of its run, for the report."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        durable.write(run / PRECISIONS, [json.dumps(content, indent=1).encode()])

    @classmethod
    def read(cls, run: Path) -> "PrecisionTable | None":
        """Returns the table that was kept there; None if there is none, or it is damaged."""
        try:
            saved: Any = from_json(durable.read(run / PRECISIONS, 2**16))
            losses = tuple(
                PrecisionLoss(
                    str(each["precision"]),
                    number(each["loss"]),
                    whole(each["tokens"]),
                    whole(each["nbytes"]),
                )
                for each in saved["losses"]
            )
            is_known = saved["format"] == FORMAT and len(losses) > 0
            is_known = is_known and all(math.isfinite(each.loss) for each in losses)
            return cls(str(saved["model"]), losses) if is_known else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def losses_of(
    found: StoredModel,
    evaluate: Callable[[TransformerModel], Evaluation],
    precisions: Iterable[str],
) -> Iterator[PrecisionLoss]:
    """Loads a model in each precision, one at a time, and evaluates it."""
    for precision in precisions:
        model = found.load(precision=precision)[0]
        yield PrecisionLoss.of(model, evaluate(model))

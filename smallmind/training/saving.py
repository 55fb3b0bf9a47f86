"""Training that saves its checkpoints on the way."""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from smallmind.config import TrainingConfig
from smallmind.training.checkpoint import BackgroundSaver, Checkpoint
from smallmind.training.records import Record, SaveRecord

if TYPE_CHECKING:
    from smallmind.training.loop import Training


@dataclass(frozen=True)
class SaveFailedRecord:
    """A checkpoint that the disk did not take; the next save tries again."""

    step: int
    reason: str


def saved_steps(
    training: "Training",
    config: TrainingConfig,
    directory: str | PathLike[str],
    checkpoint: Checkpoint | None = None,
) -> Iterator[Record | SaveFailedRecord]:
    """training.steps, with every checkpoint that is due saved in the background, `config.keep` of
    them in the directory of the run.

    The last one is on the disk when this ends, however it ends. OSError where that one fails.
    """
    saver = BackgroundSaver(directory, config.keep)
    try:
        for record in training.steps(config, checkpoint):
            if not isinstance(record, SaveRecord):
                yield record
                continue
            failure = saver.save(training.checkpoint(), record.best)
            if failure:
                yield SaveFailedRecord(record.step, str(failure))
    finally:
        saver.wait()
    saver.close()

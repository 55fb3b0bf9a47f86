"""What is saved once training has stopped: the model, the final evaluation and a sample."""

from typing import NamedTuple

from smallmind.runs.directory import RunDirectory
from smallmind.training.clock import StepClock
from smallmind.training.evaluation import Evaluation
from smallmind.training.records import FinalRecord
from smallmind.training.training import Training


class Ending(NamedTuple):
    """The evaluation on the held-out part, and a text that the model wrote.

    Both are None if the run has not ended, or was stopped during the evaluation.
    """

    final: Evaluation | None = None
    sample: str | None = None


def save_ending(training: Training, directory: RunDirectory) -> Ending:
    """Saves the model, and if the run has ended its final evaluation and its sample."""
    step = training.progress.step
    has_ended = training.progress.ended or step >= training.config.steps
    if step or has_ended:
        directory.save_model(training.model, training.tokenizer, step)
    final = None
    if has_ended:
        with StepClock(training.progress).apart("final evaluation"):
            final = training.evaluate_held_out()
    if final:
        directory.log(_final_record(step, final), training.progress.seconds["total"])
    directory.flush()
    if final is None:
        return Ending()
    # Last: a run with a sample is finished.
    sample = training.sample()
    directory.save_sample(step, sample)
    return Ending(final, sample)


def _final_record(step: int, final: Evaluation) -> FinalRecord:
    return FinalRecord(
        step,
        final.loss,
        final.perplexity,
        final.bits_per_character,
        final.bits_per_byte,
        final.accuracy,
    )

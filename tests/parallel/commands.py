"""Command lines one after the other in one process: python -m tests.parallel.commands FILE.

FILE holds a JSON list of (spikes, early, words): whether the loss spikes once, and whether
gradients are sent during the backward pass. Under mpiexec all ranks run all of them.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from smallmind.nn.transformer import TransformerModel
from smallmind.training import gradients
from tests.faults.runs import status
from tests.parallel.disturbed import SPIKE, prepare
from tests.programs import start_untimed

SPIKE_AT = 6, 8  # batch, and the end of its last shard, on whichever rank has that


def _spiking():
    """A loss of a model that spikes once."""
    original, done = TransformerModel.loss_and_gradients, []

    def loss_and_gradients(self, ids, targets, scale=1.0, at=None, **named):
        loss = original(self, ids, targets, scale, at, **named)
        if self.backend == "none" or at is None:
            return loss
        is_there = (at.number, at.first_row // ids.shape[1] + len(ids)) == SPIKE_AT
        if is_there and not done:
            done.append(True)
            return SPIKE
        return loss

    return loss_and_gradients


@contextmanager
def disturbing(spikes, early):
    """Within the block, the loss spikes once, and gradients are sent during the backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        start_untimed(patch)  # the spike comes in a pass that trains
        if spikes:
            patch.setattr(TransformerModel, "loss_and_gradients", _spiking())
        if early:
            patch.setattr(gradients, "MIN_EXCHANGE_SHARE", -1.0)
            patch.setattr(gradients, "COLD_STEPS", 1)
            patch.setattr(gradients, "TIMED_STEPS", 1)
        yield


if __name__ == "__main__":
    prepare()
    for spikes, early, words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        with disturbing(spikes, early):
            assert status(*words) == 0, words

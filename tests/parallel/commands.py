"""Command lines one after the other in one process: python -m tests.parallel.commands FILE.

FILE holds a JSON list of (spikes, early, words): whether the loss spikes once, and whether
gradients are sent during the backward pass. Under mpiexec all ranks run all of them.
"""

import json
import sys
from pathlib import Path

from smallmind.nn.transformer import TransformerModel
from smallmind.training import gradients
from tests.faults.runs import status
from tests.parallel.disturbed import SPIKE, prepare

SPIKE_AT = 6, 7  # batch and window: in the last shard, on whichever rank has that
original = TransformerModel.loss_and_gradients


def spiking():
    """The loss of a run spikes once."""
    done = []

    def loss_and_gradients(self, *arguments):
        is_there = (self.passes, self.first_window) == SPIKE_AT and self.backend != "none"
        loss = original(self, *arguments)
        if is_there and not done:
            done.append(True)
            return SPIKE
        return loss

    TransformerModel.loss_and_gradients = loss_and_gradients


if __name__ == "__main__":
    prepare()
    usual = gradients.WORTH_OVERLAP, gradients.COLD_STEPS, gradients.TIMED_STEPS
    for spikes, early, words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        TransformerModel.loss_and_gradients = original
        chosen = (-1.0, 1, 1) if early else usual
        gradients.WORTH_OVERLAP, gradients.COLD_STEPS, gradients.TIMED_STEPS = chosen
        if spikes:
            spiking()
        assert status(*words) == 0, words

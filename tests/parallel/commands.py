"""Command lines one after the other in one process: python -m tests.parallel.commands FILE.

FILE holds a JSON list of (fault or None, words). Under mpiexec all ranks run all of them.
"""

import json
import sys
from pathlib import Path

from smallmind.nn.transformer import TransformerModel
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
    for spikes, words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        TransformerModel.loss_and_gradients = original
        if spikes:
            spiking()
        assert status(*words) == 0, words

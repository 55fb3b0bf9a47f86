"""A step of `bench.instruct` in one framework: python -m bench.peers.instruct NAME FILE.

NAME is one of NAMES. Reads commands from stdin and answers each with a line:
`{"step": i}` -> seconds of the step on batch i, by the clock and of its threads, and its loss;
`{"peak": true}` -> bytes of memory.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from smallmind import AdamW, ModelConfig, TransformerModel
from smallmind.kernels.timing import serve
from smallmind.memory.tracker import peak_resident_bytes
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.chat import KINDS
from smallmind.text.conversations import PackedDataset
from smallmind.text.samplers import Epochs, draw
from smallmind.text.tokenizer import Tokenizer

SHAPE = "vocab_size", "n_embd", "n_layer", "n_head"  # of the model
# Ours learns the answers, as runs on conversations do, or all tokens, as the book and PyTorch do.
NAMES = "ours", "ours, all tokens", "torch", "torch as in the book", "torch, packed"
RATE, WEIGHT_DECAY = 5e-5, 0.1  # those of the book
PAIRS = 8  # in an update
IGNORED = -100

Step = Callable[[int], float]


class Pairs:
    """Tokens of instruction pairs, in the file that `bench.instruct` writes."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.marked, self.T = file["marked"], int(file["T"])
            self.shape = {name: int(file[name]) for name in SHAPE}
        starts = np.flatnonzero(self.marked % KINDS == KINDS - 1)
        self.each = np.split(self.marked // KINDS, starts[1:])
        self.order = np.random.default_rng(0).permutation(len(self.each))

    def padded(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Batch `number` of eight pairs in random order -> ids and targets, padded at the end."""
        chosen = [self.each[i] for i in self.order[number * PAIRS : (number + 1) * PAIRS]]
        shape = len(chosen), max(map(len, chosen)) - 1
        ids, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, tokens in enumerate(chosen):
            ids[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return ids, targets

    def model(self) -> TransformerModel:
        """The model that all contestants begin with."""
        return TransformerModel(
            ModelConfig(block_size=self.T, **self.shape, **ARCHITECTURES["gpt2"])
        )

    def packed(self, learn: str = "all") -> Epochs:
        """Packs these pairs into rows, one to an update."""
        tokens = self.marked, self.marked
        return Epochs(PackedDataset(*tokens, self.T, 1, 0, Tokenizer(kind="byte"), learn))


def _ours(pairs: Pairs, learn: str) -> Step:
    model = pairs.model()
    optimizer = AdamW(model, RATE, weight_decay=WEIGHT_DECAY)
    rows = pairs.packed(learn)

    def step(number: int) -> float:
        batch = draw(rows, number)
        loss = model.loss_and_gradients(
            batch.ids, batch.targets, weights=batch.weights, firsts=batch.firsts
        )
        optimizer.step()
        return loss

    return step


def _torch(pairs: Pairs, is_packed: bool, is_of_book: bool) -> Step:
    import torch
    from torch.nn import functional

    from smallmind.bench.peers.job import Sizes
    from smallmind.bench.peers.torch_gpt2 import Model
    from smallmind.bench.peers.torch_step import load

    rows, shape = pairs.packed(), pairs.shape
    sizes = shape["n_embd"], shape["n_layer"], shape["n_head"], shape["vocab_size"]
    model = Model(Sizes(1, pairs.T, *sizes))
    # Ours is gone before the first step, whose gradients and moments take more memory.
    load(model, pairs.model().parameters)
    if is_of_book:
        from bench.peers import book_gpt2

        model = book_gpt2.Model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)

    def step(number: int) -> float:
        positions = mask = None
        if is_packed:
            batch = draw(rows, number)
            assert batch.firsts is not None and batch.weights is not None
            ids = torch.from_numpy(batch.ids.astype(np.int64))
            targets = torch.from_numpy(np.where(batch.weights > 0, batch.targets, IGNORED))
            firsts, places = torch.from_numpy(batch.firsts), torch.arange(pairs.T)
            positions = places - firsts
            mask = (firsts[:, None, :, None] <= places) & (places[:, None] >= places)
        else:
            ids, targets = map(torch.from_numpy, pairs.padded(number))
        logits = model.logits(ids, positions, mask)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def main() -> None:
    name, path = sys.argv[1:]
    pairs = Pairs(path)
    if name in NAMES[:2]:
        step = _ours(pairs, "answers" if name == NAMES[0] else "all")
    else:
        step = _torch(pairs, name == NAMES[4], name == NAMES[3])

    def timed(number: int) -> dict[str, Any]:
        start, begun = time.perf_counter(), time.process_time()
        loss = step(number)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "cpu_seconds": time.process_time() - begun, "loss": loss}

    serve(step=timed, peak=lambda _: peak_resident_bytes())


if __name__ == "__main__":
    main()

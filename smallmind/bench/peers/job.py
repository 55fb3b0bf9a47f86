"""The task of every contestant: model, initial weights, batches, optimizer settings."""

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np

from smallmind.settings.config import ModelConfig
from smallmind.settings.presets import ARCHITECTURES

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.99)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1  # of matrices
MAX_GRAD_NORM = 1.0

# index of the step -> its loss in nats per token, before the update
Step = Callable[[int], float]


@dataclass(frozen=True)
class Sizes:
    """B windows of T tokens, n_layer blocks of n_embd channels in n_head heads, V tokens."""

    B: int
    T: int
    n_embd: int
    n_layer: int
    n_head: int
    V: int = 65

    @property
    def name(self) -> str:
        return f"B{self.B} T{self.T} {self.n_layer}x{self.n_embd} {self.n_head} heads"


def model_config(sizes: Sizes, arch: str) -> ModelConfig:
    """Returns the config of a model of these sizes."""
    return ModelConfig(
        vocab_size=sizes.V,
        block_size=sizes.T,
        n_embd=sizes.n_embd,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        **ARCHITECTURES[arch],
    )


class Job:
    """A file with the weights by name, the tokens of a text, and where each batch starts in it.

    `arch` is the name of an architecture, "gpt2", "llama" or "modern".
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with np.load(path) as file:
            arrays = dict(file)
        self.sizes = Sizes(*map(int, arrays.pop("sizes")))
        self.arch = str(arrays.pop("arch"))
        self.tokens = arrays.pop("tokens")
        self.starts = arrays.pop("starts")
        self.weights = arrays

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """-> ids, targets (B, T), the targets one token later."""
        place = self.starts[index % len(self.starts)][:, None] + np.arange(self.sizes.T + 1)
        windows = self.tokens[place]
        return windows[:, :-1], windows[:, 1:]


def write(
    path: str | os.PathLike[str],
    sizes: Sizes,
    arch: str,
    weights: dict[str, np.ndarray],
    text: bytes,
) -> None:
    """Writes the file of a job. Batches are drawn from the text, of at most V characters."""
    values = np.frombuffer(text, np.uint8)
    tokens = np.searchsorted(np.unique(values), values).astype(np.int64)
    random = np.random.default_rng(0)
    starts = random.integers(0, len(tokens) - sizes.T - 1, (256, sizes.B))
    facts = {"sizes": np.array(astuple(sizes)), "arch": np.array(arch)}
    np.savez(path, tokens=tokens, starts=starts, **facts, **weights)  # type: ignore[arg-type]

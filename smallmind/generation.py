"""Sampling text from a model, token by token."""

from collections.abc import Iterator

import numpy as np

from smallmind.config import InputError
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import mix
from smallmind.text.tokenizer import Tokenizer


def generate(
    model: TransformerModel,
    tokenizer: Tokenizer,
    prompt: str = "\n",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
) -> str:
    """prompt -> prompt and max_tokens more tokens. The same seed gives the same text.

    temperature divides the logits; 0 always takes the likeliest token. top_k keeps the k likeliest
    tokens, top_p the fewest whose probabilities reach p (Holtzman et al. 2020). Past the block size
    the model sees the last block_size tokens. InputError for an unknown character in the prompt.
    """
    pieces = stream(model, tokenizer, prompt, max_tokens, temperature, top_k, top_p, seed)
    return prompt + "".join(pieces)


def stream(
    model: TransformerModel,
    tokenizer: Tokenizer,
    prompt: str = "\n",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
) -> Iterator[str]:
    """As `generate`, but yields what follows the prompt piece by piece."""
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    if max_tokens < 0:
        raise InputError(f"max_tokens={max_tokens} must be at least 0")
    if not temperature >= 0:
        raise InputError(f"temperature={temperature} must be at least 0")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p={top_p} must be above 0 and at most 1")
    ids = tokenizer.encode(prompt)
    return tokenizer.stream(_sample(model, ids, max_tokens, temperature, top_k, top_p, seed))


def _sample(
    model: TransformerModel,
    ids: np.ndarray,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> Iterator[int]:
    context = ids[-model.config.block_size :]
    for i in range(max_tokens):
        logits = model.forward(context[None])[0, -1]
        token = choose(logits, temperature, top_k, top_p, uniform=(mix(seed, i) >> 11) / 2**53)
        yield token
        context = np.append(context, np.int32(token))[-model.config.block_size :]


def choose(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    uniform: float,
) -> int:
    """logits (V,) and a number from 0 to 1 -> the token that it draws."""
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return int(order[0])
    scaled = logits[order].astype(np.float64) / temperature
    p = np.exp(scaled - scaled[0])
    p /= p.sum()
    kept = len(p) if top_k is None else min(top_k, len(p))
    if top_p is not None:
        kept = min(kept, int(np.searchsorted(np.cumsum(p), top_p)) + 1)
    cumulative = np.cumsum(p[:kept])
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])

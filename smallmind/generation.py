"""Sampling text from a model, token by token."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from smallmind import activity
from smallmind.checks import InputError, check_type
from smallmind.config import GenerationConfig
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.transformer import TransformerModel
from smallmind.randomness import hash64
from smallmind.text.tokenizer import Tokenizer

TRIM_EVERY = 16  # tokens


def generate(
    model: TransformerModel, tokenizer: Tokenizer, prompt: str | None = None, **settings: Any
) -> str:
    """prompt (default: a newline) -> the prompt followed by the text that the model generates.

    settings are the fields of GenerationConfig: max_tokens (500), temperature (0.8; 0 is greedy),
    top_k and top_p (sample from the most likely tokens only; Holtzman et al. 2020), seed (the same
    seed gives the same text). As in Hugging Face's transformers, the temperature comes first, then
    top_k, and top_p is a share of what top_k has left. The model sees only the last block_size
    tokens. InputError for a setting out of range, or a character in prompt that the model does not
    know.
    """
    check_type("tokenizer", tokenizer, Tokenizer)
    prompt = tokenizer.opening if prompt is None else prompt
    return prompt + "".join(stream(model, tokenizer, prompt, GenerationConfig(**settings)))


def stream(
    model: TransformerModel, tokenizer: Tokenizer, prompt: str, config: GenerationConfig
) -> Iterator[str]:
    """Like `generate`, but yields only the text after the prompt, piece by piece."""
    check_type("model", model, TransformerModel)
    check_type("tokenizer", tokenizer, Tokenizer)
    check_type("prompt", prompt, str)
    if model.tokenizer_state not in (None, tokenizer.state()):
        raise InputError(
            f"{tokenizer!r} is not the tokenizer that the model was trained with; take the one "
            "that smallmind.load returns with the model"
        )
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"vocab_size={model.config.vocab_size}"
        )
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    ids = tokenizer.encode(prompt)
    return tokenizer.stream(_sample(model, ids, tokenizer.vocab_size, config))


def _sample(
    model: TransformerModel, ids: np.ndarray, vocab_size: int, config: GenerationConfig
) -> Iterator[int]:
    """ids (n,) -> the sampled tokens that follow, one by one, each below vocab_size."""
    window = model.config.block_size
    context = ids[-window:]
    # A growing context rents arrays of many sizes: a separate pool, trimmed now and then, keeps
    # them from piling up in the pool of a training run.
    with TensorPool() as pool:
        for i in activity.parts(range(config.max_tokens)):
            with model.workspace.using_pool(pool):
                logits = model.forward(context[None])[0, -1, :vocab_size]
            if i % TRIM_EVERY == 0 and len(context) < window:
                pool.trim()
            # Counter-based: token i depends on the seed and i, not on earlier draws.
            token = choose(logits, config, uniform=(hash64(config.seed, i) >> 11) / 2**53)
            yield token
            context = np.append(context, np.int32(token))[-window:]


def choose(logits: np.ndarray, config: GenerationConfig, uniform: float) -> int:
    """logits (V,), uniform in [0, 1) -> the sampled token."""
    if not np.isfinite(logits).all():
        raise InputError("the model's logits are not finite: its weights are too large or damaged")
    order = np.argsort(-logits, kind="stable")
    if config.temperature == 0:
        return int(order[0])
    with np.errstate(over="ignore"):  # a tiny temperature may divide to -inf, as it should
        p = np.exp((logits[order].astype(np.float64) - logits[order[0]]) / config.temperature)
    if config.top_k is not None:
        p = p[: config.top_k]
    cumulative = np.cumsum(p / p.sum())
    if config.top_p is not None:
        cumulative = cumulative[: np.searchsorted(cumulative, config.top_p) + 1]
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])

"""Writing text with a model, token by token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, suggesting
from smallmind.console import activity
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import GenerationConfig
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.decoder import Continuation, Decoder, check_tokenizer
from smallmind.writing.form import Form


class Sample(NamedTuple):
    """A text that a model wrote after a prompt."""

    text: str  # without the prompt
    tokens: int
    ended: str  # by "length", by "stop", at the "end" of a text, or of what its "form" allows
    seed: int


@suggesting(GenerationConfig)
def generate(
    model: TransformerModel,
    tokenizer: Tokenizer,
    prompt: str | None = None,
    form: Form | None = None,
    **settings: Any,
) -> str:
    """prompt (default: a newline) -> the prompt followed by the text that the model generates.

    settings are the fields of GenerationConfig: max_tokens (500), temperature (0.8; 0 is greedy),
    top_k, top_p and min_p (sample from the most likely tokens only), repetition_penalty,
    presence_penalty, frequency_penalty, stop, seed (the same seed gives the same text). The text
    ends at `<|endoftext|>`, if the tokenizer has it, or with a turn. It has the given form, as in
    `form=Form(tokenizer, "json")`. InputError for a setting out
    of range, or a character in prompt that the model does not know.
    """
    prompt = _prompt(tokenizer, prompt)
    return prompt + "".join(stream(model, tokenizer, prompt, GenerationConfig(**settings), form))


@suggesting(GenerationConfig)
def generate_samples(
    model: TransformerModel,
    tokenizer: Tokenizer,
    prompt: str | None = None,
    n: int = 1,
    form: Form | None = None,
    **settings: Any,
) -> list[Sample]:
    """Writes n texts at once, as `generate` does, with the seeds seed, seed + 1, ...

    Each is what `generate` writes with its seed, up to the rounding of the logits.
    """
    if check_type("n", n, int) < 1:
        raise InputError(f"n={n} must be at least 1")
    config = GenerationConfig(**settings)
    return Writer(model, tokenizer, _prompt(tokenizer, prompt), config, n, form).samples()


def stream(
    model: TransformerModel,
    tokenizer: Tokenizer,
    prompt: str,
    config: GenerationConfig,
    form: Form | None = None,
) -> Iterator[str]:
    """Writes as `generate` does -> only the text after the prompt, piece by piece."""
    writer = Writer(model, tokenizer, prompt, config, 1, form)
    return (piece for (piece,) in writer.pieces() if piece)


def _prompt(tokenizer: Tokenizer, prompt: str | None) -> str:
    check_type("tokenizer", tokenizer, Tokenizer)
    return tokenizer.opening if prompt is None else prompt


class Writer:
    """Writes n texts after a prompt, once: piece by piece, or as samples.

    A text ends at any of the tokenizer's `ends`. Afterwards `seconds` says how long it took.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        prompt: str | np.ndarray,
        config: GenerationConfig,
        n: int = 1,
        form: Form | None = None,
    ) -> None:
        check_tokenizer(model, tokenizer)
        check_type("prompt", prompt, str, np.ndarray)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        ids = tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt
        self.texts = [
            Continuation(tokenizer, ids, replace(config, seed=config.seed + row), form=form)
            for row in range(n)
        ]
        self.seconds = 0.0

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each text."""
        return [text.count for text in self.texts]

    @property
    def ended(self) -> list[str]:
        """Why each text ended."""
        return [text.ended or "length" for text in self.texts]

    def pieces(self) -> Iterator[list[str]]:
        """Yields lists with the next piece of each text, "" where there is nothing."""
        start, texts = activity.clock(), self.texts
        length = min(self.model.config.block_size, len(texts[0].ids) + self.config.max_tokens)
        with Decoder(self.model, self.tokenizer, len(texts), length) as decoder:
            steps = activity.parts(range(self.config.max_tokens))
            for _, tokens in zip(steps, decoder.write([texts]), strict=False):
                pieces = {token.continuation: token.piece for token in tokens}
                yield [pieces.get(text, "") for text in texts]
        self.seconds = activity.clock() - start

    def samples(self) -> list[Sample]:
        """Writes all of them -> their texts."""
        for _ in self.pieces():
            pass
        return [
            Sample(text.text, text.count, text.ended or "length", text.config.seed)
            for text in self.texts
        ]

"""The likeliest answers of a model, several of them written together."""

from collections.abc import Iterator, Sequence

import numpy as np

from smallmind.console import activity
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import GenerationConfig
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.decoder import Continuation, Decoder
from smallmind.writing.form import Form

SLOTS = 8  # answers that are written at a time
SPARE_TOKENS = 8  # that an answer may be longer than the wanted one


def likeliest(
    tokenizer: Tokenizer,
    ids: np.ndarray,
    most: int,
    context: int,
    stop: tuple[str, ...] = (),
    form: Form | None = None,
) -> Continuation:
    """-> a prompt, ids (N,), and its likeliest continuation of at most so many tokens.

    The prompt loses its beginning where both would not fit in the context.
    """
    most = min(most, max(1, context - 1))
    config = GenerationConfig(max_tokens=most, temperature=0.0, stop=stop or None)
    return Continuation(tokenizer, ids[-max(1, context - most) :], config, form=form)


def written(
    model: TransformerModel, tokenizer: Tokenizer, texts: Sequence[Continuation]
) -> Iterator[int]:
    """Writes texts of any lengths, and yields the number of each as soon as it has ended."""
    longest = max((len(text.ids) + text.config.max_tokens for text in texts), default=1)
    length = min(model.config.block_size, longest)
    numbers = {text: number for number, text in enumerate(texts)}
    yield from (number for text, number in numbers.items() if text.ended)
    steps = iter(activity.parts(range(len(texts))))
    with Decoder(model, tokenizer, min(SLOTS, max(1, len(texts))), length) as decoder:
        for tokens in decoder.write([text] for text in texts):
            for token in tokens:
                if token.is_last:
                    next(steps, None)
                    yield numbers[token.continuation]
    next(steps, None)


def answers(
    model: TransformerModel, tokenizer: Tokenizer, texts: Sequence[Continuation]
) -> list[str]:
    """Writes all of these -> what follows each prompt."""
    for _ in written(model, tokenizer, texts):
        pass
    return [text.text for text in texts]

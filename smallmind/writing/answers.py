"""The likeliest answers of a model, several of them written together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from smallmind.console import activity
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import GenerationConfig
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.decoder import Continuation, Decoder

TOGETHER = 8  # answers
MORE = 8  # tokens that an answer may be longer than the wanted one


class Asked(NamedTuple):
    """A prompt, int32 (n,), and how it is continued."""

    ids: np.ndarray
    config: GenerationConfig

    @classmethod
    def greedily(
        cls, ids: np.ndarray, most: int, context: int, stop: tuple[str, ...] = ()
    ) -> "Asked":
        """-> a prompt for at most so many likeliest tokens; it loses its beginning to leave
        room.
        """
        most = min(most, max(1, context - 1))
        return cls(
            ids[-max(1, context - most) :],
            GenerationConfig(max_tokens=most, temperature=0.0, stop=stop or None),
        )


def written(
    model: TransformerModel, tokenizer: Tokenizer, asked: Sequence[Asked]
) -> Iterator[tuple[int, str]]:
    """Yields the number of each prompt and what follows it, as soon as that has ended.

    Prompts and answers may have any lengths: an answer that ends leaves its place to the next.
    """
    longest = max((len(one.ids) + one.config.max_tokens for one in asked), default=1)
    length = min(model.config.block_size, longest)
    waiting = iter(enumerate(asked))
    numbers: dict[Continuation, int] = {}
    pieces: dict[Continuation, list[str]] = {}
    steps = iter(activity.parts(range(len(asked))))
    with Decoder(model, tokenizer, min(TOGETHER, max(1, len(asked))), length) as decoder:
        while True:
            while decoder.free and (following := next(waiting, None)):
                number, (ids, config) = following
                text = Continuation(tokenizer, ids, config)
                numbers[text], pieces[text] = number, []
                decoder.add(text)
            if not numbers:
                break
            for token in decoder.step():
                pieces[token.continuation].append(token.piece)
            for text in [text for text in numbers if text.ended]:
                next(steps, None)
                yield numbers.pop(text), "".join(pieces.pop(text))
    next(steps, None)


def answers(model: TransformerModel, tokenizer: Tokenizer, asked: Sequence[Asked]) -> list[str]:
    """Returns the text that follows each prompt."""
    found = dict(written(model, tokenizer, asked))
    return [found[i] for i in range(len(asked))]

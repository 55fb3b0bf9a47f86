"""Writing text with a model, token by token."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, suggesting
from smallmind.console import activity
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.transformer import TransformerModel
from smallmind.randomness import hash64
from smallmind.sampling import Seen, choose
from smallmind.settings.config import GenerationConfig
from smallmind.text.tokenizer import Tokenizer


class Sample(NamedTuple):
    """A text that a model wrote after a prompt."""

    text: str  # without the prompt
    tokens: int
    ended: str  # by "length", by "stop" or at the "end" of a text
    seed: int


@suggesting(GenerationConfig)
def generate(
    model: TransformerModel, tokenizer: Tokenizer, prompt: str | None = None, **settings: Any
) -> str:
    """prompt (default: a newline) -> the prompt followed by the text that the model generates.

    settings are the fields of GenerationConfig: max_tokens (500), temperature (0.8; 0 is greedy),
    top_k, top_p and min_p (sample from the most likely tokens only), repetition_penalty,
    presence_penalty, frequency_penalty, stop, seed (the same seed gives the same text). The text
    ends at `<|endoftext|>`, if the tokenizer has it, or with a turn. InputError for a setting out
    of range, or a character in prompt that the model does not know.
    """
    prompt = _prompt(tokenizer, prompt)
    return prompt + "".join(stream(model, tokenizer, prompt, GenerationConfig(**settings)))


@suggesting(GenerationConfig)
def generate_samples(
    model: TransformerModel,
    tokenizer: Tokenizer,
    prompt: str | None = None,
    n: int = 1,
    **settings: Any,
) -> list[Sample]:
    """Like `generate`, but n texts at once, of the seeds seed, seed + 1, ...

    Each is what `generate` writes with its seed, up to the rounding of the logits.
    """
    if check_type("n", n, int) < 1:
        raise InputError(f"n={n} must be at least 1")
    config = GenerationConfig(**settings)
    return Writer(model, tokenizer, _prompt(tokenizer, prompt), config, n).samples()


def stream(
    model: TransformerModel, tokenizer: Tokenizer, prompt: str, config: GenerationConfig
) -> Iterator[str]:
    """Like `generate`, but yields only the text after the prompt, piece by piece."""
    writer = Writer(model, tokenizer, prompt, config, 1)
    return (piece for (piece,) in writer.pieces() if piece)


def _prompt(tokenizer: Tokenizer, prompt: str | None) -> str:
    check_type("tokenizer", tokenizer, Tokenizer)
    return tokenizer.opening if prompt is None else prompt


class Writer:
    """Writes n texts after a prompt, once: piece by piece, or as samples.

    A text ends at any of the tokenizer's `ends`. Afterwards `counts` are the tokens of each,
    `ended` why it ended, `seconds` how long it took.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        prompt: str | np.ndarray,
        config: GenerationConfig,
        n: int = 1,
    ) -> None:
        check_type("model", model, TransformerModel)
        check_type("tokenizer", tokenizer, Tokenizer)
        check_type("prompt", prompt, str, np.ndarray)
        if model.tokenizer_digest not in (None, tokenizer.digest):
            raise InputError(
                f"{tokenizer!r} is not the tokenizer that the model was trained with; take the one "
                "that smallmind.load returns with the model"
            )
        if tokenizer.vocab_size > model.config.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model "
                f"vocab_size={model.config.vocab_size}"
            )
        if not len(prompt):
            raise InputError("the prompt is empty; give at least one character")
        self.model, self.tokenizer, self.config, self.n = model, tokenizer, config, n
        self.ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.counts = [0] * n  # tokens of each text
        self.ended = ["length"] * n
        self.seconds = 0.0

    def pieces(self) -> Iterator[list[str]]:
        """Yields lists with the next piece of each text, "" where there is nothing yet."""
        start = activity.clock()
        stops = (self.config.stop,) if isinstance(self.config.stop, str) else self.config.stop
        texts = [_Text(self.tokenizer, stops or ()) for _ in range(self.n)]
        for tokens in self._tokens(texts):
            yield [
                "" if token is None else text.add(token)
                for text, token in zip(texts, tokens, strict=True)
            ]
        self.ended = [text.ended or "length" for text in texts]
        self.seconds = activity.clock() - start
        yield [text.end() for text in texts]

    def samples(self) -> list[Sample]:
        texts = ["".join(pieces) for pieces in zip(*self.pieces(), strict=True)]
        seeds = range(self.config.seed, self.config.seed + self.n)
        return [Sample(*each) for each in zip(texts, self.counts, self.ended, seeds, strict=True)]

    def _tokens(self, texts: "list[_Text]") -> Iterator[list[int | None]]:
        """The next token of each text, None for those that have ended, until all have."""
        config, V, n = self.config, self.tokenizer.vocab_size, self.n
        if not config.max_tokens:
            return
        seen = [Seen(V, self.ids) for _ in range(n)]
        block_size = self.model.config.block_size
        cache = KeyValueCache(self.model, 1, min(block_size, len(self.ids) + config.max_tokens))
        last = self.ids[-cache.length :][None]
        # A separate pool: the prompt rents arrays of its own sizes, which a training run that this
        # model belongs to would never use again.
        with TensorPool() as pool:
            for i in activity.parts(range(config.max_tokens)):
                with self.model.workspace.using_pool(pool):
                    logits = self.model.decode(last, cache)[:, :V]
                if i == 0:
                    pool.trim()
                    if n > 1:
                        cache, logits = cache.repeated(n), logits.repeat(n, axis=0)
                tokens: list[int | None] = [None] * n
                for row, text in enumerate(texts):
                    if text.ended is None:
                        # Token i of a seed depends on these two, not on earlier draws.
                        uniform = (hash64(config.seed + row, i) >> 11) / 2**53
                        token = choose(logits[row], config, uniform, seen[row])
                        seen[row].add(token)
                        self.counts[row] += 1
                        tokens[row] = token
                yield tokens
                if all(text.ended for text in texts):
                    return
                last = np.array([[0 if token is None else token] for token in tokens], np.int32)


class _Text:
    """One text, of which only what certainly belongs to it is handed out."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        self.ended: str | None = None
        self._stops = tuple(stops)
        self._ends = tokenizer.ends
        self._given: list[int] = []
        self._pieces = tokenizer.stream(self._taken())
        self._held = ""  # may be the beginning of a stop string

    def _taken(self) -> Iterator[int]:
        while self._given:
            yield self._given.pop()

    def add(self, token: int) -> str:
        """The next token -> what the text goes on with."""
        if token in self._ends:
            self.ended = "end"
            return ""
        self._given.append(token)
        self._held += next(self._pieces)
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            self.ended = "stop"
            self._held = self._held[: min(places)[0]]
            return ""
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        piece = self._held[: len(self._held) - keep]
        self._held = self._held[len(piece) :]
        return piece

    def end(self) -> str:
        rest = "" if self.ended == "stop" else "".join(self._pieces)
        return self._held + rest


def _overlap(text: str, stop: str) -> int:
    """The longest end of a text that is a beginning of `stop`, in characters."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )

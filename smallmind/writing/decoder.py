"""Texts that a model writes together: they join and leave between tokens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.transformer import TransformerModel
from smallmind.randomness import hash64
from smallmind.settings.config import GenerationConfig
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.form import Form
from smallmind.writing.sampling import Alternatives, Drawing, SeenTokens, alternatives, choose_each


def check_tokenizer(model: TransformerModel, tokenizer: Tokenizer) -> None:
    """Raises InputError if a model was not trained with this tokenizer."""
    check_type("model", model, TransformerModel)
    check_type("tokenizer", tokenizer, Tokenizer)
    if model.tokenizer_digest not in (None, tokenizer.digest):
        raise InputError(
            f"{tokenizer!r} is not the tokenizer that the model was trained with; use the one "
            f"that smallmind.load returns with the model"
        )
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"vocab_size={model.config.vocab_size}"
        )


def choices_in(
    model: TransformerModel, ids: np.ndarray, vocab_size: int, top: int
) -> list[Alternatives]:
    """ids (T,) -> how likely each token after the first one was, and the `top` likeliest there."""
    found: list[Alternatives] = []
    if len(ids) > 1:
        hidden = np.empty((len(ids) - 1, model.config.n_embd), model.workspace.activation_dtype)
        model.hidden(hidden, ids[None, :-1])
        for rows in model.network.head.blocks(hidden):
            tokens = ids[1:][rows].tolist()

            def use(logits: np.ndarray, tokens: list[int] = tokens) -> None:
                each = zip(logits[:, :vocab_size], tokens, strict=True)
                found.extend(alternatives(row, token, top) for row, token in each)

            model.with_logits_of(hidden, rows, use)
    return found


class Token(NamedTuple):
    """One more token of a text."""

    continuation: "Continuation"
    id: int
    piece: str  # of text, as far as it certainly belongs to it; the last piece has all that is left
    alternatives: Alternatives | None  # if the text asks for them
    is_last: bool = False


class Continuation:
    """A text that a model writes after a prompt, ids (N,), once it has been added to a `Decoder`.

    The same prompt, settings and seed give the same text, whatever else is written. It ends at any
    of the tokenizer's `ends`, at a stop string, where its form is complete or after max_tokens:
    `ended` is then "end", "stop", "form" or "length", also if the form was completed because no
    more tokens were left. `tokens` are those written so far, after those that it has `begun` with,
    `text` is what they spell. `top` asks for that many alternatives to each token. `seed` is by
    default that of the settings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: np.ndarray,
        config: GenerationConfig,
        top: int | None = None,
        begun: Sequence[int] = (),
        form: Form | None = None,
        seed: int | None = None,
    ) -> None:
        if not len(ids):
            raise InputError("the prompt is empty; give at least one character")
        self._form = form.begin(begun) if form else None
        self.ids, self.config, self.top = np.append(ids, np.array(begun, np.int32)), config, top
        self.seed = config.seed if seed is None else seed
        self.tokens = list(begun)
        self.ended: str | None = None if config.max_tokens else "length"
        self._begun = len(begun)
        self._prompt, self._vocab_size = ids, tokenizer.vocab_size
        self._seen: SeenTokens | None = None
        stops = (config.stop,) if isinstance(config.stop, str) else config.stop
        begins = tuple(ids.tolist()) == tokenizer.beginning
        self._text = _Text(tokenizer, stops or (), begins)
        self._pieces: list[str] = []
        for token in begun:
            self._text.skip(token)

    @property
    def count(self) -> int:
        """The number of tokens that have been written."""
        return len(self.tokens) - self._begun

    @property
    def text(self) -> str:
        """The text so far, as far as it certainly belongs to the answer."""
        return "".join(self._pieces)

    def _drawing(self) -> Drawing:
        """Returns how the next token is chosen: by a number that seed and position determine."""
        if self._seen is None:  # which is as large as the vocabulary: not while the text waits
            self._seen = SeenTokens(self._vocab_size, self._prompt)
            for token in self.tokens:
                self._seen.add(token)
        uniform = (hash64(self.seed, len(self.tokens)) >> 11) / 2**53
        allowed = self._form.allowed() if self._form else None
        return Drawing(self.config, uniform, self._seen, allowed)

    def _append(self, token: int, logits: np.ndarray) -> Token:
        """Appends the token that was chosen by logits (V,), or another if its form refuses it."""
        form = self._form
        while form and not form.take(token, self.config.max_tokens - self.count):
            (token,) = choose_each(logits[None], [self._drawing()])
        found = None if self.top is None else alternatives(logits, token, self.top)
        if self._seen:
            self._seen.add(token)
        self.tokens.append(token)
        piece = self._text.add(token)
        self.ended = self._text.ended
        if self.ended is None and form and form.is_complete:
            self.ended = "form"
        if (self.ended is None and self.count == self.config.max_tokens) or (
            form and form.hurried and self.ended in ("end", "form")
        ):
            self.ended = "length"
        if self.ended:
            piece += self._text.end()
            self._seen = None
        self._pieces.append(piece)
        return Token(self, token, piece, found, self.ended is not None)


class Decoder:
    """`Decoder(model, tokenizer, slots)`: writes up to `slots` texts at a time.

    Each `step` reads a part of a prompt, or short prompts, of at most `part` tokens, and writes a
    token of every text whose prompt has been read: so a long prompt does not stop the others.
    `length` is the number of tokens that the model sees of a text, by default its context. A text
    that has ended leaves by itself. Close it after use, as a `with` statement does. InputError if
    the tokenizer is not the model's.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        slots: int,
        length: int | None = None,
        part: int | None = None,
    ) -> None:
        check_tokenizer(model, tokenizer)
        self.model, self.vocab_size = model, tokenizer.vocab_size
        self.cache = KeyValueCache(model, slots, length)
        self.part = self.cache.length if part is None else check_type("part", part, int)
        self.slots = slots
        self._slots: dict[int, Continuation]  # the texts that they hold
        self._reading: list[_Prompt]
        self._writing: list[int]  # the slots of texts whose prompt has been read
        self.clear()
        # A separate pool: prompts rent arrays of their own sizes, which a training run that this
        # model belongs to would never use again.
        self._pool = TensorPool()

    def close(self) -> None:
        """Frees the arrays that passes rent."""
        self._pool.close()

    def clear(self) -> None:
        """Makes all texts leave: also after an error in the middle of a step."""
        self._free = list(range(self.slots))[::-1]
        self._slots, self._reading, self._writing = {}, [], []
        for slot in self._free:
            self.cache.release(slot)

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        """The number of texts that may be added now."""
        return len(self._free)

    def add(self, *texts: Continuation) -> None:
        """Takes texts with the same prompt, which is read once.

        InputError if there are not so many free slots.
        """
        if len(texts) > self.free:
            raise InputError(f"{len(texts)} texts do not fit in {self.free} free slots")
        going_on = [text for text in texts if not text.ended]
        if not going_on:
            return
        slots = [self._free.pop() for _ in going_on]
        self._slots.update(zip(slots, going_on, strict=True))
        self._reading.append(_Prompt(slots, going_on[0].ids[-self.cache.length :]))

    def remove(self, text: Continuation) -> None:
        """Makes a text leave, wherever it is. Does nothing if it has left."""
        for slot, other in list(self._slots.items()):
            if other is text:
                self._leave(slot)

    def step(self) -> list[Token]:
        """Reads a part of the prompts, then writes a token of each text -> these tokens."""
        with self.model.workspace.using_pool(self._pool):
            writing = self._writing  # not those whose prompt ends in this step
            return [*self._read(), *self._write(writing)]

    def write(self, prompts: Iterable[Sequence[Continuation]]) -> Iterator[list[Token]]:
        """Yields the tokens of each step until all texts have ended.

        The texts of a prompt are added, as in `add`, as soon as there are slots for them.
        """
        waiting = iter(prompts)
        texts = next(waiting, None)
        while True:
            while texts is not None and len(texts) <= self.free:
                self.add(*texts)
                texts = next(waiting, None)
            if not self._slots:
                return
            yield self.step()

    def _leave(self, slot: int) -> None:
        del self._slots[slot]
        self._free.append(slot)
        self.cache.release(slot)
        self._writing = [other for other in self._writing if other != slot]
        for prompt in self._reading:
            if slot in prompt.slots:
                prompt.slots.remove(slot)
        self._reading = [prompt for prompt in self._reading if prompt.slots]

    def _read(self) -> Iterator[Token]:
        """Reads a part of the prompts that have waited longest; after its end, the first tokens.

        Where a prompt is cut does not depend on others: what its text is does not either.
        """
        left = self.part
        while self._reading:
            prompt = self._reading[0]
            # A slot may have left meanwhile, but not the one that has read a part.
            first = prompt.slots[0]
            if first != prompt.reads:
                prompt.reads, prompt.done = first, 0
            places = slice(prompt.done, prompt.done + self.part)
            length = len(prompt.ids[places])
            if length > left:
                return
            together = self._alike(left // length)
            left -= length * len(together)
            self.cache.select([each.slots[0] for each in together])
            if not prompt.done:
                self.cache.clear()
            ids = np.stack([each.ids[places] for each in together])
            logits = self.model.decode(ids, self.cache)[:, : self.vocab_size]
            for each in together:
                each.reads, each.done = each.slots[0], each.done + length
            if prompt.done == len(prompt.ids):
                self._pool.trim()
                for number, each in enumerate(together):
                    yield from self._has_read(each, logits[number : number + 1])

    def _alike(self, most: int) -> list["_Prompt"]:
        """Returns the prompts that are read in one pass: the next ones, if they are as long."""
        first = self._reading[0]
        if first.done:
            return [first]
        others = itertools.takewhile(
            lambda other: len(other.ids) == len(first.ids) and not other.done, self._reading
        )
        return list(itertools.islice(others, most))

    def _has_read(self, prompt: "_Prompt", logits: np.ndarray) -> Iterator[Token]:
        """logits (1, V) after a prompt -> the first tokens of its texts, which begin to write."""
        del self._reading[0]
        self.cache.copy(prompt.slots[0], prompt.slots[1:])
        self._writing = sorted([*self._writing, *prompt.slots])
        yield from self._written(prompt.slots, logits.repeat(len(prompt.slots), 0))

    def _write(self, slots: list[int]) -> Iterator[Token]:
        """Yields the next token of the texts in these slots."""
        if not slots:
            return
        ids = np.array([[self._slots[slot].tokens[-1]] for slot in slots], np.int32)
        self.cache.select(slots)
        logits = self.model.decode(ids, self.cache)[:, : self.vocab_size]
        yield from self._written(slots, logits)

    def _written(self, slots: list[int], logits: np.ndarray) -> Iterator[Token]:
        """logits (B, V) after the texts in these slots -> their next tokens."""
        texts = [self._slots[slot] for slot in slots]
        chosen = choose_each(logits, [text._drawing() for text in texts])
        for slot, text, token, row in zip(slots, texts, chosen, logits, strict=True):
            yield text._append(token, row)
            if text.ended:
                self._leave(slot)


class _Prompt:
    """A prompt of which only a part has been read, and the slots that wait for it."""

    def __init__(self, slots: list[int], ids: np.ndarray) -> None:
        self.slots, self.ids = slots, ids
        self.done = 0  # tokens that have been read, by one of the slots
        self.reads = slots[0]


class _Text:
    """One text, of which only what certainly belongs to it is handed out."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str], begins: bool) -> None:
        self.ended: str | None = None
        self._stops = tuple(stops)
        self._ends = tokenizer.ends
        self._added: list[int] = []
        self._pieces = tokenizer.stream(self._taken(), begins)
        self._held = ""  # may be the beginning of a stop string

    def _taken(self) -> Iterator[int]:
        while self._added:
            yield self._added.pop()

    def skip(self, token: int) -> None:
        """Takes a token whose text has been handed out elsewhere."""
        self._added.append(token)
        next(self._pieces)

    def add(self, token: int) -> str:
        """The next token -> what the text goes on with."""
        if token in self._ends:
            self.ended = "end"
            return ""
        self._added.append(token)
        self._held += next(self._pieces)
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            self.ended = "stop"
            self._held = self._held[: min(found)[0]]
            return ""
        unsure = max((overlap(self._held, stop) for stop in self._stops), default=0)
        piece = self._held[: len(self._held) - unsure]
        self._held = self._held[len(piece) :]
        return piece

    def end(self) -> str:
        rest = "" if self.ended == "stop" else "".join(self._pieces)
        return self._held + rest


def overlap(text: str, stop: str) -> int:
    """Returns the longest end of a text that is a beginning of `stop`, in characters."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )

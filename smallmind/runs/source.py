"""The text of a run, from wherever it comes: in memory, or as tokens on disk."""

import dataclasses
import functools
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from smallmind.checks import InputError, count_of
from smallmind.console import activity
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, identity, prepare
from smallmind.corpus.reading import LABELS, PAIRS, QUESTIONS, Report
from smallmind.corpus.shards import INDEX, Index
from smallmind.corpus.survey import (
    BEGINNING_CHARACTERS,
    DocumentStarts,
    conversations,
    hashed,
    held_out_of,
    joined,
    parted,
    texts_of,
)
from smallmind.corpus.tokens import TokensOnDisk, are_tokens, find_tokens
from smallmind.files import durable
from smallmind.files.encoding import encoded
from smallmind.losses.preference_settings import METHODS, PLAIN
from smallmind.losses.preferences import Encoded, PairsDataset, encode_answers, windows_of
from smallmind.losses.question_data import (
    Asked,
    QuestionsDataset,
    encode_questions,
    most_tokens,
)
from smallmind.losses.reward_settings import OF_REWARDS, RewardsConfig
from smallmind.memory.available import available_bytes
from smallmind.runs.files import Text, is_literal, name_of, paths_of
from smallmind.settings.config import RunConfig
from smallmind.settings.presets import Fields
from smallmind.settings.rules import LONGEST_WINDOW
from smallmind.settings.settings import Settings
from smallmind.text.chat import REJECTED, Conversation, encode_each
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import HELD_OUT, Dataset, Tokens
from smallmind.text.packing import window_for
from smallmind.text.stories import built_in_text
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer

CHUNK = 1 << 20  # characters
SAMPLE_CHARACTERS = 100_000  # that tell about a whole text
TOKENS = "tokens"  # the directory, beside runs, of texts that were too large for memory
LARGE = 0.1  # share of the free memory: a larger text is kept on disk
WINDOW_STEP = 32  # tokens, of which the windows for pairs are multiples
UNSAFE = re.compile(r"[^\w.-]+")  # in names of directories, somewhere


class Source:
    """The text of a run, from wherever it comes. Each kind is a subclass."""

    name: str  # a short one
    characters: int
    beginning = ""
    nbytes = 0  # that it takes in memory
    report: Report | None = None  # if it was read from files
    tokenizer: Tokenizer | None = None  # that its tokens are of; None: of any
    on_disk: str | None = None  # where its tokens are
    now: datetime | None = None  # in templates that write the time
    is_chat = is_built_in = False
    facts: Mapping[str, Any] = MappingProxyType({})  # for settings that follow from its tokens

    @functools.cached_property
    def text(self) -> str:
        """Returns all of it, or what turns say; nothing of tokens on disk."""
        return ""

    @property
    def text_to_learn(self) -> str:
        """The part of the text from which a tokenizer is learned."""
        return self.text

    @property
    def alphabet(self) -> str:
        """A text with all characters that the tokenizer has to know."""
        return self.text

    @functools.cached_property
    def held_out(self) -> int:
        """Returns the size of documents, or conversations, at its end that are held out."""
        raise NotImplementedError

    @functools.cached_property
    def sha256(self) -> str:
        """Returns the digest that identifies it."""
        raise NotImplementedError

    def rewarded(self, config: RewardsConfig) -> "Source":
        """Returns its questions, answers to which are rewarded. InputError if it has none."""
        raise InputError(
            f"--reward {config.reward} asks questions, and {self.name} has none: give records with "
            "prompt, question or messages, or --chat alone for built-in ones"
        )

    def about_conversations(self, tokenizer: Tokenizer) -> Fields:
        """Returns the facts for settings that follow from conversations; none of plain text."""
        del tokenizer
        count = self.report.conversations if self.report else 0
        return {"conversations": count} if self.is_chat else {}

    def tokens(self, tokenizer: Tokenizer) -> Tokens:
        """Returns all of its tokens, of plain text."""
        raise NotImplementedError

    def dataset(self, tokenizer: Tokenizer, T: int, run: RunConfig) -> Dataset:
        """Returns its tokens in two parts. InputError if they are too few for windows of T."""
        raise NotImplementedError

    def whole(self, tokenizer: Tokenizer, T: int) -> PackedDataset | None:
        """Returns all conversations as the held-out part, for an evaluation; None of plain text."""
        del tokenizer, T
        return None

    def about_tokens(self, tokenizer: Tokenizer) -> float:
        """Counts its tokens in a part of it -> about how many it has."""
        sample = self.text[:SAMPLE_CHARACTERS]
        return self.characters * len(tokenizer.encode(sample)) / max(1, len(sample))

    def unknown(self, tokenizer: Tokenizer) -> str:
        """Returns the characters of plain text that a tokenizer does not know."""
        return tokenizer.unknown(self.text)

    def without(self, characters: str) -> "TextSource":
        """Returns plain text without these characters."""
        return TextSource(self.text.translate(dict.fromkeys(map(ord, characters))), self.name)


class TextSource(Source):
    """A text in memory."""

    text: str

    def __init__(
        self, text: str, name: str, held_out: int = 0, report: Report | None = None
    ) -> None:
        self.text, self.name, self.report = text, name, report
        self.held_out = held_out  # characters of documents at its end; 0: the last tenth of tokens
        self.characters = len(text)
        self.beginning = text[:BEGINNING_CHARACTERS]
        self.nbytes = sys.getsizeof(text)

    @property
    def text_to_learn(self) -> str:
        return self.text[: len(self.text) - (self.held_out or int(len(self.text) * HELD_OUT))]

    @functools.cached_property
    def sha256(self) -> str:
        return digest(self.text)

    def tokens(self, tokenizer: Tokenizer) -> Tokens:
        return tokenizer.encode_documents(self.text)

    def dataset(self, tokenizer: Tokenizer, T: int, run: RunConfig) -> Dataset:
        held_out = self.held_out or None
        return Dataset.from_text(self.text, tokenizer, T, run.batch_size, run.seed, held_out)


class ConversationSource(Source):
    """Conversations in memory, the last tenth of which are held out."""

    is_chat = True
    now: datetime

    def __init__(
        self,
        conversations: Sequence[Conversation],
        name: str,
        held_out: int | None = None,
        report: Report | None = None,
        is_built_in: bool = False,
    ) -> None:
        self.is_built_in = is_built_in
        self.conversations = conversations
        self.now = datetime.now().replace(microsecond=0)
        self.name, self.report = name, report
        self._marked: tuple[str, list[np.ndarray]] | None = None  # of a tokenizer, by its digest
        self._held_out = held_out
        self.characters = sum(len(turn.text) for turns in conversations for turn in turns)
        held = ((turn.text, turn.more) for turns in conversations for turn in turns)
        self.nbytes = sum(sys.getsizeof(text) for texts in held for text in texts if text)

    @functools.cached_property
    def held_out(self) -> int:
        """The number of those that are held out. InputError if there is only one conversation."""
        count = self._held_out
        return held_out_of(len(self.conversations)) if count is None else count

    @functools.cached_property
    def sha256(self) -> str:
        sha = hashlib.sha256()
        with activity.doing("Computing the digest of the conversations", usual=True):
            for _ in hashed(activity.parts(self.conversations), sha):
                pass
        return sha.hexdigest()

    @property
    def text(self) -> str:
        """The text of all turns that are trained on, for a tokenizer that is made from it."""
        return "".join(texts_of(self.conversations[: -self.held_out]))

    @property
    def alphabet(self) -> str:
        """The characters of all turns."""
        found: set[str] = set()
        for conversation in self.conversations:
            found.update(*(turn.text + turn.more for turn in conversation))
        return "".join(sorted(found))

    def rewarded(self, config: RewardsConfig) -> "Source":
        return RewardSource(self, config)

    def about_conversations(self, tokenizer: Tokenizer) -> Fields:
        def window() -> int:
            return window_for([len(tokens) for tokens in self.marked(tokenizer)])

        return {"conversations": len(self.conversations), "window": window}

    def marked(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Returns the marked tokens of each conversation."""
        if self._marked and self._marked[0] == tokenizer.digest:
            return self._marked[1]
        template = format_of(tokenizer)
        assert template  # see `fit_template`
        parts = activity.parts(self.conversations)
        with activity.doing("Encoding the conversations", usual=True):
            marked = list(encode_each(tokenizer, template.at(self.now), parts))
        self._marked = tokenizer.digest, marked
        thoughts = sum(bool(turn.thought) for turns in self.conversations for turn in turns)
        if self.report and not template.thinks:
            self.report = self.report.leaving_out(thoughts)
        return marked

    def whole(self, tokenizer: Tokenizer, T: int) -> PackedDataset:
        if format_of(tokenizer) is None:
            raise InputError(
                f"{self.name} has conversations, and the model was not trained on any: evaluate it "
                "on plain text"
            )
        every = np.concatenate(self.marked(tokenizer))
        return PackedDataset(every, every, T, RunConfig.batch_size, 0, tokenizer)

    def dataset(self, tokenizer: Tokenizer, T: int, run: RunConfig) -> Dataset:
        run = dataclasses.replace(run, chat=True)
        marked, count = self.marked(tokenizer), self.held_out
        train, held_out = map(np.concatenate, (marked[:-count], marked[-count:]))
        self._marked = None  # once is enough
        return dataset_of((train, held_out), tokenizer, T, run)


class PreferenceSource(ConversationSource):
    """Conversations that end in better and worse answers, the last tenth of which are held out."""

    def __init__(self, source: ConversationSource, method: str) -> None:
        super().__init__(source.conversations, source.name, report=source.report)
        alone = sum(turns[-1].role != REJECTED for turns in source.conversations)
        if self.report and alone and method != "kto":
            note = f"Left out: {count_of(alone, 'text')} without a worse answer"
            self.report = self.report.noting(note)
        self.method = method
        self._encoded: tuple[str, list[Encoded]] | None = None  # of a tokenizer, by its digest

    def about_conversations(self, tokenizer: Tokenizer) -> Fields:
        def window() -> int:
            longest = max(pair.length for pair in self.encoded(tokenizer))
            return min(LONGEST_WINDOW, -(-longest // WINDOW_STEP) * WINDOW_STEP)

        return {"conversations": len(self.conversations), "window": window, "has_pairs": True}

    def encoded(self, tokenizer: Tokenizer) -> list[Encoded]:
        """Returns the marked tokens of the answers, two by two. InputError if there are none."""
        if not self._encoded or self._encoded[0] != tokenizer.digest:
            template, method = format_of(tokenizer), self.method
            assert template  # see `fit_template`
            found = encode_answers(tokenizer, template.at(self.now), self.conversations, method)
            self._encoded = tokenizer.digest, found
            if not found:
                raise InputError(
                    f"--loss {method} learns from pairs of a better and a worse answer, and "
                    f"{self.name} has none: give records with prompt, chosen and rejected"
                )
        return self._encoded[1]

    def dataset(self, tokenizer: Tokenizer, T: int, run: RunConfig) -> Dataset:
        encoded = self.encoded(tokenizer)
        kept = [pair for pair in encoded if pair.length <= T]
        if self.report and len(kept) < len(encoded):
            long = count_of(len(encoded) - len(kept), "pair")
            self.report = self.report.noting(f"Left out: {long} longer than {T} tokens")
        if len(kept) < 2:
            some = count_of(len(encoded), "answer" if self.method == "kto" else "pair")
            fit = f", {len(kept)} of which fit into block_size={T}" if len(encoded) > 1 else ""
            raise InputError(
                f"{self.name} has {some}{fit}; two are needed, one of them to hold out: "
                f"{'raise --block-size, or ' if fit else ''}give more"
            )
        labels = np.array([pair.label for pair in kept]) if self.method == "kto" else None
        return PairsDataset(windows_of(kept), tokenizer, run.batch_size, run.seed, labels)


class RewardSource(ConversationSource):
    """Questions in conversations, to which a model tries answers; the last tenth is held out."""

    def __init__(self, source: ConversationSource, config: RewardsConfig) -> None:
        held_out, is_built_in = source.held_out, source.is_built_in
        super().__init__(source.conversations, source.name, held_out, source.report, is_built_in)
        self.config = config
        self._encoded: tuple[str, list[tuple[list[Asked], np.ndarray]]] | None = None

    def about_conversations(self, tokenizer: Tokenizer) -> Fields:
        def window() -> int:
            encoded = self.encoded(tokenizer)
            prompt = max(len(one.ids) for asked, _ in encoded for one in asked)
            longest = prompt + self._most(encoded)
            return min(LONGEST_WINDOW, -(-longest // WINDOW_STEP) * WINDOW_STEP)

        count = len(self.conversations)
        return {"conversations": count, "window": window, "has_questions": True}

    def encoded(self, tokenizer: Tokenizer) -> list[tuple[list[Asked], np.ndarray]]:
        """Returns the questions of each conversation, and its marked tokens. InputError if none."""
        if not self._encoded or self._encoded[0] != tokenizer.digest:
            template = format_of(tokenizer)
            assert template  # see `fit_template`
            found = encode_questions(tokenizer, template.at(self.now), self.conversations)
            self._encoded = tokenizer.digest, found
            if not any(asked for asked, _ in found):
                raise InputError(f"{self.name} has no question that --reward could ask")
        return self._encoded[1]

    def _most(self, encoded: Sequence[tuple[list[Asked], np.ndarray]]) -> int:
        """Returns how many tokens an answer may have."""
        return self.config.reward_tokens or most_tokens([x for asked, _ in encoded for x in asked])

    def dataset(self, tokenizer: Tokenizer, T: int, run: RunConfig) -> Dataset:
        encoded = self.encoded(tokenizer)
        most, held_out = self._most(encoded), self.held_out
        parts, left_out = [], 0
        for part in (encoded[:-held_out], encoded[-held_out:]):
            every = [one for asked, _ in part for one in asked]
            parts.append([one for one in every if len(one.ids) + most - 1 <= T])
            left_out += len(every) - len(parts[-1])
        if self.report and left_out:
            long = count_of(left_out, "question")
            note = f"Left out: {long} that leave less than {most} of {T} tokens for an answer"
            self.report = self.report.noting(note)
        train, asked = parts
        if not (train and asked):
            fit = len(train) + len(asked)
            raise InputError(
                f"{fit} of {count_of(fit + left_out, 'question')} leave {most} of block_size={T} "
                "tokens for an answer, and each part needs one: raise --block-size, or lower "
                "--reward-tokens"
            )
        marked = [
            np.concatenate([x for _, x in y]) for y in (encoded[:-held_out], encoded[-held_out:])
        ]
        return QuestionsDataset(
            train,
            asked,
            tokenizer,
            run.batch_size,
            run.seed,
            self.config.reward_answers,
            most,
            (marked[0], marked[1]),
        )


def for_rewards(source: Source, config: RewardsConfig) -> Source:
    """Returns the questions of a source if answers to them are rewarded, else the source."""
    return source.rewarded(config) if config.reward else source


def reading_for(settings: Settings) -> str | None:
    """Returns the `loss` for which `read_source` reads a text: OF_REWARDS, or a preference."""
    return OF_REWARDS if settings.rewards.reward else settings.preferences.loss


class TokenSource(Source):
    """Tokens in files, which are read window by window. InputError for another tokenizer."""

    tokenizer: Tokenizer

    def __init__(self, found: TokensOnDisk, name: str, from_text: bool = False) -> None:
        self.found = found
        self.is_chat = found.is_chat
        self.on_disk = found.path
        self.name, self.report = name, found.report
        self.tokenizer = found.tokenizer
        self.held_out = found.held_out_characters
        self.characters = found.characters  # of tokens of other programs, an estimate
        self.beginning = found.beginning
        self.sha256 = found.sha256
        if not from_text:  # whose settings are chosen, as for a text in memory
            self.facts = {"of_tokens": self._settings(), "directory": str(found.path)}

    def _settings(self) -> Fields:
        """Returns the settings of the tokenizer that the tokens were encoded with."""
        found, tokenizer = self.found, self.tokenizer
        fields = {field: getattr(tokenizer, name) for name, field in tokenizer.settings.items()}
        fields["tokenizer"] = tokenizer.kind
        if not self.is_chat and found.separator != tokenizer.separator:
            fields["text_separator"] = found.separator
        return fields

    def about_tokens(self, tokenizer: Tokenizer) -> float:
        return float(len(self.tokens(tokenizer)))

    def tokens(self, tokenizer: Tokenizer) -> Tokens:
        self._check(tokenizer)
        return self.found.tokens

    def dataset(self, tokenizer: Tokenizer, T: int, run: RunConfig) -> Dataset:
        self._check(tokenizer)
        run = dataclasses.replace(run, chat=self.is_chat)
        return dataset_of((self.found.train, self.found.held_out), tokenizer, T, run)

    def _check(self, tokenizer: Tokenizer) -> None:
        if tokenizer.digest != self.found.tokenizer.digest:
            raise InputError(
                f"the tokens in {self.found.path} are not those of this model; give the texts "
                "that they were made from"
            )


def dataset_of(
    parts: tuple[Tokens, Tokens], tokenizer: Tokenizer, T: int, run: RunConfig
) -> Dataset:
    """Returns both parts of a run, as windows of T: of marked tokens if it is on conversations."""
    train, held_out = parts
    if run.chat:
        return PackedDataset(train, held_out, T, run.batch_size, run.seed, tokenizer, run.learn)
    return Dataset(train, T, run.batch_size, run.seed, tokenizer, held_out)


def digest(text: str) -> str:
    """-> SHA-256 of a text. InputError if it has halves of characters, which no file holds."""
    sha = hashlib.sha256()
    with activity.doing("Computing the digest of the text", usual=len(text) < activity.LARGE):
        # In pieces, without a copy of a long text.
        for start in activity.parts(range(0, len(text), CHUNK)):
            sha.update(encoded(text, start, start + CHUNK))
    return sha.hexdigest()


def read_source(
    text: Text,
    run: RunConfig | None = None,
    encoding: Encoding | None = None,
    cache: Path | None = None,
    loss: str | None = PLAIN,
    is_earlier: bool = False,
) -> Source:
    """Paths, a text itself, or None for the built-in stories -> the text, or its tokens.

    A string with a line break, or of more than 1000 characters, is a text itself. Documents are
    joined by the separator of `encoding`; `run` says how they are encoded and where records have
    their text. Texts that are large for the memory are prepared in `cache`, if it is given. Worse
    answers are read for a `loss` of preferences; None: for weights that the run starts from; for
    OF_REWARDS also questions without an answer. With
    is_earlier texts are read as versions before 0.3 did. InputError if there is no text, or a file
    cannot be read.
    """
    if text is None and run and run.chat:
        from smallmind.text.questions import HELD_OUT_CONVERSATIONS as UNSEEN
        from smallmind.text.questions import built_in_conversations

        return ConversationSource(
            built_in_conversations(seed=run.seed), "questions", UNSEEN, is_built_in=True
        )
    if text is None:
        return TextSource(built_in_text(), "stories")
    if is_literal(text):
        return TextSource(str(text), "text")
    paths, encoding = paths_of(text), encoding or Encoding("char")
    if found := find_tokens(paths, encoding.tokenizer):
        return TokenSource(found, name_of(text))
    corpus = corpus_of(paths, run, loss)
    corpus.is_earlier = is_earlier
    if cache and loss not in (*METHODS, OF_REWARDS) and _is_large(corpus.about_characters):
        return _prepared(corpus, encoding, cache, name_of(text))
    pieces = list(corpus.pieces())
    if any(piece.turns for piece in pieces):
        chats, report = list(conversations(pieces)), corpus.report
        if loss in METHODS or any(turns[-1].role == REJECTED for turns in chats):
            chat = ConversationSource(chats, name_of(text), report=report)
            return PreferenceSource(chat, loss or METHODS[0])
        if len(chats) == 1 and len(parts := parted(chats[0])) > 1 and report:
            note = f"Divided the only conversation into {len(parts)}: the last of them is held out"
            chats, report = parts, report.noting(note)
        return ConversationSource(chats, name_of(text), report=report)
    if loss in METHODS:
        raise InputError(
            f"--loss {loss} learns from better and worse answers, and {name_of(text)} has none: "
            "give records with prompt, chosen and rejected"
        )
    starts = DocumentStarts()
    content = "".join(joined(pieces, encoding.separator, starts))
    return TextSource(content, name_of(text), starts.held_out(len(content)), corpus.report)


def reread_source(
    directory: Path,
    run: RunConfig,
    encoding: Encoding,
    sha256: str,
    cache: Path,
    loss: str = PLAIN,
) -> Source:
    """Returns the text that a run was created with. InputError, with advice, if it has changed."""
    if run.text is not None:
        with suppress(InputError):
            if kept := _find_prepared(run, encoding, sha256, cache):
                return kept
        run = recognising(run)
    problem: InputError | None = None
    for is_earlier in (False, True):
        try:
            source = read_source(run.text, run, encoding, cache, loss, is_earlier)
            if source.sha256 == sha256:
                return source
        except InputError as error:
            problem = problem or error
    if isinstance(run.text, str):
        with suppress(OSError, ValueError):
            # Earlier versions read every file as plain text, and kept its line ends.
            with durable.open_regular(run.text) as file:
                plain = TextSource(file.read().decode("utf-8-sig"), name_of(run.text))
            if plain.sha256 == sha256:
                return plain
    if problem:
        raise InputError(
            f"{problem}; if the text of the run has moved, say where it is: smallmind train "
            f"--resume {directory} PATH"
        )
    raise InputError(
        f"{name_of(run.text)} has changed since the run was created; restore the text as it was"
    )


def recognising(run: RunConfig) -> RunConfig:
    """Returns the settings of a saved run for reading texts: each file tells if it is a chat."""
    return dataclasses.replace(run, chat=None) if run.chat else run


def about_characters(text: Text, run: RunConfig) -> int | None:
    """Returns about how many characters a text has, from its bytes; None of tokens, or built in."""
    if text is None:
        return None
    if is_literal(text):
        return len(str(text).encode(errors="surrogatepass"))  # as its file would have
    paths = paths_of(text)
    return None if are_tokens(paths) else corpus_of(paths, run).about_characters


def size_on_disk(text: Text, run: RunConfig) -> int | None:
    """Returns about how many characters a text has that is large for the memory; else None."""
    count = None if is_literal(text) else about_characters(text, run)
    return count if count and _is_large(count) else None


def corpus_of(
    paths: Sequence[str | PathLike[str]], run: RunConfig | None, loss: str | None = PLAIN
) -> Corpus:
    """Returns the texts that paths mean, read as the settings say."""
    is_tuned = loss is None and run is not None and run.init_from
    reads = {"kto": LABELS, OF_REWARDS: QUESTIONS}.get(loss or "", "")
    if not reads and (loss in METHODS or is_tuned):
        reads = PAIRS
    if run is None:
        return Corpus(paths)
    return Corpus(
        paths,
        run.text_field,
        run.text_encoding,
        chat=run.chat,
        exclude=run.exclude,
        include=run.include,
        gitignore=run.gitignore,
        assistant=run.assistant,
        preferences=reads,
    )


def _is_large(characters: int) -> bool:
    return characters > LARGE * available_bytes()


def _prepared(corpus: Corpus, encoding: Encoding, cache: Path, name: str) -> TokenSource:
    """Returns the tokens of a text in the cache, where they are now if they were not before."""
    key = hashlib.sha256(repr(sorted(identity(corpus, encoding).items())).encode()).hexdigest()
    directory = cache / f"{UNSAFE.sub('_', name)[:40]}-{key[:12]}"
    with activity.doing(f"Preparing the text in {directory}, as it would take much of the memory"):
        shards = prepare(corpus, directory, encoding)
    return TokenSource(TokensOnDisk.of_shards(shards), name, from_text=True)


def _find_prepared(
    run: RunConfig, encoding: Encoding, sha256: str, cache: Path
) -> TokenSource | None:
    """Returns the tokens of a text that is large, or no longer there, in the cache."""
    with suppress(InputError):
        if size_on_disk(run.text, run) is None:
            return None
    if not isinstance(encoding.tokenizer, Tokenizer):
        return None
    wanted = encoding.tokenizer.digest
    for path in sorted(cache.glob(f"*/{INDEX}")):
        with suppress(InputError, FileNotFoundError):
            index = Index.read(path.parent)
            made_from = index.state.get("made_from", {})
            if made_from.get("beginning", []) != list(encoding.tokenizer.beginning):
                continue
            if index.state.get("sha256") == sha256 and index.recipe.tokenizer_digest == wanted:
                found = find_tokens([path.parent], None)
                return TokenSource(found, name_of(run.text), from_text=True) if found else None
    return None

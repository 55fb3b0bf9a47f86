"""From texts to shards of tokens, in memory that does not grow with the texts.

They are read two to four times: to measure them, to learn tokens, to count the tokens if their last
tenth is held out, and to write them. plan.json keeps what the first passes found, so that only the
writing is repeated after a kill.
"""

import dataclasses
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError, check_type, count_of
from smallmind.console import activity
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.shard_writer import (
    ShardWriter,
    check_count,
    check_own,
    described,
    make_directory,
    remove_leftovers,
    written,
)
from smallmind.corpus.shards import (
    INDEX,
    PLAN,
    PROGRESS,
    REMEDY,
    Index,
    Shards,
    open_shards,
    read_record,
    write_record,
)
from smallmind.corpus.survey import (
    CorpusPlan,
    conversations,
    hashed,
    joined,
    survey,
    survey_conversations,
    texts_of,
)
from smallmind.files import durable
from smallmind.files.lock import RunLock
from smallmind.settings.config import SHARD_TOKENS, RunConfig
from smallmind.text.chat import MARK_KINDS, encode_each
from smallmind.text.dataset import HELD_OUT
from smallmind.text.templates import fit_template, format_of, headers_of
from smallmind.text.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"
TOKENS_PER_COMMIT = 1 << 25  # tokens after which progress is recorded
TOKENS_PER_APPEND = 1 << 18  # tokens of whole conversations that are written at once, or more
MAX_SKIPPED = 100  # files whose names are recorded


class Encoding(NamedTuple):
    """A way to encode texts: a kind of tokenizer that is fitted to them, or a given one."""

    tokenizer: str | Tokenizer
    settings: Mapping[str, Any] = MappingProxyType({})  # of a tokenizer that is fitted
    chosen_separator: str | None = None  # None: the tokenizer's
    template: str | None = None  # of conversations; None: the tokenizer's, else the usual one

    @classmethod
    def of_run(cls, run: RunConfig, tokenizer: Tokenizer | None = None) -> "Encoding":
        """-> the encoding that settings describe. InputError if they name no tokenizer."""
        if tokenizer is None and run.tokenizer not in parts.TOKENIZERS:
            tokenizer = Tokenizer.load(run.tokenizer)
        if tokenizer:
            return cls(tokenizer, chosen_separator=run.text_separator, template=run.chat_template)
        names = parts.load(parts.TOKENIZERS, run.tokenizer).settings
        settings = {name: getattr(run, field) for name, field in names.items()}
        return cls(run.tokenizer, settings, run.text_separator, run.chat_template)

    @property
    def kind(self) -> type[Tokenizer] | Tokenizer:
        """The class of a tokenizer that is fitted, or the one that is given."""
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        return parts.load(parts.TOKENIZERS, self.tokenizer)

    @property
    def separator(self) -> str:
        """The token or text that separates documents."""
        return self.kind.separator if self.chosen_separator is None else self.chosen_separator

    def described(self) -> dict[str, Any]:
        """-> everything that must stay equal for the tokens to be equal, as JSON."""
        said = {"separator": self.chosen_separator, "template": self.template}
        chosen: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        if isinstance(self.tokenizer, Tokenizer):
            if self.tokenizer.beginning:
                chosen["beginning"] = list(self.tokenizer.beginning)
            return {"tokenizer": self.tokenizer.digest, **chosen}
        return {"tokenizer": self.tokenizer, **self.settings, **chosen}


def prepare(
    corpus: Corpus,
    directory: str | PathLike[str],
    encoding: Encoding,
    shard_tokens: int = SHARD_TOKENS,
) -> Shards:
    """Writes the tokens of texts to a directory, with their tokenizer.json -> what it holds.

    Resumes what a process that was killed had begun, and does nothing if the directory is complete.
    InputError if it was begun with other texts or settings, or holds other files, or a text cannot
    be used or changes meanwhile; OSError if the disk refuses something. Both leave what can be
    resumed.
    """
    directory = Path(check_type("directory", directory, str, PathLike))
    check_count("shard_tokens", shard_tokens)  # before texts are read for long
    wanted = identity(corpus, encoding, shard_tokens)
    if os.path.lexists(directory / INDEX):
        index = Index.read(directory)
        _check_same(directory, index.state.get("made_from"), wanted)
        _tidy(directory, index)
        return open_shards(directory)
    # Once it has a plan, the tokenizer is there, and nothing else is overwritten.
    if directory.is_dir() and not {PLAN, PROGRESS} <= set(os.listdir(directory)):
        check_own(directory, (PLAN, TOKENIZER))
    plan = _read_plan(directory, wanted)
    if plan:
        try:  # what a process that was killed had chosen or learned
            tokenizer = Tokenizer.load(directory / TOKENIZER)
            if isinstance(encoding.tokenizer, Tokenizer):  # with its template
                tokenizer = tokenizer.with_published(encoding.tokenizer.published)
            if plan.conversations:
                tokenizer, _ = fit_template(tokenizer, encoding.template)
        except InputError as error:
            raise InputError(f"{error}; remove {directory} to start over") from None
        _write(corpus, plan, tokenizer, directory, wanted)
    else:
        is_new = not directory.exists()
        try:
            make_directory(directory)
            with RunLock(directory):  # or another process would find out the same meanwhile
                if corpus.has_conversations():
                    plan, characters = survey_conversations(conversations(corpus.pieces()))
                else:
                    plan, characters = survey(corpus.pieces(), encoding.separator)
                tokenizer = _fitted(corpus, plan, characters, encoding)
                plan = plan._replace(train_tokens=_train_tokens(corpus, plan, tokenizer))
            _write(corpus, plan, tokenizer, directory, wanted)
        except BaseException:
            if is_new:
                with suppress(OSError):  # not empty
                    directory.rmdir()
            raise
    return open_shards(directory)


def begun_with(directory: Path) -> str | None:
    """-> the kind of tokenizer that a directory of shards was begun with; None if none is known."""
    for name in (INDEX, PLAN):
        with suppress(FileNotFoundError, InputError), read_record(directory / name) as fields:
            begun = fields["state"] if name == INDEX else fields
            kind = begun["made_from"]["tokenizer"]
            return kind if kind in parts.TOKENIZERS else None
    return None


def identity(
    corpus: Corpus, encoding: Encoding, shard_tokens: int = SHARD_TOKENS
) -> dict[str, Any]:
    """Returns the inputs of a directory of shards: equal inputs give equal shards."""
    return {
        "files": _files_digest(corpus),
        "field": corpus.field,
        "encoding": corpus.encoding,
        "shard_tokens": shard_tokens,
        **({} if corpus.chat is None else {"chat": corpus.chat}),
        **({} if corpus.reads_generated else {"generated": False}),
        **({"earlier": True} if corpus.is_earlier else {}),
        **({} if corpus.assistant is None else {"assistant": corpus.assistant}),
        **encoding.described(),
    }


def load_tokenizer(shards: Shards) -> Tokenizer:
    """Returns the tokenizer of prepared texts. InputError if it is missing or another one."""
    path = shards.directory / TOKENIZER
    try:
        tokenizer = Tokenizer.load(path)
    except InputError as error:
        raise InputError(f"{error}; {REMEDY}") from None
    if tokenizer.digest != shards.index.recipe.tokenizer_digest:
        raise InputError(f"{path} is not the tokenizer of these tokens; {REMEDY}")
    published = shards.index.state.get("published")
    return tokenizer if published is None else tokenizer.with_published(published)


def _files_digest(corpus: Corpus) -> str:
    """-> the SHA-256 of the names, sizes and times of the files."""
    sha = hashlib.sha256()
    for file in corpus.files:
        try:
            time = os.stat(file.name).st_mtime_ns
        except OSError as error:
            raise InputError(f"cannot read {file.name}: {error.strerror}") from None
        sha.update(f"{os.path.abspath(file.name)}\0{file.size}\0{time}\n".encode(errors="replace"))
    return sha.hexdigest()


def _check_same(directory: Path, found: Any, wanted: dict[str, Any]) -> None:
    if found == wanted:
        return
    found = found if isinstance(found, dict) else {}
    changed = [name for name in wanted if found.get(name) != wanted[name]]
    changed = changed or [name for name in found if name not in wanted]
    raise InputError(
        f"{directory} was made from other texts or settings ({', '.join(changed)}); choose another "
        "directory, or remove it to start over"
    )


def _read_plan(directory: Path, wanted: dict[str, Any]) -> CorpusPlan | None:
    """Returns the plan of a process that was killed; None if there is none."""
    if not os.path.lexists(directory / PLAN):
        return None
    with read_record(directory / PLAN) as fields:
        made_from, plan = fields["made_from"], CorpusPlan(**fields["plan"])
    _check_same(directory, made_from, wanted)
    return plan


def _template_time(path: Path) -> datetime:
    """Returns the time that templates write: the plan's; earlier versions took its file's."""
    with read_record(path) as fields:
        if "template_time" not in fields:
            return datetime.fromtimestamp(os.stat(path).st_mtime)
        return datetime.fromisoformat(fields["template_time"])


def _tidy(directory: Path, index: Index) -> None:
    """Removes what is left of a process that was killed once the directory was complete."""
    known, records = described(index.parts), (PROGRESS, PLAN)
    names = {*written(directory), *(name for name in records if (directory / name).exists())}
    if names <= known:
        return
    # Another process may be doing the same, or the directory be on a disk that is read only.
    with suppress(InputError, OSError), RunLock(directory):
        remove_leftovers(directory, known)
        durable.clear_stale(directory, 0, (TOKENIZER, PLAN))
        for name in records:
            if os.path.lexists(directory / name):
                durable.remove(directory / name)


def _fitted(corpus: Corpus, plan: CorpusPlan, characters: str, encoding: Encoding) -> Tokenizer:
    """Returns the tokenizer of surveyed texts. InputError if it does not know a character."""
    tokenizer = encoding.tokenizer
    if isinstance(tokenizer, Tokenizer):
        if unknown := tokenizer.unknown(characters):
            raise InputError(
                f"the texts have {count_of(len(unknown), 'character')} that the tokenizer does not "
                f"know, such as {unknown[0]!r}; remove them, or choose another tokenizer"
            )
    elif not encoding.kind.is_learned:
        characters += headers_of(encoding.template) if plan.conversations else ""
        tokenizer = Tokenizer(characters, tokenizer, **encoding.settings)
    else:
        pieces = corpus.pieces("Learning the tokens of")
        if plan.conversations:
            count = plan.conversations - plan.held_out
            texts = texts_of(itertools.islice(conversations(pieces), count))
        else:
            held_out = plan.held_out or int(plan.characters * HELD_OUT)
            texts = _first(joined(pieces, encoding.separator), plan.characters - held_out)
        tokenizer = encoding.kind.learn(texts, **encoding.settings)
    return fit_template(tokenizer, encoding.template)[0] if plan.conversations else tokenizer


def _train_tokens(corpus: Corpus, plan: CorpusPlan, tokenizer: Tokenizer) -> int:
    """Returns the number of tokens to train on, if the last of them are held out; else 0."""
    if plan.held_out or plan.conversations:
        return 0
    tokens = {"char": plan.characters, "byte": plan.nbytes}.get(tokenizer.kind)
    if tokens is None:
        texts = joined(corpus.pieces("Counting the tokens of"), plan.separator)
        encoded = tokenizer.encode_chunks(tokenizer.chunks(texts))
        tokens = sum(map(len, tokenizer.begin_documents(encoded)))
    return tokens - int(tokens * HELD_OUT)


def _write(
    corpus: Corpus, plan: CorpusPlan, tokenizer: Tokenizer, directory: Path, wanted: dict[str, Any]
) -> None:
    """Writes all that is missing in the directory."""
    vocab_size, append = tokenizer.vocab_size, _append
    if plan.conversations:
        vocab_size, append = MARK_KINDS * vocab_size, _append_conversations
    writer = ShardWriter(directory, vocab_size, tokenizer.digest, wanted["shard_tokens"])
    with writer:
        durable.clear_stale(directory, 0, (TOKENIZER, PLAN))
        if not os.path.lexists(directory / PLAN):
            tokenizer.save(directory / TOKENIZER)
            time = datetime.now().isoformat(timespec="seconds")
            record = {"made_from": wanted, "plan": plan._asdict(), "template_time": time}
            write_record(directory / PLAN, record)
        if append(writer, corpus, plan, tokenizer) != plan.sha256:
            raise InputError(
                f"the texts have changed since {directory} was started; remove it to start over"
            )
        report = corpus.report
        assert report  # the corpus has been read to its end
        template = format_of(tokenizer) if plan.conversations else None
        if template and not template.thinks:
            report = report.leaving_out(plan.thoughts)
        shown = dataclasses.replace(report, skipped=report.skipped[:MAX_SKIPPED])
        writer.state.update(made_from=wanted, report=dataclasses.asdict(shown), **plan._asdict())
        if plan.conversations:  # the template, which tokenizer.json has no place for
            writer.state["published"] = dict(tokenizer.published)
    durable.remove(directory / PLAN)


def _append(writer: ShardWriter, corpus: Corpus, plan: CorpusPlan, tokenizer: Tokenizer) -> str:
    """Writes all missing tokens -> SHA-256 of the whole text, of which only the rest is encoded."""
    sha, lengths = hashlib.sha256(), deque[int]()
    begun = writer.position or {"part": 0, "characters": 0, "tokens": 0}
    texts = joined(corpus.pieces("Encoding"), plan.separator)
    train = _first(texts, plan.characters - plan.held_out)
    uncommitted = 0
    for part, of_part in enumerate((train, texts) if plan.held_out else (texts,)):
        done, tokens, last = 0, 0, None
        if part < begun["part"]:
            done = plan.characters
        elif part == begun["part"]:
            done, tokens, last = begun["characters"], begun["tokens"], begun.get("last")
        remaining = _remaining(tokenizer.chunks(of_part), done, sha, lengths)
        chunks = tokenizer.encode_chunks(remaining, last)
        for ids in tokenizer.begin_documents(chunks, last):
            # The training part ends between documents, or after a number of tokens.
            train_ids = len(ids) * (part == 0) if plan.held_out else plan.train_tokens - tokens
            train_ids = min(len(ids), max(0, train_ids))
            done += lengths.popleft()
            tokens, uncommitted = tokens + len(ids), uncommitted + len(ids)
            position = {"part": part, "characters": done, "tokens": tokens}
            position |= {"last": int(ids[-1])} if len(ids) else {}
            writer.append(ids[:train_ids])
            writer.append(ids[train_ids:], position, held_out=True)
            if uncommitted >= TOKENS_PER_COMMIT:
                writer.commit()
                uncommitted = 0
    return sha.hexdigest()


def _append_conversations(
    writer: ShardWriter, corpus: Corpus, plan: CorpusPlan, tokenizer: Tokenizer
) -> str:
    """Writes the marked tokens of all conversations that are missing -> SHA-256 of all of them."""
    template, sha = format_of(tokenizer), hashlib.sha256()
    assert template
    planned = _template_time(writer.directory / PLAN)
    done = begun = int((writer.position or {"conversations": 0})["conversations"])
    trained_on = plan.conversations - plan.held_out
    batch: list[np.ndarray] = []
    tokens = uncommitted = 0
    read = hashed(conversations(corpus.pieces("Encoding")), sha)
    for marked in encode_each(tokenizer, template.at(planned), itertools.islice(read, begun, None)):
        batch.append(marked)
        done, tokens = done + 1, tokens + len(marked)
        if tokens < TOKENS_PER_APPEND and done not in (trained_on, plan.conversations):
            continue
        ids = np.concatenate(batch)
        writer.append(ids, {"conversations": done}, held_out=done > trained_on)
        batch, tokens, uncommitted = [], 0, uncommitted + tokens
        if uncommitted >= TOKENS_PER_COMMIT:
            writer.commit()
            uncommitted = 0
    return sha.hexdigest()


def _remaining(
    texts: Iterable[str], done: int, sha: "hashlib._Hash", lengths: deque[int]
) -> Iterator[str]:
    """Hashes the texts and yields what is beyond the first `done` characters; notes its lengths."""
    for text in texts:
        activity.tick()
        sha.update(text.encode())
        # A chunk ended there once, but another version may cut in other places.
        rest, done = text[done:], max(0, done - len(text))
        if rest:
            lengths.append(len(rest))
            yield rest


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yields as many characters of the texts; takes no more of them."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return

"""Tokens on disk that a run can take as they are: prepared ones, and files of other programs."""

import hashlib
import os
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

from smallmind.checks import InputError, whole
from smallmind.console import activity
from smallmind.corpus.finding import TRAINING_NAME, WILDCARDS, expand
from smallmind.corpus.preparation import TOKENIZER, load_tokenizer
from smallmind.corpus.reading import Report, Skipped
from smallmind.corpus.shards import INDEX, Shards, holds_tokens, open_shards
from smallmind.corpus.token_files import TOKENS_PER_CHECK, MappedTokens, TokenFile, check_vocabulary
from smallmind.text.dataset import HELD_OUT
from smallmind.text.tokenizer import Tokenizer

SUFFIX = ".bin"
HELD_OUT_NAME = re.compile(r"(?:^|[_.-])val(?:id|idation)?(?:[_.-]|$)", re.IGNORECASE)
SAMPLE_TOKENS = 1 << 16  # tokens from which the length of a text is estimated
BEGINNING_TOKENS = 100  # tokens


class TokensOnDisk(NamedTuple):
    """The tokens of a text in both parts, and what is known about the text."""

    path: str  # of a directory or file, for messages
    train: MappedTokens
    held_out: MappedTokens
    tokens: MappedTokens  # of both
    tokenizer: Tokenizer
    sha256: str  # of the text, or of the tokens where it is unknown
    characters: int
    held_out_characters: int  # of whole documents
    beginning: str
    separator: str  # of documents
    report: Report | None
    is_chat: bool = False  # they are marked tokens of conversations

    @classmethod
    def of_shards(cls, shards: Shards) -> Self:
        """Opens output of `prepare`. InputError if it is something else, or files are missing."""
        state = shards.index.state
        try:
            return cls(
                str(shards.directory),
                shards.train,
                shards.held_out,
                MappedTokens((*shards.train.files, *shards.held_out.files)),
                load_tokenizer(shards),
                str(state["sha256"]),
                whole(state["characters"]),
                whole(state["held_out"]),
                str(state["beginning"]),
                str(state["separator"]),
                _report(state["report"]),
                bool(state.get("conversations")),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{shards.directory / INDEX} does not describe a text: {error}; prepare it again"
            ) from None

    @classmethod
    def of_files(cls, paths: Sequence[Path], tokenizer: Tokenizer | None) -> Self:
        """Files of other programs, which are held out if they are named val, else a tenth."""
        if not tokenizer:
            beside = paths[0].parent / TOKENIZER
            if not beside.is_file():
                raise InputError(
                    f"{paths[0]} does not say what its tokens are: name their tokenizer with "
                    f"--tokenizer FILE, or put its {TOKENIZER} beside it"
                )
            tokenizer = Tokenizer.load(beside)
        files = [TokenFile(path) for path in paths]
        held_out = [file for file in files if HELD_OUT_NAME.search(file.path.stem)]
        training = [file for file in files if file not in held_out]
        if not training:
            raise InputError(f"{paths[0]} is a held-out part; give the training part too")
        tokens = MappedTokens((*training, *held_out))
        check_vocabulary(tokens, tokenizer.vocab_size)
        count = sum(map(len, held_out)) or int(len(tokens) * HELD_OUT)
        sample = tokens[: min(SAMPLE_TOKENS, len(tokens))]
        spelled = tokenizer.spelled(sample).characters
        return cls(
            str(paths[0]),
            tokens.part(0, len(tokens) - count),
            tokens.part(len(tokens) - count),
            tokens,
            tokenizer,
            _digest(tokens, count),
            round(len(tokens) * spelled / max(1, len(sample))),
            0,
            tokenizer.decode(sample[:BEGINNING_TOKENS]),
            tokenizer.separator,
            None,
        )


def are_tokens(paths: Sequence[str | PathLike[str]]) -> bool:
    """Returns True if one of the paths means tokens rather than texts."""
    return any(holds_tokens(path) or _token_files(Path(path)) for path in paths)


def find_tokens(
    paths: Sequence[str | PathLike[str]], tokenizer: Tokenizer | str | None
) -> TokensOnDisk | None:
    """Returns the tokens that paths mean; None if they are texts.

    `tokenizer`, or its kind, has been asked for: InputError if the tokens are of another one. Files
    of other programs need it, unless a tokenizer.json is beside them.
    """
    directories = [Path(path) for path in paths if holds_tokens(path)]
    if directories:
        if len(paths) > 1:
            raise InputError(
                f"{directories[0]} contains tokens: give it on its own, without other texts"
            )
        found = TokensOnDisk.of_shards(open_shards(directories[0]))
        _check_kind(found, tokenizer)
        return found
    files = [file for path in paths for file in _token_files(Path(path))]
    if not files:
        return None
    if others := [path for path in paths if not _token_files(Path(path))]:
        raise InputError(f"{files[0]} contains tokens, and {others[0]} does not: give one of them")
    if tokenizer == "byte":
        tokenizer = Tokenizer(kind="byte")
    return TokensOnDisk.of_files(files, None if isinstance(tokenizer, str) else tokenizer)


def _token_files(path: Path) -> list[Path]:
    """Returns a file of tokens, or those for training and evaluation in a directory.

    It needs both, or a tokenizer.json: one with some file of such a name may well hold texts.
    """
    if os.path.isdir(path):
        named = sorted(path.glob(f"*{SUFFIX}"))
        training, held_out = (
            [file for file in named if name.search(file.stem)]
            for name in (TRAINING_NAME, HELD_OUT_NAME)
        )
        is_certain = held_out or os.path.isfile(path / TOKENIZER)
        return sorted({*training, *held_out}) if training and is_certain else []
    if path.suffix != SUFFIX:
        return []
    is_pattern = any(mark in path.name for mark in WILDCARDS) and not os.path.lexists(path)
    return expand(path) if is_pattern else [path]


def _check_kind(found: TokensOnDisk, tokenizer: Tokenizer | str | None) -> None:
    """Raises InputError if another tokenizer than that of the tokens was asked for."""
    kind = found.tokenizer.kind
    if isinstance(tokenizer, Tokenizer):
        if found.is_chat:  # which have added theirs
            tokenizer = tokenizer.with_special(list(found.tokenizer.special))
        if tokenizer.digest != found.tokenizer.digest:
            raise InputError(
                f"{found.path} has tokens of another tokenizer, {TOKENIZER} in it; prepare the "
                "texts with the one that is needed: smallmind prepare ... --tokenizer FILE"
            )
    elif tokenizer not in (None, "char", kind):  # "char" is the default
        raise InputError(
            f"tokenizer={tokenizer!r} contradicts {found.path}, whose tokens are those of "
            f"{kind!r}; leave it out"
        )


def _digest(tokens: MappedTokens, held_out: int) -> str:
    """-> the SHA-256 of tokens and of how many are held out."""
    sha = hashlib.sha256(str(held_out).encode())
    with activity.doing("Computing the digest of the tokens", usual=len(tokens) < activity.LARGE):
        for start in activity.parts(range(0, len(tokens), TOKENS_PER_CHECK)):
            sha.update(tokens[start : start + TOKENS_PER_CHECK].astype("<i4", copy=False).data)
    return sha.hexdigest()


def _report(saved: dict[str, Any]) -> Report:
    """Rebuilds a Report from its stored form."""
    return Report(
        skipped=tuple(Skipped(str(path), str(reason)) for path, reason in saved["skipped"]),
        notes=tuple(map(str, saved["notes"])),
        **{name: whole(saved[name]) for name in ("files", "documents", "characters", "empty")},
        **{name: whole(saved.get(name, 0)) for name in ("conversations", "turns", "unanswered")},
        kinds=tuple(
            (str(kind), whole(files), whole(documents), whole(characters))
            for kind, files, documents, characters in saved.get("kinds", ())
        ),
    )

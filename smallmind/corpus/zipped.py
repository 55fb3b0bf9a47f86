"""Zip archives: every member that is text, in the archive's own order."""

import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import closing
from typing import IO, cast

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.compressed import DAMAGED, Expansion, UnpackedStream, damaged
from smallmind.corpus.files import FileStream
from smallmind.corpus.reading import Skipped, shown
from smallmind.corpus.source import Piece, Source, Stream, read_found

ENCRYPTED = 1  # flag of a member
# The others unpack a block at once, however much comes out of it.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OUTSIDE = re.compile(r"[\\/]|[A-Za-z]:|(.*[\\/])?\.\.([\\/]|$)", re.DOTALL)


def read_zip(source: Source) -> Iterator[Piece]:
    """Each member by its own suffix. Nothing is written to disk.

    InputError if the archive is damaged, encrypted or made to do harm.
    """
    with closing(cast(FileStream, source.open())) as file:  # never inside another file
        archive = _opened(source, file)
        members = archive.infolist()
        for member in members:
            activity.tick()
            _check(source, member)
        # Members that share their bytes are how a small archive becomes petabytes.
        if sum(member.compress_size for member in members) > file.size():
            raise InputError(f"{source.name} has members that overlap; pack its files again")
        expansion = Expansion(source.name, file, source.reading.limits)
        for member in members:
            # Not is_dir(), which fails for an empty name.
            if not member.filename.endswith("/") and not _is_hidden(member.filename):
                yield from _read_member(source, archive, member, expansion)


def _opened(source: Source, file: FileStream) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(cast(IO[bytes], file))
    except InputError:
        raise
    except DAMAGED as error:
        raise damaged(source.name, error) from None


def _check(source: Source, member: zipfile.ZipInfo) -> None:
    """InputError for a member that no honest archive has, or that cannot be read."""
    name = shown(member.orig_filename)
    if OUTSIDE.match(member.orig_filename):
        raise InputError(
            f"{source.name} has a member {name!r}, outside the folder of the archive; "
            "refusing it: such paths are used to overwrite files"
        )
    if member.flag_bits & ENCRYPTED:
        raise InputError(f"{source.name} is encrypted; unpack it and give the files in it")
    if member.compress_type not in METHODS:
        raise InputError(
            f"{source.name}: {name} is not compressed with deflate, as is usual; unpack the "
            "archive and give the files in it"
        )


def _is_hidden(name: str) -> bool:
    return any(part[:1] == "." != part or part == "__MACOSX" for part in name.split("/"))


def _read_member(
    source: Source, archive: zipfile.ZipFile, member: zipfile.ZipInfo, expansion: Expansion
) -> Iterator[Piece]:
    def open() -> Stream:
        try:
            inner = archive.open(member)
        except InputError:
            raise
        except DAMAGED as error:
            raise damaged(source.name, error) from None
        return UnpackedStream(source.name, inner, expansion, inner.close)

    opened = source.member(shown(member.filename), open)
    if stat.S_ISLNK(member.external_attr >> 16):
        source.reading.tally.skipped.append(Skipped(opened.name, "is a symbolic link"))
    else:
        yield from read_found(opened)

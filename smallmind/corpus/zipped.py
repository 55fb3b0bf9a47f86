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
from smallmind.corpus.entry import Entry, Piece, Stream, read_found
from smallmind.corpus.files import FileStream
from smallmind.corpus.reading import Skipped, shown

ENCRYPTED = 1  # flag of a member
# The others unpack a block at once, however much comes out of it.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OUTSIDE = re.compile(r"[\\/]|[A-Za-z]:|(.*[\\/])?\.\.([\\/]|$)", re.DOTALL)


def read_zip(entry: Entry) -> Iterator[Piece]:
    """Each member by its own suffix. Nothing is written to disk.

    InputError if the archive is damaged, encrypted or made to do harm.
    """
    with closing(cast(FileStream, entry.open())) as file:  # never inside another file
        archive = _opened(entry, file)
        members = archive.infolist()
        for member in members:
            activity.tick()
            _check(entry, member)
        # Members that share their bytes are how a small archive becomes petabytes.
        if sum(member.compress_size for member in members) > file.size():
            raise InputError(f"{entry.name} has members that overlap; pack its files again")
        expansion = Expansion(entry.name, file, entry.reading.limits)
        for member in members:
            # Not is_dir(), which fails for an empty name.
            if not member.filename.endswith("/") and not _is_hidden(member.filename):
                yield from _read_member(entry, archive, member, expansion)


def _opened(entry: Entry, file: FileStream) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(cast(IO[bytes], file))
    except InputError:
        raise
    except DAMAGED as error:
        raise damaged(entry.name, error) from None


def _check(entry: Entry, member: zipfile.ZipInfo) -> None:
    """InputError for a member that no honest archive has, or that cannot be read."""
    name = shown(member.orig_filename)
    if OUTSIDE.match(member.orig_filename):
        raise InputError(
            f"{entry.name} has a member {name!r}, outside the folder of the archive; "
            "refusing it: such paths are used to overwrite files"
        )
    if member.flag_bits & ENCRYPTED:
        raise InputError(f"{entry.name} is encrypted; unpack it and give the files in it")
    if member.compress_type not in METHODS:
        raise InputError(
            f"{entry.name}: {name} is not compressed with deflate, as is usual; unpack the "
            "archive and give the files in it"
        )


def _is_hidden(name: str) -> bool:
    return any(part[:1] == "." != part or part == "__MACOSX" for part in name.split("/"))


def _read_member(
    entry: Entry, archive: zipfile.ZipFile, member: zipfile.ZipInfo, expansion: Expansion
) -> Iterator[Piece]:
    def open() -> Stream:
        try:
            inner = archive.open(member)
        except InputError:
            raise
        except DAMAGED as error:
            raise damaged(entry.name, error) from None
        return UnpackedStream(entry.name, inner, expansion, inner.close)

    opened = entry.member(shown(member.filename), open)
    if stat.S_ISLNK(member.external_attr >> 16):
        entry.reading.tally.skipped.append(Skipped(opened.name, "is a symbolic link"))
    else:
        yield from read_found(opened)

"""UTF-8: what a file in anything else probably is, and the command that turns it into text."""

import os
import re
import shlex
from typing import NamedTuple

from smallmind.checks import InputError
from smallmind.files.languages import ENCODINGS, UTF16, most_likely

# First bytes -> what the file is, and the command that makes text of it. Those that read standard
# input take a file of any name.
FORMATS = {
    b"\x1f\x8b": ("compressed with gzip", "gzip -dc < {file} > {text}"),
    b"BZh": ("compressed with bzip2", "bzip2 -dc < {file} > {text}"),
    b"\xfd7zXZ\0": ("compressed with xz", "xz -dc < {file} > {text}"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -dc < {file} > {text}"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "7z e -so {file} > {text}"),
    b"PK\x03\x04": ("a zip archive", "unzip -p {file} > {text}"),
    b"%PDF-": ("a PDF document", "pdftotext {file} {text}"),
    b"\xd0\xcf\x11\xe0": ("an Office document", ""),
    b"\xff\xff\xff\xff": ("an Arrow file", ""),  # a stream, as the library datasets keeps
}
# The formats of zip archives, by the name of their first file, which begins at byte 30.
ZIPPED = {
    b"mimetypeapplication/epub+zip": ("an EPUB book", "pandoc -t plain -o {text} {file}"),
    b"mimetypeapplication/vnd.oasis": ("an Office document", ""),
    b"[Content_Types].xml": ("an Office document", ""),
    b"_rels/.rels": ("an Office document", ""),
}
# The longer mark first: that of UTF-32 begins with that of UTF-16.
MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
ALL_MARKS = tuple(MARKS)
UTF8_MARK = b"\xef\xbb\xbf"
MARKED = UTF8_MARK, *ALL_MARKS  # beginnings of texts
HTML, NOTEBOOK, WHATSAPP = "an HTML page", "a Jupyter notebook", "a WhatsApp chat"
# A day and a minute, in one of both orders: with Arabic digits, and marks of the direction.
DIGIT = rb"(?:\d|\xd9[\xa0-\xa9]|\xdb[\xb0-\xb9])"
BETWEEN = rb"(?:\xe2\x80\x8f)?[./-](?:\xe2\x80\x8f)? ?" + DIGIT
STAMP = rb"(?:%s{1,4}%s{1,2}%s{1,4}[^\d\n]{1,32}?%s{1,2}[:.]%s{2}"
STAMP %= DIGIT, BETWEEN, BETWEEN, DIGIT, DIGIT
STAMP += rb"|\d{1,2}[:.]\d\d[^\d\n]{0,16}, \d{1,2}[./-]\d{1,2}[./-]\d{4})"
PDF = "a PDF document"
MHTML = "a web archive (MHTML) or a multipart email"
# The formats below whose text can be read: the suffixes of their readers.
TEXT_OF = {HTML: ".html", NOTEBOOK: ".ipynb", PDF: ".pdf", MHTML: ".mhtml"}
# These formats may be valid UTF-8, and would pass for plain text: pattern, kind, command.
TEXTUAL = (
    (rb"version https://git-lfs\.github\.com/", "a Git LFS pointer", "git lfs pull"),
    (rb"(?:\.\./)*(?:\.git)?/annex/objects/", "a git-annex pointer", "git annex get ."),
    (rb"\{\\rtf", "an RTF document", "pandoc -f rtf -t plain -o {text} {file}"),
    (rb"ARROW1\0", "an Arrow file", ""),
    (rb"SQLite format 3\0", "an SQLite database", ""),
    (rb"%PDF-", PDF, "pdftotext {file} {text}"),
    (rb"%!PS", "a PostScript document", "ps2ascii {file} {text}"),
    (
        rb"(?:[\w-]+:[^\n]*\n(?:[ \t][^\n]*\n)*)*?content-type:\s*multipart/",
        MHTML,
        "",
    ),
    (rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", HTML, ""),
    (
        # In brackets a year comes first in logs too, which have no mark of the direction.
        rb"(?:\xe2\x80[\x8e\x8f])?(?:\[(?!\d{4}-\d\d-\d\d \d(?!.*\xe2\x80\x8e))%s[^\n\]]{0,24}\]|"
        rb"%s[^\d\n:]{0,32} -) " % (STAMP, STAMP),
        WHATSAPP,
        "",
    ),
    (rb'\s*\{\s*"(?:cells|metadata|nbformat\w*)"\s*:.*"(?:cell_type|nbformat)"\s*:', NOTEBOOK, ""),
)
ANY_TEXTUAL = re.compile(b"|".join(each[0] for each in TEXTUAL), re.IGNORECASE | re.DOTALL)
ASCII = bytes(range(0x80))
CONTROLS = bytes({*range(0x20)} - {*b"\t\n\f\r\x1b"})
MIN_CONTROLS = 0.01  # share of the bytes, in UTF-16 or what is no text
MIN_CONTROLS_IN_ASCII = 0.3  # in UTF-16 all of whose bytes are ASCII, as in Russian: two fifths
MIN_VALID_SHARE = 0.9  # share of the bytes above ASCII, in a damaged UTF-8 text


class Disguise(NamedTuple):
    """The format of a file that would pass for plain text."""

    kind: str
    command: str  # that makes text of it, or fetches it; "" if there is none

    def advice(self, path: str, suffix: str = ".txt") -> str:
        """Says what to do with the file at this path."""
        if not self.command:
            return "save it as plain text (UTF-8) first"
        verb = "convert it" if "{file}" in self.command else "fetch it: in its folder, run"
        return f"{verb}: {_filled(self.command, path, suffix)}"


def disguised(head: bytes) -> Disguise | None:
    """The first bytes of a file -> its format, if that is none of plain text, but valid UTF-8."""
    if head.startswith(ALL_MARKS):
        name = next(name for mark, name in MARKS.items() if head.startswith(mark))
        head = head.decode(name, "ignore").encode("utf-8", "ignore")
    head = head.removeprefix(UTF8_MARK)
    if not ANY_TEXTUAL.match(head):
        return None
    for pattern, kind, command in TEXTUAL:
        if re.match(pattern, head, re.IGNORECASE | re.DOTALL):
            return Disguise(kind, command)
    return None


def encoded(text: str, start: int, stop: int, errors: str = "strict", offset: int = 0) -> bytes:
    """Encodes text[start:stop] in UTF-8. InputError for an unpaired surrogate.

    `offset` is where the text begins in a longer one, whose positions are reported.
    """
    try:
        return text[start:stop].encode("utf-8", errors)
    except UnicodeEncodeError as error:
        position = offset + start + error.start
        raise InputError(
            f"the text has {error.object[error.start]!r}, an unpaired surrogate, at position "
            f"{position}: replace it, as with text.encode(errors='replace').decode()"
        ) from None


def advice(path: str, data: bytes, suffix: str = ".txt") -> str:
    """The path and contents of a file that is not UTF-8 -> what it probably is, and what to do.

    `suffix` is that of the file which the advice makes.
    """
    if found := _format(data):
        kind, extract = found
        if not extract:
            return f"it is {kind}; save it as plain text (UTF-8) first"
        return f"it is {kind}: {_filled(extract, path, suffix)}"
    encoding = likely_encoding(data)
    if encoding is None:
        return "its encoding is unknown: save it as UTF-8 in the program that wrote it"
    if encoding == "UTF-8":
        command = "iconv -c -f UTF-8 -t UTF-8 < {file} > {text}"
        return f"the rest is valid; to drop the invalid bytes: {_filled(command, path, suffix)}"
    command = f"iconv -f {encoding} -t UTF-8 < {{file}} > {{text}}"
    return f"it is probably {encoding}: {_filled(command, path, suffix)}"


def likely_encoding(data: bytes) -> str | None:
    """-> the probable encoding, by its name in iconv; "UTF-8" if damaged; None: unknown."""
    for mark, name in MARKS.items():
        if data.startswith(mark):
            return name if _decodes(data, name) else None
    if unmarked := unmarked_utf16(data):
        return unmarked
    if b"\0" in data:
        return None
    if _is_nearly_utf8(data):
        return "UTF-8"
    return None if _controls(data) > MIN_CONTROLS else most_likely(data, ENCODINGS | UTF16)


def unmarked_utf16(data: bytes) -> str | None:
    """-> UTF-16LE or UTF-16BE for a text without a byte order mark, else None.

    Nearly every second byte is zero, or the text looks like a language. Many bytes are controls, so
    that Python may decode it as UTF-8 too: Russian and Greek have no others in place of letters.
    """
    sample = data[:4096]
    controls = _controls(sample)  # zeros are some of them
    if controls <= MIN_CONTROLS:
        return None
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        halves = sample[first::2], sample[1 - first :: 2]
        if halves[0].count(0) > 0.9 * len(halves[0]) and 0 not in halves[1]:
            return name if _decodes(data, name) else None
    if sample.isascii():  # as UTF-8 would be, with a control now and then
        return most_likely(data, UTF16) if controls > MIN_CONTROLS_IN_ASCII else None
    return None if _is_nearly_utf8(sample) else most_likely(data, UTF16)


def _controls(data: bytes) -> float:
    """Returns the share of controls."""
    return 1 - len(data.translate(None, delete=CONTROLS)) / max(1, len(data))


def _is_nearly_utf8(data: bytes) -> bool:
    above = len(data.translate(None, delete=ASCII))
    valid = len(data.decode("utf-8", "ignore").encode().translate(None, delete=ASCII))
    return valid >= MIN_VALID_SHARE * above


def _format(data: bytes) -> tuple[str, str] | None:
    """Returns the format of a file that is not plain text, and a command that extracts the text."""
    for magic, found in FORMATS.items():
        if data.startswith(magic):
            zipped = [ZIPPED[name] for name in ZIPPED if data.startswith(name, 30)]
            return zipped[0] if zipped and magic == b"PK\x03\x04" else found
    return None


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _filled(command: str, path: str, suffix: str) -> str:
    """Returns the command for a file, which writes the text beside it."""
    file = f"./{path}" if path.startswith("-") else path
    text = f"{os.path.splitext(file)[0]}-utf8{suffix}"
    return command.format(file=shlex.quote(file), text=shlex.quote(text))

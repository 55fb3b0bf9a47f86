"""Text files in any encoding: what is read by itself, with `encoding`, and what is refused."""

import bz2
import codecs
import gzip
import lzma
import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.corpus.corpus import Corpus
from smallmind.files.encoding import likely_encoding, unmarked_utf16
from tests.corpus.languages import TEXTS, UNSEEN
from tests.corpus.reading import corpus, documents, refused, written

TEXT = "Ein süßer Bär aß “vier” Möhren für 3 € 🐻.\nZeile zwei\n"
LATIN = "Ein süßer Bär aß vier Möhren.\n" * 4
WESTERN = "Ein süßer Bär aß “vier” Möhren für 3 € das Stück.\n" * 4
DAMAGED = WESTERN.encode() + b"\xff tail\n"
PLAIN = "plain words\n"

MARKED = {
    "UTF-8": codecs.BOM_UTF8 + TEXT.encode(),
    "UTF-16 little-endian": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "UTF-16 big-endian": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "UTF-32 little-endian": codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
    "UTF-32 big-endian": codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"),
}


@pytest.mark.parametrize("piece", [1, 2, 3, 5, None])
@pytest.mark.parametrize("kind", MARKED)
def test_a_byte_order_mark_says_the_encoding(kind, piece, tmp_path):
    path = written(tmp_path / "a.txt", MARKED[kind])
    for encoding in (None, "latin-1"):
        texts = corpus(path, piece, encoding=encoding)
        assert documents(texts) == [TEXT]
        name = kind.partition(" ")[0]
        note = f"text was read as {name} because of its byte order mark in 1 file"
        assert texts.report.notes == (() if kind == "UTF-8" else (note,))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "shift_jis", "gb18030"])
def test_an_encoding_can_be_given(encoding, tmp_path):
    text = "日本語\n" if encoding == "shift_jis" else "süß\n"
    path = written(tmp_path / "a.txt", text.encode(encoding))
    assert documents(corpus(path, 1, encoding=encoding)) == [text]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("latin-11", "latin-1"), ("uft-8", "utf-8"), ("windows-1525", "windows-125"), ("", "")],
)
def test_an_unknown_encoding_names_a_known_one(name, nearest):
    message = refused("x", encoding=name)
    assert message.startswith(f"encoding={name!r} is unknown; did you mean {nearest}")
    b"".decode(message.removesuffix("?").rpartition(" ")[2])


@pytest.mark.parametrize("name", ["rot13", "zlib", "undefined", "unicode_escape", "a\0", "\ud800"])
def test_codecs_that_are_not_encodings_are_unknown(name):
    assert "is unknown; did you mean" in refused("x", encoding=name)


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["a", "ä", "€", "🐻", "\r", "\n", "\r\n", "\x85", "\u2028"])),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "gb18030", "utf-7"]),
    st.integers(1, 9),
)
def test_pieces_change_neither_characters_nor_line_ends(tmp_path_factory, words, encoding, piece):
    text = "".join([*words, "."])
    path = written(tmp_path_factory.getbasetemp() / "words.txt", text.encode(encoding))
    texts = corpus(path, piece, encoding=encoding)
    assert documents(texts) == [text.replace("\r\n", "\n").replace("\r", "\n")]
    # A CR that is held back comes with what follows it.
    assert all(len(part.text) <= piece + 1 for part in texts.pieces())


def test_changed_line_ends_are_noted(tmp_path):
    for name in ("a", "b", "c"):
        written(tmp_path / name, "one\r\ntwo\r\n")
    written(tmp_path / "d", "one\rtwo")
    written(tmp_path / "e", "one\ntwo")
    texts = Corpus(tmp_path)
    assert set(documents(texts)) == {"one\ntwo\n", "one\ntwo"}
    assert texts.report.notes == (
        "CR line ends became LF in 1 file",
        "CRLF line ends became LF in 3 files",
    )


COMMANDS = {  # what a message says, the bytes of the file, the text that its command makes of it
    "UTF-16": ("probably UTF-16LE; add --encoding UTF-16", PLAIN.encode("utf-16-le"), PLAIN),
    "UTF-16BE": ("probably UTF-16BE; add --encoding UTF-16BE", PLAIN.encode("utf-16-be"), PLAIN),
    "Windows-1252": ("byte 0xfc at offset 5, but probably ", WESTERN.encode("cp1252"), WESTERN),
    "ISO-8859-1": ("byte 0xfc at offset 5, but probably ", LATIN.encode("latin-1"), LATIN),
    "damaged": (
        "the rest is valid; to drop the invalid bytes: iconv -c",
        DAMAGED,
        WESTERN + " tail\n",
    ),
    "cut": ("the rest is valid; to drop", WESTERN.encode() + b"\xe2\x82", WESTERN),
    "gzip": ("with gzip; convert it: gzip -dc", gzip.compress(WESTERN.encode()), WESTERN),
    "bzip2": ("is compressed with bzip2", bz2.compress(WESTERN.encode()), WESTERN),
    "xz": ("is compressed with xz", lzma.compress(WESTERN.encode()), WESTERN),
}


@pytest.mark.parametrize("name", ["book.txt", "my book.txt", "it's", "-f.txt"])
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_works_on_that_very_file(kind, name, tmp_path, monkeypatch):
    expected, data, text = COMMANDS[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(data)
    message = refused(name)
    assert message.startswith(f"{name} is ") and expected in message
    assert refused(name, piece=1).startswith(message.partition(",")[0].partition(";")[0])
    command = message.rpartition(": ")[2]
    if kind in ("Windows-1252", "ISO-8859-1"):
        advice = f"probably {kind}; add --encoding {kind}, or convert it: {command}"
        assert message.endswith(advice) and documents(Corpus(name, encoding=kind)) == [text]
    if not shutil.which(command.split()[0]):
        pytest.skip(f"{command.split()[0]} is not installed")
    subprocess.run(["sh", "-c", command], check=kind not in ("damaged", "cut"))
    [converted] = tmp_path.glob("*-utf8.txt")
    assert documents(converted) == [text]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes(range(1, 256)) * 4, "its encoding is unknown: save it as UTF-8"),
        (bytes(range(256)) * 4, "its encoding is unknown"),
        (b"\x81 plain words", "its encoding is unknown"),
        (b"\xd0\xcf\x11\xe0 office", "is an Office document; save it as plain text (UTF-8) first"),
        (
            b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml\xff",
            "is an Office document; save it as",
        ),
        (b"PK\x03\x04" + bytes(26) + b"mimetypeapplication/epub+zip\xff", "pandoc -t plain -o "),
        (b"cut \xe2\x82", "byte 0xe2 at offset 4"),
        (b"\xff\xfea", "is not UTF-16: byte 0x61 at offset 2; it is damaged"),
    ],
)
def test_what_is_not_utf8_is_refused_with_advice(data, words, tmp_path):
    assert words in refused(written(tmp_path / "a.txt", data))
    position = refused(tmp_path / "a.txt").partition(",")[0].partition(";")[0]
    assert refused(tmp_path / "a.txt", piece=1).startswith(position)


def test_a_command_is_not_given_for_what_it_cannot_read(tmp_path):
    data = gzip.compress(LATIN.encode("latin-1"))
    message = refused(written(tmp_path / "a.txt.gz", data))
    assert message.endswith("but probably ISO-8859-1; add --encoding ISO-8859-1")
    message = refused(written(tmp_path / "a\nb.txt", LATIN.encode("latin-1")))
    assert message.endswith("but probably ISO-8859-1; add --encoding ISO-8859-1")


def test_a_wrong_encoding_that_was_given_is_refused(tmp_path):
    path = written(tmp_path / "a.txt", b"ab\xff")
    message = refused(path, encoding="ascii")
    assert message.endswith(
        "is not ascii: byte 0xff at offset 2; give another --encoding, or none for UTF-8"
    )


def test_a_named_text_with_some_zeros_is_read(tmp_path):
    assert documents(written(tmp_path / "a.txt", b"a\0b\0 plain")) == ["a\0b\0 plain"]


def test_a_text_without_characters_is_refused(tmp_path):
    assert "is empty; give a file with text" in refused(written(tmp_path / "a.txt", b""))
    assert "has no text in it" in refused(written(tmp_path / "b.txt", codecs.BOM_UTF8))


LANGUAGES = [(name, encoding) for name, (encodings, *_) in TEXTS.items() for encoding in encodings]


@pytest.mark.parametrize(("language", "encoding"), LANGUAGES)
def test_the_encoding_is_proposed_by_the_language(language, encoding, tmp_path):
    text = TEXTS[language][2].encode(encoding, "ignore").decode(encoding)
    for times in (1, 100):
        path = written(tmp_path / "a.txt", (text * times).encode(encoding))
        message = refused(path)  # never read in silence
        assert refused(path, piece=1) == message
        [_, option, command] = re.split("; add --encoding |, or convert it: iconv -f ", message)
        assert command.startswith(option) and option in message.partition("; add")[0]
        assert documents(Corpus(path, encoding=option)) == [text * times]


@pytest.mark.parametrize(
    ("texts", "share_of_short"), [(TEXTS, 0.94), (UNSEEN, 0.9)], ids=["seen", "unseen"]
)
def test_the_first_proposal_is_right_for_long_texts_and_nine_short_ones_of_ten(
    texts, share_of_short
):
    def share(kind):
        cases = [
            (encoding, text.encode(encoding, "ignore"))
            for encodings, short, long in texts.values()
            for encoding in {*encodings, "UTF-16LE"}
            for text in (short if kind == "short" else [long])
        ]
        assert len(cases) > 30
        right = 0
        for encoding, data in cases:
            likely = likely_encoding(data)
            right += likely is not None and data.decode(likely, "replace") == data.decode(encoding)
        return right / len(cases)

    assert share("long") == 1
    assert share("short") >= share_of_short


@pytest.mark.parametrize(
    "data", [b"a\xff", b"\xff\n", b"\x81 plain words", bytes(range(1, 256)) * 9]
)
def test_what_looks_like_no_language_is_unknown(data):
    assert likely_encoding(data) is None


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31mred\x1b[0m",
        "a page\x0canother",
        "b\x08bold" * 9,
        "a\x01b" * 9,
        "000\x04𐀀",
        "a\x01bcé" * 99,
    ],
)
def test_controls_alone_are_no_utf16(text, tmp_path):
    assert documents(written(tmp_path / "a.txt", text)) == [text]


def test_an_empty_text_has_no_encoding():
    assert unmarked_utf16(b"") is None


def test_a_damaged_text_is_none_in_another_encoding(tmp_path):
    data = TEXTS["Russian"][2].encode() * 5
    assert likely_encoding(data[:100] + b"\xff" + data[100:]) == "UTF-8"
    assert likely_encoding(TEXTS["Chinese"][2].encode() + b"\xe4\xbd") == "UTF-8"

"""A text that is not UTF-8: the error names what it is, and its command works on that file."""

import bz2
import codecs
import gzip
import lzma
import shutil
import subprocess

import pytest

from smallmind import InputError
from smallmind.runs.source import read_source

WESTERN = "Ein süßer Bär aß “vier” Möhren für 3 € das Stück.\n" * 4
LATIN = "Ein süßer Bär aß vier Möhren.\n" * 4
DAMAGED = WESTERN.encode() + b"\xff tail\n"


CASES = {
    "UTF-16 without a mark": ("UTF-16LE", b"plain words\n".decode().encode("utf-16-le"), None),
    "UTF-16BE without a mark": ("UTF-16BE", b"plain words\n".decode().encode("utf-16-be"), None),
    "Windows-1252": ("Windows-1252", WESTERN.encode("cp1252"), WESTERN),
    "Latin-1": ("ISO-8859-1", LATIN.encode("latin-1"), LATIN),
    "damaged": ("the rest is", DAMAGED, WESTERN + " tail\n"),
    "cut": ("the rest is", WESTERN.encode() + b"\xe2\x82", WESTERN),
    "gzip": ("gzip", gzip.compress(WESTERN.encode()), WESTERN),
    "bzip2": ("bzip2", bz2.compress(WESTERN.encode()), WESTERN),
    "xz": ("xz", lzma.compress(WESTERN.encode()), WESTERN),
}


def read(path):
    return read_source(path).text


def refused(path):
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["book.txt", "my book.txt", "it's", "-f.txt"])
@pytest.mark.parametrize("kind", CASES)
def test_the_command_works_on_that_very_file(kind, name, tmp_path, monkeypatch):
    expected, data, text = CASES[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(data)
    message = refused(name)
    assert f"{name} is not UTF-8" in message and expected in message
    command = message.rpartition(": ")[2]
    if not shutil.which(command.split()[0]):
        pytest.skip(f"{command.split()[0]} is not installed")
    subprocess.run(["sh", "-c", command], check=kind not in ("damaged", "cut"), cwd=tmp_path)
    [written] = tmp_path.glob("*-utf8.txt")
    assert read(written) == (text or "plain words\n")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7\n\xe2\xe3\xcf\xd3\n", "a PDF document; convert it: pdftotext "),
        (b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml\xff", "an office document; save it as"),
        (b"PK\x03\x04" + bytes(26) + b"mimetypeapplication/epub+zip\xff", "pandoc -t plain -o "),
        ("привет мир\n".encode("koi8-r"), "its encoding is unknown: save it as UTF-8"),
        (bytes(range(256)) * 4, "its encoding is unknown"),
        (codecs.BOM_UTF16_LE + b"odd", "is not UTF-16: byte 0x64 at offset 4; it is damaged"),
        (b"\x81 plain words", "its encoding is unknown"),
    ],
)
def test_what_needs_another_program_is_named(data, words, tmp_path):
    (tmp_path / "file").write_bytes(data)
    assert words in refused(tmp_path / "file")


def test_a_text_with_some_zeros_is_read(tmp_path):
    (tmp_path / "zeros.txt").write_bytes(b"a\0b\0 some plain words follow")
    assert read(tmp_path / "zeros.txt").startswith("a\0b\0 ")

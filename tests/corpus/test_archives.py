"""Compressed files and archives: what they hold, damaged ones, and bombs."""

import bz2
import gzip
import io
import lzma
import random
import struct
import zipfile
import zlib

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from tests.corpus.reading import corpus, documents, refused, skipped, written

COMPRESSORS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
TEXT = "Ein süßer Bär\n" * 10
LINES = '{"text": "one"}\n"two"\n'


def zipped(path, members, method=zipfile.ZIP_DEFLATED):
    """Writes an archive of members by name to path, and returns path."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("piece", [1, 7, None])
@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_is_read_by_its_inner_suffix(suffix, piece, tmp_path):
    compress = COMPRESSORS[suffix]
    path = written(tmp_path / f"a.txt.{suffix}", compress(TEXT.encode()))
    assert documents(corpus(path, piece)) == [TEXT]
    path = written(tmp_path / f"a.JSONL.{suffix.upper()}", compress(LINES.encode()))
    assert documents(corpus(path, piece)) == ["one", "two"]
    path = written(tmp_path / f"a.csv.{suffix}", compress(b"id,text\n1,one\n"))
    assert documents(corpus(path, piece)) == ["one"]
    path = written(tmp_path / f"a.{suffix}", compress("\ufeffwide".encode("utf-16-le")))
    assert documents(corpus(path, piece)) == ["wide"]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_several_compressed_files_in_one(suffix, tmp_path):
    compress = COMPRESSORS[suffix]
    data = compress(b"one ") + compress(b"") + compress(b"two")
    assert documents(written(tmp_path / f"a.{suffix}", data)) == ["one two"]
    assert documents(written(tmp_path / f"b.{suffix}", data + bytes(8))) == ["one two"]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_damaged_compressed_file_is_refused(suffix, tmp_path):
    data = COMPRESSORS[suffix](random.Random(1).randbytes(50_000).hex().encode())
    path = tmp_path / f"a.{suffix}"
    flipped = data[:9000] + bytes([data[9000] ^ 8]) + data[9001:]
    for damaged in (data[:-1], data[:-40], data[:100], data[:3], flipped, data + b"more", b"text"):
        for paths in (path, tmp_path):
            written(path, damaged)
            message = refused(paths)
            assert "is damaged or incomplete: " in message and "download or copy it" in message
    assert "is empty" in refused(written(path, b""))
    assert "has no text in it" in refused(written(path, COMPRESSORS[suffix](b"")))


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_bomb_is_refused(suffix, tmp_path):
    path = written(tmp_path / f"a.txt.{suffix}", COMPRESSORS[suffix](b"a" * 80_000_000))
    assert "expands more than 200-fold" in refused(path)
    small = written(tmp_path / f"b.txt.{suffix}", COMPRESSORS[suffix](b"a" * 1_000_000))
    assert documents(small) == ["a" * 1_000_000]
    limits = Limits(unpacked=10_000, piece=1000)
    assert "expands more than 200-fold" in refused(small, limits=limits)


def test_xz_that_would_take_gigabytes_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 24}]
    data = bytearray(lzma.compress(b"text", filters=filters))
    assert documents(written(tmp_path / "a.xz", bytes(data))) == ["text"]
    data[16] = 40  # a dictionary of 4 GiB
    data[20:24] = struct.pack("<I", zlib.crc32(data[12:20]))
    assert "is damaged or incomplete: Memory usage limit" in refused(
        written(tmp_path / "b.xz", bytes(data))
    )


def test_archives_inside_archives_are_not_opened(tmp_path):
    inner = gzip.compress(b"text")
    message = refused(written(tmp_path / "a.gz.gz", gzip.compress(inner)))
    assert message.endswith("is a .gz file inside a compressed file; unpack the outer one first")
    for suffix in (".tar", ".tar.gz", ".tgz", ".7z", ".rar"):
        path = written(tmp_path / f"a{suffix}", gzip.compress(b"text"))
        assert " archive; unpack it and give the files in it" in refused(path)
    path = zipped(
        tmp_path / "a.zip", {"a.txt": "text", "b.zip": "", "c.gz": inner, "d.parquet": ""}
    )
    texts = Corpus(path)
    assert documents(texts) == ["text"]
    assert len(skipped(texts, tmp_path)) == 3
    assert skipped(texts, tmp_path)["a.zip: c.gz"] == "is a .gz file inside a compressed file"


@pytest.mark.parametrize("piece", [1, None])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_each_member_is_read_by_its_suffix(method, piece, tmp_path):
    members = {
        "z.txt": TEXT,
        "folder/": "",
        "folder/a.jsonl": LINES,
        "folder/ä.csv": "text\nthree\n",
        "page.html": "<p>four</p>",
        "wide": "\ufefffive".encode("utf-16-le"),
        "image.png": b"\x89PNG\0",
        "empty.txt": "",
        ".hidden": "hidden",
        "__MACOSX/z.txt": "hidden",
        "./here.txt": "six",
    }
    texts = corpus(zipped(tmp_path / "a.zip", members, method), piece)
    assert documents(texts) == [TEXT, "one", "two", "three", "four", "five", "six"]
    assert skipped(texts, tmp_path) == {
        "a.zip: image.png": "is not UTF-8: byte 0x89 at offset 0",
        "a.zip: empty.txt": "has no text in it",
    }
    assert documents(texts) == documents(texts)


def test_a_long_member_is_skipped_too_if_its_end_is_no_text(tmp_path):
    path = zipped(tmp_path / "a.zip", {"a.txt": b"words " * 500_000 + b"\xff", "b.txt": "text"})
    texts = Corpus(path)
    assert documents(texts) == ["text"]
    assert "at offset 3,000,000" in skipped(texts, tmp_path)["a.zip: a.txt"]


def test_a_damaged_record_in_an_archive_is_named(tmp_path):
    path = zipped(tmp_path / "a.zip", {"b.jsonl": LINES + "{"})
    message = refused(path)
    assert "has no text in it: " in message
    assert "a.zip: b.jsonl is damaged: line 3 is not JSON" in message


@pytest.mark.parametrize(
    "name", ["../a.txt", "/etc/a.txt", "a/../../b.txt", "..\\a.txt", "C:\\a.txt", "\\a", "a/.."]
)
def test_members_outside_the_archive_are_refused(name, tmp_path):
    path = zipped(tmp_path / "a.zip", {"ok.txt": "text", name: "text"})
    message = refused(path)
    assert f"has a member {name!r}, outside the folder" in message


def test_dots_in_names_are_harmless(tmp_path):
    members = {"a..b/c../d...txt": "one", "...": "hidden", "a:b.txt": "two"}
    path = zipped(tmp_path / "a.zip", members)
    assert "'a:b.txt', outside the folder" in refused(path)  # on drive A
    del members["a:b.txt"]
    assert documents(zipped(path, members)) == ["one"]


def changed(path, **fields):
    """The first member's entry in the directory of an archive, with other values in its fields."""
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    offsets = {"flags": (8, "<H"), "method": (10, "<H"), "packed": (20, "<I"), "size": (24, "<I")}
    for name, value in fields.items():
        offset, layout = offsets[name]
        struct.pack_into(layout, data, start + offset, value)
    return written(path.with_name("changed.zip"), bytes(data))


def test_what_cannot_be_unpacked_is_refused(tmp_path):
    path = zipped(tmp_path / "a.zip", {"a.txt": TEXT * 100})
    assert "is encrypted; unpack it" in refused(changed(path, flags=1))
    assert "a.txt is not compressed with deflate" in refused(changed(path, method=12))
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        bomb = zipped(tmp_path / "b.zip", {"a.txt": "a" * 10_000_000}, method)
        assert "a.txt is not compressed with deflate" in refused(bomb)


def test_false_headers_are_refused(tmp_path):
    path = zipped(tmp_path / "a.zip", {"a.txt": TEXT * 100})
    assert "is damaged or incomplete" in refused(changed(path, size=10))
    assert "is damaged or incomplete" in refused(changed(path, packed=10))
    assert "has members that overlap" in refused(changed(path, packed=10**6))


def test_a_damaged_archive_is_refused(tmp_path):
    path = zipped(tmp_path / "a.zip", {"a.txt": random.Random(1).randbytes(5000).hex()})
    data = path.read_bytes()
    flipped = data[:2000] + bytes([data[2000] ^ 8]) + data[2001:]
    for damaged in (data[:-1], data[:-30], data[:100], data[5:], b"PK\x03\x04", b"text", flipped):
        assert "is damaged or incomplete: " in refused(written(tmp_path / "b.zip", damaged))
    nameless = path.read_bytes().replace(b"a.txt", b"\0.txt")
    assert len(documents(written(tmp_path / "b.zip", nameless))) == 1
    assert "is empty" in refused(written(tmp_path / "c.zip", b""))
    assert "has no text in it" in refused(zipped(tmp_path / "d.zip", {}))


def test_an_archive_that_is_a_bomb_is_refused(tmp_path):
    path = zipped(tmp_path / "a.zip", {"a.txt": "a" * 80_000_000})
    assert "expands more than 200-fold" in refused(path)
    # Each member alone is small enough.
    path = zipped(tmp_path / "b.zip", {f"{n}.txt": "a" * 20_000_000 for n in range(4)})
    assert "expands more than 200-fold" in refused(path)


def test_members_that_share_their_bytes_are_refused(tmp_path):
    data = zipped(
        tmp_path / "a.zip", {"a.txt": random.Random(1).randbytes(5000).hex()}
    ).read_bytes()
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    directory = data[start:end] * 50
    record = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 50, 50, len(directory), start, 0)
    path = written(tmp_path / "b.zip", data[:start] + directory + record)
    assert len(zipfile.ZipFile(io.BytesIO(path.read_bytes())).infolist()) == 50
    assert "has members that overlap" in refused(path)


def test_symbolic_links_in_an_archive_are_skipped(tmp_path):
    link = zipfile.ZipInfo("link.txt")
    link.external_attr = 0o120777 << 16
    texts = Corpus(zipped(tmp_path / "a.zip", {"a.txt": "text", link: "/etc/passwd"}))
    assert documents(texts) == ["text"]
    assert skipped(texts, tmp_path) == {"a.zip: link.txt": "is a symbolic link"}

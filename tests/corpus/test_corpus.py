"""Reading as a whole: documents come back as they were written, in little memory, with a report."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import random
import re
import shutil
import time
import tracemalloc
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.console import activity
from smallmind.corpus import compressed
from smallmind.corpus import corpus as corpus_module
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Skipped
from tests.corpus.reading import corpus, documents, refused, written
from tests.peaks import traced

# Documents may hold any characters; the line ends of a text become LF.
TEXTS = st.lists(st.text(min_size=1), min_size=1, max_size=6)
# A member of an archive with zero bytes is taken for binary, and one that begins with a byte order
# mark loses it.
PLAIN = st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"]), min_size=1)
ENCODINGS = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])
PIECES = st.integers(1, 50) | st.none()


def with_lf(texts):
    return [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@given(TEXTS, st.booleans(), ENCODINGS, PIECES)
def test_json_comes_back(folder, texts, is_ascii, encoding, piece):
    values = [json.dumps(text, ensure_ascii=is_ascii) for text in texts]
    path = written(folder / "a.jsonl", "\n".join(values).encode(encoding))
    assert documents(corpus(path, piece)) == with_lf(texts)
    path = written(folder / "a.json", f"[{','.join(values)}]".encode(encoding))
    assert documents(corpus(path, piece)) == with_lf(texts)


@given(TEXTS, st.sampled_from([",", ";", "\t"]), ENCODINGS, PIECES)
def test_tables_come_back(folder, texts, separator, encoding, piece):
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter=separator)
    writer.writerows([["id", "text"], *enumerate(texts)])
    path = written(folder / "a.csv", table.getvalue().encode(encoding))
    assert documents(corpus(path, piece)) == with_lf(texts)


@settings(max_examples=50)
@given(st.lists(PLAIN, min_size=1, max_size=6), ENCODINGS, PIECES)
def test_files_and_members_come_back(folder, texts, encoding, piece):
    shutil.rmtree(folder / "plain", ignore_errors=True)
    for number, text in enumerate(texts):
        written(folder / "plain" / f"{number}.txt", text.encode(encoding))
    assert documents(corpus(folder / "plain", piece)) == with_lf(texts)
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.txt", text.encode(encoding))
    assert documents(corpus(folder / "a.zip", piece)) == with_lf(texts)


@settings(max_examples=50)
@given(PLAIN, ENCODINGS, PIECES, st.sampled_from([gzip, bz2, lzma]))
def test_compressed_texts_come_back(folder, text, encoding, piece, module):
    suffix = {gzip: "gz", bz2: "bz2", lzma: "xz"}[module]
    path = written(folder / f"a.txt.{suffix}", module.compress(text.encode(encoding)))
    assert documents(corpus(path, piece)) == with_lf([text])


def test_a_reading_can_be_repeated_and_interrupted(tmp_path):
    for name in ("a.txt", "b.txt"):
        written(tmp_path / name, name)
    texts = Corpus(tmp_path)
    assert texts.report is None
    with_one = texts.pieces()
    assert next(with_one).text == "a.txt"
    other = documents(texts)
    assert other == ["a.txt", "b.txt"] == documents(texts)
    assert next(with_one).text == "b.txt"
    with_one.close()
    report = texts.report
    next(texts.pieces())
    assert texts.report is report


def test_the_report_says_what_was_read(tmp_path):
    written(tmp_path / "a.txt", "one\r\n")
    written(tmp_path / "b.jsonl", '"two"\nnull\n"three"')
    written(tmp_path / "c.png", b"\x89")
    texts = Corpus(tmp_path)
    documents(texts)
    report = texts.report
    assert (report.files, report.documents, report.characters, report.empty) == (2, 3, 12, 1)
    assert report.notes == ("CRLF line ends became LF in 1 file",)
    [image] = report.skipped
    assert isinstance(image, Skipped)
    assert str(image) == f"{tmp_path / 'c.png'} is not UTF-8: byte 0x89 at offset 0"


def test_documents_end_where_files_end(tmp_path):
    written(tmp_path / "a.txt", "a" * 10)
    written(tmp_path / "b.txt", "b\r")
    pieces = [(piece.text, piece.ends) for piece in corpus(tmp_path, 4).pieces()]
    assert pieces == [("aaaa", False), ("aaaa", False), ("aa", True), ("b\n", True)]


SUFFIXES = ["txt", "txt.gz", "txt.bz2", "txt.xz", "jsonl", "jsonl.gz", "csv", "zip"]
SIZE = {"txt": 22_000_000, "zip": 22_000_000, "jsonl": 10_000_000, "csv": 10_000_000}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Files of 22 or 10 MB, unpacked, by suffix."""
    folder = tmp_path_factory.mktemp("large")
    source = random.Random(1)
    lines = ["".join(source.choices("abcdefgh ", k=399)) + "\n" for _ in range(100)]
    # Compressed to a hundredth, so that it does not take long to write.
    block = "".join(lines)
    records = "".join(json.dumps(line) + "\n" for line in lines)
    rows = "".join(f'{number},"{line}"\n' for number, line in enumerate(lines))
    kinds = {"txt": ("", block), "jsonl": ("", records), "csv": ("id,text\n", rows)}
    for kind, (head, text) in kinds.items():
        written(folder / f"a.{kind}", head + text * (SIZE[kind] // len(text)))
    for name, module in itertools.product(("txt", "jsonl"), (gzip, bz2, lzma)):
        suffix = {gzip: "gz", bz2: "bz2", lzma: "xz"}[module]
        if f"{name}.{suffix}" in SUFFIXES:
            fast = {"preset": 0} if module is lzma else {"compresslevel": 1}
            data = module.compress((folder / f"a.{name}").read_bytes(), **fast)
            written(folder / f"a.{name}.{suffix}", data)
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.write(folder / "a.txt", "a.txt")
    return folder


@pytest.mark.parametrize(
    "suffix",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "jsonl")) for each in SUFFIXES],
)
def test_a_large_file_takes_little_memory(suffix, large):
    texts = Corpus(large / f"a.{suffix}")
    next(texts.pieces())  # loads what is loaded when it is first used
    with traced():
        characters = sum(len(text) for text, *_ in texts.pieces())
        peak = tracemalloc.get_traced_memory()[1]
    assert (
        characters > 0.9 * SIZE[suffix.partition(".")[0]] and characters == texts.report.characters
    )
    # Some blocks of 1 MiB: bytes, characters, the lines in them.
    assert peak < 8 * 2**20


def test_a_large_file_comes_in_pieces(large):
    pieces = list(Corpus(large / "a.txt").pieces())
    assert max(len(piece.text) for piece in pieces) <= 2**20
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == (large / "a.txt").read_text()


@pytest.fixture
def shown(monkeypatch):
    """The hook's messages while each look at the clock takes two seconds."""
    seconds = itertools.count(0, 2)
    monkeypatch.setattr(activity, "_state", activity._State())  # it remembers the real time
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    told = []
    with activity.showing_on(lambda phrase, _: told.append(phrase)):
        yield told


def shares(shown):
    """The percentages that were shown."""
    return [int(share) for share in re.findall(r"(\d+)%", " ".join(filter(None, shown)))]


def test_the_share_of_bytes_is_shown(large, shown):
    documents(Corpus([large / "a.txt", large / "a.txt.gz", large / "a.jsonl"]))
    assert shown[-1] is None
    assert any(phrase and phrase.startswith("Reading 3 files: ") for phrase in shown)
    assert shares(shown) == sorted(shares(shown)) and {10, 50, 90, 99} <= set(shares(shown))


def test_the_share_is_that_of_what_was_handed_out(large, tmp_path, shown):
    shutil.copy(large / "a.txt", tmp_path)
    pieces = Corpus(tmp_path).pieces()
    next(pieces)  # the file was found, so it has been decoded to its end
    assert max(shares(shown), default=0) < 10
    assert len(list(pieces)) > 20
    assert {20, 50, 90} <= set(shares(shown))


def test_errors_keep_to_one_line(tmp_path):
    path = written(tmp_path / "a\n\x1b[31m.jsonl", '"a"\n{')
    assert "a\ufffd\ufffd[31m.jsonl: line 2 is not JSON" in refused(path)


SMALL_FILES = {
    **{"a.txt": "plain\r\ntext", "b": "without a suffix", "c.PY": "print('é')\n", "d.txt": ""},
    **{"e.txt": "\ufeffmark", "f.txt": "sixteen".encode("utf-16"), "g.txt": b"caf\xe9 au lait"},
    **{"h.txt": "<!DOCTYPE html><p>page</p>", "i.txt": "zero\0 byte", "j.js": "x" * 3000},
    **{
        "k.go": "// Code generated by x; DO NOT EDIT.\n",
        "l.min.css": "a{}",
        "m.md": "---\na: b\n---\nm",
    },
    **{
        "n.txt": b"\x1f\x8bpacked",
        "o.json": '{"text": "record"}',
        "p.srt": "1\n0:01,0 --> 0:02,0\nsaid",
    },
    **{
        "q.txt": "%PDF-1.7",
        "r.txt": "Привет".encode("utf-16-le"),
        "s.tar": "archive",
        "t.txt": " \n",
    },
    **{"u.txt": "long " * 20_000, "v.txt": "[01.02.23, 10:11] Ann: hi\n[01.02.23, 10:12] Bob: hi"},
}


@pytest.mark.parametrize("settings", [{}, {"gitignore": False}, {"encoding": "latin-1"}])
@pytest.mark.parametrize("packs", [False, True])
def test_small_files_are_read_at_once_as_their_readers_would(
    tmp_path, monkeypatch, packs, settings
):
    for name, data in SMALL_FILES.items():
        written(tmp_path / "texts" / name, data)
    texts = tmp_path / "texts"
    if packs:
        with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
            for name, data in SMALL_FILES.items():
                kind = zipfile.ZIP_STORED if name < "h" else zipfile.ZIP_DEFLATED
                archive.writestr(name, data, kind)
            archive.writestr("grüße.txt", "hello")
        texts = tmp_path / "texts.zip"

    def read():
        source = Corpus(texts, **settings)
        return documents(source), source.report, source.has_conversations()

    at_once = read()
    for module in (corpus_module, compressed):
        monkeypatch.setattr(module, "small_text", lambda *_: None)
    assert read() == at_once
    assert "plain\ntext" in at_once[0] and len(at_once[1].kinds) > 3

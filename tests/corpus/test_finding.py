"""Which files paths, folders and globs mean, in which order, and what is left out."""

import os
import shutil
import socket
import tracemalloc
import zipfile

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.finding import File, FileList
from tests.corpus.reading import documents, refused, skipped, written
from tests.peaks import traced
from tests.programs import refuses


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Fills texts/ with files, folders and hidden ones; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.md", "c/z.txt", "c/a.py", "c/d/deep.txt", ".hidden.txt", ".git/x.txt"):
        written(tmp_path / "texts" / name, name)
    return tmp_path / "texts"


IN_ORDER = ["a.md", "b.txt", "c/a.py", "c/d/deep.txt", "c/z.txt"]


def test_many_files_take_little_memory_and_are_found_in_their_order():
    with traced():
        files = FileList()
        for i in range(50_000):
            files.append(
                File(f"texts/{i % 7}/\udcff{i}.txt", i, i % 9 == 0), f"/texts/{i % 45_000}"
            )
        assert tracemalloc.get_traced_memory()[0] < 2_500_000  # a list takes 9 million bytes
    assert len(files) == 50_000
    assert files[0] == ("texts/0/\udcff0.txt", 0, True)
    assert [file.size for file in files] == list(range(50_000))
    assert files[49_999] == ("texts/5/\udcff49999.txt", 49_999, False)


def test_a_file_that_is_found_twice_is_read_once_and_is_named_if_anybody_named_it(folder):
    os.symlink("b.txt", folder / "0.txt")
    paths = ["texts/c", "texts", "texts/c/z.txt", "texts/b.txt", "texts/a.md"]
    found = {file.name: file.is_named for file in Corpus(paths).files}
    assert found == {
        "texts/c/a.py": False,
        "texts/c/d/deep.txt": False,
        "texts/c/z.txt": True,
        "texts/0.txt": True,
        "texts/a.md": True,
    }


def test_a_folder_is_read_by_name(folder):
    assert documents("texts") == IN_ORDER


def test_the_order_is_not_that_of_the_directory(folder, monkeypatch):
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listed(path), reverse=True))
    assert documents("texts") == IN_ORDER
    assert documents("texts/*") == IN_ORDER


@pytest.mark.parametrize("texts", ["texts", "texts/**/*"])
def test_runs_in_a_folder_are_left_out(folder, texts):
    for name in ("config.json", "metrics.jsonl", "samples.txt"):
        written(folder / "runs" / "1" / name, '{"text": "written by a model"}')
    written(folder / "config.json", '{"text": "of a person"}')
    corpus = Corpus(texts)
    assert sorted(documents(corpus)) == sorted([*IN_ORDER, "of a person"])
    assert skipped(corpus, "texts") == {"runs/1": "is the directory of a run"}
    assert "texts/runs/1 is the directory of a run" in refused("texts/runs/1")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("texts/*.txt", ["b.txt"]),
        ("texts/**/*.txt", ["b.txt", "c/d/deep.txt", "c/z.txt"]),
        ("**/deep.txt", ["c/d/deep.txt"]),
        ("texts/**", IN_ORDER),
        ("texts/?.[mt]*", ["a.md", "b.txt"]),
        ("*/c/*.txt", ["c/z.txt"]),
        ("texts/.h*", [".hidden.txt"]),
        ("texts/c*", ["c/a.py", "c/d/deep.txt", "c/z.txt"]),
    ],
)
def test_patterns_are_expanded(pattern, expected, folder):
    assert documents(pattern) == expected
    assert documents(folder.parent / pattern) == expected


def test_a_file_with_the_name_of_a_pattern_is_that_file(folder):
    written(folder / "[b].txt", "in brackets")
    assert documents("texts/[b].txt") == ["in brackets"]


def test_a_file_is_read_once(folder):
    os.symlink("b.txt", folder / "link.txt")
    paths = ["texts/c/z.txt", "texts", folder, "texts/**", "texts/../texts/b.txt"]
    assert documents(paths) == ["c/z.txt", *[name for name in IN_ORDER if name != "c/z.txt"]]


def test_links_that_lead_back_are_harmless(folder):
    for number in range(3):
        os.symlink("..", folder / "c" / f"up{number}")
        os.symlink(folder, folder / "c" / "d" / f"top{number}")
    assert sorted(documents("texts")) == sorted(IN_ORDER)
    assert sorted(documents("texts/**/*")) == sorted(IN_ORDER)


def test_files_are_listed_with_their_size(folder):
    written(folder / "table.CSV.GZ", b"1234")
    files = Corpus("texts").files
    assert [(f.name.removeprefix("texts/"), f.is_compressed, f.size) for f in files][-2:] == [
        ("c/z.txt", False, 7),
        ("table.CSV.GZ", True, 4),
    ]


def test_what_is_no_text_is_skipped_when_found(folder):
    written(folder / "image.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    written(folder / "zeros", b"text\0 with zeros")
    written(folder / "latin.txt", "Ein süßer Bär aß vier Möhren.\n".encode("latin-1"))
    written(folder / "late.txt", b"a" * 3_000_000 + b"\xff")
    written(folder / "empty.txt", b"")
    written(folder / "settings.json", b'{"indent": 4}')
    written(folder / "book.doc", b"\xd0\xcf\x11\xe0\xa1\xb1")
    os.symlink("nowhere", folder / "lost")
    os.mkfifo(folder / "fifo")
    corpus = Corpus("texts")
    assert documents(corpus) == IN_ORDER == documents(corpus)
    reasons = skipped(corpus, "texts")
    expected = {
        "image.png": "is not UTF-8: byte 0x89 at offset 0",
        "zeros": "is binary: it has zero bytes",
        "latin.txt": "is not UTF-8: byte 0xfc at offset 5, but probably ISO-8859-1",
        "late.txt": "is not UTF-8: byte 0xff at offset 3,000,000",
        "empty.txt": "is empty",
        "settings.json": "has no field 'text', 'content' or 'story' in its only value",
        "book.doc": "is an Office document",
        "lost": "is a symbolic link to nothing",
        "fifo": "is not a regular file",
    }
    assert reasons == expected
    assert corpus.report.files == corpus.report.documents == len(IN_ORDER)


def test_what_was_also_named_is_not_skipped(folder):
    written(folder / "empty.txt", b"")
    assert refused(["texts", "texts/empty.txt"]).startswith("texts/empty.txt is empty; give")


def test_nothing_is_refused(folder, tmp_path):
    (tmp_path / "none").mkdir()
    written(tmp_path / "useless" / "image.png", b"\x89PNG\0")
    assert refused("none") == "no text was found; give a file or folder with text in it"
    assert refused([]) == refused("none")
    assert "no text was found: useless/image.png is not UTF-8" in refused("useless")
    assert refused("missing.txt").startswith("missing.txt does not exist; give the path of")
    assert refused("*.zzz").startswith("no file matches *.zzz; ")
    assert refused("").startswith("'' does not exist")
    assert refused("a\0b") == "cannot read a\ufffdb: embedded null byte"


def test_what_is_not_a_regular_file_is_refused(folder, tmp_path):
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for name in ("fifo", "socket", "/dev/zero"):
            assert refused(name).startswith(f"{name} is not a regular file, and texts are read")


def test_a_file_that_vanishes_is_an_error(folder):
    corpus = Corpus("texts")
    (folder / "b.txt").unlink()
    refuses("cannot read texts/b.txt: No such file", lambda: list(corpus.pieces()))


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="a path must be str or PathLike, not 3"):
        Corpus([3])
    with pytest.raises(TypeError, match="field must be str or None"):
        Corpus("x", field=3)
    with pytest.raises(TypeError, match="encoding must be str or None"):
        Corpus("x", encoding=3)


def test_links_that_lead_out_of_a_folder_are_not_followed(folder, tmp_path):
    written(tmp_path / "elsewhere" / "secret.txt", "secret")
    os.symlink("../elsewhere/secret.txt", folder / "a-file.txt")
    os.symlink(tmp_path / "elsewhere", folder / "c" / "a-folder")
    os.symlink("c/z.txt", folder / "inside.txt")
    for given, root in [("texts", "texts"), ("texts/**/*", "texts"), ("texts/*", "texts")]:
        texts = Corpus(given)
        assert sorted(documents(texts)) == sorted(IN_ORDER)
        reasons = skipped(texts, "texts")
        assert reasons["a-file.txt"] == f"is a symbolic link that leads out of {root}"
        assert reasons["c/a-folder"] == f"is a symbolic link that leads out of {root}"
    assert documents("texts/a-file.txt") == ["secret"]  # it is named
    os.symlink("texts", "link")
    assert sorted(documents("link")) == sorted(IN_ORDER)


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("c", ["a.md", "b.txt"]),
        ("c/", ["a.md", "b.txt"]),
        ("*.txt", ["a.md", "c/a.py"]),
        ("c/d", ["a.md", "b.txt", "c/a.py", "c/z.txt"]),
        ("texts/c/*.txt", ["a.md", "b.txt", "c/a.py"]),
        (["*.md", "d"], ["b.txt", "c/a.py", "c/z.txt"]),
        ("nothing", IN_ORDER),
        (None, IN_ORDER),
    ],
)
def test_excluded_files_are_left_out(folder, exclude, expected):
    named = [str(path) for path in sorted(folder.rglob("[!.]*")) if path.is_file()]
    named = [os.path.relpath(path) for path in named if ".git" not in path]
    for paths in ("texts", "texts/**/*", named, folder):
        texts = Corpus(paths, exclude=exclude)
        assert sorted(documents(texts)) == sorted(expected)
        notes = [note for note in texts.report.notes if note.startswith("Excluded by")]
        assert len(notes) == len([exclude] if isinstance(exclude, str) else exclude or [])
        assert all(note.endswith("nothing") == (exclude == "nothing") for note in notes)


def test_excluding_everything_is_an_error(folder):
    message = refused("texts", exclude=["*.md", "c", "b.*"])
    assert message.startswith("no text was found (Excluded by '*.md': 1 path")
    with pytest.raises(TypeError, match="a pattern must be str"):
        Corpus("texts", exclude=[3])


def test_what_few_people_mean_to_read_is_named(tmp_path):
    for name in ("node_modules/a/index.js", "node_modules/b.js", "src/app.js", "src/test/x.js"):
        written(tmp_path / "code" / name, "let a = 1\n")
    texts = Corpus(tmp_path / "code")
    documents(texts)
    note = "The texts include 2 files from node_modules; to leave them out: --exclude node_modules"
    assert texts.report.notes == (note,)
    texts = Corpus(tmp_path / "code", exclude=["node_modules"])
    assert len(documents(texts)) == 2
    assert not any("Among" in note for note in texts.report.notes)


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*.txt", ["b.txt", "c/d/deep.txt", "c/z.txt"]),
        ("c", ["c/a.py", "c/d/deep.txt", "c/z.txt"]),
        ("c/*.py", ["c/a.py"]),
        (["*.md", "d/"], ["a.md", "c/d/deep.txt"]),
    ],
)
def test_only_what_is_included_is_read(folder, include, expected):
    for paths in ("texts", "texts/**/*", folder):
        texts = Corpus(paths, include=include)
        assert sorted(documents(texts)) == sorted(expected)
        notes = [note for note in texts.report.notes if note.startswith("Included by")]
        assert notes and not any(note.endswith("nothing") for note in notes)
    assert documents(["texts/a.md", "texts/c"]) == ["a.md", "c/a.py", "c/d/deep.txt", "c/z.txt"]
    assert documents(Corpus(["texts/a.md", "texts"], include="*.py")) == ["a.md", "c/a.py"]
    assert refused("texts", include="*.zzz").startswith("no text was found (Included by '*.zzz': n")
    with pytest.raises(TypeError, match="a pattern must be str"):
        Corpus("texts", include=[3])


GENERATED = {
    "app.min.js": "a=1",
    "style-min.css": "a{b:c}",
    "app.js.map": '{"version":3,"sources":["a.ts"],"mappings":"AAAA"}',
    "map.txt": '{"version": 3, "sources": [], "mappings": "AAAA"}',
    "package-lock.json": '{"text": "x"}',
    "Cargo.lock": "version = 3",
    "go.sum": "a v1 h1:x=",
    "a_pb2.py": "x = 1",
    "bundle.js": "var a=1;" * 5000,
    "long.py": "x = [" + "1, " * 5000 + "]",
    "zz_made.go": "// Code generated by stringer. DO NOT EDIT.\n\npackage a\n",
    "licensed.go": "// A license\n// of two lines\n\n// Code generated by x. DO NOT EDIT.\n",
    "p.rb": "# Generated by the protocol buffer compiler.  DO NOT EDIT!\n",
    "r.js": "/**\n * @generated\n */\nlet a = 1\n",
}
WRITTEN = {
    "story.txt": "They generated power. Do not edit this line.\n" + "word " * 3000,
    "long.jsonl": '{"text": "' + "word " * 3000 + '"}',
    "gen.go": 'package a\n\nconst mark = "Code generated by me. DO NOT EDIT."\n',
    "minute.js": "let minutes = 1\n",
    "padlock.txt": "a lock",
}


@pytest.mark.parametrize("packed", [False, True])
def test_generated_and_minified_files_are_left_out_and_counted(tmp_path, packed):
    folder = tmp_path / "code"
    for name, text in {**GENERATED, **WRITTEN}.items():
        written(folder / name, text)
    if packed:
        (tmp_path / "packed").mkdir()
        with zipfile.ZipFile(tmp_path / "packed" / "a.zip", "w") as archive:
            for name, text in {**GENERATED, **WRITTEN}.items():
                archive.writestr(name, text)
        folder = tmp_path / "packed"
    texts = Corpus(folder)
    for _ in range(2):
        assert len(documents(texts)) == len(WRITTEN)
        assert texts.report.notes[-1] == (
            f"Not read: {len(GENERATED)} files generated or minified; --no-gitignore reads them"
        )
    assert len(documents(Corpus(folder, gitignore=False))) == len({**GENERATED, **WRITTEN})
    if not packed:
        assert len(documents(Corpus(folder, include="*.js"))) == 4
        assert documents(folder / "app.min.js") == ["a=1"]  # it is named
        alone = tmp_path / "alone"
        written(alone / "a.min.js", "a=1")
        assert refused(alone).startswith("no text was found (Not read: 1 file generated or")


def test_what_gitignore_names_is_left_out(folder, tmp_path, monkeypatch):
    """Rules of folders above count up to the repository's, and those of another one do not."""
    shutil.rmtree(folder / ".git")
    written(tmp_path / ".git" / "info" / "exclude", "a.md\n")
    written(tmp_path / ".gitignore", "texts/\n*.py\n")
    written(folder / "c" / ".gitignore", "/d/\n!a.py\n")
    kept = ["b.txt", "c/a.py", "c/z.txt"]
    for paths in ("texts", "texts/**/*", folder, "texts/../texts"):
        texts = Corpus(paths)
        assert sorted(documents(texts)) == kept
        assert any("listed in .gitignore; --no-gitignore reads" in x for x in texts.report.notes)
        assert sorted(documents(Corpus(paths, gitignore=False))) == sorted(IN_ORDER)
    monkeypatch.chdir(folder)
    assert documents(".") == kept
    assert documents("**/*") == kept
    assert documents("c/d") == ["c/d/deep.txt"]  # it is named
    assert documents(["a.md", "c/d/deep.txt"]) == ["a.md", "c/d/deep.txt"]
    written(folder / ".git" / "HEAD", "")
    assert documents(".") == ["a.md", *kept]
    written(folder / ".gitignore", "*\n")
    message = refused(".")
    assert message.startswith("no text was found (Left out: 3 paths listed in .gitignore; --no-")


def test_what_was_read_is_counted_by_kind(tmp_path):
    for name, text in {"a.py": "ab\r\n", "b.py": "c", "n": "d", "e.jsonl": '"fgh"\n"i"\n'}.items():
        written(tmp_path / "all" / name, text)
    written(tmp_path / "all" / "zeros.bin", b"\0")
    with zipfile.ZipFile(tmp_path / "all" / "z.zip", "w") as archive:
        archive.writestr("a.py", "jk")
        archive.writestr("b.md", "l" * 20)
    texts = Corpus(tmp_path / "all")
    documents(texts)
    assert texts.report.kinds == (
        (".md", 1, 1, 20),
        (".py", 3, 3, 6),
        (".jsonl", 1, 2, 4),
        ("", 1, 1, 1),
    )


@pytest.mark.parametrize(
    ("names", "test"),
    [
        (("train.jsonl", "test.jsonl"), "test.jsonl"),
        (("train-00000-of-2.txt", "validation-00000-of-1.txt"), "validation-00000-of-1.txt"),
        (("train/a.txt", "test/a.txt"), "test"),
        (("data_train.txt", "data_dev.txt"), "data_dev.txt"),
        (("test.txt", "other.txt"), None),
        (("train.py", "eval.py"), None),
        (("train/a.txt", "latest/a.txt", "contest.txt"), None),
    ],
)
def test_the_test_split_of_a_data_set_is_named(tmp_path, names, test):
    for name in names:
        written(tmp_path / name, '"text"\n')
    texts = Corpus(tmp_path)
    documents(texts)
    notes = [note for note in texts.report.notes if "a test split" in note]
    words = f"The texts include a test split, {test}; to leave them out: --exclude {test}"
    assert notes == ([words] if test else [])

"""Parquet files: without pyarrow one line says what to install; with it each row is a document.

A stand-in for pyarrow reads JSON, as pyarrow itself is not needed for anything else.
"""

import json
import sys
import types

import pytest

from smallmind.corpus.corpus import Corpus
from tests.corpus.reading import conversations, documents, refused, written


class Schema(list):
    @property
    def names(self):
        return [field.name for field in self]


class Rows:
    def __init__(self, names, columns):
        self.rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        self.schema = Schema()

    def to_pylist(self):
        return self.rows


class ParquetFile:
    def __init__(self, file):
        assert file.seekable() and file.readable() and not file.closed
        file.seek(0, 2)
        size = file.tell()
        file.seek(0)
        self.table = json.loads(file.read(size))
        kinds = {str: "string", list: "list<element: struct<content: string>>"}
        self.schema_arrow = Schema(
            types.SimpleNamespace(name=name, type=kinds.get(type(values and values[0]), "int64"))
            for name, values in self.table.items()
        )

    def iter_batches(self, batch_size, columns):
        assert "unread" not in columns
        values = [self.table[name] for name in columns]
        for start in range(0, len(values[0]), batch_size):
            if values[0][start] == "damaged":
                raise OSError("Corrupt snappy\ncompressed data.")
            yield Rows(columns, [column[start : start + batch_size] for column in values])


@pytest.fixture
def pyarrow(monkeypatch):
    module = types.ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)


@pytest.fixture
def no_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)


def test_without_pyarrow_a_line_says_what_to_install(tmp_path, no_pyarrow):
    path = written(tmp_path / "a.parquet", b"PAR1")
    assert refused(path) == f'{path} needs pyarrow: pip install "smallmind[parquet]"'
    assert refused(tmp_path) == refused(path)


def test_each_row_is_a_document(tmp_path, pyarrow):
    texts = [f"text {number}" for number in range(1000)]
    path = written(tmp_path / "a.parquet", json.dumps({"id": [3], "text": [*texts, None, ""]}))
    corpus = Corpus(path)
    assert documents(corpus) == texts and corpus.report.empty == 2
    assert documents(Corpus(written(path, '{"id": ["b"]}'), field="id")) == ["b"]


@pytest.mark.parametrize(
    ("table", "turns"),
    [
        (
            {
                "id": [1],
                "Messages": [[{"role": "user", "content": "a"}, {"from": "gpt", "value": "b"}]],
                "prompt": ["c"],
                "completion": ["d"],
            },
            [("user", "a"), ("assistant", "b")],
        ),
        (
            {"Instruction": ["a"], "input": [None], "output": ["b"], "System": ["c"]},
            [("system", "c"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {
                "prompt": [[{"role": "user", "content": "a"}]],
                "completion": [[{"role": "assistant", "content": "b"}]],
                "text": ["c"],
            },
            [("user", "a"), ("assistant", "b")],
        ),
    ],
)
def test_rows_with_turns_are_conversations(table, turns, tmp_path, pyarrow):
    columns = {name: values * 300 for name, values in table.items()} | {"unread": ["a"] * 300}
    texts = Corpus(written(tmp_path / "a.parquet", json.dumps(columns)))
    assert texts.has_conversations()
    assert conversations(texts) == [turns] * 300
    assert texts.report.notes[0].startswith("read conversations from ")
    unread = [*(name for name in ("prompt", "completion") if name in table and "Messages" in table)]
    unread += [name for name in ("text", "unread") if name in columns]
    assert texts.report.notes[1] == f"Not read: the text in {', '.join(map(repr, unread))}"
    assert conversations(Corpus(tmp_path, chat=True)) == [turns] * 300


def test_rows_without_turns_are_texts(tmp_path, pyarrow):
    columns = {"text": ["a"], "question": ["b"], "answer": [{"value": "c"}]}
    path = written(tmp_path / "a.parquet", json.dumps(columns))
    assert documents(path) == ["a"] and not Corpus(path).has_conversations()
    written(path, json.dumps({"text": ["a"], "messages": [[]], "id": [1]}))
    assert documents(path) == ["a"]
    assert "has no conversation in its columns; --chat needs fields" in refused(path, chat=True)
    written(path, json.dumps({"messages": [[{"role": "critic", "content": "4"}]]}))
    assert "turn 1 of row 1 has the role 'critic'" in refused(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("PAR1", "is damaged, or not a Parquet file: Expecting value: line 1 column 1"),
        ('{"text": ["damaged"]}', "is damaged, or not a Parquet file: Corrupt snappy\ufffdcompr"),
        ('{"text": [3]}', "has a number as field 'text' in row 1; give --field"),
        ('{"id": [3]}', "has no field 'text', 'content' or 'story' in its columns; give --field"),
        ('{"text": []}', "has no text in it"),
        ("", "is empty"),
    ],
)
def test_a_damaged_file_is_refused(data, words, tmp_path, pyarrow):
    assert words in refused(written(tmp_path / "a.parquet", data))

"""JSON lines, JSON and tables: a document per record, from the right field."""

import json

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from tests.corpus.reading import corpus, documents, lines, refused, skipped, written

LONG = 'A long cell, with "quotes".\n' * 40_000  # 1.1 million characters


def test_each_line_is_a_document(tmp_path):
    data = lines({"text": "one", "id": 1}, "two\r\n", {"id": 2, "text": "three\n"}) + "\n\n"
    assert documents(written(tmp_path / "a.jsonl", data)) == ["one", "two\n", "three\n"]
    assert documents(written(tmp_path / "a.ndjson", data.replace("\n", "\r\n"))) == [
        "one",
        "two\n",
        "three\n",
    ]


@pytest.mark.parametrize("piece", [1, 7, None])
def test_separators_within_a_text_do_not_end_a_line(piece, tmp_path):
    texts = ["a\u2028b\x85c", "\x1c\x0b", "\n"]
    data = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
    assert documents(corpus(written(tmp_path / "a.jsonl", data), piece)) == texts


def test_an_array_and_a_single_record(tmp_path):
    assert documents(written(tmp_path / "a.json", '["a", {"story": "b"}]')) == ["a", "b"]
    assert documents(written(tmp_path / "b.json", '{"content": "c", "id": 3}')) == ["c"]
    assert documents(written(tmp_path / "c.json", '"d"')) == ["d"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_the_field_is_the_obvious_one_or_the_users(name, tmp_path):
    row = {"story": "s", "Content": "c", "text": "t", "body": "b"}
    path = written(tmp_path / name, json.dumps(row))
    assert documents(path) == ["t"]
    assert documents(Corpus(path, field="body")) == ["b"]
    assert documents(Corpus(path, field="content")) == ["c"]
    del row["text"], row["Content"]
    assert documents(written(path, json.dumps(row))) == ["s"]
    message = refused(path, field="title")
    assert "has no field 'title' in " in message
    assert message.endswith("give --field with one of these: story, body")


@pytest.mark.parametrize("field", ["prompt,response", "Prompt, RESPONSE"])
@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", '{"prompt": "p", "response": "r"}\n'), ("a.csv", "prompt,response\np,r\n")],
)
def test_fields_with_a_comma_between_them_are_to_be_joined(tmp_path, name, data, field):
    path = written(tmp_path / name, data)
    message = refused(path, field=field)
    assert "--field takes one name: join " in message and "into one field" in message
    assert "give --field with one of these" in refused(path, field="prompt,none")


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("a.csv", "id,Content\n1,one\n", "column"),
        ("a.tsv", "id\tContent\n1\tone\n", "column"),
        ("b.csv", "Content\none\n", "column"),
        ("a.jsonl", '{"id": 1, "Content": "one"}\n', "field"),
    ],
)
def test_the_report_names_the_field_that_the_user_has_not_named(tmp_path, name, data, word):
    path = written(tmp_path / name, data)
    for field, notes in [
        (None, (f"read the text from {word} 'Content' in 1 file",)),
        ("Content", ()),
    ]:
        texts = Corpus(path, field=field)
        assert documents(texts) == ["one"]
        assert texts.report.notes == notes


def test_records_without_text_are_counted(tmp_path):
    data = lines({"text": None}, {"text": ""}, None, "", {"text": "one"})
    texts = Corpus(written(tmp_path / "a.jsonl", data))
    assert documents(texts) == ["one"]
    assert (texts.report.empty, texts.report.documents, texts.report.characters) == (4, 1, 3)
    assert "has no text in it" in refused(written(tmp_path / "b.jsonl", lines(None)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "b', "line 2 is not JSON: unterminated string starting at column 10;"),
        ("nonsense", "line 2 is not JSON: expecting value at column 1;"),
        ('"a" "b"', "line 2 is not JSON: extra data at column 5;"),
        ("[" * 100_000, "line 2 is not JSON: it is nested too deeply;"),
        ('{"text":' * 100_000, "line 2 is not JSON: it is nested too deeply;"),
        ("1" * 10_000, "line 2 is not JSON: exceeds the limit"),
        ("3", "has a number in line 2; a record must be"),
        ("true", "has true or false in line 2;"),
        ("[]", "has an array in line 2;"),
        ('{"text": 3}', "has a number as field 'text' in line 2; give --field"),
        ('{"text": ["a"]}', "has an array as field 'text' in line 2;"),
        ('{"content": "b"}', "has no field 'text' in line 2; give --field with one of these: cont"),
        ("{}", "has no field 'text' in line 2; it has no fields"),
    ],
)
def test_a_damaged_line_is_named(line, words, tmp_path):
    path = written(tmp_path / "a.jsonl", lines({"text": "one"}) + line + "\n")
    message = refused(path)
    assert "a.jsonl" in message and words in message
    # It was found, but its first document has already been read: it cannot be skipped any more.
    assert words in refused(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('["a", ', "is not JSON: expecting value at column 7 of line 1; correct it"),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        (
            '{\n"text": "a"}\n{"text": "b"}',
            "the second in line 3; write one value per line, or join",
        ),
        ('{"text": "a"}\n{"text": "b"', "line 2 is not JSON"),
        ('{"text": {}}', "has an object as field 'text' in its only value"),
        ("[[1]]", "has an array in element 1"),
        ("[]", "has no text in it"),
    ],
)
def test_a_damaged_json_file_is_refused(data, words, tmp_path):
    assert words in refused(written(tmp_path / "a.json", data))


def test_what_would_not_fit_into_memory_is_refused(tmp_path):
    limits = Limits(piece=100, record=1000, whole=2000)
    path = written(tmp_path / "a.jsonl", lines("short", "x" * 1001))
    assert "line 2 has more than 1,000 characters" in refused(path, limits=limits)
    path = written(tmp_path / "a.json", json.dumps("x" * 2000))
    message = refused(path, limits=limits)
    assert "has more than 2,000 bytes" in message and "convert it to .jsonl" in message
    for cell in ("x" * 1001, '"' + "x\n" * 501 + '"'):
        path = written(tmp_path / "a.csv", f"text\nshort\n{cell}\n")
        assert "has more than 1,000 characters" in refused(path, limits=limits)
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(513 * 10**6)  # takes no space
    assert "has more than 512,000,000 bytes" in refused(tmp_path / "huge.json")


def test_a_table_has_a_document_per_row(tmp_path):
    data = 'id,Text\r\n1,"two\r\nlines, ""quoted"""\r\n\r\n2,\r\n3,plain\r\n'
    texts = corpus(written(tmp_path / "a.csv", data), 1)
    assert documents(texts) == ['two\nlines, "quoted"', "plain"]
    assert texts.report.empty == 1
    assert documents(written(tmp_path / "a.tsv", "id\tstory\n1\ta, b; c\n")) == ["a, b; c"]
    assert documents(written(tmp_path / "b.csv", "id;text\n1;a, b\n")) == ["a, b"]
    assert documents(Corpus(tmp_path / "a.csv", field="id")) == ["1", "2", "3"]


def test_the_only_column_holds_the_text(tmp_path):
    path = written(tmp_path / "a.csv", "\ufeffquote\none\ntwo\n")
    assert documents(path) == ["one", "two"]
    assert "has no field 'text'" in refused(path, field="text")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1,2,3", "the row in line 3 has 3 cells and the header 2; put quotes"),
        ('1,"2" 3', "the row in line 3 is damaged: ',' expected after '\"'"),
        ('1,"never ends\n\n', "the row in line 3 is damaged: unexpected end of data"),
    ],
)
def test_a_damaged_row_is_named(rows, words, tmp_path):
    assert words in refused(written(tmp_path / "a.csv", f"id,text\n1,one\n{rows}\n"))


def test_a_table_without_a_text_names_its_columns(tmp_path):
    path = written(tmp_path / "a.csv", "id,name,\x1b[31m\n1,a,b\n")
    assert refused(path).endswith(
        "has no field 'text', 'content' or 'story' in the header row; "
        "give --field with one of these: id, name, \ufffd[31m"
    )
    written(tmp_path / "b.txt", "text")
    texts = Corpus(tmp_path)
    assert documents(texts) == ["text"]
    assert "has no field" in skipped(texts, tmp_path)["a.csv"]
    for empty in ("", "\n\n", "id,text\n"):
        assert "a.csv" in refused(written(path, empty))


def test_short_rows_have_no_text_and_empty_cells_at_the_end_do_not_matter(tmp_path):
    texts = Corpus(written(tmp_path / "a.csv", "id,text\n1\n2,two,,\n"))
    assert documents(texts) == ["two"] and texts.report.empty == 1


def test_records_longer_than_a_piece(tmp_path):
    quoted = '"' + LONG.replace('"', '""') + '"'
    for path in (
        written(tmp_path / "a.csv", f"id,text\n1,{quoted}\n2,{quoted}\n"),
        written(tmp_path / "a.jsonl", lines(LONG, {"text": LONG})),
        written(tmp_path / "a.json", json.dumps([LONG, LONG])),
    ):
        assert documents(path) == [LONG, LONG]
        assert max(len(piece.text) for piece in Corpus(path).pieces()) <= 2**20


def test_many_records(tmp_path):
    texts = [f"Story {number}\nwith a second line." for number in range(30_000)]
    assert documents(written(tmp_path / "a.jsonl", lines(*texts))) == texts
    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(texts))
    assert documents(written(tmp_path / "a.csv", "id,text\n" + rows)) == texts


def test_half_characters_are_replaced(tmp_path):
    texts = Corpus(written(tmp_path / "a.jsonl", '"a\\ud83d"\n"\\ud83d\\udc3b"\n'))
    assert documents(texts) == ["a\ufffd", "🐻"]
    assert texts.report.notes == ("unpaired surrogates became U+FFFD in 1 file",)

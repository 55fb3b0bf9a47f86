"""Conversations in files of records: recognised, read turn by turn, counted, refused by line."""

import csv
import gzip
import io
import json
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import InputError
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from tests.corpus.reading import conversations, corpus, documents, lines, refused, written

QUESTION, ANSWER = ("user", "Who has the owl?"), ("assistant", "Tom.")
SYSTEM = ("system", "Be brief.")
USER, ASSISTANT = {"role": "user", "content": "Who has the owl?"}, {"from": "gpt", "value": "Tom."}
ASKED, SAID = QUESTION[1], ANSWER[1]


FORMS = [
    ({"messages": [USER, ASSISTANT]}, [QUESTION, ANSWER], "'messages'"),
    ({"Conversations": [USER, ASSISTANT]}, [QUESTION, ANSWER], "'Conversations'"),
    ({"conversation": [USER, ASSISTANT]}, [QUESTION, ANSWER], "'conversation'"),
    (
        {"messages": [USER, ASSISTANT], "system": "Be brief.", "text": "t"},
        [SYSTEM, QUESTION, ANSWER],
        "'messages' and 'system'",
    ),
    (
        {"messages": [{"role": "developer", "content": "Be brief."}, USER, ASSISTANT, USER]},
        [SYSTEM, QUESTION, ANSWER, QUESTION],
        "'messages'",
    ),
    (
        {"messages": [ASSISTANT, USER, {"role": "Bot", "content": "Tom."}]},
        [ANSWER, QUESTION, ANSWER],
        "'messages'",
    ),
    (
        {
            "messages": [
                {"role": "system", "content": None},
                {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},
                {"role": "human", "content": ""},
                {"role": "model", "content": "c"},
            ]
        },
        [("system", ""), ("user", "ab"), ("user", ""), ("assistant", "c")],
        "'messages'",
    ),
    (
        {"instruction": ASKED, "input": "", "output": SAID, "text": "all of it"},
        [QUESTION, ANSWER],
        "'instruction', 'input' and 'output'",
    ),
    (
        {"instruction": "Who?", "input": "Tom\nAnn", "response": SAID},
        [("user", "Who?\n\nTom\nAnn"), ANSWER],
        "'instruction', 'input' and 'response'",
    ),
    (
        {"instruction": "Who?", "context": "Tom has it.", "response": SAID, "category": "qa"},
        [("user", "Who?\n\nTom has it."), ANSWER],
        "'instruction', 'context' and 'response'",
    ),
    (
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT],
            "system": "Be long.",
        },
        [SYSTEM, QUESTION, ANSWER],
        "'messages' and 'system'",
    ),
    (
        {"instruction": ASKED, "input": " \n", "answer": SAID},
        [QUESTION, ANSWER],
        "'instruction', 'input' and 'answer'",
    ),
    ({"prompt": ASKED, "completion": SAID}, [QUESTION, ANSWER], "'prompt' and 'completion'"),
    ({"query": ASKED, "response": SAID}, [QUESTION, ANSWER], "'query' and 'response'"),
    ({"prompt": ASKED, "output": SAID}, [QUESTION, ANSWER], "'prompt' and 'output'"),
    (
        {"system_prompt": "Be brief.", "Question": ASKED, "ANSWER": SAID, "id": 3},
        [SYSTEM, QUESTION, ANSWER],
        "'Question', 'ANSWER' and 'system_prompt'",
    ),
    (
        {"prompt": [USER], "completion": [ASSISTANT]},
        [QUESTION, ANSWER],
        "'prompt' and 'completion'",
    ),
    ({"prompt": [USER], "completion": SAID}, [QUESTION, ANSWER], "'prompt' and 'completion'"),
    ({"question": 0, "answer": SAID}, [("user", "0"), ANSWER], "'question' and 'answer'"),
]


@pytest.mark.parametrize(("record", "turns", "fields"), FORMS, ids=[form[2] for form in FORMS])
def test_the_usual_forms_are_recognised(tmp_path, record, turns, fields):
    for path in (
        written(tmp_path / "a.jsonl", "null\n" + lines(record, record)),
        written(tmp_path / "a.json", json.dumps([record, record])),
        written(tmp_path / "a.ndjson.gz", gzip.compress(lines(record, record).encode())),
    ):
        texts = Corpus(path)
        assert texts.has_conversations()
        assert conversations(texts) == [turns, turns]
        report = texts.report
        assert report.notes[0] == f"read conversations from {fields} in 1 file"
        unread = [name for name in record if name in ("text", "category") or unused(record, name)]
        words = (f"Not read: the text in {', '.join(map(repr, unread))}",) if unread else ()
        assert report.notes[1:] == words
        assert (report.documents, report.conversations, report.turns) == (2, 2, 2 * len(turns))
        assert report.characters == 2 * sum(len(text) for _, text in turns)
        assert conversations(Corpus(path, chat=True)) == [turns, turns]


@pytest.mark.parametrize(
    ("name", "data", "turns"),
    [
        ("a.csv", "id,Question,ANSWER\n1,Who has the owl?,Tom.\n", [QUESTION, ANSWER]),
        ("a.csv", "prompt;completion\nWho has the owl?;Tom.\n", [QUESTION, ANSWER]),
        ("a.tsv", "answer\tquestion\nTom.\tWho has the owl?\n", [QUESTION, ANSWER]),
        (
            "a.csv",
            'System,instruction,input,output\nBe brief.,"Who,\r\n""we""?","Tom,Ann",Tom.\n',
            [SYSTEM, ("user", 'Who,\n"we"?\n\nTom,Ann'), ANSWER],
        ),
        ("a.csv", "system,query,text,response,\n,0,t,Tom.\n", [("user", "0"), ANSWER]),
    ],
)
def test_columns_are_recognised_in_any_letter_case(tmp_path, name, data, turns):
    texts = Corpus(written(tmp_path / name, data))
    assert conversations(texts) == [turns]
    assert any(note.startswith("read conversations from ") for note in texts.report.notes)


def unused(record, name):
    """True for a system prompt beside one that a conversation begins with."""
    return name == "system" and record[name] == "Be long."


TEXTS = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]))
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), max_size=6)
SAID_TEXT = TEXTS.filter(str.strip)
LAST = st.tuples(st.just("user"), SAID_TEXT), st.tuples(st.just("assistant"), SAID_TEXT)
ANSWERED = st.builds(lambda turns, last: [*turns, *last], TURNS, st.tuples(*LAST))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("conversations")


@given(
    st.lists(ANSWERED, min_size=1, max_size=4),
    st.sampled_from([("role", "content"), ("from", "value")]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.integers(1, 50) | st.none(),
)
def test_turns_come_back(folder, found, names, encoding, piece):
    records = [{"messages": [dict(zip(names, turn, strict=True)) for turn in t]} for t in found]
    data = lines(*records)
    path = written(folder / "a.jsonl", data.encode(encoding))
    assert conversations(corpus(path, piece)) == found
    path = written(folder / "a.json", json.dumps(records, ensure_ascii=False).encode(encoding))
    assert conversations(corpus(path, piece)) == found
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a.txt", "a story")
        archive.writestr("a.jsonl", data)
    assert conversations(corpus(folder / "a.zip", piece)) == [[("", "a story")], *found]
    assert Corpus(folder / "a.zip").has_conversations()


@given(
    st.lists(st.tuples(SAID_TEXT, TEXTS, SAID_TEXT), min_size=1, max_size=5),
    st.sampled_from([",", ";", "\t"]),
    st.integers(1, 50) | st.none(),
)
def test_columns_come_back(folder, rows, separator, piece):
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter=separator)
    writer.writerows([["instruction", "input", "output"], *rows])
    expected = [
        [("user", f"{asked}\n\n{more}" if more.strip() else asked), ("assistant", answer)]
        for asked, more, answer in rows
    ]
    assert conversations(corpus(written(folder / "a.csv", table.getvalue()), piece)) == expected


NAMES = "messages conversations role from content value text prompt completion instruction input"
KEYS = st.sampled_from([*NAMES.split(), "output", "system", "question", "answer", "type"])
WORDS = st.sampled_from(["", "user", "gpt", "tool", "text", "\ud83d", "<|im_end|>", "\r", "\0"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.lists(VALUES, min_size=1, max_size=3), st.sampled_from([None, True, False]))
def test_any_record_is_read_or_refused_in_a_line(folder, values, chat):
    path = written(folder / "any.jsonl", lines(*values))
    texts = Corpus(path, chat=chat)
    try:
        pieces = list(texts.pieces())
    except InputError as error:
        assert str(error).isprintable() and "any.jsonl" in str(error)
        return
    assert all(bool(piece.turns) != bool(piece.text) for piece in pieces) and pieces[-1].ends
    for piece in pieces:
        for text in (piece.text, *(turn.text for turn in piece.turns)):
            text.encode()
    assert texts.report.conversations == sum(bool(piece.turns) for piece in pieces)
    assert texts.has_conversations() == bool(texts.report.conversations)
    assert not (chat is False and any(piece.turns for piece in pieces))


@pytest.mark.parametrize(
    "values",
    [
        [{"text": "a", "prompt": "b"}, {"text": "c", "answer": "d"}],
        [{"text": "a", "messages": "b"}, {"text": "c", "messages": [USER]}],
        [{"text": "a", "messages": [{"id": 1}]}, {"text": "c"}],
        [{"text": "a", "messages": []}, {"text": "c", "messages": []}],
        [{"content": "a", "query": 7, "response": 200}, {"content": "c"}],
        [{"story": "a", "question": "b", "answer": {"value": "c"}}, {"story": "c"}],
        ["a", {"text": "c", "messages": [USER, ASSISTANT]}],
    ],
)
def test_records_with_a_text_and_no_conversation_are_texts(tmp_path, values):
    path = written(tmp_path / "a.jsonl", lines(*values))
    assert not Corpus(path).has_conversations()
    assert documents(path) == documents(Corpus(path, chat=False)) == ["a", "c"]


@pytest.mark.parametrize(("record", "turns", "fields"), FORMS, ids=[form[2] for form in FORMS])
def test_a_field_or_no_chat_reads_texts(tmp_path, record, turns, fields):
    del turns, fields
    path = written(tmp_path / "a.jsonl", lines({**record, "text": "t", "body": "b"}))
    for texts, expected in (
        (Corpus(path, chat=False), "t"),
        (Corpus(path, field="body"), "b"),
        (Corpus(path, field="body", chat=False), "b"),
    ):
        assert not texts.has_conversations()
        assert documents(texts) == [expected] and texts.report.conversations == 0
    message = refused(path, field="body", chat=True)
    assert message.startswith("--chat reads conversations, and --field body single texts")


def test_conversations_without_an_answer_are_counted(tmp_path):
    silent = [
        {"messages": [USER]},
        {"messages": []},
        {"messages": None},
        {"messages": [USER, {"role": "assistant", "content": " \n"}]},
        {"messages": [USER, {"role": "assistant", "content": None}]},
    ]
    path = written(tmp_path / "a.jsonl", lines(*silent, {"messages": [USER, ASSISTANT]}, *silent))
    texts = Corpus(path)
    assert conversations(texts) == [[QUESTION, ANSWER]]
    report = texts.report
    assert (report.unanswered, report.conversations, report.empty) == (10, 1, 0)
    words = "a.jsonl has no conversation with an answer"
    assert words in refused(written(tmp_path / "b" / "a.jsonl", lines(*silent)))
    assert words in refused(tmp_path / "b")
    table = "question,answer\na\nb,\n,c\nd,e\n"
    texts = Corpus(written(tmp_path / "a.csv", table))
    assert [turns[0][1] for turns in conversations(texts)] == ["d"]
    assert texts.report.unanswered == 2
    assert "Left out: 1 conversation with a blank question" in texts.report.notes
    path = written(tmp_path / "b.jsonl", lines({"prompt": "a"} | {"answer": "b"}, {"prompt": "a"}))
    texts = Corpus(path)
    assert len(conversations(texts)) == 1 and texts.report.unanswered == 1


ROLES = "known roles are system, developer, user, human, "


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"messages": [USER, {"role": "critic", "content": "4"}]},
            "turn 2 of line 2 has the role",
        ),
        ({"messages": [{"content": "a"}]}, f"turn 1 of line 2 has no role; {ROLES}"),
        ({"messages": [{"role": 3, "content": "a"}]}, f"turn 1 of line 2 has no role; {ROLES}"),
        ({"messages": [{"role": "user"}]}, "turn 1 of line 2 has no content; correct or remove it"),
        ({"messages": [USER, "Tom."]}, "turn 2 of line 2 is not an object with role and content;"),
        ({"messages": "Tom."}, "the messages of line 2 are not a list; correct or remove it"),
        ({"messages": {"role": "user"}}, "the messages of line 2 are not a list"),
        (
            {"text": "a"},
            "line 2 has no field 'messages', unlike those before it",
        ),
        ("Tom.", "line 2 is not an object with a conversation"),
        (3, "line 2 is not an object with a conversation"),
        (
            {"messages": [{"role": "user", "content": True}]},
            "'content' of turn 1 of line 2 is not te",
        ),
        ({"messages": [{"from": "human", "value": {}}]}, "'value' of turn 1 of line 2 is not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "part 1 of the field 'content' of turn 1 of line 2 is not text, but of type 'image_",
        ),
        (
            {"messages": [USER, ASSISTANT], "system": True},
            "the field 'system' of line 2 is not text",
        ),
    ],
)
def test_a_wrong_turn_is_named(tmp_path, record, words):
    first = {"messages": [USER, ASSISTANT], "system": ""}
    path = written(tmp_path / "a.jsonl", lines(first, record))
    message = refused(path)
    assert words in message and message.startswith(f"{path}: ")
    assert any(x in message for x in ("correct or remove it", "remove such turns", "such parts"))
    assert "--no-chat" not in message  # there is no text to read
    assert words.replace("line", "element") in refused(
        written(tmp_path / "a.json", json.dumps([first, record]))
    )
    assert len(conversations(written(path, lines(first, first)))) == 2  # the advice is followed


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": ["a", "b"]}, "turn 1 of line 1 is not an object with role and content"),
        ({"messages": [{"name": "a"}]}, "turn 1 of line 1 has no role"),
        ({"prompt": "a", "completion": True}, "the field 'completion' of line 1 is not text"),
        ({"question": {}, "answer": "a"}, "the field 'question' of line 1 is not text"),
        ({"prompt": "a", "completion": ["b", "c"]}, "the field 'completion' of line 1 is not text"),
    ],
)
def test_what_looks_like_a_conversation_is_refused_as_one(tmp_path, record, words):
    assert words in refused(written(tmp_path / "a.jsonl", lines(record)))


def test_no_chat_is_advised_where_there_is_a_text(tmp_path):
    turns = [USER, ASSISTANT, {"role": "critic", "content": "4"}]
    records = [{"text": "a", "messages": turns[:2]}, {"text": "b", "messages": turns}]
    path = written(tmp_path / "a.jsonl", lines(*records))
    assert refused(path).endswith("remove such turns, or give --no-chat to read the texts")
    assert documents(Corpus(path, chat=False)) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "data", "where"),
    [
        ("a.jsonl", '{"text": "a"}\n', "line 1"),
        ("a.jsonl", '"a"\n', "line 1"),
        ("a.json", '["a"]', "element 1"),
        ("a.csv", "text,id\na,1\n", "the header row"),
        ("a.csv", "text\na\n", "the header row"),
        ("a.tsv", "id\tquestion\n1\ta\n", "the header row"),
    ],
)
def test_chat_refuses_records_without_a_conversation(tmp_path, name, data, where):
    path = written(tmp_path / name, data)
    message = refused(path, chat=True)
    assert f"{name} has no conversation in {where}; --chat needs fields with messages" in message
    assert "leave it out to read texts" in message
    assert refused(tmp_path, chat=True) == message  # also if it was found


def test_chat_takes_texts_beside_conversations(tmp_path):
    written(tmp_path / "z.txt", "a story")
    message = refused(tmp_path, chat=True)
    assert message.startswith("no conversations were found; --chat needs records with messages")
    written(tmp_path / "a.jsonl", lines({"prompt": "a", "answer": "b"}))
    texts = Corpus(tmp_path, chat=True)
    assert conversations(texts) == [[("user", "a"), ("assistant", "b")], [("", "a story")]]


def test_texts_and_conversations_may_be_mixed(tmp_path):
    written(tmp_path / "a.txt", "one\r\n")
    written(tmp_path / "b.csv", "question,answer\nWho has the owl?,Tom.\r\n")
    written(tmp_path / "c.jsonl", lines({"text": "two"}))
    written(tmp_path / "d.jsonl", lines({"messages": [USER, ASSISTANT]}))
    texts = Corpus(tmp_path)
    answered = [QUESTION, ANSWER]
    assert conversations(texts) == [[("", "one\n")], answered, [("", "two")], answered]
    report = texts.report
    assert (report.files, report.documents, report.conversations, report.turns) == (4, 4, 2, 4)
    assert report.notes == (
        "CRLF line ends became LF in 1 file",
        "read conversations from 'messages' in 1 file",
        "read conversations from 'question' and 'answer' in 1 file",
        "read the text from field 'text' in 1 file",
    )


def test_turns_are_cleaned_each_for_itself(tmp_path):
    turns = [
        {"role": "user", "content": "a\r\nb\r"},
        {"role": "assistant", "content": "\n\ud83d c"},
    ]
    texts = Corpus(written(tmp_path / "a.jsonl", lines({"messages": turns})))
    assert conversations(texts) == [[("user", "a\nb\n"), ("assistant", "\n\ufffd c")]]
    assert texts.report.notes[:2] == (
        "CR line ends became LF in 1 file",
        "CRLF line ends became LF in 1 file",
    )
    assert "unpaired surrogates became U+FFFD in 1 file" in texts.report.notes


def test_long_conversations_and_turns(tmp_path):
    many = [USER, ASSISTANT] * 5_000
    long = [USER, {"role": "assistant", "content": "a" * (5 << 20)}]
    path = written(tmp_path / "a.jsonl", lines({"messages": many}, {"messages": long}))
    texts = Corpus(path)
    found = conversations(texts)
    assert [len(turns) for turns in found] == [10_000, 2] and len(found[1][1][1]) == 5 << 20
    assert texts.report.turns == 10_002
    message = refused(path, limits=Limits(record=1 << 20))
    assert "line 2 has more than 1,048,576 characters; divide it" in message or "line 1" in message
    nested = '{"messages": ' + "[" * 100_000
    message = refused(written(tmp_path / "b.jsonl", lines({"messages": many}) + nested))
    assert "line 2 is not JSON: it is nested too deeply" in message


def test_a_text_that_is_called_messages_is_a_text(tmp_path):
    path = written(tmp_path / "a.jsonl", lines({"messages": "a"}, {"messages": "b"}))
    assert refused(path).endswith("give --field with one of these: messages")
    assert documents(Corpus(path, field="messages")) == ["a", "b"]


def test_looking_for_conversations_reads_the_first_records_only(tmp_path):
    """Nothing is read of what has no records, and of other files no more than the beginning."""
    written(tmp_path / "a.txt.gz", b"damaged")
    written(tmp_path / "b.txt", b"\xff\xff")
    path = written(tmp_path / "c.jsonl", lines({"text": "a"}) + "damaged")
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr("a.jsonl", lines({"text": "a"}) + "damaged")
        archive.writestr("b.txt", b"\xff\xff")
    names = [path, tmp_path / "a.txt.gz", tmp_path / "b.txt", tmp_path / "d.zip"]
    for name in names:
        refused(name)
    assert not Corpus(names).has_conversations()
    written(path, lines({"question": "a", "answer": "b"}) + "damaged")
    assert Corpus(names).has_conversations()


def test_a_number_is_an_answer_too(tmp_path):
    path = written(
        tmp_path / "a.jsonl", '{"question": "2 + 2?", "answer": 4}\n{"question": 5, "answer": 0.5}'
    )
    texts = [turn.text for piece in Corpus(path).pieces() for turn in piece.turns]
    assert texts == ["2 + 2?", "4", "5", "0.5"]

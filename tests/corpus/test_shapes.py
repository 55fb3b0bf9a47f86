"""Shapes of records in published files: each becomes conversations or texts, and is said."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.checks import InputError
from smallmind.corpus import shapes
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from tests.corpus.reading import conversations, corpus, documents, lines, refused, written

SAID = [("user", "q"), ("assistant", "a")]
TWICE = [*SAID, ("user", "q2"), ("assistant", "a2")]
ASKED = [("system", "s"), *SAID]
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WORSE = {"role": "assistant", "content": "b"}
HUMAN = "\n\nHuman: q\n\nAssistant: a"


def message(number, parent, role, text, rank=None, **more):
    """A message as Open Assistant writes it: oasst-data/oasst_data/schemas.py of its repository."""
    named = {"message_id": f"m{number}", "parent_id": None if parent is None else f"m{parent}"}
    return {**named, "text": text, "role": role, "lang": "en", "rank": rank, **more}


MESSAGES = [
    message(0, None, "prompter", "q"),
    message(1, 0, "assistant", "worse", 1),
    message(2, 0, "assistant", "deleted", 0, deleted=True),
    message(3, 0, "assistant", "a", 0.0),
    message(4, 3, "prompter", "q2"),
    message(5, 4, "assistant", "unranked"),
    message(6, 4, "assistant", "a2", 2),
]
ROWS = [{**each, "message_tree_id": "m0"} for each in MESSAGES]


def tree(number):
    """A message with its replies."""
    own = [x for x in MESSAGES if x["parent_id"] == f"m{number}"]
    return {**MESSAGES[number], "replies": [tree(MESSAGES.index(each)) for each in own]}


def parts(*texts, role=None):
    return {**({"role": role} if role else {}), "parts": [{"text": text} for text in texts]}


def langchain(kind, text):
    return {"type": kind, "data": {"content": text, "type": kind, "additional_kwargs": {}}}


def constructor(kind, text):
    path = ["langchain", "schema", "messages", f"{kind}Message"]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": {"content": text}}


PUBLISHED = [  # of each file the name, its records, the conversations, and words of the report
    ("ultrachat.jsonl", [{"id": "0", "data": ["q", "a", "q2", "a2"]}], [TWICE], "lists of texts"),
    ("dialog.jsonl", [{"dialog": ["q", "a"]}] * 2, [SAID] * 2, "lists of texts"),
    (
        "capybara.jsonl",
        [{"source": "s", "conversation": [{"input": "q", "output": "a"}]}],
        [SAID],
        "pairs",
    ),
    ("pairs.jsonl", [{"conversation": [{"human": "q", "assistant": "a"}]}], [SAID], "pairs"),
    (
        "trees.jsonl",
        [{"message_tree_id": "m0", "tree_state": "growing", "prompt": tree(0)}] * 2,
        [TWICE] * 2,
        "the replies of the best rank",
    ),
    ("messages.jsonl", ROWS, [TWICE], "the replies of the best rank"),
    (
        "two.jsonl",
        [*ROWS[:4], *({**x, "message_tree_id": "n"} for x in ROWS)],
        [SAID, TWICE],
        "the replies of the best rank",
    ),
    ("hh.jsonl", [{"chosen": HUMAN, "rejected": HUMAN + "?"}], [SAID], "preferences"),
    (
        "hh2.jsonl",
        [{"chosen": HUMAN + "\n\nHuman: q2\n\nAssistant: a2", "rejected": HUMAN}],
        [TWICE],
        "preferences",
    ),
    (
        "split.jsonl",
        [{"prompt": HUMAN[:-1], "chosen": " a", "rejected": "b"}],
        [SAID],
        "preferences",
    ),
    ("dpo.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}], [SAID], "preferences"),
    (
        "orca.jsonl",
        [{"system": "s", "question": "q", "chosen": "a", "rejected": "b"}],
        [ASKED],
        "preferences",
    ),
    (
        "ultrafeedback.jsonl",
        [{"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER, WORSE], "score": 8.5}],
        [SAID],
        "preferences",
    ),
    (
        "trl.jsonl",
        [{"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WORSE]}],
        [SAID],
        "preferences",
    ),
    (
        "factory.jsonl",
        [{"conversations": [USER], "chosen": ASSISTANT, "rejected": WORSE}],
        [SAID],
        "preferences",
    ),
    (
        "openai.jsonl",
        [
            {
                "input": {"messages": [USER]},
                "preferred_output": [ASSISTANT],
                "non_preferred_output": [WORSE],
            }
        ],
        [SAID],
        "preferences",
    ),
    (
        "gemini.jsonl",
        [
            {
                "systemInstruction": parts("s"),
                "contents": [parts("q", role="user"), parts("a", role="model")],
            }
        ],
        [ASKED],
        "the contents of Gemini",
    ),
    (
        "langchain.json",
        [[langchain("system", "s"), langchain("human", "q"), langchain("ai", "a")]],
        [ASKED],
        "LangChain",
    ),
    (
        "langchain.jsonl",
        [{"messages": [{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}]}],
        [SAID],
        "LangChain",
    ),
    (
        "dumped.jsonl",
        [[constructor("Human", "q"), constructor("AI", "a")]],
        [SAID],
        "LangChain",
    ),
    ("list.json", [[USER, ASSISTANT]], [SAID], "a list of messages"),
    (
        "rows.jsonl",
        [{"conversation_id": i, **turn} for i in (1, 2) for turn in (USER, ASSISTANT)],
        [SAID] * 2,
        "a message per row",
    ),
    (
        "batch.jsonl",
        [
            {
                "custom_id": "1",
                "url": "/v1/chat/completions",
                "body": {"messages": [USER, ASSISTANT]},
            }
        ],
        [SAID],
        "the bodies of requests",
    ),
    (
        "rated.jsonl",
        [{"instruction": "q", "completions": [{"response": "a", "overall_score": 9.0}]}],
        [SAID],
        "the best and the worst of rated answers",
    ),
    (
        "ranked.jsonl",
        [
            {
                "prompt": "\n\nHuman: q\n\nAssistant: ",
                "answers": [{"answer": "b", "rank": 2.0}, {"answer": "a", "rank": 1.0}],
            }
        ],
        [SAID],
        "the best and the worst of rated answers",
    ),
    (
        "arena.jsonl",
        [
            {
                "winner": winner,
                "conversation_a": [USER, ASSISTANT],
                "conversation_b": [USER, WORSE],
            }
            for winner in ("model_a", "tie")
        ],
        [SAID] * 2,
        "the better and the worse of two answers",
    ),
    (
        "preferred.jsonl",
        [
            {
                "context": [USER],
                "response1": "b",
                "response2": "a",
                "overall_preference": 2,
            }
        ],
        [SAID],
        "the better and the worse of two answers",
    ),
    (
        "posts.jsonl",
        [{"history": "q", "human_ref_A": "b", "human_ref_B": "a", "labels": 0}],
        [SAID],
        "the better and the worse of two answers",
    ),
    (
        "safe.jsonl",
        [{"prompt": "q", "response_0": "b", "response_1": "a", "better_response_id": 1}],
        [SAID],
        "the better and the worse of two answers",
    ),
    (
        "questions.jsonl",
        [{"question": "q", "answers": ["a", "b"]}],
        [SAID],
        "the first answer",
    ),
    (
        "squad.jsonl",
        [{"id": "1", "context": "", "question": "q", "answers": {"text": ["a", "b"]}}],
        [SAID],
        "the first answer",
    ),
]


@pytest.mark.parametrize(("name", "records", "turns", "words"), PUBLISHED)
def test_conversations_of_published_files(tmp_path, name, records, turns, words):
    for path in (
        written(tmp_path / f"{name.removesuffix('l')}l", lines(*records)),
        written(tmp_path / "a.json.gz", gzip.compress(json.dumps(records).encode())),
    ):
        texts = Corpus(path)
        assert texts.has_conversations()
        assert conversations(texts) == turns
        assert any(note.startswith(f"read {words}") or words in note for note in texts.report.notes)


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.names)
def test_each_shape_of_a_conversation_is_among_the_published(shape):
    if not shape.preferences:  # see test_pairs.py
        assert not shape.is_chat or any(words in shape.words for *_, words in PUBLISHED)


@pytest.mark.parametrize(
    "record",
    [
        {"inputs": "q", "targets": "a", "task_name": "t"},  # FLAN
        {"inputs": [1], "targets": [2], "inputs_pretokenized": "q", "targets_pretokenized": "a"},
        {"input": "q", "output": "a"},
        {"input_text": "q", "output_text": "a"},
        {"problem": "q", "level": "Level 5", "solution": "a"},
        {"role_1": "Physicist", "message_1": "q", "message_2": "a"},
        {"user": "q", "assistant": "a"},
        {"human": "q", "bot": "a"},
        {"article": "q", "highlights": "a"},
        {"input": [USER], "output": ASSISTANT},
        {"prompt": json.dumps([USER]), "completion": repr([ASSISTANT])},
        {"id": "x", "items": [{"from": "human", "value": "q"}, {"from": "chatgpt", "value": "a"}]},
        {"id": "x", "chat": [USER, ASSISTANT]},
        {"messages": [{"author": "user", "content": "q"}, {"author": "bot", "content": "a"}]},
    ],
    ids=" ".join,
)
def test_pairs_and_messages_have_other_names_too(tmp_path, record):
    assert conversations(written(tmp_path / "a.jsonl", lines(record))) == [SAID]


def test_a_text_is_read_before_what_may_be_parts_of_other_things(tmp_path):
    record = {"text": "t", "user": "ann", "input": "q", "output": "a", "chat": [USER, ASSISTANT]}
    texts = Corpus(written(tmp_path / "a.jsonl", lines(record)))
    assert documents(texts) == ["t"]
    assert texts.report.notes[-1] == "Not read: the text in 'user', 'input', 'output', 'chat'"
    two = {"a": [USER, ASSISTANT], "b": [USER, WORSE]}  # which of both is not known
    assert "give --field with one of these: a, b" in refused(
        written(tmp_path / "b.jsonl", lines(two))
    )


def test_a_call_may_be_a_turn_of_its_own(tmp_path):
    call = {"name": "f", "arguments": {"x": 1}}
    for name, said in (("function_call", call), ("tool_call", [call, call])):
        turns = [USER, {"from": name, "value": json.dumps(said)}]
        turns += [{"from": "tool_response", "value": "4"}, ASSISTANT]
        (piece,) = Corpus(written(tmp_path / "a.jsonl", lines({"messages": turns}))).pieces()
        assert [turn.role for turn in piece.turns] == ["user", "assistant", "tool", "assistant"]
        found = [each["function"] for each in json.loads(piece.turns[1].more)["tool_calls"]]
        assert found == ([call] if said is call else said) and piece.turns[1].learned
    turns[1]["value"] = "f(1)"
    path = written(tmp_path / "b.jsonl", lines({"messages": turns}))
    assert "turn 2 of line 1 is not a list of calls" in refused(path)


FRAMES = {  # `DataFrame({"question": ["q", "q2"], "answer": ["a", "a2"]}).to_json(orient=...)`
    "split": {
        "columns": ["question", "answer"],
        "index": [0, 1],
        "data": [["q", "a"], ["q2", "a2"]],
    },
    "records": [{"question": "q", "answer": "a"}, {"question": "q2", "answer": "a2"}],
    "index": {
        "0": {"question": "q", "answer": "a"},
        "1": {"question": "q2", "answer": "a2"},
    },
    "columns": {"question": {"0": "q", "1": "q2"}, "answer": {"0": "a", "1": "a2"}},
    "values": [["q", "a"], ["q2", "a2"]],
    "table": {
        "schema": {"fields": [{"name": "question", "type": "string"}], "pandas_version": "1.4.0"},
        "data": [{"index": 0, "question": "q", "answer": "a"}, {"question": "q2", "answer": "a2"}],
    },
    "list": {"question": ["q", "q2"], "answer": ["a", "a2"]},
    "named": {"x": {"question": "q", "answer": "a"}, "y": {"question": "q2", "answer": "a2"}},
    "named columns": {"question": {"x": "q", "y": "q2"}, "answer": {"x": "a", "y": "a2"}},
    "data": {"data": [{"question": "q", "answer": "a"}, {"question": "q2", "answer": "a2"}]},
    "train": {"train": [{"question": "q", "answer": "a"}, {"question": "q2", "answer": "a2"}]},
    "rows": {
        "features": [],
        "rows": [
            {"row_idx": 0, "row": {"question": "q", "answer": "a"}},
            {"row_idx": 1, "row": {"question": "q2", "answer": "a2"}},
        ],
    },
    "task": {
        "Contributors": [],
        "Definition": [""],
        "Positive Examples": [{"input": "x", "output": "y", "explanation": "z"}],
        "Instances": [
            {"id": "1", "input": "q", "output": ["a", "b"]},
            {"id": "2", "input": "q2", "output": "a2"},
        ],
    },
    "paragraphs": {
        "version": "",
        "data": [
            {
                "paragraphs": [
                    {
                        "context": "",
                        "qas": [
                            {"question": "q", "answers": [{"text": "a", "answer_start": 0}]},
                            {"question": "none", "answers": [], "is_impossible": True},
                            {"question": "q2", "answers": [{"text": "a2", "answer_start": 0}]},
                        ],
                    }
                ]
            }
        ],
    },
}


@pytest.mark.parametrize("form", FRAMES)
def test_files_that_hold_records(tmp_path, form):
    for data in (json.dumps(FRAMES[form]), json.dumps(FRAMES[form], indent=2)):
        texts = Corpus(written(tmp_path / "a.json", data))
        assert conversations(texts) == [SAID, [("user", "q2"), ("assistant", "a2")]]
        assert texts.has_conversations()
        assert any(note.startswith("read ") for note in texts.report.notes[:-1]) == (
            form != "records"
        )


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_an_array_may_have_the_name_of_lines(tmp_path, name, indent):
    records = [{"text": "a"}, {"text": "b"}]
    assert documents(written(tmp_path / name, json.dumps(records, indent=indent))) == ["a", "b"]


def test_texts_in_a_frame_and_what_is_not_read(tmp_path):
    frame = {"id": {"0": 1, "1": 2}, "text": {"0": "a", "1": "b"}}
    assert documents(written(tmp_path / "a.json", json.dumps(frame))) == ["a", "b"]
    assert documents(written(tmp_path / "b.json", '[[1, "a"], [2, "b"]]')) == ["a", "b"]
    record = {"train": [{"text": "a"}], "test": [{"text": "b"}]}
    texts = Corpus(written(tmp_path / "c.json", json.dumps(record)))
    assert documents(texts) == ["a"]
    assert texts.report.notes[-1] == "Not read: the text in 'test'"
    record = {"text": "a", "data": [{"text": "b"}], "items": ["c", "d"]}
    assert documents(written(tmp_path / "d.jsonl", lines(record))) == ["a"]


@pytest.mark.parametrize("extra", [{"chat": False}, {"field": "text"}])
def test_texts_are_read_where_they_are_asked_for(tmp_path, extra):
    record = {"prompt": "q", "chosen": "a", "rejected": "b", "text": "t"}
    path = written(tmp_path / "a.json", json.dumps({"data": [record, record]}))
    assert documents(Corpus(path, **extra)) == ["t", "t"]
    assert documents(Corpus(path, field="chosen")) == ["a", "a"]
    path = written(tmp_path / "b.jsonl", lines(USER, ASSISTANT))
    settings = {name: value and "content" for name, value in extra.items()}
    assert documents(Corpus(path, **settings)) == ["q", "a"]


def test_a_part_of_gemini_that_is_not_text_is_named(tmp_path):
    record = {"contents": [{"role": "user", "parts": [{"inlineData": {"data": "x"}}]}]}
    path = written(tmp_path / "a.jsonl", lines(record))
    assert "part 1 of the field 'content' of turn 1 of line 1 is not text, but of" in refused(path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_have_the_shapes_too(tmp_path, kind):
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
    pairs = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    for records, turns in ((pairs, [SAID]), (ROWS, [TWICE])):
        names = list(dict.fromkeys(name for record in records for name in record))
        rows = [[record.get(name) for name in names] for record in records]
        path = tmp_path / f"a.{kind}"
        if kind == "csv":
            table = [names, *(["" if x is None else str(x) for x in row] for row in rows)]
            written(path, "".join(",".join(row) + "\n" for row in table))
        else:
            columns = [
                [float(x) if isinstance(x, int) and not isinstance(x, bool) else x for x in column]
                for column in zip(*rows, strict=True)
            ]
            parquet.write_table(pa.table(dict(zip(names, columns, strict=True))), path)
        assert conversations(Corpus(path)) == turns


@pytest.mark.parametrize("piece", [1, 5, 64, None])
@pytest.mark.parametrize("indent", [None, 1])
def test_arrays_are_read_as_they_come(tmp_path, piece, indent):
    values = [{"text": "a\n" * 40, "n": 12345, "x": [1.5, -0.0, True]}, "b", {"text": '"\\]'}]
    path = written(tmp_path / "a.json", json.dumps(values, indent=indent))
    assert documents(corpus(path, piece)) == ["a\n" * 40, "b", '"\\]']
    numbers = list(range(3000))
    path = written(tmp_path / "b.json", json.dumps([{"text": str(n), "n": n} for n in numbers]))
    assert documents(corpus(path, piece)) == [str(n) for n in numbers]


def test_an_array_may_be_longer_than_what_is_read_whole(tmp_path):
    limits = Limits(piece=100, record=1000, whole=2000)
    path = written(tmp_path / "a.json", json.dumps(["x" * 500] * 100))
    assert len(documents(Corpus(path, limits=limits))) == 100
    path = written(tmp_path / "b.json", json.dumps(["x", "y" * 3000]))
    assert "has more than 1,000 characters" in refused(path, limits=limits)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('[{"text": "a"},\n {"text": "b"}\n {"text": "c"}]', "delimiter at column 2 of line 3"),
        ('[{"text": "a"},\n {"text" "b"}]' + " " * 99, "delimiter at column 10 of line 2"),
        ('[{"text": "a"},]', "expecting value at column 16 of line 1"),
        ('[\n"a"] []', "has more than one JSON value, the second in line 2"),
        ('["a"', "expecting ',' delimiter at column 5 of line 1"),
        ('["a", {"text": 1, "text": 2}]', "has the key 'text' twice"),
    ],
)
@pytest.mark.parametrize("piece", [3, None])
def test_a_damaged_array_is_named(tmp_path, data, words, piece):
    assert words in refused(written(tmp_path / "a.json", data), piece=piece)


SAYINGS = st.text(st.sampled_from("ab \n\r\x85é\u2028\ud83d"), max_size=5)
MESSAGES_OF_ALL_KINDS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "human", "gpt"]), SAYINGS), max_size=6
)


@given(
    st.lists(MESSAGES_OF_ALL_KINDS, min_size=1, max_size=4),
    st.sampled_from([("role", "content"), ("from", "value")]),
)
def test_messages_with_a_role_and_a_text_alone_are_read_like_all_others(found, names):
    """The former take a short way."""
    plain = [[dict(zip(names, turn, strict=True)) for turn in turns] for turns in found]
    plain.append([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    others = [[{**turn, "n": 1} for turn in turns] for turns in plain]
    with tempfile.TemporaryDirectory() as folder:
        read = []
        for records in plain, others:
            path = written(Path(folder) / "a.jsonl", lines(*({"messages": x} for x in records)))
            texts = Corpus(path)
            read.append((list(texts.pieces()), texts.report))
    assert read[0] == read[1]


def test_the_records_of_a_large_object_are_read_as_they_come(tmp_path):
    """A small one is read whole, and gives the same, with the same report."""
    records = [{"question": f"q{i}", "answer": "a" * 50} for i in range(20)]
    values = [
        {"version": "1.1", "n": 2.5, "data": records, "about": "words"},
        {"train": records},
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a" * 99},
            ]
        },
        {"columns": ["text"], "data": [["a" * 99], ["b"]]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a" * 99}]},
        {"data": [], "text": "a" * 99},
        {"data": [1, 2], "text": "a" * 99},
        {"prompt": "q", "data": records, "completion": "a"},
    ]
    for value in values:
        path = written(tmp_path / "a.json", json.dumps(value))
        read = []
        for piece in 2**20, 10**4, 60:
            texts = corpus(path, piece)
            found = conversations(texts)
            counts = texts.report.documents, texts.report.conversations, texts.report.notes
            read.append((found, counts))
        assert read[0] == read[1] == read[2], value
    for damaged in (
        '{"data": [{"text": "a"}, {"text": "b"}',
        '{"data": [{"text": "a"}], "a": 1, "a": 2}',
    ):
        path = written(tmp_path / "a.json", damaged)
        for piece in 2**20, 8:
            with pytest.raises(InputError, match=r"a\.json"):
                conversations(corpus(path, piece))
    written(path, json.dumps({"data": records}))
    limits = Limits(piece=100, whole=200)
    assert len(conversations(Corpus(path, limits=limits))) == 20

"""Data as they are published: missing values, marked turns, odd tables, files in disguise."""

import gzip
import hashlib
import json
import zipfile

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from smallmind.corpus.survey import conversations, hashed, survey_conversations
from smallmind.text.chat import Turn
from tests.corpus.reading import documents, lines, refused, skipped, written

USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
ASKED, SAID = Turn("user", "2+2?"), Turn("assistant", "4")


def read(path, **settings):
    """The conversations that a path holds, and the notes about them."""
    corpus = Corpus(path, **settings)
    found = [list(turns) for turns in conversations(corpus.pieces())]
    return found, corpus.report.notes


def turns_of(path, record, **more):
    """The turns of a record in a file of its own, and the notes about it but for the first."""
    found, notes = read(written(path, json.dumps({**record, **more})))
    assert len(found) == 1
    return found[0], notes[1:]


# Values that are no text


@pytest.mark.parametrize("missing", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999", "null"])
def test_what_is_not_finite_is_missing(tmp_path, missing):
    data = f'{{"instruction": "Add 2 and 3.", "input": {missing}, "output": "5"}}\n'
    answers = f'{{"instruction": "a", "input": "", "output": {missing}}}\n'
    found, _ = read(written(tmp_path / "a.jsonl", data + answers))
    assert found == [[Turn("user", "Add 2 and 3."), Turn("assistant", "5")]]
    found, _ = read(written(tmp_path / "a.json", f"[{data.strip()},\n{answers}]"))
    assert found == [[Turn("user", "Add 2 and 3."), Turn("assistant", "5")]]
    texts = Corpus(written(tmp_path / "b.jsonl", f'{{"text": {missing}}}\n{missing}\n"a"\n'))
    assert documents(texts) == ["a"] and texts.report.empty == 2


@pytest.mark.parametrize(
    "digits", ["0.10", "1E5", "-0", "-0.0", "5", "1e-7", "3.14159265358979323846"]
)
def test_numbers_keep_their_digits(tmp_path, digits):
    path = written(tmp_path / "a.jsonl", f'{{"prompt": "Price?", "response": {digits}}}')
    assert read(path)[0] == [[Turn("user", "Price?"), Turn("assistant", digits)]]
    path = written(tmp_path / "b.json", f'{{"question": {digits}, "answer": "a"}}')
    assert read(path)[0] == [[Turn("user", digits), Turn("assistant", "a")]]


def test_parquet_has_missing_values_and_digits_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from decimal import Decimal

    table = {
        "question": pa.array(["Price?", "Sum?", "None?", "Nothing?"]),
        "context": pa.array(["x", None, "", "y"]),
        "answer": pa.array([0.1, 4.0, float("nan"), float("inf")], pa.float32()),
        "weight": pa.array([1.0, float("nan"), None, 0.0]),
        "source": pa.array(["web"] * 4),
    }
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    found, notes = read(tmp_path / "a.parquet")
    assert found == [
        [Turn("user", "Price?\n\nx"), Turn("assistant", "0.1")],
        [Turn("user", "Sum?"), Turn("assistant", "4.0")],
    ]
    assert "Not read: the text in 'source'" in notes
    prices = pa.array([Decimal("0.10"), Decimal("5.00")])
    parquet.write_table(pa.table({"prompt": ["a", "b"], "answer": prices}), tmp_path / "b.parquet")
    assert [turns[1].text for turns in read(tmp_path / "b.parquet")[0]] == ["0.10", "5.00"]
    turns = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.0}]
    ]
    turns[0] += [{"role": "assistant", "content": None, "weight": float("nan")}, ASSISTANT]
    parquet.write_table(pa.table({"messages": turns}), tmp_path / "c.parquet")
    found, notes = read(tmp_path / "c.parquet")
    assert [turn.learned for turn in found[0]] == [True, False, False, True]
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "d.parquet")
    assert "has two columns with the name 'text'; rename one" in refused(tmp_path / "d.parquet")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", '{"question": "", "answer": "x"}'),
        ("a.jsonl", '{"prompt": " \\n", "completion": "x"}'),
        ("a.json", '{"instruction": null, "input": "", "output": "x"}'),
        ("a.jsonl", '{"prompt": NaN, "response": "x"}'),
        ("a.jsonl", lines({"messages": [{"role": "user", "content": " "}, ASSISTANT]})),
        ("a.jsonl", lines({"conversations": [{"from": "human", "value": ""}, ASSISTANT]})),
        ("a.csv", "question,answer\n,x\n"),
        ("a.tsv", "prompt\tresponse\n \tx\n"),
    ],
)
def test_a_blank_question_is_not_learned(tmp_path, name, data):
    path = written(tmp_path / name, data)
    assert "has no conversation with an answer to learn" in refused(path)
    written(tmp_path / "b.txt", "text")
    texts = Corpus(tmp_path)
    assert documents(texts) == ["text"]
    assert skipped(texts, tmp_path)[name] == "has no conversation with an answer to learn"


def test_rows_with_a_blank_question_are_counted(tmp_path):
    path = written(tmp_path / "a.csv", "question,answer\n,x\n2+2?,4\n \t,y\n")
    found, notes = read(path)
    assert found == [[ASKED, SAID]]
    assert "Left out: 2 conversations with a blank question" in notes


def test_a_blank_question_between_others_is_context(tmp_path):
    blank = {"role": "user", "content": "\n"}
    turns, notes = turns_of(tmp_path / "a.jsonl", {"messages": [blank, ASSISTANT, USER, ASSISTANT]})
    assert turns == [Turn("user", "\n"), SAID._replace(learned=False), ASKED, SAID]
    assert notes == ("Not learned: 1 answer to a blank question",)
    turns, _ = turns_of(tmp_path / "b.jsonl", {"messages": [USER, blank, ASSISTANT]})
    assert turns[-1].learned  # it answers what is before the blank turn
    turns, _ = turns_of(tmp_path / "c.jsonl", {"instruction": "", "input": "2+2?", "output": "4"})
    assert turns == [ASKED, SAID]


# Marks, silent turns and thoughts


@pytest.mark.parametrize(
    "mark",
    [
        *({"weight": 0}, {"weight": 0.0}, {"weight": "0"}, {"train": False}, {"train": "false"}),
        *(
            {"trainable": False},
            {"training": False},
            {"learn": 0},
            {"loss": False},
            {"masked": True},
        ),
    ],
)
def test_a_turn_that_is_marked_is_context(tmp_path, mark):
    wrong = {"role": "assistant", "content": "5", **mark}
    asked_again = {"role": "user", "content": "Sure?"}
    right = {
        **ASSISTANT,
        **{name: 1 - float(value in (1, "1", True)) for name, value in mark.items()},
    }
    turns, notes = turns_of(tmp_path / "a.jsonl", {"messages": [USER, wrong, asked_again, right]})
    assert turns == [ASKED, Turn("assistant", "5", False), Turn("user", "Sure?"), SAID]
    assert notes == ("Not learned: 1 answer marked so in the file",)
    path = written(tmp_path / "b.jsonl", lines({"messages": [USER, wrong]}))
    assert "has no conversation with an answer to learn" in refused(path)


def test_marks_of_a_record_and_odd_marks(tmp_path):
    pairs = [{"prompt": "a", "completion": "b", "label": False}, {"prompt": "c", "completion": "d"}]
    more = [
        {**pairs[1], "weight": 0},
        {**pairs[1], "trainable": False},
        {**pairs[1], "label": True},
    ]
    found, notes = read(written(tmp_path / "a.jsonl", lines(*pairs, *more)))
    assert found == [[Turn("user", "c"), Turn("assistant", "d")]] * 2
    assert "Left out: 3 conversations marked not to be learned" in notes
    turns, notes = turns_of(
        tmp_path / "b.jsonl", {"messages": [USER, {**ASSISTANT, "weight": 0.5}]}
    )
    assert turns == [ASKED, SAID] and notes == ("Read: 1 weight other than 0 and 1, as 1",)
    path = written(tmp_path / "c.jsonl", lines({"messages": [USER, {**ASSISTANT, "train": "me"}]}))
    assert "the field 'train' of turn 2 of line 1 is not a number, true or false" in refused(path)
    found, _ = read(written(tmp_path / "d.csv", "question,answer,weight\na,b,0\nc,d,1\ne,f,\n"))
    assert [turns[0].text for turns in found] == ["c", "e"]


@pytest.mark.parametrize(
    "silent",
    [
        {"content": None, "tool_calls": []},
        {"content": ""},
        {"content": " \n\t"},
        {"content": []},
        {"content": [{"type": "text", "text": ""}]},
        {"content": None, "refusal": "I cannot."},
        {"content": None, "reasoning_content": "hm"},
    ],
)
def test_an_answer_without_text_is_never_learned(tmp_path, silent):
    """Also where an unknown turn was between it and the next, as our advice is to remove that."""
    turns = [USER, {"role": "assistant", **silent}, {"role": "critic", "content": "4"}, ASSISTANT]
    path = written(tmp_path / "a.jsonl", lines({"messages": turns}))
    assert "turn 3 of line 1 has the role 'critic'" in refused(path)
    del turns[2]
    found, notes = turns_of(path, {"messages": turns})
    assert [turn.learned for turn in found] == [True, False, True] and not found[1].text.strip()
    assert "Not learned: 1 turn of the assistant without text" in notes
    names = [name for name, value in silent.items() if value and name == "refusal"]
    assert (
        notes[-1:] == tuple(f"Not read: the text in {name!r} of turns" for name in names)
        or not names
    )


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_read_and_counted(tmp_path, name):
    said = [ASKED, SAID._replace(thought="two and two\n")]
    thinking = {**ASSISTANT, name: "two and two\r\n"}
    turns, notes = turns_of(tmp_path / "a.jsonl", {"messages": [USER, thinking]})
    assert turns == said and "Read: 1 thought before an answer" in notes
    turns, notes = turns_of(
        tmp_path / "b.jsonl", {"question": "2+2?", "answer": "4", name: "two and two\n"}
    )
    assert turns == said and notes == ("Read: 1 thought before an answer",)
    kind = {"reasoning_content": "reasoning"}.get(name, name)
    parts = [{"type": kind, kind: "two and two\n"}, {"type": "text", "text": "4"}]
    record = {"messages": [USER, {"role": "assistant", "content": parts}]}
    turns, _ = turns_of(tmp_path / "c.jsonl", record)
    assert turns == said
    _, notes = turns_of(tmp_path / "d.jsonl", {"messages": [{**USER, name: "how much"}, ASSISTANT]})
    assert notes == (f"Not read: the text in {name!r} of turns",)


def test_thoughts_and_marks_change_the_digest_and_nothing_else_does():
    def digest(*turns):
        return survey_conversations([turns, turns])[0].sha256

    before = hashlib.sha256()
    list(hashed([(ASKED, SAID)] * 2, before))
    assert before.hexdigest() == digest(ASKED, SAID)
    known = "286fff5466a89d7088b3fb170f246d2b4f2ddc8d0f80cf986fbded140a5fa1bc"  # of saved runs
    assert before.hexdigest() == known
    others = digest(ASKED, SAID._replace(learned=False)), digest(ASKED, SAID._replace(thought="x"))
    assert len({before.hexdigest(), *others}) == 3


# No text disappears without a line


@pytest.mark.parametrize(
    ("record", "question"),
    [
        ({"question": "Who?", "context": "Ann has it.", "answer": "Ann"}, "Who?\n\nAnn has it."),
        ({"prompt": "Who?", "input": "Ann has it.", "response": "Ann"}, "Who?\n\nAnn has it."),
        ({"query": "Who?", "context": " ", "answer": "Ann"}, "Who?"),
        ({"question": "Who?", "context": ["a", "b"], "answer": "Ann"}, "Who?\n\na\n\nb"),
        ({"instruction": "Who?", "context": "b", "input": "a", "output": "Ann"}, "Who?\n\na\n\nb"),
        ({"question": "Who?", "choices": ["Ann", "Tom"], "answer": "Ann"}, "Who?\n\nAnn\nTom"),
        ({"question": "Who?", "choices": ["Tom", "Ann"], "answer": 1}, "Who?\n\nTom\nAnn"),
        ({"question": "Who?", "options": ["Tom", "Ann"], "answer": "1"}, "Who?\n\nTom\nAnn"),
        (
            {
                "question": "Who?",
                "choices": {"text": ["Ann", "Bo"], "label": ["1", "2"]},
                "answer": "Ann",
            },
            "Who?\n\n1. Ann\n2. Bo",
        ),
        (
            {"question": "Who?", "options": {"A": "Ann", "B": "Bo", "C": None}, "answer": "Ann"},
            "Who?\n\nA. Ann\nB. Bo",
        ),
    ],
)
def test_what_a_question_is_about_is_in_it(tmp_path, record, question):
    turns, notes = turns_of(tmp_path / "a.jsonl", record)
    assert turns == [Turn("user", question), Turn("assistant", "Ann")]
    assert not any(note.startswith("Not read") for note in notes)


def test_choices_have_letters_where_the_answer_is_one(tmp_path):
    record = {"question": "2+2?", "choices": ["3", "4"], "answer": "B"}
    turns, _ = turns_of(tmp_path / "a.jsonl", record)
    assert turns == [Turn("user", "2+2?\n\nA. 3\nB. 4"), Turn("assistant", "B")]
    _, notes = turns_of(tmp_path / "b.jsonl", {**record, "choices": ["a", "b"], "answer": 0})
    assert notes == ("Read: 1 answer as the number of a choice, counting from 0",)
    turns, notes = turns_of(tmp_path / "c.jsonl", {**record, "answer": 4})  # it is one of them
    assert turns[1] == SAID and not notes
    path = written(tmp_path / "d.jsonl", lines({**record, "answer": 2}))
    assert "the answer of line 1, 2, is not one of its choices; correct" in refused(path)
    data = 'question,choices,answer\n2+2?,"[""3"", ""4""]",B\n'
    turns, _ = read(written(tmp_path / "e.csv", data))
    assert turns == [[Turn("user", "2+2?\n\nA. 3\nB. 4"), Turn("assistant", "B")]]


def test_the_history_of_a_question_is_before_it(tmp_path):
    record = {"instruction": "and 3?", "input": "", "output": "4", "system": "Be brief."}
    for history in (
        [["1+1?", "2"]],
        [{"role": "user", "content": "1+1?"}, {"from": "gpt", "value": "2"}],
    ):
        turns, notes = turns_of(tmp_path / "a.jsonl", record, history=history)
        assert [turn[:2] for turn in turns] == [
            *(("system", "Be brief."), ("user", "1+1?"), ("assistant", "2")),
            *(("user", "and 3?"), ("assistant", "4")),
        ]
        assert not notes and all(turn.learned for turn in turns)
    for nothing in (None, [], ""):
        assert len(turns_of(tmp_path / "a.jsonl", record, history=nothing)[0]) == 3
    path = written(tmp_path / "b.jsonl", lines({**record, "history": [["a"]]}))
    assert "part 1 of 'history' of line 1 is not a question with its answer" in refused(path)
    path = written(tmp_path / "b.jsonl", lines({**record, "history": "before"}))
    assert "the field 'history' of line 1 is not a list" in refused(path)


def test_fields_that_only_some_records_have_are_read(tmp_path):
    records = [
        {"instruction": "a", "output": "b"},
        {"instruction": "c", "input": "d", "output": "e"},
        {"instruction": "f", "output": "g", "system": "h", "history": [["i", "j"]]},
    ]
    found, notes = read(written(tmp_path / "a.jsonl", lines(*records)))
    texts = [[turn.text for turn in turns] for turns in found]
    assert texts == [["a", "b"], ["c\n\nd", "e"], ["h", "i", "j", "f", "g"]]
    assert len([note for note in notes if note.startswith("read conversations from")]) == 3


def test_fields_with_text_that_are_not_read_are_named(tmp_path):
    record = {"messages": [{**USER, "name": "Ann"}, ASSISTANT], "id": 7, "source": "a web page"}
    record |= {"tags": [{"en": "sum"}], "score": "0.5", "flag": True, "empty": ["", None]}
    _, notes = turns_of(tmp_path / "a.jsonl", record)
    assert notes == ("Not read: the text in 'name' of turns, 'source', 'tags'",)
    texts = Corpus(written(tmp_path / "b.jsonl", lines({"text": "a", "title": "b", "id": 3})))
    assert documents(texts) == ["a"]
    assert texts.report.notes[-1] == "Not read: the text in 'title'"
    texts = Corpus(written(tmp_path / "c.csv", "id,title,text\n1,,a\n2,b,c\n"))
    assert documents(texts) == ["a", "c"]
    assert texts.report.notes[-1] == "Not read: the text in 'title'"
    texts = Corpus(tmp_path / "c.csv", field="title")  # somebody has chosen
    assert documents(texts) == ["b"] and texts.report.notes == ()
    many = {"prompt": "a", "answer": "b", **{f"field{i}": "c" for i in range(300)}}
    _, notes = turns_of(tmp_path / "d.jsonl", many)
    assert "'field11', 244 more" in notes[-1] and "'field12'" not in notes[-1]


def test_text_that_is_read_elsewhere_is_not_named(tmp_path):
    """UltraChat repeats the first question beside the messages."""
    _, notes = turns_of(tmp_path / "a.jsonl", {"prompt": "2+2?", "messages": [USER, ASSISTANT]})
    assert notes == ()
    _, notes = turns_of(tmp_path / "b.jsonl", {"prompt": "3+3?", "messages": [USER, ASSISTANT]})
    assert notes == ("Not read: the text in 'prompt'",)


# Tables


def test_tsv_has_no_quotation_marks(tmp_path):
    path = written(tmp_path / "a.tsv", 'text\tn\n"hi there\t1\nbye"\t2\nthird\t3\n')
    texts = Corpus(path)
    assert documents(texts) == ['"hi there', 'bye"', "third"]
    assert any("quotation marks around cells were read as text" in x for x in texts.report.notes)
    written(path, '"text"\t"n"\n"a\tb"\t"1"\n"say ""hi"""\t"2"\n')  # unless all cells have them
    assert documents(path) == ["a\tb", 'say "hi"']
    found, _ = read(written(path, 'question\tanswer\n"a" or b?\t"a"\n'))
    assert found == [[Turn("user", '"a" or b?'), Turn("assistant", '"a"')]]
    written(path, "text\tn\na\tb\tc\n")
    assert "the row in line 2 has 3 cells and the header 2; remove tabs" in refused(path)


@pytest.mark.parametrize("first", ["sep=;", "SEP=;", '"sep=;"', "\ufeffsep=;"])
def test_excel_names_its_separator(tmp_path, first):
    data = f'{first}\r\nprompt;completion\r\n"a, b";c\r\n'
    found, _ = read(written(tmp_path / "a.csv", data))
    assert found == [[Turn("user", "a, b"), Turn("assistant", "c")]]
    written(tmp_path / "a.csv", data + "d;e;f\r\n")
    assert "the row in line 4 has 3 cells" in refused(tmp_path / "a.csv")


def test_a_comma_in_a_quoted_header_separates_nothing(tmp_path):
    path = written(tmp_path / "a.csv", '"question, short";answer\nx;y\n')
    assert refused(path).endswith("give --field with one of these: question, short, answer")
    assert documents(Corpus(path, field="answer")) == ["y"]
    written(path, '"a ""b"", c"|text\nx|y\n')
    assert documents(path) == ["y"]


@pytest.mark.parametrize("name", ["messages", "Conversations"])
def test_cells_may_hold_conversations_as_json(tmp_path, name):
    cell = json.dumps(json.dumps([USER, ASSISTANT])).replace('\\"', '""')
    for data in (f"{name}\n{cell}\n{cell}\n", f"id,{name}\n1,{cell}\n2,{cell}\n"):
        found, _ = read(written(tmp_path / "a.csv", data))
        assert found == [[ASKED, SAID]] * 2
    record = {name: json.dumps([USER, ASSISTANT])}
    assert read(written(tmp_path / "a.jsonl", lines(record)))[0] == [[ASKED, SAID]]
    written(tmp_path / "a.csv", f'{name}\n"[{{broken}}]"\n')
    assert "of the row in line 2 are not JSON" in refused(tmp_path / "a.csv")
    assert documents(written(tmp_path / "b.csv", f"{name}\n[sic] a text\n")) == ["[sic] a text"]


SIDE_BY_SIDE = "[{'content': '2+2?', 'role': 'user'}\n {'content': '4', 'role': 'assistant'}]"


@pytest.mark.parametrize(
    "cell",
    [
        json.dumps([USER, ASSISTANT]),
        repr([USER, ASSISTANT]),
        SIDE_BY_SIDE,  # as pandas writes lists of Parquet, which are arrays of NumPy
        SIDE_BY_SIDE.replace("'4'", "'4', 'at': datetime.datetime(2023, 4, 9, tzinfo=<UTC>)"),
        SIDE_BY_SIDE.replace("'4'", "'4', 'at': Timestamp('2023-04-09', tz='UTC'), 'n': nan"),
        f"array({[USER, ASSISTANT]},\n      dtype=object)",
    ],
    ids=["JSON", "Python", "NumPy", "dates", "pandas", "array"],
)
def test_cells_may_hold_conversations_in_all_shapes(tmp_path, cell):
    def table(**cells):
        quoted = ('"' + text.replace('"', '""') + '"' for text in cells.values())
        return written(tmp_path / "a.csv", f"{','.join(cells)}\n{','.join(quoted)}\n")

    for name in ("messages", "conversation", "chat", "dialogue", "text"):
        for more in ({}, {"id": "1"}):
            assert read(table(**more, **{name: cell}))[0] == [[ASKED, SAID]]
    assert read(table(text="said", conversations=cell))[0] == [[ASKED, SAID]]
    assert read(table(prompt="2+2?", chosen=cell, rejected="5"))[0] == [[ASKED, SAID]]
    assert documents(Corpus(table(text=cell), field="text")) == [cell]
    assert documents(Corpus(table(text=cell), chat=False)) == [cell]


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("conversation", "['2+2?', '4']"),
        ("data", "['2+2?' '4']"),  # of NumPy
        (
            "contents",
            '[{"parts": [{"text": "2+2?"}]}, {"role": "model", "parts": [{"text": "4"}]}]',
        ),
        ("messages", "[{'type': 'human', 'content': '2+2?'}, {'type': 'ai', 'content': '4'}]"),
        ("conversation", "[{'input': '2+2?', 'output': '4'}]"),
    ],
)
def test_cells_may_hold_other_lists(tmp_path, name, cell):
    cell = cell.replace('"', '""')
    assert read(written(tmp_path / "a.csv", f'{name}\n"{cell}"\n'))[0] == [[ASKED, SAID]]


def test_answers_in_cells_may_be_objects_of_python(tmp_path):
    for answers in ("array(['4'], dtype=object)", "['4']"):
        cell = f"{{'text': {answers}, 'answer_start': array([5], dtype=int32)}}"
        data = f'context,question,answers\n,2+2?,"{cell}"\n'
        assert read(written(tmp_path / "a.csv", data))[0] == [[ASKED, SAID]]


@pytest.mark.parametrize("kind", ["list_", "large_list", "json", "python"])
@pytest.mark.parametrize("name", ["messages", "conversation", "turns"])
def test_columns_of_parquet_may_hold_conversations_too(tmp_path, name, kind):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    turns = [USER, ASSISTANT]
    column = pa.array([json.dumps(turns) if kind == "json" else repr(turns)])
    if kind.endswith(("list", "list_")):
        struct = pa.struct([("role", pa.string()), ("content", pa.string())])
        column = pa.array([turns], getattr(pa, kind)(struct))
    parquet.write_table(pa.table({"id": ["x"], name: column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == [[ASKED, SAID]]


@pytest.mark.parametrize("answer", ['{""a"": 1}', "[1, 2]", '[{""name"": ""f""}]', "['a']"])
def test_an_answer_in_json_is_a_text(tmp_path, answer):
    path = written(tmp_path / "a.csv", f'question,answer\n2+2?,"{answer}"\n')
    assert read(path)[0] == [[ASKED, SAID._replace(text=answer.replace('""', '"'))]]


def test_the_same_name_twice_is_refused(tmp_path):
    words = "has two columns with the name 'text'; rename one of them"
    assert words in refused(written(tmp_path / "a.csv", "text,text\na,b\n"))
    assert words in refused(written(tmp_path / "a.tsv", "id\ttext\ttext \n1\ta\tb\n"))
    assert documents(written(tmp_path / "b.csv", "text,,\na,,\n")) == ["a"]
    words = "has the key 'text' twice, with different values; correct"
    assert f"line 2 {words}" in refused(
        written(tmp_path / "a.jsonl", '"a"\n{"text":"a","text":"b"}')
    )
    assert words in refused(written(tmp_path / "a.json", '[{"text": "a", "text": 3}]'))
    assert documents(written(tmp_path / "b.jsonl", '{"text":"a","id":1,"id":1}')) == ["a"]


def test_a_json_file_may_have_a_value_per_line(tmp_path):
    data = '\n{"text": "a b c"}\n\n{"text": "d e f"}\n'
    expected = ["a b c", "d e f"]
    texts = Corpus(written(tmp_path / "a.json.gz", gzip.compress(data.encode())))
    assert documents(texts) == expected
    assert "read JSON with one value per line in 1 file" in texts.report.notes
    assert documents(written(tmp_path / "a.json", data)) == expected
    assert documents(Corpus(tmp_path / "a.json", limits=Limits(whole=10))) == expected
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.json", data.replace("\n", "\r\n"))
    assert documents(tmp_path / "a.zip") == expected


def test_a_part_that_is_not_text_is_named(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    path = written(
        tmp_path / "a.jsonl", lines({"messages": [{"role": "user", "content": parts}, ASSISTANT]})
    )
    words = "part 2 of the field 'content' of turn 1 of line 1 is not text, but of type 'image_url'"
    assert words in refused(path) and "remove such parts" in refused(path)
    del parts[1]
    written(path, lines({"messages": [{"role": "user", "content": parts}, ASSISTANT]}))
    assert read(path)[0] == [[Turn("user", "a"), SAID]]


# Files that are something else

PAGE = (
    '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>T</title></head><body><p>A &amp; b</p>'
)
PAGE += "<script>no</script></body></html>"
NOTEBOOK = {
    "cells": [
        {
            "cell_type": "markdown",
            "source": ["# Title\n", "words"],
            "attachments": {"a.png": "iVBO"},
        },
        {
            "cell_type": "code",
            "source": "print(1)",
            "outputs": [{"data": {"image/png": "iVBORw0"}}],
        },
    ],
    "nbformat": 4,
}
DISGUISED = [
    (
        "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n",
        "is a Git LFS pointer",
    ),
    (r"{\rtf1\ansi{\fonttbl{\f0 Arial;}}\f0 Hello}", "is an RTF document; convert it: pandoc"),
    ("ARROW1\0\0" + "\0" * 99, "is an Arrow file"),
    ("SQLite format 3\0" + "\0" * 99, "is an SQLite database"),
    ("%!PS-Adobe-3.0\n(Hello) show\n", "is a PostScript document"),
    ("/annex/objects/SHA256E-s1--ab.txt\n", "is a git-annex pointer"),
]


@pytest.mark.parametrize("name", ["x.txt", "x", "x.md", "x.csv", "x.jsonl", "x.html", "x.parquet"])
@pytest.mark.parametrize(("data", "words"), DISGUISED, ids=[words for _, words in DISGUISED])
def test_other_formats_are_named_whatever_the_name(tmp_path, name, data, words):
    path = written(tmp_path / name, data)
    assert f"{name} {words}" in refused(path)
    written(tmp_path / "z.txt", "text")
    texts = Corpus(tmp_path)
    assert documents(texts) == ["text"] and not texts.has_conversations()
    assert skipped(texts, tmp_path)[name] == words.split(";")[0]


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
def test_documents_are_no_tables(tmp_path, name):
    archive = (
        'Subject: a\r\n b\r\nContent-Type: multipart/related;\r\n\tboundary="c"\r\n\r\n--c\r\n'
    )
    for data, words in (
        ("%PDF-1.4\n(Hello)\n", "is a PDF document; convert it: pdftotext"),
        (archive, "is a web archive (MHTML) or a multipart email; save it as plain text"),
    ):
        assert f"{name} {words}" in refused(written(tmp_path / name, data))


@pytest.mark.parametrize(
    "start", ["", "<!DOCTYPE html>\n", '<?xml version="1.0"?>\n<!-- c -->\n', "\ufeff"]
)
def test_pages_are_read_as_pages(tmp_path, start):
    for name in ("a.xhtml", "a.xht", "a.html", "a.txt", "a.md", "a"):
        texts = Corpus(written(tmp_path / name, start + PAGE))
        assert documents(texts) == ["T\n\nA & b"]
        is_said = any("read the text of HTML" in note for note in texts.report.notes)
        assert is_said == (name in ("a.txt", "a.md", "a"))
    for name in ("a.csv", "a.jsonl", "a.json"):
        assert "is an HTML page; " in refused(written(tmp_path / name, start + PAGE))
    assert documents(written(tmp_path / "b.txt", "One writes <html> first.")) == [
        "One writes <html> first."
    ]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.ipynb", "a.txt", "a.json", "a"])
def test_notebooks_are_read_without_pictures(tmp_path, name, indent):
    texts = Corpus(written(tmp_path / name, json.dumps(NOTEBOOK, indent=indent)))
    assert documents(texts) == ["# Title\nwords\n\nprint(1)"]
    assert any("read the cells of notebooks" in note for note in texts.report.notes)
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["a = 1"]}]}], "nbformat": 3}
    assert documents(written(tmp_path / "b.ipynb", json.dumps(old))) == ["a = 1"]
    assert "has no cells of a notebook" in refused(written(tmp_path / "c.ipynb", "[3]"))


def test_a_file_of_a_folder_that_does_not_parse_is_skipped(tmp_path):
    written(tmp_path / "a.ts", "let a = 1\n")
    damaged = {
        "tsconfig.json": '{\n  // comments\n  "strict": true\n}\n',
        "b.jsonl": lines({"text": "a"}, {"text": "b"}) + '{"text": \n',
        "c.csv": "id,text\n1,a\n2,b,c\n",
        "d.csv": 'text\na\n"never ends\n',
        "e.xml": "<a>words<b></a>",
        "f.jsonl": lines({"text": "long " * 300_000}) + "no\n",
        "g.jsonl.gz": gzip.compress(
            lines(*[{"question": "a", "answer": "b"}] * 3).encode() + b"[\n"
        ),
    }
    for name, data in damaged.items():
        written(tmp_path / name, data)
    texts = Corpus(tmp_path)
    assert not texts.has_conversations()
    for _ in range(2):
        assert documents(texts) == ["let a = 1\n"]
        reasons = skipped(texts, tmp_path)
        assert reasons.keys() == damaged.keys()
        assert reasons["tsconfig.json"].startswith("is not JSON: expecting property name")
        assert reasons["b.jsonl"] == "is damaged: line 3 is not JSON: expecting value at column 10"
        assert reasons["c.csv"] == "is damaged: the row in line 3 has 3 cells and the header 2"
        report = texts.report
        assert (report.files, report.documents, report.conversations) == (1, 1, 0)
        assert report.notes == ()
    for name in damaged:
        assert name in refused(tmp_path / name)


def test_a_record_without_text_after_others_is_an_error_in_a_folder_too(tmp_path):
    written(tmp_path / "a.txt", "text")
    written(tmp_path / "b.jsonl", lines({"text": "a"}, {"body": "b"}))
    assert "has no field 'text' in line 2; give --field" in refused(tmp_path)


TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "a1"}


@pytest.mark.parametrize(
    "call",
    [
        {"tool_calls": [{"id": "a1", "function": {"name": "w", "arguments": '{"x": 1}'}}]},
        {"content": None, "tool_calls": [{"id": "a1", "name": "w", "arguments": {"x": 1}}]},
        {"tool_calls": '[{"id": "a1", "function": {"name": "w", "arguments": {"x": 1}}}]'},
        {"content": "", "function_call": {"id": "a1", "name": "w", "arguments": '{"x": 1}'}},
    ],
)
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
def test_calls_of_tools_are_answers_and_results_are_context(tmp_path, call, tools):
    turns = [USER, {"role": "assistant", **call}, RESULT, ASSISTANT]
    path = written(tmp_path / "a.jsonl", lines({"messages": turns, "tools": tools}))
    found, notes = turns_of(path, {"messages": turns, "tools": tools})
    assert notes == () and [turn.role for turn in found] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert json.loads(found[0].more) == {"tools": [TOOL]}
    function = {"name": "w", "arguments": {"x": 1}}
    expected = {"tool_calls": [{"id": "a1", "type": "function", "function": function}]}
    assert json.loads(found[1].more) == expected and found[1].learned and not found[1].text
    assert (found[2].text, json.loads(found[2].more)) == ("4", {"tool_call_id": "a1"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_calls": "w"}, "the field 'tool_calls' of turn 2 of line 1 is not a list of calls"),
        ({"tool_calls": [{"id": 1}]}, "has no name of a function and arguments in call 1"),
        ({"tools": [{"type": "function"}]}, "the field 'tools' of line 1 has no name"),
    ],
)
def test_a_damaged_call_or_tool_is_named(tmp_path, change, words):
    answer = {**ASSISTANT, **{k: v for k, v in change.items() if k == "tool_calls"}}
    record = {"messages": [USER, answer], **{k: v for k, v in change.items() if k == "tools"}}
    assert words in refused(written(tmp_path / "a.jsonl", lines(record)))

"""Better and worse answers in files: what is read of them, and what of damaged ones."""

import json

import pytest

from smallmind import InputError
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import LABELS, PAIRS
from tests.corpus.reading import conversations, lines, written

USER = {"role": "user", "content": "q"}
BETTER, WORSE = ({"role": "assistant", "content": text} for text in "ab")
READ = [("user", "q"), ("assistant", "a"), ("rejected", "b")]
HUMAN = "\n\nHuman: q\n\nAssistant:"
GOOD = {"prompt": "q", "chosen": "a", "rejected": "b"}

FORMS = {
    "texts": GOOD,
    "messages with a prompt": {"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]},
    "messages with their prompt": {"chosen": [USER, BETTER], "rejected": [USER, WORSE]},
    "UltraFeedback": {
        "prompt": "q", "chosen": [USER, BETTER], "rejected": [USER, WORSE],
        "messages": [USER, BETTER], "score_chosen": 8.5, "score_rejected": 2.0,
    },
    "rated answers": {
        "instruction": "q", "completions": [
            {"response": "c", "overall_score": 5.0}, {"response": "b", "overall_score": 2.0},
            {"response": "a", "overall_score": 9.0},
        ],
    },
    "two transcripts": {"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} b"},
    "OpenAI's": {
        "input": {"messages": [USER]}, "preferred_output": [BETTER],
        "non_preferred_output": [WORSE],
    },
    "numbers": {"prompt": "q", "chosen": 1, "rejected": 2},
    "ranked answers": {
        "prompt": f"{HUMAN} ", "answers": [{"answer": "b", "rank": 2}, {"answer": "a", "rank": 1}],
    },
    "two answers and the better one": {
        "prompt": "q", "response_0": "b", "response_1": "a", "better_response_id": 1,
    },
    "two answers and how much better one is": {
        "context": [USER], "response1": "a", "response2": "b", "overall_preference": -1,
    },
    "two conversations": {
        "conversation_a": [USER, WORSE], "conversation_b": [USER, BETTER], "winner": "model_b",
    },
    "texts of messages": {
        "prompt": "q", "chosen": json.dumps([USER, BETTER]), "rejected": repr([USER, WORSE]),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_read_in_every_form(tmp_path, form):
    path = written(tmp_path / "pairs.jsonl", lines(FORMS[form]))
    corpus = Corpus(path, preferences=PAIRS)
    wanted = [("user", "q"), ("assistant", "1"), ("rejected", "2")] if form == "numbers" else READ
    assert conversations(corpus) == [wanted]
    assert any("worst" in note or "worse" in note for note in corpus.report.notes)
    assert conversations(path) == [wanted[:2]]  # without a model to start from


def test_longer_conversations_end_in_both_answers(tmp_path):
    before = [USER, BETTER, {"role": "user", "content": "q2"}]
    record = {"system": "s", "chosen": [*before, BETTER], "rejected": [*before, WORSE]}
    path = written(tmp_path / "pairs.jsonl", lines(record))
    wanted = [("system", "s"), *READ[:2], ("user", "q2"), *READ[1:]]
    assert conversations(Corpus(path, preferences=PAIRS)) == [wanted]


def test_what_a_question_is_about_and_what_was_said_before_belong_to_pairs(tmp_path):
    record = {"instruction": "q", "input": "i", "chosen": "a", "rejected": "b", "system": "s"}
    path = written(tmp_path / "pairs.jsonl", lines({**record, "history": [["q0", "a0"]]}))
    asked = [("system", "s"), ("user", "q0"), ("assistant", "a0"), ("user", "q\n\ni")]
    assert conversations(Corpus(path, preferences=PAIRS)) == [asked + READ[1:]]
    assert conversations(path) == [asked + READ[1:2]]
    written(path, lines({**record, "history": None}))
    assert conversations(Corpus(path, preferences=PAIRS)) == [[asked[0], asked[3], *READ[1:]]]


def test_calls_and_thoughts_are_answers_too(tmp_path):
    def calling(city):
        function = {"name": "weather", "arguments": {"city": city}}
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}

    thoughtful = {**BETTER, "reasoning_content": "Hm."}
    records = (
        {"prompt": [USER], "chosen": [calling("Rome")], "rejected": [calling("Oslo")]},
        {"prompt": [USER], "chosen": [calling("Rome")], "rejected": "b"},
        {"prompt": [USER], "chosen": [thoughtful], "rejected": [WORSE]},
    )
    path = written(tmp_path / "pairs.jsonl", lines(*records))
    for kind, answers in ((PAIRS, 2), (LABELS, 2), (None, 1)):
        pieces = list(Corpus(path, preferences=kind).pieces())
        called, mixed, thought = (piece.turns[1:] for piece in pieces)
        assert len(called) == len(mixed) == len(thought) == answers
        cities = [json.loads(turn.more)["tool_calls"][0]["function"] for turn in called]
        assert [x["arguments"]["city"] for x in cities] == ["Rome", "Oslo"][:answers]
        assert thought[0].thought == "Hm." and [turn.text for turn in mixed] == ["", "b"][:answers]


DAMAGED = {
    "no worse answer": ({"prompt": "q", "chosen": "a"}, "without a worse answer"),
    "no better answer": ({"prompt": "q", "rejected": "b"}, "without a better answer"),
    "a worse one of null": ({**GOOD, "rejected": None}, "without a worse answer"),
    "a better one of null": ({**GOOD, "chosen": None}, "without a better answer"),
    "an empty one": ({**GOOD, "rejected": ""}, "without a worse answer"),
    "a blank one": ({**GOOD, "chosen": " \n"}, "without a better answer"),
    "an empty list": ({**GOOD, "rejected": []}, "without a worse answer"),
    "a blank message": (
        {"chosen": [USER, BETTER], "rejected": [USER, {**WORSE, "content": " "}]},
        "with a blank answer",
    ),
    "equal texts": ({**GOOD, "rejected": "a"}, "with the same answer twice"),
    "equal messages": (
        {"chosen": [USER, BETTER], "rejected": [USER, BETTER]},
        "with the same answer twice",
    ),
    "other prompts": (
        {"chosen": [USER, BETTER], "rejected": [{**USER, "content": "r"}, WORSE]},
        "whose answers follow different prompts",
    ),
    "one more turn": (
        {"chosen": [USER, BETTER, USER, BETTER], "rejected": [USER, WORSE]},
        "whose answers follow different prompts",
    ),
    "no answer at the end": (
        {"chosen": [USER, BETTER], "rejected": [USER]},
        "whose answers follow different prompts",
    ),
    "an answer in a list": ({**GOOD, "rejected": ["b"]}, "whose answers are not texts or messages"),
    "answers that are true or false": (
        {**GOOD, "chosen": True, "rejected": False},
        "whose answers are not texts or messages",
    ),
    "pairs in pairs": ({**GOOD, "chosen": GOOD}, "whose answers are not texts or messages"),
    "roles that are not known": (
        {"chosen": [{"role": "robot", "content": "a"}], "rejected": [WORSE]},
        "whose answers are not texts or messages",
    ),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "without a prompt"),
    "a prompt of null": ({**GOOD, "prompt": None}, "without a prompt"),
    "a prompt that is an object": ({**GOOD, "prompt": {"a": 1}}, "without a prompt"),
    "a blank prompt": ({**GOOD, "prompt": " "}, "with a blank prompt"),
    "answers that are equally good": (
        {"instruction": "q", "completions": [{"response": "a", "overall_score": 1}] * 2},
        "without a worse answer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_pairs_are_counted_and_left_out(tmp_path, damage):
    record, reason = DAMAGED[damage]
    number = ["first", *DAMAGED].index(damage) % 3
    records = [GOOD, GOOD]
    records.insert(number, record)
    path = written(tmp_path / "pairs.jsonl", lines(*records))
    corpus = Corpus(path, preferences=PAIRS)
    assert conversations(corpus) == [READ, READ]
    assert f"Left out: 1 pair {reason}" in corpus.report.notes


def test_answers_with_labels_are_read_for_kto(tmp_path):
    records = [
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": [USER], "completion": [WORSE], "label": False},
    ]
    path = written(tmp_path / "labels.jsonl", lines(*records))
    found = conversations(Corpus(path, preferences=LABELS))
    assert found == [READ[:2], [READ[0], READ[2]]]
    plain = Corpus(path)
    assert conversations(plain) == [READ[:2]]
    assert (
        "left out what --loss kto would learn as answers to avoid in 1 file" in plain.report.notes
    )
    pairs = written(tmp_path / "pairs.jsonl", lines(GOOD))
    assert conversations(Corpus(pairs, preferences=LABELS)) == [READ]


@pytest.mark.parametrize("label", [True, "true", 1, False, "No", 0])
def test_labels_are_true_or_false_in_the_forms_of_tables(tmp_path, label):
    record = {"prompt": "q", "completion": "a", "label": label}
    path = written(tmp_path / "labels.jsonl", lines(record))
    role = "assistant" if label in (True, "true") else "rejected"
    assert conversations(Corpus(path, preferences=LABELS)) == [[READ[0], (role, "a")]]


@pytest.mark.parametrize("label", [None, "", 2, "maybe", [True], "absent"])
def test_answers_without_a_label_are_counted_and_left_out(tmp_path, label):
    good = {"prompt": "q", "completion": "a", "label": True}
    damaged = {**good, "label": label}
    if label == "absent":
        del damaged["label"]
    corpus = Corpus(written(tmp_path / "labels.jsonl", lines(good, damaged)), preferences=LABELS)
    assert conversations(corpus) == [READ[:2]]
    assert "Left out: 1 answer whose label is not true or false" in corpus.report.notes


def test_another_record_among_pairs_is_an_error_with_its_line(tmp_path):
    other = {"question": "q", "answer": "a"}
    for records, number in (((GOOD, GOOD, other), 3), ((other, GOOD), 2)):
        path = written(tmp_path / "pairs.jsonl", lines(*records))
        with pytest.raises(InputError, match=f"line {number} has other fields than the records"):
            conversations(Corpus(path, preferences=PAIRS))

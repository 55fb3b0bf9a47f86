"""Tasks in files: what they mean, what is refused, what is printed, kept and compared."""

import bz2
import csv
import errno
import gzip
import json
import lzma
import os
import re

import pytest

import smallmind
from smallmind.corpus import fields
from smallmind.files import durable
from smallmind.tasks.likelihood import Scorer
from smallmind.tasks.results import read_results
from smallmind.tasks.task import evaluate_task, read_items
from smallmind.views.report import report
from tests.programs import refusal, refuses
from tests.tasks.small import BAD, GOOD, PAIRS, lines, trained

CHOICES = {"context": "the cat", "choices": ["sat on the mat.", "mat the on."], "answer": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("tasks") / "run")


@pytest.fixture(scope="module")
def loaded(run):
    return smallmind.load(run.path, precision="float32")


def refused(kind, path):
    """The message of the error for a file of items: one short line."""
    message = refusal(read_items, kind, path)
    assert len(message) < 400
    return message


@pytest.mark.parametrize("names", [("good", "bad"), ("sentence_good", "sentence_bad")])
def test_pairs_have_several_names_and_formats(tmp_path, names):
    records = [dict(zip(names, pair, strict=True)) for pair in zip(GOOD, BAD, strict=True)]
    files = [lines(tmp_path / "pairs.jsonl", records)]
    for suffix, pack in ((".gz", gzip), (".bz2", bz2), (".xz", lzma)):
        files.append(tmp_path / f"pairs.jsonl{suffix}")
        files[-1].write_bytes(pack.compress(files[0].read_bytes()))
    files.append(tmp_path / "pairs.csv")
    with files[-1].open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    files.append(tmp_path / "pairs.csv.gz")
    files[-1].write_bytes(gzip.compress(files[-2].read_bytes()))
    found = [read_items("pairs", file) for file in files]
    assert [item.texts for item in found[0]] == list(zip(GOOD, BAD, strict=True))
    assert all(items == found[0] for items in found)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(PAIRS[0]).encode() * 100)[:-9])
    assert "damaged or incomplete" in refused("pairs", path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no records"),
        ("\n\n", "has no records"),
        ('{"good": "a", "bad": "b"}\nnot JSON\n', "line 2 is not JSON"),
        ('{"good": "a", "worse": "b"}\n', "has no field 'bad'; it has good, worse"),
        ('{"good": "a", "bad": ["b"]}\n', "'bad' that is not text"),
        ('{"good": "a", "bad": ""}\n', "has an empty sentence"),
        ('["a", "b"]\n', "an array in line 1"),
        ("[" * 100_000 + "\n", "line 1"),
    ],
)
def test_lines_without_pairs_are_refused(tmp_path, content, reason):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    assert reason in refused("pairs", path)


def test_a_huge_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "LIMITS", fields.Limits(record=1000))
    path = lines(tmp_path / "pairs.jsonl", [{"good": "a" * 2000, "bad": "b"}])
    assert "has more than 1,000 characters" in refused("pairs", path)


def test_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "a.jsonl").mkdir()
    assert "not a file of records" in refused("pairs", tmp_path / "a.png")
    for path in (tmp_path / "a.jsonl", tmp_path / "none.jsonl"):
        refused("pairs", path)


@pytest.mark.parametrize(
    "answer",
    [1, 1.0, "1", "B", "b ", " b"],
    ids=["number", "fraction", "digit", "letter", "choice", "spaces"],
)
def test_the_right_choice_has_several_forms(tmp_path, answer):
    record = {"question": "x", "options": ["a ", "b "], "label": answer}
    (item,) = read_items("choices", lines(tmp_path / "c.jsonl", [record]))
    assert item.right == 1 and item.texts == ("x", "a ", "b ")


@pytest.mark.parametrize("answer", [2, -1, True, None, "C", "c", [0], 0.5, 2.0])
def test_an_answer_that_is_no_choice_is_refused(tmp_path, answer):
    path = lines(tmp_path / "c.jsonl", [{**CHOICES, "answer": answer}])
    assert "not one of its choices" in refused("choices", path)


@pytest.mark.parametrize("choices", [[], ["a"], "ab", [1, None], {"text": ["a"]}, None])
def test_choices_that_are_not_two_texts_are_refused(tmp_path, choices):
    path = lines(tmp_path / "c.jsonl", [{**CHOICES, "choices": choices}])
    assert "choices" in refused("choices", path)


def test_a_trained_model_prefers_what_it_has_read(tmp_path, loaded):
    found = evaluate_task(*loaded, "pairs", lines(tmp_path / "p.jsonl", PAIRS))
    assert [(group.name, group.verdicts) for group in found.groups] == [
        ("p0", ("11",)),
        ("p1", ("1",)),
    ]
    found = evaluate_task(*loaded, "choices", lines(tmp_path / "c.jsonl", [CHOICES]))
    assert found.all.verdicts == ("1", "1", "1")


def test_equal_sentences_are_not_likelier(tmp_path, loaded):
    record = {"good": GOOD[0], "bad": GOOD[0]}
    found = evaluate_task(*loaded, "pairs", lines(tmp_path / "p.jsonl", [record]))
    assert found.all.verdicts == ("0",)


def test_an_exact_answer_is_the_likeliest_one_but_for_spaces(tmp_path, loaded):
    written = smallmind.generate(*loaded, "the cat", max_tokens=3, temperature=0)[7:]
    whole = smallmind.generate(*loaded, "the cat", max_tokens=60, temperature=0, stop="\n")[7:]
    assert whole.startswith(written.rstrip("\n"))
    answers = "no answer of this model", ["nor this", "nor that"], f"  {whole.strip()} "
    records = [{"prompt": "the cat", "answer": answer} for answer in answers]
    found = evaluate_task(*loaded, "exact", lines(tmp_path / "e.jsonl", records))
    assert found.all.verdicts == ("001",)


def test_sentences_longer_than_the_context_are_counted(tmp_path, loaded):
    long = {"good": GOOD[0] * 9, "bad": BAD[0] * 9}
    found = evaluate_task(*loaded, "pairs", lines(tmp_path / "p.jsonl", [*PAIRS, long]))
    assert found.cut == 1 and found.all.count == 4


def test_unknown_characters_are_refused_or_skipped_and_counted(tmp_path):
    path = trained(tmp_path / "run", tokenizer="char", steps=2).path
    loaded = smallmind.load(path, precision="float32")
    odd = {"good": "Ω the", "bad": "the"}
    path = lines(tmp_path / "p.jsonl", [*PAIRS, odd])
    words = r"1 pair with characters .*'Ω'; leave them out with"
    refuses(words, evaluate_task, *loaded, "pairs", path)
    found = evaluate_task(*loaded, "pairs", path, skips_unknown=True)
    assert found.skipped == 1 and found.all.count == 3
    path = lines(tmp_path / "p.jsonl", [odd])
    refuses("only pairs", evaluate_task, *loaded, "pairs", path, skips_unknown=True)


def test_the_command_line_prints_a_table_or_json_and_keeps_the_result(run, tmp_path, cli):
    pairs = lines(tmp_path / "pairs.jsonl", PAIRS)
    printed = cli("evaluate", run.path, "--pairs", pairs).out
    assert "p0" in printed and "p1" in printed and "100.0 (" in printed
    found = json.loads(cli("evaluate", run.path, "--pairs", pairs, "--json").out)
    assert json.dumps(found).count('"p0"') == 1
    (kept,) = read_results(run.path / "tasks.json")  # the second replaced the first
    assert kept.all.count == 3 and kept.file == "pairs.jsonl"
    assert "pairs.jsonl" in report(run.path)


def test_a_result_that_cannot_be_kept_is_shown(run, tmp_path, cli, monkeypatch):
    pairs = lines(tmp_path / "a.jsonl", PAIRS[:2])

    def refuse(path, _):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(durable, "write", refuse)
    exact = lines(tmp_path / "c.jsonl", [{"prompt": "the cat", "answer": "sat"}])
    printed, errors = cli("evaluate", run.path, "--pairs", pairs, "--exact", exact)
    assert "Pairs of a.jsonl" in printed and "Exact of c.jsonl" in printed
    assert errors.count("result cannot be saved") == 2 and "Read-only" in errors


def test_items_without_a_group_are_in_none(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{**CHOICES, "group": None}, {**CHOICES, "group": "b"}])
    assert [item.group for item in read_items("choices", path)] == ["", "b"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\xff", b'{"format": "smallmind tasks 2"}'])
def test_kept_results_that_are_damaged_are_left_out(run, tmp_path, damage):
    (tmp_path / "tasks.json").write_bytes(damage)
    assert list(read_results(tmp_path / "tasks.json")) == []


def test_compare_says_that_there_is_no_difference(run, tmp_path, cli):
    other = trained(tmp_path / "other", learning_rate=0.002)
    pairs = lines(tmp_path / "pairs.jsonl", PAIRS)
    for path in (run.path, other.path):
        cli("evaluate", path, "--pairs", pairs)
    printed = cli("compare", run.path, other.path).out
    assert "no difference" in printed and "pairs.jsonl" in printed
    assert "float32" not in printed
    cli("evaluate", other.path, "--pairs", pairs, "--precision q8_0")
    printed = " ".join(cli("compare", run.path, other.path).out.split())
    assert re.search(r"pairs.jsonl: [\w ,]*float32; [\w ,]*q8_0", printed)


@pytest.mark.parametrize("flags", ["--json", "--group-by x"])
def test_flags_of_tasks_need_a_task(run, cli, flags):
    cli.refuses("is for tasks: add --pairs FILE", "evaluate", run.path, flags)


def test_choices_are_normalised_by_characters_and_by_bytes(tmp_path, loaded):
    words = "sat", "sat on the mat. the dog sat on the log.", "q", "zq vx", "éü", "€", "x€z"
    records = [
        {"context": f"the {a}", "choices": [b, c], "answer": 0}
        for a in ("cat", "dog")
        for b in words
        for c in words
        if b != c
    ]
    found = evaluate_task(*loaded, "choices", lines(tmp_path / "c.jsonl", records))
    pairs = [(each["context"], f" {choice}") for each in records for choice in each["choices"]]
    values = [each.value for each in Scorer(*loaded).continuations(pairs)]
    wanted = []
    for length in (lambda _: 1, len, lambda text: len(text.encode())):
        scores = [value / length(text[1:]) for value, (_, text) in zip(values, pairs, strict=True)]
        wanted.append("".join("01"[a >= b] for a, b in zip(scores[::2], scores[1::2], strict=True)))
    assert found.all.verdicts == tuple(wanted) and len(set(wanted)) == 3

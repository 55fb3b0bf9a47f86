"""A new run learns tokens from texts of a megabyte and more, unless told otherwise."""

import gzip
import random

import pytest

from smallmind import Run
from smallmind.corpus.preparation import PLAN, begun_with
from smallmind.corpus.shards import write_record
from smallmind.runs.creating import outline, prepare
from smallmind.settings.presets import RECIPES
from smallmind.settings.rules import Choices, Facts
from tests.programs import CATS, refuses, status

MODERN = RECIPES["modern"]
FEW = {"steps": 2, "n_layer": 1, "n_embd": 16, "n_head": 1, "block_size": 16, "batch_size": 2}


@pytest.fixture
def short(monkeypatch):
    """Tokens are learned from a thousand characters on."""
    own = {name: recipe._replace(learns_tokens=1000) for name, recipe in RECIPES.items()}
    monkeypatch.setattr("smallmind.settings.rules.RECIPES", own)


def text(characters):
    return (CATS * (characters // len(CATS) + 1))[:characters]


def kind(choices, *given):
    prepared = prepare(choices, *given)
    assert prepared.settings.run.tokenizer == prepared.tokenizer.kind
    return prepared.tokenizer.kind


def test_a_megabyte_is_enough():
    assert MODERN.tokenizer_for(999_999) == "char" and MODERN.tokenizer_for(10**6) == "bpe"
    assert RECIPES["gpt2"].tokenizer_for(10**9) == "char"
    assert kind(Choices({}), text(10**6)) == "bpe"


def test_more_minutes_keep_characters_for_longer_texts():
    kinds = [MODERN.tokenizer_for(1_100_000, minutes) for minutes in (0.5, 2, 8)]
    assert kinds == ["bpe", "bpe", "char"]
    assert MODERN.tokenizer_for(700_000, 0.5) == "bpe"
    assert MODERN.tokenizer_for(350_000, 0.5) == MODERN.tokenizer_for(700_000, 2) == "char"
    assert RECIPES["gpt2"].tokenizer_for(10**9, 0.1) == "char"
    assert Choices({"minutes": 8.0}).settings(Facts(characters=1_100_000)).run.tokenizer == "char"


@pytest.mark.parametrize(("characters", "expected"), [(999, "char"), (1000, "bpe")])
def test_texts_and_files_are_alike(short, tmp_path, characters, expected):
    file, packed = tmp_path / "text.txt", tmp_path / "text.txt.gz"
    file.write_text(text(characters))
    packed.write_bytes(gzip.compress(random.Random(1).randbytes(500).hex().encode()))
    assert packed.stat().st_size < 700
    assert kind(Choices({}), text(characters)) == kind(Choices({}), file) == expected
    assert kind(Choices({"text": [str(file)]})) == expected
    assert outline(Choices({}), characters).run.tokenizer == expected
    assert kind(Choices({}), packed) == "bpe"


def test_what_is_given_stays(short, tmp_path):
    assert kind(Choices({"tokenizer": "char"}), text(5000)) == "char"
    assert kind(Choices({"tokenizer": "byte"}), text(5000)) == "byte"
    assert kind(Choices({})) == "char"  # the built-in stories
    run = Run.create(text=text(500), out=tmp_path / "run", **FEW)
    run.train(progress=False)
    assert kind(Choices({"init_from": str(run.path)}), text(5000)) == "char"


def test_a_saved_run_keeps_its_characters(short, tmp_path):
    long = text(5000)
    run = Run.create(text=long, out=tmp_path / "run", tokenizer="char", **FEW)
    run.train(progress=False)
    again = Run.open(run.path)
    assert again.resume(progress=False, steps=3)
    assert again.settings.run.tokenizer == "char"
    assert kind(Choices(run.settings.fields, recipe=None), long) == "char"


def test_a_teacher_of_characters_says_what_to_choose(short, tmp_path):
    long = text(5000)
    teacher = Run.create(text=long, out=tmp_path / "teacher", tokenizer="char", **FEW)
    teacher.train(progress=False)
    own = {"teacher": str(teacher.path), **FEW}
    refuses(
        "has different tokens: use --tokenizer char",
        lambda: Run.create(text=long, out=tmp_path / "a", **own).train(),
    )
    student = Run.create(text=long, out=tmp_path / "b", tokenizer="char", **own)
    assert student.train(progress=False)


def test_the_tokens_of_a_teacher_are_named_by_their_file(tmp_path):
    teacher = Run.create(text=text(3000), out=tmp_path / "teacher", tokenizer="bpe", **FEW)
    teacher.train(progress=False)
    own = {"teacher": str(teacher.path), **FEW}
    file = teacher.path / "tokenizer.json"
    refuses(
        f"use --tokenizer {file}",
        lambda: Run.create(text=text(700), out=tmp_path / "a", **own).train(),
    )
    student = Run.create(text=text(700), out=tmp_path / "b", tokenizer=str(file), **own)
    assert student.train(progress=False)


def test_a_text_of_many_bytes_is_long_however_it_is_given(short, tmp_path):
    cyrillic = ("и кот сел на мат.\n" * 100)[:700]  # more than a thousand bytes
    (tmp_path / "text.txt").write_text(cyrillic, encoding="utf-8")
    assert kind(Choices({}), cyrillic) == kind(Choices({}), tmp_path / "text.txt") == "bpe"


def test_prepare_learns_tokens_too(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text(text(10**6))
    for flags, expected in [([], "bpe"), (["--tokenizer", "char"], "char")]:
        out = tmp_path / expected
        assert status("prepare", file, "--out", out, *flags) == 0
        assert kind(Choices({"text": [str(out)]})) == expected
        assert status("prepare", file, "--out", out) == 0  # it is complete already


@pytest.mark.parametrize("made_from", [{"tokenizer": "char"}, {"tokenizer": []}, {}, 7])
def test_what_was_begun_by_characters_goes_on_so(tmp_path, made_from):
    assert begun_with(tmp_path) is None
    (tmp_path / PLAN).write_text("{")
    assert begun_with(tmp_path) is None
    write_record(tmp_path / PLAN, {"made_from": made_from})
    assert begun_with(tmp_path) == ("char" if made_from == {"tokenizer": "char"} else None)

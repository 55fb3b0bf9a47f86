"""Texts from many files: what a run makes of them."""

import gzip
import hashlib
import json

import pytest

from smallmind import Run
from smallmind.corpus.survey import DocumentStarts
from smallmind.settings.sources import read_settings
from tests.programs import edited, refusal, refuses

FIELDS = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16, "batch_size": 4, "steps": 2}
STORIES = [f"story {i}: the cat sat on mat {i}, and the dog ran to hill {i}." for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = "".join(json.dumps({"story": story}) + "\n" for story in STORIES[:30])
    (folder / "a.jsonl").write_text(lines, encoding="utf-8")
    (folder / "b.txt.gz").write_bytes(gzip.compress(STORIES[30].encode()))
    for i in range(31, 40):
        (folder / f"c{i}.txt").write_bytes(STORIES[i].encode() + b"\r\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    return folder


@pytest.mark.parametrize(
    ("lengths", "held_out"),
    [([], 0), ([100], 0), ([50, 50], 0), ([90, 10], 10), ([10] * 10, 10), ([5] * 40, 20)],
)
def test_as_many_documents_as_make_a_tenth_are_held_out(lengths, held_out):
    starts, end = DocumentStarts(), 0
    for length in lengths:
        if end:
            starts.add(end)
        end += length
    assert starts.held_out(end) == held_out


def test_documents_are_held_out_whole(folder, tmp_path):
    run = Run.create(text=folder, out=tmp_path / "run", **FIELDS)
    tokenizer = run.data.tokenizer
    held_out = tokenizer.decode(run.data.held_out)
    assert held_out == "\n\n".join(STORIES[36:]) + "\n"
    whole = tokenizer.decode(run.data.train) + held_out
    assert whole == run.files.source.text and all(story in whole for story in STORIES)
    assert run.files.source.report.documents == 40 and run.files.source.report.files == 11
    assert len(run.files.source.report.skipped) == 1


def test_learned_tokens_come_from_the_training_part(folder, tmp_path):
    (folder / "c99.txt").write_text("zzzqqq " * 40, encoding="utf-8")
    fields = {**FIELDS, "tokenizer": "bpe", "bpe_vocab_size": 300}
    run = Run.create(text=[folder], out=tmp_path / "run", **fields)
    tokenizer = run.data.tokenizer
    assert run.files.source.text.count("<|endoftext|>") == 40
    assert tokenizer.decode(run.data.held_out).endswith("zzzqqq " * 40)
    assert not any(b"zz" in token for token in tokenizer.vocabulary)
    assert tokenizer.special["<|endoftext|>"] in run.data.train


def test_a_run_on_many_files_is_resumed_and_evaluated(folder, tmp_path):
    run = Run.create(text=[folder / "*.txt", folder / "a.jsonl"], out=tmp_path / "run", **FIELDS)
    run.train()
    again = Run.open(tmp_path / "run")
    assert again.files.source.text == run.files.source.text and again.is_finished
    assert again.evaluate() == again.evaluate([folder / "*.txt", folder / "a.jsonl"])
    assert len(again.resume(steps=3)) > 0
    (folder / "a.jsonl").write_text('{"story": "another one"}\n', encoding="utf-8")
    refuses("has changed since the run was created", Run.open(tmp_path / "run").files.check_text)


def test_a_text_that_has_moved_is_found_where_it_is_said_to_be(folder, tmp_path, cli):
    out = tmp_path / "run"
    Run.create(text=folder, out=out, **FIELDS).train()
    moved = folder.rename(tmp_path / "moved")
    cli.refuses(f"smallmind train --resume {out} PATH", "train --resume", out, "--steps 3")
    other = tmp_path / "other.txt"
    other.write_text("something else " * 40, encoding="utf-8")
    cli("train --resume", out, other, "--steps 3", ends=2)
    cli("train --resume", out, moved, "--steps 3")
    cli("train --resume", out, "--steps 4")  # it is remembered


@pytest.mark.parametrize("is_list", [False, True])
def test_a_file_that_an_earlier_version_read_as_plain_text_still_is(tmp_path, is_list):
    file = tmp_path / "table.csv"
    file.write_text("text,n\r\n" + "the cat sat,1\r\n" * 40, encoding="utf-8", newline="")
    plain = tmp_path / "table.txt"
    plain.write_bytes(file.read_bytes())
    run = Run.create(text=plain, out=tmp_path / "run", **FIELDS)
    with edited(tmp_path / "run" / "config.json") as config:
        run.unlock()
        assert "\r" not in run.files.source.text
        config["run"]["text"] = [str(file)] if is_list else str(file)
        config["text_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    assert Run.open(tmp_path / "run").files.source.text == file.read_bytes().decode()


@pytest.mark.parametrize("text", ["word " * 150, "x" * 400, "a\0b", "a/b" * 90])
def test_paths_that_cannot_be_are_refused_in_a_line(tmp_path, text):
    assert refusal(Run.create, text=text, out=tmp_path / "run", **FIELDS)


def test_a_list_of_lists_is_no_text(tmp_path):
    toml = tmp_path / "run.toml"
    for value in ('[["a", "b"], "c"]', "[]", "[1]", "[" * 90 + "]" * 90):
        toml.write_text(f"[run]\ntext = {value}\n", encoding="utf-8")
        refuses("must be text in quotes", read_settings, toml)


def test_settings_may_name_several_texts(folder, tmp_path, cli):
    toml = tmp_path / "run.toml"
    paths = json.dumps([str(folder / "a.jsonl"), str(folder / "c31.txt")])
    toml.write_text(f'[run]\ntext = {paths}\ntext_field = "story"\n', encoding="utf-8")
    small = "--n-layer 1 --n-embd 16 --block-size 16 --steps 2"
    assert "31" in cli("train --config", toml, small, "--out", tmp_path / "run").out
    for command in ("check", "estimate"):
        cli(command, folder, small)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(("straße " * 40).encode("latin-1"))
    cli("train", latin, small, "--encoding latin-1 --out", tmp_path / "latin")
    assert "straße" in Run.open(tmp_path / "latin").files.source.text


def test_documents_may_be_separated_by_another_character(folder, tmp_path, cli):
    fields = {**FIELDS, "text_separator": "\f", "mask_documents": True}
    run = Run.create(text=folder, out=tmp_path / "run", **fields)
    text = run.files.source.text
    assert text.count("\f") == 39 and text.endswith(STORIES[-1] + "\n")
    token = run.data.tokenizer.encode("\f")[0]
    assert run.settings.model.document_token == token and token in run.data.train
    run.train()
    again = Run.open(tmp_path / "run")
    assert again.files.source.text == text and again.evaluate() == again.evaluate(folder)
    prepared = str(tmp_path / "prepared")
    cli("prepare", folder, "--separator", ["\f"], "--out", prepared)
    on_disk = Run.create(text=prepared, out=tmp_path / "disk", **{**FIELDS, "mask_documents": True})
    assert on_disk.settings.model.document_token == token
    assert list(on_disk.data.train[:]) == list(run.data.train)
    for command in (["train", folder], ["prepare", folder, "--out", tmp_path / "x"]):
        cli.refuses("must be one character", command, "--separator ab")
        cli.refuses("--separator has no effect", command, ["--separator", "\f"], "--tokenizer bpe")

"""Texts that are odd, too short, not regular files, or change while they are trained on."""

import json

import pytest

from smallmind.runs.source import read_source
from smallmind.training.evaluation import Evaluations
from tests.faults.runs import FLAGS, TEXT, outcome, status, train

T = 64  # tokens of context
ENOUGH = T + 1 + T // 9  # so that a tenth can be held out


def trained(tmp_path, content, *flags):
    """Trains on a file with this content -> exit status."""
    path = tmp_path / "text"
    path.write_bytes(content)
    return status("train", path, *FLAGS, *flags, "--out", tmp_path / "run")


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
@pytest.mark.parametrize(
    ("content", "characters"),
    [
        (b"\xef\xbb\xbf" + TEXT.encode(), set(TEXT)),
        (TEXT.encode().replace(b"\n", b"\r\n"), set(TEXT)),
        (TEXT.encode("utf-16"), set(TEXT)),
        (TEXT.encode().replace(b" ", b"\0"), {*TEXT.replace(" ", "\0")}),
        ("\u2028\x85\x0c\ud7ff\U0010ffff".encode() * 200, set("\u2028\x85\x0c\ud7ff\U0010ffff")),
        (b"x" * 3000, {"x"}),
        (TEXT.replace("\n", " ").encode() * 25, set(TEXT) - {"\n"}),  # one line of 72 KB
    ],
    ids=["mark", "CRLF", "UTF-16", "NUL", "odd breaks", "one character", "one line"],
)
def test_every_character_of_a_text_counts(tmp_path, capsys, content, characters, tokenizer):
    """Line ends become LF; nothing is cut at a NUL or left out."""
    assert trained(tmp_path, content, "--tokenizer", tokenizer, "--steps", "3") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    expected = len(characters) if tokenizer == "char" else 256
    assert config["model"]["vocab_size"] == expected
    assert status("train", "--resume", tmp_path / "run") == 0
    assert status("generate", tmp_path / "run", "--max-tokens", "5") == 0
    assert status("evaluate", tmp_path / "run") == 0


@pytest.mark.slow
def test_a_line_of_100_megabytes_can_be_trained_on(tmp_path):
    content = TEXT.replace("\n", " ").encode()
    assert trained(tmp_path, content * (10**8 // len(content)), "--steps", "3") == 0


@pytest.mark.parametrize("tokens", [0, 1, 2, 19, T, T + 1, ENOUGH - 1])
def test_a_text_that_is_too_short_is_refused(tmp_path, capsys, tokens):
    assert trained(tmp_path, b"ab" * (tokens // 2) + b"c" * (tokens % 2), "--block-size", T) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert ("is empty" if not tokens else "needs at least ") in printed
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_just_long_enough_is_trained_on(tmp_path):
    assert trained(tmp_path, (b"ab" * ENOUGH)[:ENOUGH], "--block-size", T) == 0


@pytest.mark.parametrize("change", ["append", "truncate", "remove", "replace"])
def test_a_text_that_changes_during_a_run_does_not_affect_it(tmp_path, monkeypatch, cli, change):
    """The run continues with the text it has read; later commands refuse the changed text."""
    assert train(tmp_path, name="whole") == 0
    text, run = tmp_path / "cats.txt", tmp_path / "run"
    original = Evaluations.evaluate

    def evaluate(training, step, batches):
        if step == 7:
            if change == "remove":
                text.unlink()
            else:
                written = {"append": TEXT + "x", "truncate": "", "replace": TEXT[::-1]}[change]
                text.write_text(written, encoding="utf-8")
        return original(training, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluations, "evaluate", evaluate)
        assert train(tmp_path) == 0
    assert outcome(run) == outcome(tmp_path / "whole")
    words = {"remove": "does not exist", "truncate": "is empty"}.get(change, "has changed")
    for command in ("train --resume", "evaluate", "verify"):
        cli.refuses(words, command, run)
    text.write_text(TEXT, encoding="utf-8")
    assert read_source(text).text == TEXT
    cli("train --resume", run)


def test_a_text_longer_than_a_chunk_is_encoded_whole():
    from smallmind.text.char_tokenizer import CHUNK
    from smallmind.text.tokenizer import Tokenizer

    text = "ab" * CHUNK + "c"
    tokenizer = Tokenizer(text)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and ids[-1] == 2 and (ids[:-1:2] == 0).all()
    with pytest.raises(ValueError, match=f"position {CHUNK + 5}"):
        tokenizer.encode("a" * (CHUNK + 5) + "?")

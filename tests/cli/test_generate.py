"""`smallmind generate`: several texts, JSON, prompts one after another."""

import io
import json

import pytest

from smallmind import Run
from smallmind.cli import main

TEXT = "abcdefgh\n" * 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate") / "run"
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 12, "batch_size": 8}
    Run.create(text=TEXT, out=path, steps=60, **small).train()
    return str(path)


def generated(run, capsys, *flags):
    assert main(["generate", run, "--max-tokens", "8", *flags]) == 0
    return capsys.readouterr()


def test_speed_is_told_beside_the_text(run, capsys):
    printed = generated(run, capsys, "--prompt", "abc", "--temperature", "0")
    assert printed.out == "abcdefgh\nab\n" or printed.out.startswith("abc")
    assert "8 tokens, " in printed.err and "tokens/s" in printed.err


def test_several_texts_have_their_seeds(run, capsys):
    printed = generated(run, capsys, "--prompt", "ab", "--n", "3", "--seed", "4")
    assert [line for line in printed.out.split("\n") if "Seed" in line] == [
        f"Seed {seed}:" for seed in (4, 5, 6)
    ]
    assert "24 tokens" in printed.err


def test_json_has_a_line_per_text(run, capsys):
    flags = ["--prompt", "ab", "--n", "2", "--json", "--stop", "e", "--stop", "xx"]
    lines = generated(run, capsys, *flags, "--temperature", "0").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 2
    for number, sample in enumerate(found):
        assert sample["prompt"] == "ab" and sample["text"] == "cd"
        assert (sample["ended"], sample["tokens"]) == ("stop", 3)
        assert sample["seed"] == 1337 + number and sample["model"] == run


def test_a_text_may_end_at_a_line_break(run, capsys):
    """As a shell passes it on: a backslash and a letter."""
    flags = ["--prompt", "abcd", "--json", "--temperature", "0"]
    sample = json.loads(generated(run, capsys, *flags, "--stop", r"\n").out)
    assert (sample["text"], sample["ended"]) == ("efgh", "stop")
    sample = json.loads(generated(run, capsys, *flags, "--stop", r"gh\nab").out)
    assert (sample["text"], sample["ended"]) == ("ef", "stop")
    for stop in (r"\\n", "n", r"\t"):  # none of them is a line break
        sample = json.loads(generated(run, capsys, *flags, "--stop", stop).out)
        assert (sample["text"], sample["ended"]) == ("efgh\nabc", "length"), stop


def test_prompts_are_asked_for_until_the_input_ends(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\n!\nfgh\n"))
    printed = generated(run, capsys, "-i", "--temperature", "0")
    assert printed.out.startswith("abc") and "\nfgh" in printed.out
    assert "never seen the character '!'" in printed.err


def test_ctrl_c_ends_a_text_and_not_the_program(run, capsys, monkeypatch):
    answers = iter([KeyboardInterrupt, "abc", EOFError])

    def answer(_prompt):
        given = next(answers)
        if isinstance(given, str):
            return given
        raise given

    monkeypatch.setattr("builtins.input", answer)
    assert generated(run, capsys, "-i").out.startswith("abc")


@pytest.mark.parametrize(
    "flags", [["--n", "0"], ["-i", "--json"], ["-i", "--prompt", "a"], ["-i", "--n", "2"]]
)
def test_flags_that_contradict_each_other_are_refused(run, capsys, flags):
    assert main(["generate", run, *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1

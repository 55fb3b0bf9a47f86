"""`smallmind generate`: several texts, JSON, prompts one after another."""

import io
import json
import shutil

import pytest

from smallmind import Run
from smallmind.writing import generation
from tests.programs import edited

TEXT = "abcdefgh\n" * 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate") / "run"
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 12, "batch_size": 8}
    Run.create(text=TEXT, out=path, steps=60, **small).train()
    return path


@pytest.fixture
def generated(run, cli):
    """The output of `smallmind generate`."""
    return lambda *flags: cli("generate", run, "--max-tokens 8", *flags)


@pytest.fixture
def samples(generated):
    """The likeliest texts, as JSON."""
    return lambda *flags: [
        json.loads(line)
        for line in generated("--temperature 0 --json --prompt", *flags).out.splitlines()
    ]


def test_speed_is_told_beside_the_text(generated):
    printed = generated("--prompt abc --temperature 0")
    assert printed.out == "abcdefgh\nab\n" or printed.out.startswith("abc")
    assert "8 tokens, " in printed.err and "tokens/s" in printed.err


def test_several_texts_have_their_seeds(generated):
    printed = generated("--prompt ab --n 3 --seed 4")
    assert [line for line in printed.out.split("\n") if "Seed" in line] == [
        f"Seed {seed}:" for seed in (4, 5, 6)
    ]
    assert "24 tokens" in printed.err


def test_json_has_a_line_per_text(run, samples):
    found = samples("ab --n 2 --stop=e --stop=xx")
    assert len(found) == 2
    for number, sample in enumerate(found):
        assert sample["prompt"] == "ab" and sample["text"] == "cd"
        assert (sample["ended"], sample["tokens"]) == ("stop", 3)
        assert sample["seed"] == 1337 + number and sample["model"] == str(run)


@pytest.mark.parametrize(
    ("stop", "text", "ended"),
    [
        (r"\n", "efgh", "stop"),
        (r"gh\nab", "ef", "stop"),
        # None of these is a line break.
        *((stop, "efgh\nabc", "length") for stop in (r"\\n", "n", r"\t")),
    ],
)
def test_a_text_may_end_at_a_line_break(samples, stop, text, ended):
    """As a shell passes it on: a backslash and a letter."""
    [sample] = samples("abcd --stop", [stop])
    assert (sample["text"], sample["ended"]) == (text, ended)


def test_prompts_are_asked_for_until_the_input_ends(generated, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\n!\nfgh\n"))
    printed = generated("-i --temperature 0")
    assert printed.out.startswith("abc") and "\nfgh" in printed.out
    assert "never seen the character '!'" in printed.err


def test_ctrl_c_ends_a_text_and_not_the_program(generated, monkeypatch):
    answers = iter([KeyboardInterrupt, "abc", EOFError])

    def answer(_prompt):
        given = next(answers)
        if isinstance(given, str):
            return given
        raise given

    monkeypatch.setattr("builtins.input", answer)
    assert generated("-i").out.startswith("abc")


@pytest.mark.parametrize("flags", ["--n 0", "-i --json", "-i --prompt a", "-i --n 2"])
def test_flags_that_contradict_each_other_are_refused(run, cli, flags):
    cli.refuses("", "generate", run, flags)


@pytest.mark.parametrize("trained_in", ["bfloat16", None])
def test_a_run_writes_in_the_precision_it_was_trained_in(
    run, tmp_path, cli, monkeypatch, trained_in
):
    """Its kernels are compiled. A model file alone does not say which it was."""
    copy, used = tmp_path / "run", []
    shutil.copytree(run, copy)
    with edited(copy / "config.json") as config:
        config["training"]["precision"] = trained_in
    original = generation.Writer

    def writer(model, *arguments):
        used.append(str(model.precision))
        return original(model, *arguments)

    monkeypatch.setattr(generation, "Writer", writer)
    for path, flags in (
        (copy, ""),
        (copy, "--precision float16"),
        (copy / "model.safetensors", ""),
    ):
        cli("generate", path, "--max-tokens 2 --prompt ab", flags)
    assert used == [trained_in or "float32", "float16", "float32"]


def test_texts_have_the_form_that_is_asked_for(run, cli, samples, tmp_path):
    pytest.importorskip("llguidance")
    (sample,) = samples("a --regex [hg]{3}")
    assert len(sample["text"]) == 3 and set(sample["text"]) <= {"g", "h"}
    assert sample["ended"] == "form"
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"prompt": "ab", "answer": "hhh"}))
    for regex, right in (("h{3}", 1), ("g{3}", 0)):
        shown = cli("evaluate", run, "--exact", items, "--json --regex", regex)
        assert json.loads(shown.out)["measures"]["right"]["right"] == right


def test_a_form_that_there_is_not_is_one_line(run, cli, tmp_path):
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    cli.refuses(f"cannot read --schema {schema}", "generate", run, "--schema", schema)
    schema.write_text('{"type": "string", "format": "foo"}')
    cli.refuses(f"--schema {schema}: the schema", "generate", run, "--schema", schema)
    cli.refuses("--regex: the regex cannot be compiled", "generate", run, "--regex", "(a")
    cli.refuses("cannot spell what the json asks for", "generate", run, "--format json")
    cli.refuses("add --exact FILE", "evaluate", run, "--format json")

"""Numbers in the files of a run that cannot be right, each with every command that reads them."""

import json
import shlex
import shutil

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smallmind.files import safetensors
from tests.faults.runs import status, train

# As JSON: what no field of a run's files means, and no reader may stumble over.
WRONG = {
    "400 digits": "9" * 400,
    "5000 digits": "9" * 5000,
    "2**63": str(2**63),
    "2**70": str(2**70),
    "below 0": "-1",
    "far below 0": str(-(2**70)),
    "a fraction": "0.5",
    "1e308": "1e308",
    "1e999": "1e999",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "true": "true",
    "null": "null",
    "text": '"x"',
    "a number as text": '"7"',
    "half a character": '"\\ud800"',
    "control characters": '"\\u0000\\u001b[2J\\u202e"',
    "a long text": '"' + "x" * 100_000 + '"',
    "a list": "[1]",
    "an object": '{"a": 1}',
    "the same key twice": '{"a": 1, "a": 2}',
    "deep lists": "[" * 10_000 + "]" * 10_000,
    "deep objects": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "nothing": "",
}
FLAGS = shlex.split(
    "--steps 4 --n-layer 1 --n-embd 8 --block-size 8 --batch-size 2 --val-every 2 --val-batches 1 "
    "--save-every 2 --sample-every 2 --warmup-steps 1 --check-gradient-health --profile "
    "--diagnostic-interval 2 --backend numpy"
)
MARK = "@@"
# Checkpoints and models, and which of their metadata is JSON.
SIGNED = {
    "checkpoints/step-00000002.safetensors": ("state",),
    "checkpoints/step-00000004.safetensors": ("state",),
    "checkpoints/best.safetensors": ("state",),
    "model.safetensors": ("config", "tokenizer"),
}


def leaves(value, path=()):
    """The paths to all values, of long lists only to the first and the last."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = [(i, value[i]) for i in sorted({0, len(value) - 1}) if value]
    for key, part in inner:
        yield from leaves(part, (*path, key))


def with_leaf(text, path, raw):
    """JSON text with raw in place of a value."""
    value = json.loads(text)
    if not path:
        return raw
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = MARK
    return json.dumps(value).replace(json.dumps(MARK), raw, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with two runs, bad and good, the first of which examples change."""
    parent = tmp_path_factory.mktemp("hostile") / "runs"
    assert train(parent.parent, *FLAGS, name="runs/bad") == 0
    shutil.copytree(parent / "bad", parent / "good")
    return parent


def places(run):
    """Where a number is, or could be: the file, the line or key of metadata, the path in JSON."""
    for name in ("config.json", "profile.json", "tokenizer.json"):
        for path in leaves(json.loads((run / name).read_text())):
            yield name, None, path
    kinds = {}
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        kinds.setdefault(tuple(json.loads(line)), (number, line))
    for number, line in kinds.values():
        for path in leaves(json.loads(line)):
            yield "metrics.jsonl", number, path
    yield from (("samples.txt", None, ()), (".lock", None, ()))
    for name, encoded in SIGNED.items():
        for key, text in safetensors.read_metadata(run / name).items():
            for path in leaves(json.loads(text)) if key in encoded else [()]:
                yield name, key, path


def damage(run, place, raw):
    """Writes raw, which is JSON or meant to be, in a place; checkpoints are signed again."""
    name, key, path = place
    file = run / name
    if name == "samples.txt":
        file.write_text(f"--- step {raw}\ntext\n")
    elif name == ".lock":
        file.write_text(raw)
    elif name in SIGNED:
        tensors, metadata = safetensors.read(file)
        is_json = key in SIGNED[name]
        text = with_leaf(metadata[key], path, raw) if is_json else raw
        safetensors.write(file, tensors, {**metadata, key: text})
    elif name == "metrics.jsonl":
        lines = file.read_text().splitlines()
        lines[key] = with_leaf(lines[key], path, raw)
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_text(with_leaf(file.read_text(), path, raw))


def check_commands(runs, capfd, place, raw):
    """Each shows the run, or says in a line why it cannot; the other run is listed as ever."""
    bad, good = runs / "bad", runs / "good"
    shutil.rmtree(bad)
    shutil.copytree(good, bad)
    damage(bad, place, raw)
    out = runs.parent
    for words in (
        ["runs", runs, "--sort", "parameters"],
        ["runs", runs, "--json"],
        ["compare", good, bad],
        ["plot", good, bad],
        ["plot", bad, "--x", "time"],
        ["watch", bad, "--once"],
        ["report", bad, "--out", out / "report.html"],
        ["export-metrics", bad, "--out", out / "metrics.csv"],
        ["verify", bad],
        ["verify", bad, "--digests-only"],
        ["generate", bad, "--max-tokens", "2"],
        ["generate", bad, "--max-tokens", "2", "--checkpoint", "best"],
        ["evaluate", bad],
        ["export", bad, "--to", "gguf", out / "model.gguf"],
        ["estimate", "--config", bad / "config.json"],
        ["train", "--resume", bad],
    ):
        capfd.readouterr()
        found = status(*words)
        output, errors = capfd.readouterr()
        context = (words, place, raw[:80], found, output[-2000:], errors[-2000:])
        assert found in (0, 2) or (found == 1 and words[0] in ("verify", "train")), context
        assert "Traceback" not in errors + output, context
        assert "\x1b" not in output + errors and "\u202e" not in output + errors, context
        if words[0] == "runs":
            assert "good" in output, context
        if found:
            assert len(errors.splitlines()) <= 2 and len(errors) < 2000, context


CASES = {
    "parameters": (("config.json", None, ("parameters",)), "400 digits"),
    "seconds": (("metrics.jsonl", 1, ("elapsed_seconds",)), "1e308"),
    "final loss": (("metrics.jsonl", -1, ("final_loss",)), "text"),
    "samples": (("samples.txt", None, ()), "5000 digits"),
    "profile": (("profile.json", None, ("rows", 0, "own")), "400 digits"),
    "average": (("checkpoints/step-00000002.safetensors", "state", ("spikes", "average")), "text"),
    "best loss": (
        ("checkpoints/step-00000004.safetensors", "state", ("progress", "best_loss")),
        "a number as text",
    ),
    "config": (("checkpoints/step-00000004.safetensors", "state", ("config",)), "an object"),
    "step of the model": (("model.safetensors", "step", ()), "5000 digits"),
}


@pytest.mark.parametrize(("place", "wrong"), CASES.values(), ids=CASES)
def test_a_number_that_cannot_be_right_is_shown_or_refused(runs, capfd, place, wrong):
    check_commands(runs, capfd, place, WRONG[wrong])


@pytest.mark.parametrize("examples", [5, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_number_that_cannot_be_right_is_shown_or_refused(runs, capfd, examples):
    @hypothesis_settings(max_examples=examples, deadline=None)
    @given(place=st.sampled_from(list(places(runs / "good"))), wrong=st.sampled_from([*WRONG]))
    def check(place, wrong):
        check_commands(runs, capfd, place, WRONG[wrong])

    check()

"""The commands as a user types them, in separate processes where that matters."""

import csv
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import types

import pytest

from smallmind import Run, Tokenizer, TrainingConfig
from smallmind.cli import describe, main
from smallmind.cli.console import Console
from smallmind.cli.display import show_costs
from smallmind.cli.estimate import parse_size
from smallmind.files import safetensors
from smallmind.forecast import pace
from smallmind.forecast.memory import Program
from smallmind.kernels import compiled
from smallmind.kernels.codegen.isa import ISA
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import SCHEDULES
from smallmind.settings.rules import Choices
from smallmind.training import evaluation
from smallmind.training.records import RunProgress
from tests.faults.test_consoles import Recorded
from tests.programs import CATS, flat, printed_by, started

TEXT = CATS
SMALL = shlex.split(
    "--block-size 16 --n-embd 16 --n-layer 1 --n-head 2 --batch-size 4 --steps 30 "
    "--val-every 20 --val-batches 2 --warmup-steps 5"
)


def metrics(run):
    """The records of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def config_of(run):
    return json.loads((run / "config.json").read_text(encoding="utf-8"))


@pytest.fixture
def out(tmp_path):
    """Where a test trains its run."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a finished run."""
    root = tmp_path_factory.mktemp("cli")
    (root / "cats.txt").write_text(TEXT, encoding="utf-8")
    assert main(["train", str(root / "cats.txt"), *SMALL, "--out", str(root / "run")]) == 0
    return root / "run"


def test_train_shows_what_it_does(text, out, cli):
    printed = cli("train", text, SMALL, "--out", out)
    words = "Model|token embedding|parameters|Data|2,880|vocabulary|held out|Run|tokens per step"
    words += "|threads|instruction set|step 30/30|held-out loss|bits/char, perplexity"
    words += f"|next-char accuracy|Sample:|The run is in {out}|Directory: {out}"
    for word in words.split("|"):
        assert word in printed.flat, word
    next_command = printed.out[printed.out.index("Next: ") :].replace("\\\n", " ")
    assert flat(next_command) == f'Next: smallmind generate {out} --prompt "the cat"'
    assert "\r" not in printed.out  # lines are only rewritten on a terminal


def test_the_run_directory_is_readable_by_other_programs(run):
    files = "config.json metrics.jsonl model.safetensors samples.txt tokenizer.json"
    assert {path.name for path in run.iterdir()} == {"checkpoints", *files.split()}
    checkpoints = {path.name for path in (run / "checkpoints").iterdir()}
    steps = ("best", "step-00000020", "step-00000030")
    assert checkpoints == {f"{name}.safetensors" for name in steps}
    config = config_of(run)
    assert config["format"] == 1 and config["training"]["min_lr"] == 0.0
    assert config["model"]["n_embd"] == 16 and config["model"]["vocab_size"] == len(set(TEXT))
    assert config["training"]["enable_diagnostics"] is False
    assert config["training"]["steps"] == 30 and config["training"]["optimizer"] == "muon"
    assert config["run"]["batch_size"] == 4 and config["run"]["out"] == str(run)
    steps = [line for line in metrics(run) if "lr" in line]
    evaluations = [line for line in metrics(run) if "val_loss" in line]
    assert [line["step"] for line in steps] == [1, 10, 20, 30]
    assert [line["step"] for line in evaluations] == [20, 30]
    fields = "loss lr grad_norm tokens_per_second step_ms windows precision loss_scale clip_share"
    fields += " step kind elapsed_seconds memory peak_memory gflops waiting_share"
    assert set(steps[0]) == set(fields.split())
    fields = "train_loss val_loss perplexity bits_per_character bits_per_byte accuracy"
    assert set(evaluations[0]) == {"step", "kind", "elapsed_seconds", *fields.split()}
    tensors, metadata = safetensors.read(run / "model.safetensors")
    assert tensors["blocks.0.attention.qkv.weight"].shape == (16, 48)
    assert json.loads(metadata["config"])["n_layer"] == 1
    assert json.loads(metadata["tokenizer"])["kind"] == "char"
    assert (run / "samples.txt").read_text(encoding="utf-8").startswith("--- step 30\n")


def test_generate_streams_the_same_text_for_the_same_seed(run, cli):
    texts = [
        cli("generate", run, "--prompt", ["the "], "--seed", flags).out.removesuffix("\n")
        for flags in ("1", "1 --max-tokens 50", "2 --max-tokens 50")
    ]
    assert [len(text) for text in texts] == [len("the ") + n for n in (500, 50, 50)]
    assert texts[0].startswith(texts[1]) and texts[1] != texts[2]
    assert texts[2].startswith("the ")


def test_evaluate_measures_the_held_out_part(run, cli):
    printed = cli("evaluate", run).out
    words = ("cats, the held-out part", " 287 ", "nats per token", "bits/char", "perplexity")
    for word in (*words, "next-char accuracy"):
        assert word in printed
    assert "floor" not in printed


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_evaluate_computes_what_the_run_has_at_its_end(text, out, cli, monkeypatch, precision):
    cli("train", text, SMALL, "--steps 6 --precision", precision, "--out", out)
    original, found = evaluation.evaluate_held_out, []

    def evaluate_held_out(model, data):
        found.append((model.precision, original(model, data).loss))
        return original(model, data)

    monkeypatch.setattr(evaluation, "evaluate_held_out", evaluate_held_out)
    for flags in "", "--precision float16":
        cli("evaluate", out, flags)
    (end,) = (line["final_loss"] for line in metrics(out) if line["kind"] == "final")
    assert found[0] == (precision, end) and found[1][0] == "float16"


def test_evaluate_on_another_text_takes_all_of_it(run, tmp_path, cli):
    (tmp_path / "other.txt").write_text("the mat sat on the cat.\n", encoding="utf-8")
    printed = cli("evaluate", run, tmp_path / "other.txt").out
    assert "other, all of it (not the run's own text)" in printed and " 23 " in printed


def test_characters_that_a_model_has_never_seen_can_be_left_out(run, tmp_path, cli):
    """Only the rest of the text is measured; the message says how."""
    table = {}
    for name, content in (("known", "the mat sat."), ("other", "the Γmat sÉat.")):
        (tmp_path / f"{name}.txt").write_text(content, encoding="utf-8")
        printed = cli("evaluate", run, tmp_path / f"{name}.txt", "--unknown skip").flat
        table[name] = printed[printed.index("tokens predicted") :]
    assert table["known"] == table["other"]
    assert "skipped │ 2 characters: 'É', 'Γ' │" in printed
    for words in (
        "2 characters that the model has never",
        "'É', 'Γ'; skip them with --unknown skip, or retrain with --tokenizer bpe",
    ):
        cli.refuses(words, "evaluate", run, tmp_path / "other.txt")
    words = "remove it, or retrain with --tokenizer bpe, which handles any text"
    cli.refuses(words, "generate", run, "--prompt É")


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_the_advised_tokenizers_encode_any_text(kind, text, out, tmp_path, cli):
    flags = "--steps 1 --backend numpy --no-bias --no-tie-weights --dropout 0.1 --tokenizer"
    assert "plain NumPy" in cli("train", text, SMALL, flags, kind, "--out", out).out
    (tmp_path / "other.txt").write_text("ΓÉ" * 20, encoding="utf-8")
    cli("evaluate", out, tmp_path / "other.txt")
    assert "É" in cli("generate", out, "--prompt É --max-tokens 1").out


@pytest.fixture
def advised(tmp_path, cli):
    """The advice that `train` prints on the length of a text, before the first step."""

    def advised(text, name, *flags):
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        shape = "--block-size 8 --n-embd 8 --n-layer 1 --n-head 1 --batch-size 100 --val-every 0"
        where = "--backend numpy --out", tmp_path / name
        printed = cli("train", tmp_path / "text.txt", shape, *flags, *where).flat
        return re.search(r"the end of the text │ ╰[─┴]+╯ (.*?)Run ╭", printed)[1]

    return advised


def test_a_short_text_is_said_to_be_learned_by_heart_before_the_first_step(tmp_path, advised):
    """A line says what to expect, and how much text is enough: with it nothing is said."""
    assert advised(TEXT[:300], "few", "--steps 2") == (
        "300 characters are too few: the model will recite fragments. For new text, use 50,000 "
        "or more "
    )
    assert advised(TEXT[:300], "many", "--steps 30") == (
        "The model will memorise these 300 characters: it reads them 89 times. For new text, use "
        "50,000 characters or more "
    )
    tuned = "--steps 2 --init-from", tmp_path / "few"
    assert advised(TEXT[:300], "tuned", *tuned) == ""  # its weights have seen more
    assert advised((TEXT * 20)[:50_000], "enough", "--steps 30") == ""


def test_a_long_text_that_is_read_too_often_needs_more_text_or_fewer_steps(advised, monkeypatch):
    monkeypatch.setattr(describe, "ENOUGH_CHARACTERS", 1000)
    many = advised(TEXT[:2000], "many", "--steps 200")
    assert many.endswith("For new text, use 7,500 characters or more, or train for fewer steps ")
    assert advised((TEXT * 3)[:7500], "enough", "--steps 200") == ""


def test_the_help_says_whose_defaults_it_shows(cli):
    printed = cli("train --help").flat
    assert "defaults are those of GPT-2" not in printed
    assert "Defaults below are those of modern" in printed
    assert "from Python, TransformerModel defaults to GPT-2's parts" in printed
    assert "not the default of the command line" in flat(TransformerModel.__doc__)
    assert Choices({}).fields["norm"] == "rmsnorm"
    assert TransformerModel(5, 4, 4, 1, 1).config.norm == "layernorm"


def test_the_default_directory_is_new_each_time(text, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        cli("train", text, SMALL)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names[0].endswith("-cats") and names[1].endswith("-cats-2")


def test_profile_shows_where_time_and_memory_went(text, out, tmp_path, cli):
    trace, scope = tmp_path / "trace.json", tmp_path / "run.speedscope.json"
    flags = ["--profile-json", trace, "--profile-speedscope", scope]
    printed = cli("train", text, SMALL, flags, "--out", out)
    boxes = [line for line in printed.out.splitlines() if line[:1] in "╔║╠╟╚" and line]
    assert boxes[1].strip("║ ") == "TRAINING PERFORMANCE REPORT"
    names = "GetBatch|Forward|Loss|Backward|ClipGradients|OptimizerStep|Evaluate|  matmul"
    names += "|  attention_backward|  adamw|TOTAL|MEMORY REPORT|After training"
    for name in names.split("|"):
        assert any(name in line for line in boxes), name
    assert "Steps were not replayed from a recording, because --profile times" in printed.flat
    assert f"Wrote the trace to {trace}" in printed.flat
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"] == "OptimizerStep" for event in events) == 30
    assert f"Wrote the profile to {scope}" in printed.flat
    profile = json.loads(scope.read_text(encoding="utf-8"))
    number = [frame["name"] for frame in profile["shared"]["frames"]].index("OptimizerStep")
    opened = [(event["type"], event["frame"]) for event in profile["profiles"][0]["events"]]
    assert opened.count(("O", number)) == opened.count(("C", number)) == 30


def test_epochs_set_the_number_of_steps(text, out, cli):
    flags = [*SMALL[: SMALL.index("--steps")], "--epochs", "2", "--val-every", "20"]
    printed = cli("train", text, flags, "--val-batches 0 --warmup-steps 5 --out", out).out
    steps = 2 * -(-(2592 - 1) // 16 // 4)
    assert f"{steps} (2 epochs)" in printed and f"step {steps}/{steps}" in printed
    config = config_of(out)["training"]
    assert config["steps"] == steps and config["epochs"] == 2
    # The last evaluation covered all held-out text, so the result at the end is the same.
    loss = [line["val_loss"] for line in metrics(out) if "val_loss" in line][-1]
    assert f"Final held-out loss: {loss:.4f} nats per token, on" in printed
    assert f"is finished: {steps} steps" in cli("train --resume", out).flat


@pytest.mark.parametrize(
    ("norm", "share", "warned"),
    [("1e-6", "100.0%", True), ("0.02", "100.0%", False), ("1e6", "0.0%", False)],
)
def test_the_share_of_clipped_gradients_is_shown(text, out, cli, norm, share, warned):
    """With advice only where it helps: bench/LOG.md says what was tried."""
    flags = f"--max-grad-norm {norm} --max-grad-value 0.1 --out"
    printed = cli("train", text, SMALL, flags, out).flat
    shown = f"{share} of the gradients were clipped to max_grad_norm={float(norm)}"
    assert shown in printed
    advice = "which is far below their norms: raise --max-grad-norm, for example to 1"
    assert (f"{shown}, {advice}" in printed) == warned
    assert "lower the learning rate" not in printed


@pytest.mark.parametrize(
    ("evaluating", "total", "advised"),
    [(10.5, 50.0, True), (9.5, 50.0, False), (4.0, 5.0, False), (11.0, 60.0, False)],
)
def test_the_time_of_evaluations_is_shown(evaluating, total, advised, capsys):
    """Advice only where there is time to save, about what somebody chose, not the result's."""
    seconds = {"total": total + 7, "evaluations": evaluating, "last evaluation": 7.0}

    def shown(limits=False, **chosen):
        training = types.SimpleNamespace(
            progress=RunProgress(evaluated=250, seconds=seconds),
            config=TrainingConfig(max_grad_norm=0, **chosen),
        )
        config = types.SimpleNamespace(limits_evaluations=limits)
        files = types.SimpleNamespace(config=config)
        show_costs(Console(), types.SimpleNamespace(training=training, files=files))
        return flat(capsys.readouterr().out)

    printed = shown(val_every=10)
    for nobodys in ({}, {"val_every": 50, "val_batches": 5}):  # the defaults, and those of a preset
        assert "Evaluations took" in shown(**nobodys) and "evaluate less" not in shown(**nobodys)
    assert "evaluate less" not in shown(limits=True, val_every=10)  # the recipe has chosen it
    share = f"Evaluations took {evaluating} of {total} seconds ({evaluating / total:.0%})"
    assert share in printed
    advice = ": evaluate less often (a larger --val-every) or on less text (fewer --val-batches)"
    assert (share + advice in printed) == advised


def test_a_run_without_evaluations_does_not_say_how_long_they_took(text, out, cli):
    printed = cli("train", text, SMALL, "--steps 3 --val-every 0 --out", out).out
    assert "Final held-out loss" in printed and "Evaluations took" not in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--warmup-steps 99", "The run ends during its warmup of 99 steps"),
        ("--steps 0", "steps=0 trains nothing"),
    ],
)
def test_a_run_that_is_too_short_is_said_before_it_starts(text, out, cli, flags, words):
    for command in (["check"], ["train", "--out", out]):
        printed = cli(command, text, SMALL, flags).flat
        assert "step 30/30" not in printed[: printed.index(words)]


def test_check_fails_at_a_rate_at_which_the_run_diverges(text, cli):
    printed = cli("check", text, SMALL, "--learning-rate 10", ends=1).flat
    assert "FAILED learning at the peak rate, 1.0e+01: loss from" in printed
    assert "1 of 6 checks failed" in printed


def change_pass_24(monkeypatch, changed):
    """The loss of that pass is what `changed` makes of it."""
    original = TransformerModel.loss_and_gradients

    def loss_and_gradients(model, ids, targets, scale=1.0, at=None, **named):
        loss = original(model, ids, targets, scale, at, **named)
        return changed(loss) if at and at.number == 24 else loss

    monkeypatch.setattr(TransformerModel, "loss_and_gradients", loss_and_gradients)


def test_a_rollback_is_shown_and_logged(text, out, cli, monkeypatch):
    first = iter([math.nan])
    change_pass_24(monkeypatch, lambda loss: next(first, loss))
    printed = cli("train", text, SMALL, "--save-every 12 --out", out).flat
    assert "Step 25: the loss is not finite from an average of " in printed
    continuing = "continuing at 0.5 times the learning rate, without that batch."
    assert f"Rolled back to step 24; {continuing} The rate is now " in printed
    [kept] = [line for line in metrics(out) if "spike_step" in line]
    assert f"The rate is now {kept['next_lr']:.1e}." in printed
    assert kept["step"] == 24 and kept["spike_step"] == 25 and kept["spike_loss"] is None
    rows = csv.DictReader(io.StringIO(cli("export-metrics", out).out))
    assert next(row for row in rows if row["step"] == "24")["lr_factor"] == "0.5"


def change_initialisation(monkeypatch, name, place, value):
    """From now on every new model starts with this value in a parameter."""
    original = TransformerModel.__init__

    def init(model, *arguments, **settings):
        original(model, *arguments, **settings)
        model.parameters[name][place] = value

    monkeypatch.setattr(TransformerModel, "__init__", init)


HEALTH = "--recipe gpt2 --check-gradient-health --diagnostic-interval 10"


def test_a_finding_is_shown_once_and_logged_every_time(text, out, cli, monkeypatch):
    change_initialisation(monkeypatch, "blocks.0.mlp.expansion.bias", ..., -100)
    printed = cli("train", text, SMALL, HEALTH, "--out", out).flat
    assert printed.count("blocks.0.mlp.expansion: 64 of 64 hidden units are dead") == 1
    # Five parameters get no gradient: three lines, and the number of the others.
    assert printed.count("all gradients are zero") == 3
    assert "Step 1: zero 2 more times, see metrics.jsonl" in printed and "Health:" not in printed
    kept = [line for line in metrics(out) if "findings" in line]
    assert [line["step"] for line in kept] == [1, 10, 20, 30]
    for line in kept:
        assert sum(finding["problem"] == "zero" for finding in line["findings"]) == 5
    assert 0 < kept[1]["update_ratios"]["token_embedding.weight"] < 1


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("--config run.toml", "--config run.toml --no-profile", "TRAINING PERFORMANCE REPORT"),
        (HEALTH, "--recipe gpt2", "Health: 4 checks, no problems"),
    ],
)
def test_a_profile_and_good_health_are_shown_if_they_are_asked_for(
    text, tmp_path, monkeypatch, cli, first, second, shown
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\nenable_diagnostics = true\n")
    for name, flags in (("first", first), ("second", second)):
        printed = cli("train", text, SMALL, flags, "--out", name).out
        assert printed.count(shown) == (name == "first")


@pytest.mark.parametrize(
    ("name", "shown"), [("adamw", "adamw"), ("muon", "muon, matrix learning rate 0.02")]
)
def test_the_optimizer_and_its_rates_are_shown(text, out, cli, name, shown):
    flags = "--optimizer", name, "--steps 6 --warmup-steps 10 --out"
    assert cli("train", text, SMALL, *flags, out).cells["optimizer"] == shown


def test_a_resumed_run_is_told_what_it_can_change(text, out, cli):
    printed = cli("train", text, SMALL, "--steps 2 --warmup-steps 10 --out", out).flat
    assert "use --warmup-steps 0, or more --steps" in printed
    assert ": use more --steps" in cli("train --resume", out, "--steps 4").flat
    assert "during its warmup" not in cli("train --resume", out, "--steps 11").flat


def test_an_anomaly_is_reported_in_one_line_that_names_the_layer(text, out, cli, monkeypatch):
    change_initialisation(monkeypatch, "blocks.0.mlp.expansion.weight", (2, 3), math.nan)
    flags = "--recipe gpt2 --detect-anomaly --out"
    assert cli("train", text, SMALL, flags, out, ends=1).err == (
        "smallmind: the first NaN is in the forward pass of blocks.0.mlp.expansion (matmul_gelu, "
        "training pass 1): blocks.0.mlp.expansion.weight is not finite itself; go back to weights "
        "that are\n"
    )
    assert not out.exists()


def unwrapped(printed):
    """The printed lines, each joined with those that continue it, but for those about compiling.

    They come wherever three seconds have passed, if these kernels are not in the cache.
    """
    lines = printed.replace("\n        ", " ").splitlines()
    return [line for line in lines if not line.startswith("Compiling kernels")]


@pytest.mark.parametrize("command", ["check", "train --dry-run"])
def test_check_reports_a_sound_and_a_wrong_model(text, tmp_path, monkeypatch, cli, command):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    words = command, text, SMALL, "--out run --n-embd 32 --mlp gelu"
    lines = unwrapped(cli(*words).out)
    names = "loss at|gradient of every|compiled kernels|memorising 8"
    names += "|learning at the peak rate, 1.0e-02|gradient check"
    assert [line[:8] for line in lines[-7:-1]] == ["ok      "] * 6
    for line, name in zip(lines[-7:-1], names.split("|"), strict=True):
        assert line[8:].startswith(name) and "; expected " in line
    assert lines[-1] == "All 6 checks passed: the run can start; nothing was written"
    assert not any("not repeated" in line for line in lines)
    plain = cli(*words, "--detect-anomaly").flat
    assert "Steps are not replayed from a recording: --detect-anomaly looks at" in plain
    original = compiled.gelu_backward

    def wrong(dx, *arguments):
        original(dx, *arguments)
        dx *= 1.01

    monkeypatch.setattr(compiled, "gelu_backward", wrong)
    lines = unwrapped(cli(*words, ends=1).out)
    assert lines[2].startswith("FAILED  compiled kernels against NumPy: gradients differ by")
    assert lines[-1] == "1 of 6 checks failed: this model would not learn properly"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_console_without_unicode_gets_ascii(tmp_path, out, cli):
    text = tmp_path / "greek.txt"
    text.write_text("αβγδε αβγδε\n" * 50, encoding="utf-8")
    shown = cli.on(Recorded("ascii"), "train", text, SMALL, "--profile-wide --out", out)
    assert "+---" in shown
    assert "| Operation " in shown and "| GB/s" in shown and "+====" in shown


def test_recompute_changes_nothing_but_memory(text, tmp_path, cli):
    losses = []
    recompute = "--use-gradient-checkpointing --checkpoint-strategy every_layer"
    for number, flags in enumerate((recompute, "")):
        out = tmp_path / str(number)
        printed = cli("train", text, SMALL, "--n-layer 3 --dropout 0.1", flags, "--out", out).out
        assert ("recomputed, every_layer" in printed) == bool(flags)
        losses.append([line["loss"] for line in metrics(out) if "loss" in line])
    assert losses[0] == losses[1] and len(losses[0]) > 2


def test_wrong_input_is_one_line_and_status_2(run, text, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    for name, data in (("empty", b""), ("short", b"too short " * 3), ("binary", b"ab\xfe")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "epochs.toml").write_text("[training]\nepochs = 2\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, message in [
        ("train none", "does not exist"),
        ("train nothing", "no text was found; give a file or folder"),
        ("train empty", "is empty"),
        ("train short", "block_size=64 needs at least 72 tokens"),
        ("train binary", "byte 0xfe at offset 2"),
        (f"train {text} --out {run}", "already holds a run"),
        (f"train {text} --n-head 3", "n_embd=128 must be a multiple of n_head=3"),
        (f"train {text} --profile-json no/t.json", "cannot write"),
        (f"train {text} --profile-speedscope no/t", "--profile-speedsc"),
        (f"train {text} --steps 5 --epochs 2", "--steps and --epochs both set the length"),
        (f"train {text} --minutes 0", "minutes=0.0 must be above 0"),
        ("schedule --config epochs.toml", "depends on epochs or minutes here: give --steps"),
        (f"train {text} --threads 9999", "threads=9999 must be at most"),
        ("check none", "does not exist"),
        (f"check {text} --n-head 3", "n_embd=128 must be a multiple of n_head=3"),
        (f"train {text} --diagnostic-interval 0", "diagnostic_interval=0 must be at least 1"),
        (f"train {text} --checkpoint-strategy custom", "needs --use-gradient-checkpointing"),
        (f"train {text} --config no.toml", "no.toml: No such file"),
        (f"train {text} --config {run}/metrics.jsonl", "is not TOML"),
        (f"train {text} --config {run}/config.json --size small", "small has no effect"),
        ("generate none", "does not exist; give a run"),
        (f"generate {tmp_path}", "neither a model nor an intact checkpoint"),
        (f"generate {run} --prompt Ω", "never seen the character 'Ω'"),
        (f"generate {run} --top-p 2", "top_p=2.0 must be above 0 and at most 1"),
        (f"evaluate {tmp_path}", "is not a run: cannot read its config.json"),
        (f"evaluate {run} none", "does not exist"),
    ]:
        cli.refuses(message, arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def errors_after_a_closed_pipe(*words):
    """The errors and the exit status of a command, of whose output nobody reads the rest."""
    with started([sys.executable, "-m", "smallmind", *words], stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    return errors, process.returncode


def test_generate_survives_a_closed_pipe(run):
    errors, _ = errors_after_a_closed_pipe("generate", str(run), "--max-tokens", "3000")
    assert "Traceback" not in errors


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_an_interrupted_run_keeps_the_model_as_it_is(text, out, cli, monkeypatch):
    change_pass_24(monkeypatch, lambda loss: signal.raise_signal(signal.SIGINT) or loss)
    printed = cli("train", text, SMALL, "--out", out, ends=130).flat
    assert "Interrupted after step 2" in printed and f"The run is in {out}" in printed
    cli("generate", out, "--prompt the --max-tokens 3")


def test_training_continues_after_a_closed_pipe(text, out):
    flags = [*SMALL, "--log-every", "1", "--out", str(out)]
    assert errors_after_a_closed_pipe("train", text, *flags) == ("", 0)
    assert (out / "model.safetensors").exists()


def test_a_failure_before_the_first_step_leaves_no_directory(text, out, cli, monkeypatch):
    def fail(*_):
        raise MemoryError("Unable to allocate 5 TB")

    monkeypatch.setattr(TransformerModel, "loss_and_gradients", fail)
    printed = cli("train", text, SMALL, "--out", out, ends=1)
    assert (
        printed.err
        == "smallmind: not enough memory: Unable to allocate 5 TB (smallmind guide memory)\n"
    )
    assert not out.exists()


def test_names_that_a_shell_would_split_are_quoted(tmp_path, text, cli):
    out = tmp_path / "my run (1)"
    printed = cli("train", text, SMALL, "--out", out).out.replace("\\\n", " ")
    assert f"generate '{out}' --prompt" in flat(printed)


def test_a_text_without_words_suggests_no_prompt(tmp_path, out, cli):
    (tmp_path / "stars.txt").write_text("*** --- " * 50, encoding="utf-8")
    printed = cli("train", tmp_path / "stars.txt", SMALL, "--out", out).out.replace("\\\n", " ")
    assert flat(printed).endswith(f"Next: smallmind generate {out}")
    cli("generate", out, "--max-tokens 5")


def test_evaluate_works_from_another_directory(text, out, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    cli("train cats.txt", SMALL, "--out run")
    monkeypatch.chdir(tmp_path.parent)
    cli("evaluate", out)


def test_version(cli):
    assert cli("--version").out.startswith("smallmind 0.")


def test_seed_and_threads_are_those_of_the_flags(tmp_path, text, cli):
    losses = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        printed = cli("train", text, SMALL, "--threads 1 --seed", seed, "--out", out)
        assert printed.cells["threads"] == "1"
        losses.append(metrics(out)[-1]["final_loss"])
    assert losses[0] != losses[1]


@pytest.fixture
def schedule(cli):
    """The cells that `smallmind schedule` prints, headings first, and the lines below the box."""

    def schedule(*flags):
        lines = cli("schedule", *flags).out.splitlines()
        tables: list[list] = []
        for line in lines:
            if line[0] == "╔":
                tables.append([])
            if line[0] == "║":
                tables[-1].append([cell.strip(" ║") for cell in line.split("│")])
        assert all(table[0] == ["LEARNING RATE"] for table in tables)
        # Put tables that were split for width back side by side, with the steps only once.
        rows = [sum((row[1:] for row in rows), rows[0][:1]) for rows in zip(*tables, strict=True)]
        assert all(row[0] == rows[i][0] for table in tables for i, row in enumerate(table))
        notes = flat(" ".join(line for line in lines if line[0] not in "╔║╠╟╚"))
        return rows[1:], notes

    return schedule


def test_schedule_shows_what_train_will_do(text, out, cli, schedule):
    flags = "--schedule wsd --steps 30 --warmup-steps 5 --learning-rate 2e-3 --min-lr 2e-4"
    table, notes = schedule(flags, "--lr-decay-share 0.5")
    assert table[0] == ["step", "wsd"]
    assert notes == "Muon's matrices follow the same curve, up to 0.02"
    shown = {int(step): rate for step, rate in table[1:]}
    assert {1, 6, 15, 30} <= set(shown)
    assert shown[6] == shown[15] == "2.0e-03" and shown[30] == "3.2e-04"
    cli("train", text, SMALL, flags, "--lr-decay-share 0.5 --log-every 1 --out", out)
    trained = {line["step"]: line["lr"] for line in metrics(out) if "lr" in line}
    assert {step: f"{trained[step]:.1e}" for step in shown} == shown
    config = config_of(out)["training"]
    assert config["schedule"] == "wsd" and config["min_lr"] == 2e-4


def test_schedule_shows_all_side_by_side_and_says_which_one_it_leaves_out(schedule):
    table, notes = schedule("--recipe gpt2")
    assert table[0] == ["step", *SCHEDULES]
    assert {len(row) for row in table} == {9}
    assert table[-1][0] == "2,000"
    ends = dict.fromkeys(SCHEDULES, "1.0e-04")
    ends |= {"constant": "1.0e-03", "step": "1.3e-04", "plateau": "1.0e-03"}
    assert dict(zip(SCHEDULES, table[-1][1:], strict=True)) == ends
    assert notes == (
        "plateau is shown for a held-out loss that keeps falling; after 3 evaluations without "
        "improvement the rate is multiplied by 0.5, down to 0.0001"
    )
    table, notes = schedule("--min-lr 0 --steps 3")
    assert "exponential" not in table[0] and len(table[0]) == 8
    assert [row[0] for row in table[1:]] == ["1", "2", "3"]
    assert "down to 0 Muon's matrices follow the same curve, up to 0.02 " in notes
    assert "exponential is not shown: min_lr=0.0 must be above 0" in notes


def test_schedules_are_those_that_train_would_take(tmp_path, schedule):
    table, _ = schedule()
    ends = dict(zip(table[0][1:], table[-1][1:], strict=True))
    assert list(ends) == list(SCHEDULES)
    # To zero where a schedule can reach it, else to a tenth of the peak.
    assert float(ends["linear"]) < 1e-5 and ends["exponential"] == "1.0e-03"
    for name, end in ends.items():
        assert schedule("--schedule", name)[0][-1] == ["1,500", end]
    (tmp_path / "run.toml").write_text("[training]\nschedule = 'wsd'\n", encoding="utf-8")
    sources = "--size medium --preset production --recipe gpt2 --config", tmp_path / "run.toml"
    table, _ = schedule(*sources)
    assert table[0] == ["step", "wsd"] and table[-1] == ["5,000", "2.2e-06"]
    assert max(float(row[1]) for row in table[1:]) == 6e-4
    assert schedule(*sources, "--schedule constant")[0][0] == ["step", "constant"]
    assert schedule("--preset production")[0][0] == ["step", *SCHEDULES]


def test_schedule_in_ascii():
    words = [sys.executable, "-m", "smallmind", "schedule", "--schedule", "step"]
    assert "| step  | step " in printed_by(words, PYTHONIOENCODING="ascii")


def test_schedule_refuses_what_cannot_be_shown(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    for flags, message in [
        ("--steps 0", "steps=0 must be at least 1"),
        ("--min-lr 1", "min_lr=1.0 must be at most learning_rate=0.01"),
        ("--schedule exponential --min-lr 0", "min_lr=0.0 must be above 0"),
        ("--plot curve.txt", "must end in .png, .pdf, .svg"),
        ("--plot no/curve.png", "cannot write"),
    ]:
        cli.refuses(message, "schedule", flags)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    message = "--plot needs matplotlib: python -m pip install matplotlib"
    cli.refuses(message, "schedule --plot curve.png")
    assert not list(tmp_path.iterdir())


def saved(directory):
    """The settings of a run, all sections in one."""
    config = config_of(directory)
    return {**config["model"], **config["training"], **config["run"]}


def test_a_flag_overrides_a_file_even_with_the_default_value(text, out, tmp_path, cli):
    file = tmp_path / "run.toml"
    file.write_text("[model]\nbias = false\n[run]\nseed = 3\n", encoding="utf-8")
    cli("train", text, SMALL, "--config", file, "--seed 1337 --bias --steps 1 --out", out)
    assert saved(out)["seed"] == 1337 and saved(out)["bias"] is True


def test_a_run_can_be_trained_again_from_its_config(run, out, cli):
    cli("train --config", run / "config.json", "--out", out)
    assert saved(out) == {**saved(run), "out": str(out)}
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_settings_without_an_effect_are_refused_wherever_they_come_from(text, tmp_path, cli):
    file = tmp_path / "run.toml"
    file.write_text("[training]\ncheckpoint_strategy = 'custom'\n", encoding="utf-8")
    cli.refuses("needs --use-gradient-checkpointing", "train", text, "--config", file)
    file.write_text("[training]\nschedule = 'step'\nlr_decay_every = 9\n", encoding="utf-8")
    plan = "check", text, SMALL, "--config", file
    cli(*plan)
    # The file may be for other kinds of runs too.
    cli(*plan, "--schedule cosine")
    file.write_text("[training]\nmomentum = 0.9\n", encoding="utf-8")
    cli(*plan, "--recipe gpt2")
    cli(*plan)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--optimizer adamw --momentum 0.9",
            "--momentum has no effect with --optimizer adamw; it needs --optimizer muon",
        ),
        (
            "--recipe gpt2 --matrix-learning-rate 0.02",
            "--matrix-learning-rate has no effect with --optimizer adamw; it needs "
            "--optimizer muon",
        ),
        (
            "--lr-decay-factor 0.3",
            "--lr-decay-factor has no effect with --schedule linear; it needs --schedule step or "
            "plateau",
        ),
        (
            "--arch gpt2 --rope-theta 500",
            "--rope-theta has no effect with --position learned; it needs --position rope",
        ),
        (
            "--use-gradient-checkpointing --checkpoint-interval 2",
            "--checkpoint-interval has no effect; it needs --checkpoint-strategy custom",
        ),
        ("--vocab-size 300", "--vocab-size has no effect with --tokenizer char; it needs"),
        ("--split gpt2", "--split has no effect with --tokenizer char"),
        ("--tokenizer bpe --vocab-size 256", "bpe_vocab_size=256 must be at least 257"),
        ("--tokenizer words", "tokenizer='words' must be one of char, byte, bpe, or the path of a"),
        ("--tokenizer missing.json", "cannot read missing.json"),
    ],
)
def test_flags_without_an_effect_and_unknown_tokenizers_are_refused(text, out, cli, flags, message):
    cli.refuses(message, "train", text, flags, "--out", out)
    assert not out.exists()


def test_metrics_as_csv(run, tmp_path, cli):
    out = tmp_path / "metrics.csv"
    printed = cli("export-metrics", run, "--out", out)
    assert printed.out == "" and flat(printed.err) == f"Wrote 4 rows to {out}"
    printed = cli("export-metrics", run)
    assert printed.out == out.read_text(encoding="utf-8") and printed.err == ""
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert [row["step"] for row in rows] == ["1", "10", "20", "30"]
    assert [bool(row["val_loss"]) for row in rows] == [False, False, True, True]


def test_metrics_of_a_run_that_was_killed(run, tmp_path, cli):
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8")
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines[:-9], encoding="utf-8")
    printed = cli("export-metrics", tmp_path)
    assert len(printed.out.splitlines()) == 5
    number = len(lines.splitlines())
    assert flat(printed.err) == f"Skipped cut or damaged lines of {file}: {number}"


def test_export_metrics_refuses_what_it_cannot_write_or_read(run, tmp_path, cli):
    before = (run / "metrics.jsonl").read_bytes()
    for arguments, message in [
        (f"{run} --out {run}/metrics.jsonl", "must end in .csv"),
        (f"{run} --out {tmp_path}/no/m.csv", "cannot write"),
        (f"{tmp_path}", "is not a run: cannot read its metrics.jsonl"),
    ]:
        cli.refuses(message, "export-metrics", arguments)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.fixture
def estimate(cli):
    """The output of `smallmind estimate`: the status, its cells and its lines."""

    def estimate(*flags, ends=0):
        lines = cli("estimate", *flags, ends=ends).out.splitlines()
        cells: dict[str, str] = {}
        name = ""
        for line in lines:
            if line[0] != "│":
                continue
            first, *_, last = [cell.strip() for cell in line.split("│")[1:-1]]
            if not first:  # continues the flags in the last cell
                cells[name] += f" {last}"
            elif first.startswith("--") and not last:  # continues those in the first cell
                cells[f"{name} {first}"] = cells.pop(name)
                name = f"{name} {first}"
            else:
                name, cells[first] = first, last
        return cells, [line for line in lines if line[0] not in "╭│╰"]

    return estimate


def megabytes(cell):
    return float(cell.removesuffix(" MB").replace(",", ""))


def test_estimate_adds_up(text, estimate):
    cells, lines = estimate(text, SMALL, "--memory 1GB")
    names = "weights|working weights|gradients|moments|snapshot|activations|scratch|text|sample"
    names = [*names.split("|"), "the program itself"]
    assert list(cells)[:11] == [*names, "total"]
    total = megabytes(cells["total"])
    assert total == pytest.approx(sum(megabytes(cells[name]) for name in names), abs=0.5)
    assert f"Fits: {total} MB needed, 1,000.0 MB allowed." in lines


@pytest.mark.parametrize(("seconds", "shown"), [(0.0195, "19.5 ms"), (4.8312, "4,831 ms")])
def test_estimate_says_how_long_a_step_takes(text, cli, monkeypatch, seconds, shown):
    monkeypatch.setattr(pace, "rough_pace", lambda *_: pace.Pace(seconds, 0.01, 0.0, 0.01))
    assert f"30 steps of {shown}." in cli("estimate", text, SMALL).flat


def test_estimate_uses_the_vocabulary_of_the_text_unless_given(text, estimate):
    # 4096 channels: a token is 16 KB.
    flags = "--n-embd 4096 --memory 1TB --tie-weights"
    size = len(set(TEXT))
    given = text, f"--vocab-size {size}", "--vocab-size 1000", ""
    weights = [megabytes(estimate(words, flags)[0]["weights"]) for words in given]
    assert weights[0] == weights[1] < weights[3] < weights[2]
    assert weights[2] - weights[1] == pytest.approx((1000 - size) * 4096 * 4 / 1e6, abs=0.2)


def test_estimate_resolves_the_precision_as_train_does(cli, estimate):
    shown = {
        name: estimate("--vocab-size 65 --precision", name)[0]["working weights"]
        for name in ("auto", "float32", "bfloat16")
    }
    assert shown["auto"] == shown["bfloat16" if ISA.fast_bfloat16 else "float32"]
    assert shown["float32"] == "0.0 MB" != shown["bfloat16"]
    cli.refuses("needs backend='numba'", "estimate --backend numpy --precision float16")


@pytest.mark.parametrize("command", ["check", "train"])
def test_16_bits_that_make_steps_slower_are_said_to(text, tmp_path, cli, command, monkeypatch):
    monkeypatch.setattr(pace, "earlier_pace", lambda *_: None)  # nothing was timed before
    out = ["--out", tmp_path / "run"] if command == "train" else []
    printed = cli(command, text, SMALL, "--steps 20 --precision float16", out).flat
    fastest = "bfloat16" if ISA.fast_bfloat16 else "float32"
    assert f"float16 saves memory, not time: on this CPU, steps in {fastest} are fast" in printed


def test_estimate_names_flags_that_fit(estimate):
    """Each row of flags, passed to estimate, fits in the same memory; one more window does not."""
    given = "--vocab-size 65 --block-size 512 --memory 300MB"
    cells, _ = estimate(given, "--batch-size 16 --micro-batch-size 16 --target-batch 60", ends=1)
    rows = {name: cell for name, cell in cells.items() if cell.startswith("--")}
    assert len(rows) == 3
    for row in rows.values():
        estimate(given, row)
    more = int(rows["largest batch in one pass"].split()[1]) + 1
    estimate(given, f"--batch-size {more} --micro-batch-size {more}", ends=1)
    words = {name: name.removeprefix("60 sequences per update, ").split() for name in rows}
    named = {words[name][-1]: (words[name][0], row.split()) for name, row in rows.items()}
    passes, (_, windows, _, micro_batch) = named["passes"]
    assert windows == "60" and int(passes) == -(-60 // int(micro_batch))
    steps, flags = named["batches"]
    assert flags[4:] == ["--grad-accum-steps", steps] and int(flags[1]) * int(steps) == 60


def test_estimate_says_what_to_change_if_no_sequence_fits(estimate):
    given = "--vocab-size 65 --block-size 8192 --memory 250MB --precision float32"
    cells, lines = estimate(given, ends=1)
    assert "Not even one sequence fits." in lines
    ways = {name: megabytes(cell) for name, cell in cells.items() if name.startswith("--")}
    for word in ("float16", "every_layer", "--block-size", "--n-embd"):
        assert any(word in way for way in ways), word
    for way, total in ways.items():
        assert megabytes(estimate(given, way, ends=int(total > 250))[0]["total"]) == total
    assert min(ways.values()) <= 250 < max(ways.values())


@pytest.fixture(autouse=True)
def program(monkeypatch):
    """A program of the usual size: this process, with all that the tests import, is larger."""
    usual = Program(119 * 2**20)
    monkeypatch.setattr(Program, "measured", classmethod(lambda *_: usual))


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free for a run."""

    def set_free(nbytes):
        monkeypatch.setattr("smallmind.cli.memory.free_bytes", lambda *_: nbytes)

    return set_free


def test_estimate_compares_with_free_memory(estimate, free):
    for nbytes, status in ((10**12, 0), (10**6, 1)):
        free(nbytes)
        estimate("--vocab-size 65", ends=status)
        estimate("--vocab-size 65 --memory 1TB")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("800MB", 8e8), ("1.5GiB", 1.5 * 2**30), ("2 gb", 2e9), ("512KiB", 2**19), ("7B", 7)],
)
def test_memory_sizes_are_read(size, nbytes):
    assert parse_size(size) == nbytes


@pytest.mark.parametrize("size", ["", "MB", "1.5", "2XB", "0MB", "1..5GB", "1iB", "nanGB"])
def test_invalid_sizes_are_refused(size, cli):
    error = cli("estimate --memory", [size], ends=2).err
    assert "is not a size: write 800MB or 1.5GiB" in error


def test_estimate_refuses_what_train_refuses(cli):
    for flags, message in [
        ("none.txt", "does not exist"),
        ("--n-head 3", "must be a multiple of n_head=3"),
        ("--checkpoint-strategy custom", "needs --use-gradient-checkpointing"),
        ("--vocab-size 0", "vocab_size=0 must be at least 1"),
        ("--target-batch 0", "target_batch=0 must be at least 1"),
    ]:
        cli.refuses(message, "estimate", flags)


def test_train_refuses_what_does_not_fit_before_it_starts(text, out, cli, monkeypatch, free):
    def open_backend(_name):
        raise AssertionError("a model was allocated")

    monkeypatch.setattr("smallmind.nn.backend.open_backend", open_backend)
    for megabytes, message in [
        (180, "of memory and 180.0 MB is free; use --micro-batch-size "),
        (158, "--use-gradient-checkpointing --checkpoint-strategy every_layer ("),
        (1, "1.0 MB is free; no setting makes it fit: close other programs"),
    ]:
        free(megabytes * 10**6)
        cli.refuses(message, "train", text, "--recipe gpt2 --block-size 256 --out", out)
        assert not out.exists()


def test_the_advice_of_train_can_be_followed(text, out, cli, free):
    free(150 * 10**6)
    flags = "--batch-size 64 --n-embd 128 --micro-batch-size 64 --steps 2 --precision float32"
    words = "train", text, SMALL, flags, "--out", out
    advice = cli(*words, ends=2).err.split("; use ")[1].split(" (")[0]
    assert advice == "--micro-batch-size 32"
    cli(*words, advice)


@pytest.mark.parametrize(("share", "warned"), [(0.95, True), (0.85, False)])
def test_train_warns_near_the_limit(text, out, cli, estimate, free, share, warned):
    total = estimate(text, SMALL)[0]["total"]
    nbytes = int(megabytes(total) * 1e6 / share)
    free(nbytes)
    words = f"This run needs {total} of the {nbytes / 1e6:,.1f} MB free."
    assert (words in cli("train", text, SMALL, "--steps 1 --out", out).out) == warned


def test_tokens_learned_from_the_text(text, out, tmp_path, cli):
    flags = "--tokenizer bpe --vocab-size 270 --split gpt4"
    printed = cli("train", text, SMALL, flags, "--out", out).flat
    assert "270 tokens" in printed and "bits/byte" in printed
    assert config_of(out)["model"]["vocab_size"] == 270
    state = Tokenizer.load(out / "tokenizer.json").state()
    assert state["split"] == "gpt4" and len(state["merges"]) == 2 * 13
    printed = cli("generate", out, "--max-tokens 5 --prompt", ["any text: \u65e5"]).out
    assert printed.startswith("any text: \u65e5")
    assert "bits/byte" in cli("evaluate", out).out
    # Another run takes the tokenizer from its file.
    again = tmp_path / "again"
    cli("train", text, SMALL, "--tokenizer", out / "tokenizer.json", "--out", again)
    assert Tokenizer.load(again / "tokenizer.json").state() == state
    cli("estimate", text, flags)
    cli("check", text, SMALL, flags)


def test_a_run_keeps_its_tokenizer(text, tmp_path):
    out = tmp_path / "run"
    run = Run.create(text=text, tokenizer="bpe", bpe_vocab_size=270, steps=2, out=out)
    state = run.data.tokenizer.state()
    run.unlock()
    other = Tokenizer("other text, other text", "bpe", vocab_size=270)
    other.save(out / "tokenizer.json")  # what the directory has counts, it is not learned again
    assert Run.open(out).data.tokenizer.state() == other.state() != state


def test_a_vocabulary_that_is_too_large_is_said(text, tmp_path, cli):
    shape = "--n-embd 64 --n-layer 2 --block-size 16 --steps 1 --tokenizer bpe --vocab-size"
    for size, words in (("100000", "no further pair occurs twice"), ("270", "too few to learn")):
        assert words in cli("train", text, shape, size, "--out", tmp_path / size).flat

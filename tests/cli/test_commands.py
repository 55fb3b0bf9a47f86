"""The table of commands, and what every command prints: nothing is wider than 80 columns."""

import importlib
import os
import re

import pytest

from smallmind import ModelConfig
from smallmind.cli import main
from smallmind.cli.console import Console, wrap
from smallmind.cli.program import COMMANDS
from tests.cli.test_cli import SMALL
from tests.faults.test_consoles import Recorded
from tests.programs import CATS, flat


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a text and a finished run on it."""
    root = tmp_path_factory.mktemp("commands")
    (root / "cats.txt").write_text(CATS, encoding="utf-8")
    assert main(["train", str(root / "cats.txt"), *SMALL, "--out", str(root / "run")]) == 0
    return root


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_two_functions_and_help(name, cli):
    module_name, help_line = COMMANDS[name]
    module = importlib.import_module(f"smallmind.cli.{module_name}")
    assert callable(module.add_arguments) and callable(module.run)
    printed = cli(name, "--help")
    assert printed.out.startswith(f"usage: smallmind {name} ")
    assert flat(module.__doc__) in printed.flat
    assert help_line[0].islower() and not help_line.endswith(".")
    assert f" {name} {help_line}" in cli("--help").flat


# A new run: as chosen, with its vocabulary, a tiny one that loads kernels, and as saved. The others
# build models of other shapes too.
@pytest.mark.parametrize(("name", "most"), [("train", 4), ("check", 6), ("estimate", 6)])
def test_a_command_validates_the_config_of_its_model_a_few_times(
    name, most, root, tmp_path, monkeypatch, cli
):
    importlib.import_module("smallmind.nn.gradient_check")  # has a config of its own
    validated, original = [], ModelConfig.__post_init__

    def validate(config):
        validated.append(config)
        original(config)

    monkeypatch.setattr(ModelConfig, "__post_init__", validate)
    out = ["--out", tmp_path / "run"] if name == "train" else []
    cli(name, root / "cats.txt", SMALL, out)
    assert len(validated) <= most


def too_wide(printed):
    """Lines of more than 80 columns, except a single word, which is never broken."""
    return [line for line in printed.splitlines() if len(line) > 80 and len(line.split()) > 1]


def commands(root):
    """Every command, with flags that make it print a lot. Files are in the working directory."""
    text, run = os.path.relpath(root / "cats.txt"), os.path.relpath(root / "run")
    out = ["--out", "out"]
    teacher = ["--teacher", run, "--teacher-cache", "cache", "--learn-temperature"]
    health = ["--check-gradient-health", "--diagnostic-interval", "10", "--profile"]
    trace = ["--profile-json", "trace.json", "--profile-speedscope", "run.speedscope.json"]
    trace += ["--tensorboard"]
    yield ["train", text, *SMALL, *teacher, *health, *trace, "--epochs", "0", *out]
    yield ["runs", os.path.dirname(run)]
    yield ["compare", run, "out"]
    yield ["plot", run, "out"]
    yield ["plot", run, "--x", "time", "--out", "plot.svg"]
    yield ["train", "--resume", run]
    yield ["check", text, *SMALL]
    yield ["estimate", text]
    yield ["estimate", "--memory", "300MB", "--block-size", "8192"]
    yield ["estimate", text, "--memory", "1MB", "--block-size", "16", *teacher[:2]]
    yield ["estimate", text, "--memory", "300MB", "--target-batch", "60", "--block-size", "512"]
    yield ["evaluate", run]
    yield ["evaluate", run, text]
    yield ["schedule"]
    yield ["schedule", "--min-lr", "0", "--steps", "2000000"]
    yield ["verify", run]
    yield ["lessons"]
    yield ["lessons", "writing_a_layer"]
    yield ["export-metrics", run, "--out", "metrics.csv"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_line_is_wider_than_80_columns(root, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)  # paths are as short as there: an absolute one may fill a line
    for arguments in commands(root):
        streams = [Recorded("utf-8", is_terminal) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", streams[0])
            patch.setattr("sys.stderr", streams[1])
            assert main(arguments) in (0, 1)
        for stream in streams:
            shown = re.split(r"[\r\n]+|\x1b\[K", stream.shown())
            assert not too_wide("\n".join(shown)), arguments


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_no_line_of_help_is_wider_than_80_columns(name, monkeypatch, cli):
    monkeypatch.setenv("COLUMNS", "80")
    assert not too_wide(cli(name, "--help").out)


def test_an_error_is_one_line_that_is_only_wrapped_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = []
    for is_terminal in (False, True):
        stream = Recorded("utf-8", is_terminal)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            assert main(["train", str(tmp_path / "none")]) == 2
        shown.append(stream.shown())
    assert shown[0].count("\n") == 1 < shown[1].count("\n") and not too_wide(shown[1])
    assert shown[0].split() == shown[1].split()


def test_words_are_wrapped_and_never_broken():
    text = "step 12/30  loss 1.25  /a/very/long/path/that/has-hyphens " + 90 * "x" + " end"
    wrapped = wrap(text, 40)
    assert wrapped.split() == text.split()
    assert all(len(line) <= 40 or len(line.split()) == 1 for line in wrapped.splitlines())
    assert wrap("short  enough", 40) == "short  enough"


def test_a_command_to_copy_continues_between_flags(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Recorded("utf-8")
    words = ["smallmind", "generate", "a longer run (1)", "--prompt", "the cat"]
    Console(stream).command("Next:", words)
    assert stream.shown() == (
        "Next: smallmind generate 'a longer run (1)' \\\n    --prompt \"the cat\"\n"
    )


def test_the_former_name_of_a_flag_is_read_and_hidden(root, tmp_path, cli):
    out = tmp_path / "run"
    cli("train", root / "cats.txt", SMALL, "--windows-at-once 2 --steps 1 --out", out)
    assert '"micro_batch_size": 2' in (out / "config.json").read_text(encoding="utf-8")
    assert "windows-at-once" not in cli("train --help").out

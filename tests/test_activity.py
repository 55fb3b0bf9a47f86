"""Long activities are announced, and say how far they are: on a clock that the tests set."""

import io
import itertools
import re
import sys
import threading
import time

import numpy as np
import pytest

from smallmind import Distillation, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.cli import main
from smallmind.cli.console import Console
from smallmind.console import activity
from smallmind.files import durable, safetensors
from smallmind.runs import source
from smallmind.runs.directory import RunDirectory
from smallmind.runs.parallel import Leader
from smallmind.runs.session import save_ending
from smallmind.text import byte_tokenizer, char_tokenizer, tokenizer
from smallmind.text.dataset import Dataset
from smallmind.training.checkpoint import BackgroundSaver
from smallmind.training.evaluation import evaluate_tokens
from smallmind.training.progress import ProgressLine
from smallmind.training.state import RunState

TEXT = "the cat sat on the mat. " * 100


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is being done, and nothing has been shown."""
    monkeypatch.setattr(activity, "_state", activity._State())


@pytest.fixture
def slow(monkeypatch):
    """Whoever reads the clock finds that two seconds have passed."""
    seconds = itertools.count(0, 2)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))


@pytest.fixture
def shown(fresh):
    """The messages to the hook: phrases, and whether they are usual."""
    told = []
    with activity.showing_on(lambda phrase, usual: told.append((phrase, usual))):
        yield told


def new_training(**settings):
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 8, 8, 1, 1, backend="numpy")
    return Training(model, tokenizer, TEXT, block_size=8, batch_size=4, **settings)


def standard_error(monkeypatch):
    """A terminal of 80 columns in its place."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    return terminal


def new_directory(path):
    return RunDirectory(path / "run").create()


def shares(phrases, start=""):
    """ "Reading: 17%, 0:12 left" -> 17, of those that begin with start."""
    texts = [phrase.split(": ")[-1] for phrase, _ in phrases if (phrase or "").startswith(start)]
    return [int(text.partition("%")[0]) for text in texts if "%" in text]


def test_a_step_that_takes_long_says_how_far_it_is(slow):
    training, told = new_training(), []
    training.on_step = lambda step, so_far: told.append((step, so_far))
    list(training.steps(TrainingConfig(steps=1, grad_accum_steps=2, micro_batch_size=1)))
    assert {step for step, _ in told} == {1}
    # Two batches of four windows, one after the other, and several kernels in each.
    assert {"12%", "25%", "50%", "75%", "88%"} <= {so_far.split(",")[0] for _, so_far in told}
    assert len(set(told)) > 50


def test_without_a_display_a_long_step_is_told_to_the_hook(slow, shown):
    list(new_training().steps(TrainingConfig(steps=1, micro_batch_size=1)))
    assert set(shares(shown, "Training step 1")) == {25, 50, 75}
    assert all(usual for phrase, usual in shown if phrase)


def test_short_steps_and_evaluations_are_not_announced(monkeypatch, shown):
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    list(new_training().steps(TrainingConfig(steps=2, val_every=1, val_batches=1)))
    assert shown == []


def test_the_progress_line_changes_within_a_step(slow, monkeypatch):
    terminal = standard_error(monkeypatch)
    line = ProgressLine()
    line.progress.steps = 2000
    with activity.refreshing(lambda so_far: line.during(12, so_far)):
        for _ in activity.parts("abc"):
            pass
    assert "step   12/2000 (33%, 0:" in terminal.getvalue()


@pytest.fixture
def model_file(tmp_path):
    training = new_training()
    new_directory(tmp_path).save_model(training.model, training.tokenizer, 1)
    return tmp_path / "run" / "model.safetensors"


def generating(file):
    return main(["generate", str(file), "--prompt", "the ", "--max-tokens", "20"])


def test_a_first_token_that_takes_long_is_announced(slow, monkeypatch, capsys, model_file):
    """Later ones are not, since the output may be a pipe that leads to the terminal."""
    terminal = standard_error(monkeypatch)
    assert generating(model_file) == 0
    assert "Generating: 0:" in terminal.getvalue() and "%" not in terminal.getvalue()
    assert len(capsys.readouterr().out) == len("the ") + 20 + 1


def test_a_text_on_a_terminal_says_how_far_it_is_between_tokens(slow, monkeypatch, model_file):
    terminal = standard_error(monkeypatch)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generating(model_file) == 0
    shown = re.findall(r" \[Generating: (\d+)%, [\d:]+ left \.\.\.\]", terminal.getvalue())
    assert list(map(int, dict.fromkeys(shown))) == list(range(5, 100, 5))


@pytest.mark.parametrize("together", [False, True])
def test_a_text_in_a_file_says_how_far_it_is_elsewhere(
    slow, monkeypatch, tmp_path, model_file, together
):
    terminal = standard_error(monkeypatch)
    with open(tmp_path / "text", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        if together:  # > text 2>&1
            monkeypatch.setattr(sys, "stderr", file)
        else:
            monkeypatch.setattr(terminal, "fileno", sys.__stderr__.fileno)
        assert generating(model_file) == 0
    text = (tmp_path / "text").read_text(encoding="utf-8")
    notes, _, generated = text.rpartition("the ")
    assert generated.index("\n") == 20 and ("tokens/s" in generated) == together
    assert ("Using" in notes) == together
    assert ("Generating: 5%" in terminal.getvalue()) == (not together)


@pytest.mark.parametrize("batches", [3, 0])
def test_an_evaluation_says_how_far_it_is(slow, shown, batches):
    assert new_training().evaluations.evaluate(7, batches)
    found = shares(shown, "Evaluating after step 7: ")
    assert found == sorted(found) and found[-1] > 80 and len(set(found)) > 4
    assert shown[-1] == (None, False)


def test_the_end_of_a_run_says_how_far_it_is(slow, shown, tmp_path):
    training = new_training()
    list(training.steps(TrainingConfig(steps=0)))
    save_ending(training, new_directory(tmp_path), lambda _: None, Leader())
    assert len(set(shares(shown, "Evaluating the held-out text: "))) > 3
    assert len(set(shares(shown, "Writing a sample: "))) > 10


def test_evaluating_a_text_says_how_far_it_is(slow, shown):
    training = new_training()
    evaluate_tokens(training.model, training.tokenizer, training.tokenizer.encode(TEXT))
    assert len(set(shares(shown, "Evaluating the text: "))) > 5


def test_the_teacher_says_how_far_it_is(slow, shown, tmp_path):
    teacher = TransformerModel(len(set(TEXT)), 8, 8, 1, 1, backend="numpy")
    new_training(distillation=Distillation(teacher, cache=tmp_path / "cache"))
    phrase = f"Running the teacher over the text once, for {tmp_path / 'cache'}"
    assert (phrase, False) in shown


@pytest.mark.parametrize("large", [False, True])
def test_only_large_files_are_announced_before_they_are_read(large, shown, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(activity, "LARGE", 100 if large else 10**9)
    file, text = tmp_path / "model", tmp_path / "text"
    safetensors.write(file, {"x": np.zeros(99)}, {})
    text.write_text(TEXT)
    source.read_source(text)
    safetensors.read(file)
    safetensors.open_tensors(file)
    source.digest(TEXT)
    model = TransformerModel(8, 8, 8, 1, 1, backend="numpy")
    tokenizer = Tokenizer(TEXT)
    Dataset.from_text(TEXT, tokenizer, 8)
    new_directory(tmp_path).save_model(model, tokenizer, 1)
    phrases = [
        *(f"Reading {text}", f"Reading {file}", f"Reading {file}"),
        "Computing the digest of the text",
        "Initialising the weights",
        *("Listing the characters of the text", "Encoding the text", "Saving the model"),
    ]
    assert [phrase for phrase, _ in shown if phrase] == (phrases if large else [])


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_long_text_says_how_far_it_is(slow, shown, monkeypatch, kind):
    for module in (source, byte_tokenizer, char_tokenizer, tokenizer):
        monkeypatch.setattr(module, "CHUNK", 100)
    Dataset.from_text(TEXT, Tokenizer(TEXT, kind), 8)
    source.digest(TEXT)
    assert len(set(shares(shown, "Encoding"))) > 5 and len(set(shares(shown, "Computing"))) > 5
    assert (len(set(shares(shown, "Listing"))) > 5) == (kind == "char")


def test_a_run_that_waits_for_a_slow_disk_says_so(shown, tmp_path, monkeypatch):
    released = threading.Event()

    class Slow(durable.Files):
        def fsync(self, file):
            released.wait(60)

    def release(phrase, usual):
        shown.append((phrase, usual))
        released.set()

    monkeypatch.setattr(durable, "files", Slow())
    monkeypatch.setattr(activity, "REFRESH", 0.01)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)  # else it may be shown again
    with activity.showing_on(release), BackgroundSaver(tmp_path) as saver:
        saver.save(RunState(1, {"x": np.zeros(1, np.float32)}, {}))
    assert shown == [("Waiting for a checkpoint to be written", False), (None, False)]


def test_lines_about_compiling_are_rare_in_a_file(monkeypatch):
    now, file = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with activity.showing_on(Console(file).activity), activity.expecting_kernels(200):
        for _ in range(60):
            activity.begin_compiling()
            now[0] += 2
            activity.end_compiling()
    lines = file.getvalue().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"{n} of about 200 ..." for n in (1, 16, 31, 46)
    ]


def test_no_total_is_said_that_is_not_known_or_too_small(shown):
    activity.begin_compiling()
    activity.end_compiling()
    with activity.expecting_kernels(1):
        activity.begin_compiling()
        activity.end_compiling()
    phrases = [phrase for phrase, _ in shown if phrase]
    assert phrases == [f"{activity.COMPILING}: 1", f"{activity.COMPILING}: 2 of about 2"]


def test_a_file_of_any_name_shows_no_control_characters(shown):
    with activity.doing("Reading \x1b[31mred\n"):
        assert shown == [("Reading \ufffd[31mred\ufffd", False)]


def test_what_an_interrupt_left_open_ends_with_what_surrounds_it(shown):
    with activity.doing("outer"):
        interrupted = activity.doing("inner")
        interrupted.__enter__()
        counted = activity.parts("ab")
        next(counted)
    assert shown[-1] == (None, False)
    with activity.doing("next"):
        counted.close()
        del interrupted
    assert [phrase for phrase, _ in shown][-2:] == ["next", None]

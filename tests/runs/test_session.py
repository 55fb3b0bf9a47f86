"""A run from Python, without the command line: created, interrupted, resumed, loaded, verified."""

import filecmp
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Run, Settings, TransformerModel
from smallmind.console.activity import clock
from smallmind.forecast import pace
from smallmind.forecast.pace import Pace
from smallmind.runs import assembly
from smallmind.settings.rules import Choices
from smallmind.training import evaluation
from smallmind.training.records import FileWarningRecord, SampleRecord, SaveRecord, StepRecord
from tests.programs import CATS, edited, refusal, refuses
from tests.runs import small

TEXT = CATS
FIELDS = {**small.FIELDS, "block_size": 16, "n_embd": 16, "dropout": 0.1, "batch_size": 4}
FIELDS |= {"steps": 20, "val_every": 7, "val_batches": 2, "save_every": 5, "warmup_steps": 5}
FIELDS["backend"] = "numba"
STEPS = [5, 7, 10, 14, 15, 20]  # with a checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was never interrupted, and its records."""
    run = Run.create(text=TEXT, out=tmp_path_factory.mktemp("session") / "run", **FIELDS)
    return run, run.train()


def outcome(run):
    """The outcome of a run: a hash of its model, and the losses of its steps."""
    model = (run.path / "model.safetensors").read_bytes()
    losses = [row["loss"] for row in run.metrics().rows if "loss" in row]
    return hashlib.sha256(model).hexdigest(), losses


def weights(model):
    return model.flat.data.copy()


def test_training_writes_the_whole_directory_and_prints_nothing(finished, tmp_path, capfd):
    run = Run.create(text=TEXT, out=tmp_path / "run", **FIELDS)
    seen = []
    records = run.train(on_record=seen.append)
    assert records == seen and records[-1].step == 20
    assert [r.step for r in records if isinstance(r, StepRecord)] == list(range(1, 21))
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "samples.txt",
        "text.txt",
        "tokenizer.json",
    }
    assert run.is_finished and len(run.sample) == 1 + evaluation.SAMPLE_TOKENS
    assert run.path.joinpath("samples.txt").read_text() == f"--- step 20\n{run.sample}\n"
    assert capfd.readouterr() == ("", "")


def test_samples_on_the_way_change_nothing_else(finished, tmp_path):
    fields = {**FIELDS, "sample_every": 4}
    run = small.left(Run.create(text=TEXT, out=tmp_path / "run", **fields), step=13)
    samples = run.path / "samples.txt"
    assert re.findall("--- step ([0-9]+)\n", samples.read_text()) == ["4", "8", "12"]
    resumed = Run.open(run.path)
    records = resumed.resume()
    assert [r.step for r in records if isinstance(r, SampleRecord)] == [16]
    assert outcome(resumed) == outcome(finished[0])
    texts = dict(re.findall("--- step ([0-9]+)\n(.*?)\n(?=---|$)", samples.read_text(), re.S))
    assert list(texts) == ["4", "8", "12", "16", "20"]
    assert {len(text) for text in texts.values()} == {1 + evaluation.SAMPLE_TOKENS}
    assert finished[0].sample.startswith(texts["20"])
    assert resumed.training.progress.seconds["samples"] > 0
    more = Run.open(run.path)
    more.resume(steps=24, sample_every=2)
    assert samples.read_text().count("--- step") == 7  # 22 and 24 more


def test_compressed_checkpoints_and_a_command_after_each_save_change_nothing_else(
    finished, tmp_path
):
    copies = tmp_path / "copies"
    copies.mkdir()
    run = Run.create(text=TEXT, out=tmp_path / "run", **FIELDS, compress=True)
    run.after_save = f"cp {{}} {shlex.quote(str(copies))}"
    small.left(run, step=13)
    resumed = Run.open(run.path)
    assert resumed.after_save is None  # it is never saved
    resumed.after_save = "no-such-program-anywhere"
    records = resumed.resume()
    warnings = [r.warning for r in records if isinstance(r, FileWarningRecord)]
    assert warnings and all("could not be run" in warning for warning in warnings)
    assert any(isinstance(r, SaveRecord) for r in records)
    assert outcome(resumed) == outcome(finished[0])
    kept = run.path / "checkpoints"
    for copy in copies.iterdir():
        assert not (kept / copy.name).exists() or filecmp.cmp(copy, kept / copy.name, shallow=False)
    assert TransformerModel.load(kept / "best.safetensors").config == resumed.training.model.config
    assert any("save_seconds" in row for row in run.metrics().rows)
    assert b"after_save" not in (run.path / "config.json").read_bytes()
    resumed = Run.open(run.path)
    resumed.resume(steps=24, compress=False)  # reads the compressed one, writes plain ones


def test_a_sample_has_400_tokens(finished):
    assert len(finished[0].sample) == 1 + 400


def test_settings_are_resolved_and_saved(finished):
    run, _ = finished
    assert run.settings.model.vocab_size == len(set(TEXT))
    assert run.settings.training.min_lr == 0.0 and run.settings.run.threads >= 1
    saved = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    assert Settings.from_dict(saved) == run.settings == Run.open(run.path).settings
    assert (run.path / "text.txt").read_text(encoding="utf-8") == TEXT


def test_settings_can_come_as_one_object_and_the_text_as_a_path(finished, tmp_path):
    text = tmp_path / "cats.txt"
    text.write_text(TEXT, encoding="utf-8")
    settings = Choices(FIELDS).settings()
    with pytest.raises(InputError, match="recipe='gpt2' has no effect"):
        Run.create(settings, text, out=tmp_path / "run", recipe="gpt2")
    run = Run.create(settings, text, out=str(tmp_path / "run"))
    assert run.files.name == "cats" and run.settings.run.text == str(text)
    run.train()
    assert outcome(run) == outcome(finished[0])


@pytest.mark.parametrize("stop", range(1, 20, 3))
def test_leaving_the_loop_saves_everything_and_resuming_continues(finished, tmp_path, stop):
    run = small.left(Run.create(text=TEXT, out=tmp_path / "run", **FIELDS), stop)
    assert run.newest().step in (stop, stop + 1) and not run.is_finished
    opened = Run.open(run.path)
    opened.resume()
    assert opened.is_finished
    assert outcome(opened) == outcome(finished[0])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_training_and_the_same_object_resumes(finished, tmp_path):
    run = Run.create(text=TEXT, out=tmp_path / "run", **FIELDS)
    before = signal.getsignal(signal.SIGINT)

    def interrupt(record):
        if record.step == 9:
            signal.raise_signal(signal.SIGINT)

    records = run.train(on_record=interrupt)
    assert records[-1].step == 9 and run.newest().step == 9 and not run.is_finished
    assert signal.getsignal(signal.SIGINT) is before
    refuses("has been trained to step 9 already: resume it", run.train)
    assert [r.step for r in run.resume() if isinstance(r, StepRecord)] == list(range(10, 21))
    assert outcome(run) == outcome(finished[0])
    assert run.resume() == [] and run.is_finished


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("signalled", [True, False], ids=["Ctrl-C", "stop"])
def test_what_stops_a_run_while_it_is_built_is_not_lost(finished, tmp_path, monkeypatch, signalled):
    run, original = Run.create(text=TEXT, out=tmp_path / "run", **FIELDS), assembly.build_training
    built = []

    def build(*arguments):
        if not built:
            signal.raise_signal(signal.SIGINT) if signalled else run.stop()
        built.append(original(*arguments))
        return built[-1]

    monkeypatch.setattr(assembly, "build_training", build)
    if signalled:
        with pytest.raises(KeyboardInterrupt):
            run.train()
        built.append(None)
    else:
        assert run.train() == []
    assert len(built) == 1 and run.newest() is None
    run.resume()
    assert outcome(run) == outcome(finished[0])


def test_a_second_session_keeps_what_was_hung_on_the_training(finished, tmp_path):
    run, told = Run.create(text=TEXT, out=tmp_path / "run", **FIELDS), []
    run.training.on_step = on_step = lambda *shown: told.append(shown)
    run.train(on_record=lambda record: record.step == 9 and run.stop())
    first = run.training
    run.resume()
    assert run.training is not first and run.training.on_step is on_step
    assert outcome(run) == outcome(finished[0])


def test_a_run_that_was_killed_resumes_from_its_last_checkpoint(finished, tmp_path):
    out = shutil.copytree(finished[0].path, tmp_path / "run")
    for name in (
        "model.safetensors",
        *(f"checkpoints/step-{n:08d}.safetensors" for n in STEPS[3:]),
    ):
        (out / name).unlink()
    (out / "checkpoints" / "best.safetensors").unlink()
    run = Run.open(out)
    assert Run.unfinished(tmp_path).path == out
    run.resume(threads=1, check_gradient_health=True)
    assert outcome(run) == outcome(finished[0])
    refuses("no unfinished run", Run.unfinished, tmp_path)


def test_only_what_does_not_affect_the_result_may_change(finished):
    with pytest.raises(InputError, match="learning_rate is fixed when a run is created; you can"):
        Run.open(finished[0].path).resume(learning_rate=1.0)


def test_every_checkpoint_can_be_loaded(finished):
    run, records = finished
    final, tokenizer = run.load()
    assert tokenizer.characters == "".join(sorted(set(TEXT)))
    assert (weights(run.load("newest")[0]) == weights(final)).all()
    assert (weights(run.load(20)[0]) == weights(final)).all()
    last = str(run.path / "checkpoints" / "step-00000020.safetensors")
    for source in (run.path, run.path / "model.safetensors", last):
        assert (weights(smallmind.load(source)[0]) == weights(final)).all()
    losses = {r.step: r.val_loss for r in records if hasattr(r, "val_loss")}
    best = min(losses, key=losses.__getitem__)
    assert (weights(run.load("best")[0]) == weights(run.load(best)[0])).all()
    assert (weights(run.load(5)[0]) != weights(final)).any()
    numpy_model, _ = run.load(5, backend="numpy")
    assert (weights(numpy_model) == weights(run.load(5)[0])).all()
    text = smallmind.generate(final, tokenizer, "the ", max_tokens=20)
    assert text.startswith("the ") and len(text) == 24
    for missing in (6, "oldest"):
        refuses(r"choose newest, best or one of the steps 5, 7, 10", run.load, missing)


def test_a_run_without_a_model_loads_its_newest_checkpoint(finished, tmp_path):
    out = shutil.copytree(finished[0].path, tmp_path / "run")
    (out / "model.safetensors").unlink()
    (out / "checkpoints" / "step-00000020.safetensors").write_bytes(b"damaged")
    (out / "checkpoints" / "best.safetensors").unlink()
    expected = weights(finished[0].load(15)[0])
    assert (weights(smallmind.load(out)[0]) == expected).all()


def test_a_path_that_cannot_be_loaded_is_refused_in_one_line(finished, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no model")
    for path, message in [
        (tmp_path / "none", "does not exist; give a run, a checkpoint or a model file"),
        (tmp_path / "empty", "has neither a model nor an intact checkpoint"),
        (tmp_path / "text", "is not a valid safetensors file"),
    ]:
        assert message in refusal(smallmind.load, path)


def test_a_run_is_evaluated_tabulated_and_verified(finished):
    run = Run.open(finished[0].path)
    held_out = run.evaluate()
    assert held_out.tokens == int(len(TEXT) * 0.1) - 1
    assert run.evaluate(TEXT).loss == held_out.loss  # its own text: the held-out part
    other = run.evaluate("the mat sat on the cat.\n")
    assert other.tokens == 23 and other.loss != held_out.loss
    assert [row["step"] for row in run.metrics().rows] == list(range(1, 21))
    verdicts = run.verify()
    assert all(verdict.fault is None for verdict in verdicts)
    pairs = [f"retrained from step {a} to {b}" for a, b in itertools.pairwise(STEPS)]
    assert [verdict.name for verdict in verdicts[-len(pairs) :]] == pairs
    assert len(run.verify(digests_only=True)) == len(STEPS) + 3


def test_an_old_config_is_opened_and_a_newer_one_is_refused(finished, tmp_path):
    out = shutil.copytree(finished[0].path, tmp_path / "run")
    with edited(out / "config.json") as config:
        del config["format"], config["distillation"], config["training"]["max_rollbacks"]
        config["training"]["windows_at_once"] = config["training"].pop("micro_batch_size")
    assert Run.open(out).settings == finished[0].settings.replace(
        out=str(out), text=str(out / "text.txt")
    )
    (out / "config.json").write_text(json.dumps({**config, "format": 2}), encoding="utf-8")
    refuses("a newer smallmind wrote it, in format 2", Run.open, out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 2}, "unknown setting 'n_layers'; did you mean n_layer?"),
        ({"n_layer": 0}, "n_layer=0 must be at least 1"),
        ({"text": "too short\n"}, "needs at least"),
        ({"text": "nowhere.txt"}, "nowhere.txt does not exist"),
        ({"threads": 9999}, "threads=9999 must be at most"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(tmp_path, fields, message):
    given = {"text": TEXT, "out": tmp_path / "a" / "run", **fields}
    assert message in refusal(Run.create, **given) and not list(tmp_path.iterdir())


def test_a_directory_is_used_once_and_discarded_if_untrained(finished, tmp_path):
    refuses("already holds a run", Run.create, text=TEXT, out=finished[0].path)
    run = Run.create(text=TEXT, out=tmp_path / "a" / "run", **FIELDS)
    assert (run.path / "text.txt").exists()
    run.discard_untrained()
    assert not list(tmp_path.iterdir())
    finished[0].discard_untrained()
    assert finished[0].is_finished


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_a_text_with_half_a_character_is_refused(tmp_path, tokenizer):
    text = TEXT + "half \ud83d of a cat"
    with pytest.raises(InputError, match="an unpaired surrogate, at position 2885: replace"):
        Run.create(text=text, out=tmp_path / "run", tokenizer=tokenizer, **FIELDS)
    assert not (tmp_path / "run").exists()
    assert "half ? of a cat" in text.encode(errors="replace").decode()


def test_a_moved_run_finds_its_text(finished, tmp_path):
    moved = shutil.copytree(finished[0].path, tmp_path / "moved")
    assert Run.open(moved).settings.run.text == str(moved / "text.txt")
    (moved / "text.txt").write_text(TEXT + "more", encoding="utf-8")
    refuses("text has changed since the run was created", Run.open(moved).evaluate)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("reopened", [False, True])
def test_a_run_that_was_interrupted_while_timed_still_ends_after_its_minutes(
    tmp_path, monkeypatch, reopened
):
    monkeypatch.setattr(pace, "measure", interrupted)
    run = Run.create(text=TEXT, out=tmp_path / "run", minutes=3.0, **FIELDS)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.files.config.awaits_timing and "not timed yet, to train for 3 minutes" in repr(run)
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(6.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(pace, "refitting", lambda *_: lambda: None)
    run = Run.open(run.path) if reopened else run
    run.resume()
    steps = run.settings.training.steps
    assert run.is_finished and 25 <= steps <= 29 and not run.files.config.awaits_timing
    assert Run.open(run.path).settings.training.steps == steps
    monkeypatch.setattr(pace, "measure", None)  # only once
    assert Run.open(run.path).resume() == []


@pytest.mark.parametrize("start", [Run.train, Run.resume, lambda run: list(run.steps())])
def test_a_run_that_is_stopped_while_timed_has_not_begun(tmp_path, monkeypatch, start):
    run = Run.create(text=TEXT, out=tmp_path / "run", minutes=3.0, **FIELDS)
    measure = pace.measure

    def measure_and_stop(training, *arguments):
        losses = training.model.loss_and_gradients
        with monkeypatch.context() as patch:
            patch.setattr(training.model, "loss_and_gradients", lambda *a: run.stop() or losses(*a))
            return measure(training, *arguments)

    monkeypatch.setattr(pace, "measure", measure_and_stop)
    assert start(run) == [] and run.files.config.awaits_timing
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(6.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(pace, "refitting", lambda *_: lambda: None)
    assert 25 <= start(run)[-1].step <= 29


def test_a_run_that_awaits_timing_gets_its_length_from_whoever_resumes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "measure", interrupted)
    run = Run.create(text=TEXT, out=tmp_path / "run", minutes=3.0, **FIELDS)
    run.unlock()
    run = Run.open(run.path)
    run.resume(steps=10)
    assert run.is_finished and run.settings.training.steps == 10
    assert not Run.open(run.path).files.config.awaits_timing


def test_a_run_of_minutes_ends_after_so_many_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(1e-6, 0.0, 0.0, 0.0))
    run = Run.create(text=TEXT, out=tmp_path / "run", minutes=3.0, **FIELDS)
    run.session.fit_steps(clock() + 180)
    data = run.training.data
    tokens = run.settings.training.steps * data.batch_size * data.block_size
    assert 63 * len(data.train) < tokens <= 64 * len(data.train)
    run.discard_untrained()


def test_a_tokenizer_is_restored_rather_than_rebuilt(finished, tmp_path, monkeypatch):
    out = shutil.copytree(finished[0].path, tmp_path / "run")
    (out / "model.safetensors").unlink()
    monkeypatch.setattr(smallmind.Tokenizer, "__init__", refuse_text(smallmind.Tokenizer.__init__))
    run = Run.open(out)
    run.resume()
    assert np.isfinite(run.evaluate().loss)


def refuse_text(original):
    """A constructor that fails if it is given the text of the run."""

    def init(tokenizer, text="", kind="char"):
        assert len(text) < len(TEXT)
        original(tokenizer, text, kind)

    return init

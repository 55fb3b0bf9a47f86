"""Training as in the guide: the arguments, the files, and a script with every switch on."""

import dataclasses
import os
import signal
from functools import partial

import pytest

from smallmind import InputError, Run, Training, TrainingConfig, load
from smallmind.training import checkpoint as checkpoints
from smallmind.training.records import EvaluationRecord, StepRecord
from tests.programs import CATS
from tests.training.test_resume import new_training

SCRIPT = """
from smallmind import CheckpointStrategy, Tokenizer, Training, TrainingConfig, TransformerModel

with open("data.txt", encoding="utf-8") as file:
    text = file.read()
tokenizer = Tokenizer(text)
shape = {"block_size": 128, "n_embd": 128, "n_layer": 4, "n_head": 4}
model = TransformerModel(vocab_size=tokenizer.vocab_size, dropout=0.1, **shape)
training = Training(model, tokenizer, text, block_size=128, batch_size=16, seed=42)
lean = {"use_gradient_checkpointing": True, "checkpoint_strategy": CheckpointStrategy.SQRT_LAYERS}
config = TrainingConfig(
    use_mixed_precision=True, enable_diagnostics=True, check_gradient_health=True, **lean
)
watching = {"on_record": print, "val_every": 500, "val_batches": 10}
saving = {"save_every": 500, "checkpoint_dir": "checkpoints", "resume": True}  # continues one
training.train_optimized(
    steps=2000, learning_rate=0.001, grad_accum_steps=4, config=config, **watching, **saving
)
training.profiler.print_report()
"""


small_training = partial(new_training, n_layer=1, n_embd=16, dropout=0.0)


def test_arguments_override_the_config(tmp_path):
    given = {"steps": 6, "learning_rate": 2e-3, "log_every": 2, "save_every": 3, "val_batches": 1}
    given |= {"grad_accum_steps": 2, "warmup_steps": 1, "val_every": 4, "min_lr": 1e-5}
    training, reported = small_training(), []
    config = TrainingConfig(steps=99, beta1=0.8, min_lr=1e-4)
    records = training.train_optimized(
        checkpoint_dir=tmp_path / "saved", config=config, on_record=reported.append, **given
    )
    for name, value in given.items():
        assert getattr(training.config, name) == value, name
    assert training.config.beta1 == 0.8
    assert records == reported
    assert [r.step for r in records if isinstance(r, StepRecord)] == [1, 2, 4, 6]
    assert [r.step for r in records if isinstance(r, EvaluationRecord)] == [4, 6]
    checkpoint, _ = checkpoints.newest(tmp_path / "saved")
    assert checkpoint.step == 6
    same = small_training()
    same.train(beta1=0.8, **given)
    assert same.model.flat.data.tobytes() == training.model.flat.data.tobytes()


@pytest.mark.parametrize("resume", [False, True])
def test_one_run_at_a_time_uses_a_directory(tmp_path, resume):
    """The second one starts before the first has saved anything."""

    def start_another(_record):
        with pytest.raises(InputError, match=f"is in use by process {os.getpid()}"):
            small_training().train_optimized(1, checkpoint_dir=tmp_path, resume=resume)

    config = TrainingConfig(steps=2, val_every=0)
    small_training().train_optimized(
        checkpoint_dir=tmp_path, config=config, on_record=start_another
    )
    assert checkpoints.steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_run_interrupted_before_its_first_checkpoint_does_not_resume_from_its_own_weights(
    tmp_path,
):
    """The object then has other weights than those that the run began with."""

    def interrupt(record):
        if record.step == 3:
            raise KeyboardInterrupt

    settings = {"checkpoint_dir": tmp_path, "log_every": 1, "val_every": 0, "save_every": 5}
    training = small_training()
    with pytest.raises(KeyboardInterrupt):
        training.train_optimized(8, on_record=interrupt, **settings)
    with pytest.raises(InputError, match=r"before its first checkpoint .* build a new model"):
        training.train_optimized(8, resume=True, **settings)
    anew = small_training()
    anew.train_optimized(8, resume=True, **settings)
    whole = small_training()
    whole.train(8, log_every=1, val_every=0)
    assert anew.model.flat.data.tobytes() == whole.model.flat.data.tobytes()
    assert training.train_optimized(2, checkpoint_dir=tmp_path / "other", resume=True)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_train_saves_and_resumes_as_a_run_does(tmp_path):
    """Ctrl-C during step 4 ends it after that step; the files are those of a Run."""
    settings = {"val_every": 2, "val_batches": 1, "keep": 2, "progress": False}
    first_five = 8, 2e-3, 1, 3, tmp_path / "saved"  # positional, as in the guide

    def interrupt(record):
        if record.step == 3 and isinstance(record, StepRecord):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        first = small_training().train(*first_five, **settings, on_record=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert max(checkpoints.steps(tmp_path / "saved")) == first[-1].step < 8
    resumed, whole = small_training(), small_training()
    rest = resumed.train(*first_five, **settings, resume=True)
    records = whole.train(8, 2e-3, 1, **settings)

    def losses(of):
        return [(r.step, r.loss) for r in of if isinstance(r, StepRecord)]

    assert losses(first) + losses(rest) == losses(records)
    assert resumed.model.flat.data.tobytes() == whole.model.flat.data.tobytes()
    model, tokenizer = load(tmp_path / "saved")
    assert model.flat.data.tobytes() == whole.model.flat.data.tobytes()
    assert tokenizer.digest == whole.tokenizer.digest
    fields = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16, "save_every": 3}
    del settings["progress"]
    run = Run.create(text=CATS, steps=8, recipe="gpt2", out=tmp_path / "run", **fields, **settings)
    run.train()
    files = [set(os.listdir(tmp_path / each / "checkpoints")) for each in ("saved", "run")]
    assert files[0] | {"best.safetensors"} == files[1] | {"best.safetensors"}


def test_positional_arguments_have_the_order_of_the_guide():
    training = small_training()
    training.train_optimized(2, 6e-4, 1, 0, None, TrainingConfig(val_every=0), 2, 1)
    given = {"steps": 2, "learning_rate": 6e-4, "log_every": 1, "save_every": 0, "val_every": 0}
    expected = TrainingConfig(**given, grad_accum_steps=2, warmup_steps=1)
    assert training.config == expected.with_min_lr()


@pytest.mark.parametrize(
    ("min_lr", "expected"), [(None, 5e-5), (1e-6, 1e-6)], ids=["a tenth", "set"]
)
def test_min_lr_is_a_tenth_of_the_peak_unless_it_is_set(min_lr, expected):
    training = small_training()
    config = TrainingConfig(val_every=0, min_lr=min_lr)
    training.train_optimized(steps=1, learning_rate=5e-4, config=config)
    assert training.config.min_lr == pytest.approx(expected)


def test_checkpoints_of_another_run_are_left_alone(tmp_path):
    config = TrainingConfig(steps=3, val_every=0)
    small_training().train_optimized(checkpoint_dir=tmp_path, config=config)
    [path] = (tmp_path / "checkpoints").iterdir()
    before = path.read_bytes()
    training = small_training()
    with pytest.raises(InputError, match="holds checkpoints of another run; choose another"):
        training.train_optimized(steps=2, checkpoint_dir=tmp_path, config=config)
    assert training.progress.step == 0 and path.read_bytes() == before


def test_a_script_with_every_switch_on(tmp_path, monkeypatch, capsys):
    """As written, except that it stops after two updates."""
    (tmp_path / "data.txt").write_text(CATS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    original, names = Training.steps, {}

    def run_script(steps):
        monkeypatch.setattr(Training, "steps", steps)
        exec(compile(SCRIPT, "script", "exec"), names)
        return names["training"], capsys.readouterr().out

    training, printed = run_script(
        lambda self, *arguments, **named: original(self, *arguments, until=2, **named)
    )
    config = training.config
    assert (config.steps, config.grad_accum_steps, config.val_batches) == (2000, 4, 10)
    assert config.use_mixed_precision and config.checkpoint_strategy == "sqrt_layers"
    assert training.progress.step == 2
    assert os.listdir("checkpoints/checkpoints") == ["step-00000002.safetensors"]
    assert "StepRecord(step=1, " in printed and "HealthRecord(step=1, " in printed
    assert "TRAINING PERFORMANCE REPORT" in printed

    def of_three(self, config, state=None, **named):
        return original(self, dataclasses.replace(config, steps=3), state, **named)

    for trained in ([3], []):  # the second time it continues, the third time it is finished
        training, printed = run_script(of_three)
        assert training.progress.step == 3
        assert ("StepRecord(step=3, " in printed) == bool(trained)

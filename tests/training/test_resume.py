"""A run resumed from a checkpoint equals the uninterrupted run, bit for bit."""

import hashlib
import json
import shlex
import shutil
import signal
import sys

import pytest

from smallmind import InputError, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.files import safetensors
from smallmind.kernels.codegen.threads import set_threads
from smallmind.training import checkpoint as checkpoints
from smallmind.training.checkpoint import BackgroundSaver, Saver
from smallmind.training.records import (
    EarlyStopRecord,
    EvaluationRecord,
    SaveFailedRecord,
    StepRecord,
    TargetRecord,
)
from smallmind.training.training import SNAPSHOT_EVERY
from tests.programs import CATS, finished, last_of_each, started
from tests.training.small import at_each_pass

EVERYTHING = {"grad_accum_steps": 2, "schedule": "plateau", "plateau_patience": 1, "val_every": 7}
EVERYTHING |= {"val_batches": 1, "early_stopping_patience": 50, "log_every": 1, "save_every": 5}
EVERYTHING |= {"use_gradient_checkpointing": True, "checkpoint_strategy": "every_layer"}
EVERYTHING["warmup_steps"] = 3


def new_training(seed=5, snapshot_every=SNAPSHOT_EVERY, **settings):
    tokenizer = Tokenizer(CATS)
    shape = {"block_size": 16, "n_embd": 24, "n_layer": 3, "n_head": 2, "dropout": 0.1, "seed": 3}
    model = TransformerModel(tokenizer.vocab_size, **shape | settings)
    run = {"batch_size": 3, "seed": seed, "snapshot_every": snapshot_every}
    return Training(model, tokenizer, CATS, **run)


class Saves(Saver):
    """A saver that records what it is given, and stops training when it saves a given step."""

    def __init__(self, training, stop_at=None, directory=None):
        self.training, self.stop_at, self.directory = training, stop_at, directory
        self.saved = []  # steps, and whether they were the best so far

    def save(self, state, best):
        self.saved.append((state.step, best))
        if state.step == self.stop_at:
            if self.directory:
                self.directory.mkdir(exist_ok=True)
                checkpoints.save(self.directory, state)
            self.training.stop()

    def wait(self):
        pass

    close = wait


def digest(training):
    """A hash of everything that a step reads, except time."""
    state = training.state()
    sha = hashlib.sha256()
    for name, value in sorted(state.tensors.items()):
        sha.update(name.encode() + value.tobytes())
    rest = {**state.state, "progress": {**state.state["progress"], "seconds": 0}}
    return sha.hexdigest(), safetensors.to_json(rest)


def shown(records):
    """The parts of records that do not depend on the clock."""
    return [
        (record.step, record.loss, record.lr, record.grad_norm)
        if isinstance(record, StepRecord)
        else record
        for record in records
    ]


def run(config, until=None, state=None, tmp_path=None):
    """Trains, if given until the save of a step -> records, training and the state on disk."""
    training = new_training()
    records = list(training.steps(config, state, saver=Saves(training, until, tmp_path)))
    return records, training, checkpoints.newest(tmp_path)[0] if tmp_path else None


def assert_resumes_whole(build, config, steps, directory):
    """Runs that end after these steps and resume from their checkpoint equal the whole run.

    build() makes the training of each -> those of the whole and the last resumed one, and records.
    """
    whole = build()
    records = list(whole.steps(config))
    for step in steps:
        first, resumed, place = build(), build(), directory / f"at {step}"
        place.mkdir()
        begun = list(first.steps(config, until=step))
        checkpoints.save(place, first.state())
        rest = list(resumed.steps(config, checkpoints.newest(place)[0]))
        assert shown(begun + rest) == shown(records), step
        assert digest(resumed) == digest(whole), step
    return whole, resumed, records


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, precision):
    config = TrainingConfig(steps=22, precision=precision, **EVERYTHING)
    records, unbroken, _ = run(config)
    for step in (5, 7, 20):  # 7: its evaluation was the best so far
        first, _, saved = run(config, step, tmp_path=tmp_path / str(step))
        rest, resumed, _ = run(config, state=saved)
        assert shown(first + rest) == shown(records)
        assert digest(resumed) == digest(unbroken)


def resume_on_other_threads(directory):
    """Trains with one thread, and resumes with three from its saves. Prints their number."""
    settings = {**EVERYTHING, "val_every": 4, "early_stopping_patience": 3, "steps": 60}
    settings |= {"learning_rate": 0.1, "early_stopping_min_delta": 0.05}
    for precision in ("float32", "float16", "bfloat16"):
        config = TrainingConfig(precision=precision, **settings)
        set_threads(1)
        unbroken = new_training()
        saves = Saves(unbroken)
        records = list(unbroken.steps(config, saver=saves))
        every = 2 if precision == "float32" else 4
        for step, _ in saves.saved[::every]:
            set_threads(1)
            first, _, at = run(config, step, tmp_path=directory / f"{precision}-{step}")
            set_threads(3)
            rest, resumed, _ = run(config, state=at)
            assert shown(first + rest) == shown(records), (precision, step)
            assert digest(resumed) == digest(unbroken), (precision, step)
        rates = {record.lr for record in records if isinstance(record, StepRecord)}
        assert {0.1, 0.05} <= rates and isinstance(records[-1], EarlyStopRecord)
        print(precision, len(saves.saved))


def test_a_run_with_one_thread_is_resumed_with_three(tmp_path):
    name = "resume_on_other_threads"
    code = f"import sys, pathlib; from {__name__} import {name}; {name}(pathlib.Path(sys.argv[1]))"
    result = finished([sys.executable, "-c", code, str(tmp_path)], NUMBA_NUM_THREADS="3")
    assert result.returncode == 0, result.stderr
    assert [int(line.split()[1]) > 3 for line in result.stdout.splitlines()] == [True] * 3


def test_a_stop_in_the_middle_of_a_step_leaves_no_trace():
    config = TrainingConfig(steps=12, **{**EVERYTHING, "grad_accum_steps": 3})
    records, unbroken, _ = run(config)
    for stopped_after in (1, 2, 3, 7, 13):  # batches
        training = new_training()

        def stop(number, training=training, after=stopped_after):
            if number == after:
                training.stop()

        at_each_pass(training.model, before=stop)
        first = list(training.steps(config))
        assert training.progress.step == stopped_after // 3
        saved = training.state()
        rest, resumed, _ = run(config, state=saved if saved.step else None)
        assert shown(first + rest) == shown(records)
        assert digest(resumed) == digest(unbroken)


def test_a_run_until_a_step_equals_one_stopped_after_it():
    config = TrainingConfig(steps=12, **EVERYTHING)
    records, unbroken, _ = run(config)
    training = new_training()
    saves = Saves(training)
    first = list(training.steps(config, until=8, saver=saves))
    assert training.progress.step == 8 and saves.saved[-1] == (8, False)
    rest = list(training.steps(config, training.state(), until=99))
    assert shown(first + rest) == shown(records)
    assert digest(training) == digest(unbroken)


def test_an_interrupted_evaluation_is_repeated():
    config = TrainingConfig(steps=9, **EVERYTHING)
    records, unbroken, _ = run(config)
    training = new_training()
    at_each_pass(training.model, before=lambda _: training.stop(), name="losses")
    first = list(training.steps(config))
    assert training.progress.step == 7 and training.progress.evaluated == 0
    rest, resumed, _ = run(config, state=training.state())
    evaluations = [r for r in first + rest if isinstance(r, EvaluationRecord)]
    assert evaluations == [r for r in records if isinstance(r, EvaluationRecord)]
    assert digest(resumed) == digest(unbroken)


def test_early_stopping_ends_the_run_and_stays_ended(monkeypatch):
    config = TrainingConfig(
        steps=50, val_every=2, early_stopping_patience=3, early_stopping_min_delta=0.1, save_every=0
    )
    training, saves, records = ended_by(config, [3.0, 2.5, 2.45, 2.6, 2.44, 9.0], monkeypatch)
    stops = [r for r in records if isinstance(r, EarlyStopRecord)]
    assert stops == [EarlyStopRecord(step=10, best_step=10, best_loss=2.44)]
    assert training.progress.step == 10 and saves.saved[-1] == (10, True)


def ended_by(config, losses, monkeypatch):
    """A run whose evaluations find these losses has ended, and is not continued."""
    losses, training = iter(losses), new_training()

    def evaluate(step, _):
        return EvaluationRecord(step, 1.0, next(losses), 1.0, 1.0, 1.0, 0.5)

    monkeypatch.setattr(training.evaluations, "evaluate", evaluate)
    saves = Saves(training)
    records = list(training.steps(config, saver=saves))
    assert list(new_training().steps(config, training.state())) == []
    return training, saves, records


def test_a_run_ends_at_the_first_evaluation_that_reaches_the_target(monkeypatch):
    config = TrainingConfig(steps=50, val_every=2, target_loss=2.5, save_every=0)
    training, _, records = ended_by(config, [3.0, 2.6, 2.5, 2.0], monkeypatch)
    assert records[-1] == TargetRecord(step=6, look_loss=2.5, target=2.5)
    assert training.progress.step == 6 and training.progress.ended


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: new_training(seed=6), "was saved with a different batch size or seed"),
        (lambda: new_training(n_embd=32), "was saved with a different model"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(other, message):
    training = new_training()
    config = TrainingConfig(steps=2, val_every=0)
    list(training.steps(config))
    with pytest.raises(InputError, match=message):
        list(other().steps(config, training.state()))
    with pytest.raises(InputError, match="was saved with different training settings"):
        other_rate = TrainingConfig(steps=2, val_every=0, learning_rate=2e-3)
        list(new_training().steps(other_rate, training.state()))


def test_a_saver_gets_every_due_state_and_the_last_one(tmp_path):
    config = TrainingConfig(steps=12, save_every=5, val_every=0, keep=2)
    training = new_training()
    with BackgroundSaver(tmp_path, config.keep) as saver:
        list(training.steps(config, saver=saver))
        # The steps have ended, so the last one is on disk already.
        assert checkpoints.newest(tmp_path)[0].step == 12
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000010.safetensors", "step-00000012.safetensors"]


@pytest.mark.parametrize("max_rollbacks", [0, 3])
def test_a_saver_writes_the_state_of_its_step(tmp_path, max_rollbacks):
    """Even while later steps change the model, and whether it has its own copy or the snapshot."""
    config = TrainingConfig(steps=12, save_every=1, val_every=0, max_rollbacks=max_rollbacks)
    expected = {}

    class RecordingSaver(BackgroundSaver):
        def save(self, state, best=False):
            expected[state.step] = {name: x.copy() for name, x in state.tensors.items()}
            return super().save(state, best)

    with RecordingSaver(tmp_path, keep=99) as saver:
        list(new_training().steps(config, saver=saver))
    assert sorted(expected) == list(range(1, 13))
    for path, fault in checkpoints.verify(tmp_path):
        assert fault is None
        saved = checkpoints.load(path)
        assert saved.tensors.keys() == expected[saved.step].keys()
        for name, tensor in expected[saved.step].items():
            assert saved.tensors[name].tobytes() == tensor.tobytes(), (saved.step, name)


@pytest.mark.parametrize("max_rollbacks", [0, 3])
@pytest.mark.parametrize(
    ("failing", "lost"), [({3}, set()), ({3}, {3}), ({3, 4}, {3}), ({11, 12}, set()), ({12}, set())]
)
def test_a_state_that_could_not_be_saved_is_retried_unchanged(
    tmp_path, max_rollbacks, failing, lost, monkeypatch
):
    """As it was at its step, although the run has continued and taken other snapshots."""
    tries_before_the_next = 3 if max_rollbacks else 2  # the last one when the next save starts
    config = TrainingConfig(steps=12, save_every=1, val_every=0, max_rollbacks=max_rollbacks)
    whole, original, tries = {}, checkpoints.save, []

    def save(directory, state, keep=3, best=False):
        whole[state.step] = {name: x.tobytes() for name, x in state.tensors.items()}
        tries.append(state.step)
        may_succeed = state.step not in lost and tries.count(state.step) >= tries_before_the_next
        if state.step in failing and not may_succeed:
            raise OSError(28, "No space left on device")
        original(directory, state, keep, best)

    monkeypatch.setattr(checkpoints, "save", save)
    training = new_training()
    with BackgroundSaver(tmp_path, keep=99) as saver:
        records = list(training.steps(config, saver=saver))
    reported = [record.step for record in records if isinstance(record, SaveFailedRecord)]
    assert reported == [step + 1 for step in lost]
    for path, fault in checkpoints.verify(tmp_path):
        saved = checkpoints.load(path)
        assert fault is None
        assert {name: x.tobytes() for name, x in saved.tensors.items()} == whole[saved.step]
    last = {name: x.tobytes() for name, x in training.state().tensors.items()}
    assert checkpoints.newest(tmp_path)[0].step == 12 and whole[12] == last


def test_a_checkpoint_with_old_names_and_fewer_fields_is_resumed():
    config = TrainingConfig(steps=12, micro_batch_size=2, **EVERYTHING)
    records, unbroken, _ = run(config)
    first = new_training()
    before = list(first.steps(config, until=5))
    saved = first.state()
    fields = saved.state["config"]
    fields["windows_at_once"] = fields.pop("micro_batch_size")
    del fields["lr_decay_share"], saved.state["model"]["bias"]
    rest, resumed, _ = run(config, state=saved)
    assert shown(before + rest) == shown(records)
    assert digest(resumed) == digest(unbroken)


def test_preserved_restores_model_and_run():
    config = TrainingConfig(steps=4, precision="float16", val_every=0)
    training = new_training()
    list(training.steps(config))
    before, model, progress = digest(training), training.model, training.progress
    settings = model.precision, model.recompute_plan, model.micro_batch_size
    with training.preserved():
        other = TrainingConfig(
            steps=3, micro_batch_size=1, use_gradient_checkpointing=True, val_every=0
        )
        list(training.steps(other))
        assert training.progress.step == 3 and digest(training) != before
    assert digest(training) == before and training.progress is progress
    assert (model.precision, model.recompute_plan, model.micro_batch_size) == settings
    assert not model.flat.grad.any()


SMALL = shlex.split("""
    --block-size 16 --n-embd 16 --n-layer 2 --n-head 2 --batch-size 4 --val-every 20 --val-batches 2
    --warmup-steps 5 --log-every 1 --save-every 10 --dropout 0.1
""")


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "used_gflops" not in line]  # one for each session
    keys = ("step", "loss", "lr", "grad_norm", "train_loss", "val_loss", "warning")
    return [{key: line[key] for key in keys if key in line} for line in lines]


def tensors_of(out):
    return {
        name: hashlib.sha256(value.tobytes()).hexdigest()
        for name, value in checkpoints.newest(out)[0].tensors.items()
    }


def smallmind(*arguments):
    return started([sys.executable, "-m", "smallmind", *last_of_each(*arguments)])


@pytest.fixture
def trained(tmp_path, text, cli):
    """Trains a run, and copies it without some of its files -> the whole run, and the copy."""

    def trained(steps, *missing):
        whole, out = tmp_path / "whole", tmp_path / "run"
        cli("train", text, SMALL, "--steps", str(steps), "--out", whole)
        shutil.copytree(whole, out)
        for name in missing:
            (out / name).unlink()
        return whole, out

    return trained


def step_file(step):
    return f"checkpoints/step-{step:08}.safetensors"


BEST = "checkpoints/best.safetensors"


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_a_run_that_was_interrupted_is_resumed(tmp_path, text, number, cli):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    cli("train", text, SMALL, "--steps 60 --out", whole)
    arguments = ["train", text, *SMALL, "--steps", "60", "--out", str(broken), "--threads", "1"]
    with smallmind(*arguments) as process:
        for line in process.stdout:
            if line.startswith("step 40/60  held-out"):  # by now an earlier save has ended
                process.send_signal(number)
                break
        process.stdout.read()
    if number == signal.SIGKILL:
        assert process.returncode == -number
        with open(broken / "metrics.jsonl", "a") as file:
            file.write('{"step": 59, "loss"')  # a truncated line
    else:
        assert process.returncode == 128 + number
    assert "Resuming after step" in cli("train --resume", broken).out
    learnt = losses(broken)
    if number == signal.SIGKILL:
        [warning] = [line for line in learnt if "warning" in line]
        assert warning["warning"] == "removed damaged lines from metrics.jsonl: 1"
        learnt.remove(warning)
    assert learnt == losses(whole)
    assert tensors_of(broken) == tensors_of(whole)
    assert "is finished: 60 steps" in cli("train --resume", broken).out


def test_resume_skips_damaged_files_and_says_so(trained, cli):
    whole, out = trained(40)
    for name in (step_file(40), BEST):
        data = bytearray((out / name).read_bytes())
        data[len(data) // 2] ^= 1
        (out / name).write_bytes(data)
    printed = cli("train --resume", out).out
    assert "Skipping step-00000040.safetensors:" in printed
    assert "Resuming after step 30" in printed
    assert losses(out) == losses(whole) and tensors_of(out) == tensors_of(whole)


def test_diagnostics_can_be_turned_on_when_resuming(trained, cli):
    whole, out = trained(20, step_file(20), BEST)
    watching = "--detect-anomaly --check-gradient-health --profile --diagnostic-interval 15"
    printed = cli("train --resume", out, watching).out
    assert "Resuming after step 10" in printed and "PERFORMANCE REPORT" in printed
    learnt = losses(out)
    learnt.remove({"step": 15})  # the rest of its health record
    assert learnt == losses(whole) and tensors_of(out) == tensors_of(whole)


def test_resume_before_the_first_checkpoint_starts_over(trained, cli):
    whole, out = trained(12, "model.safetensors")
    shutil.rmtree(out / "checkpoints")
    assert "Starting over: no checkpoint yet" in cli("train --resume", out).out
    assert losses(out) == losses(whole) and tensors_of(out) == tensors_of(whole)


def test_resume_auto_takes_the_newest_unfinished_run(tmp_path, text, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("older", "newer"):
        cli("train", text, SMALL, "--steps 20 --out", f"runs/{name}")
    cli.refuses("no unfinished run in runs", "train --resume auto")
    for name in (step_file(20), BEST):
        (tmp_path / "runs" / "older" / name).unlink()
    printed = cli("train --resume auto").out
    assert "Resuming after step 10" in printed and "The run is in runs/older" in printed


def test_resume_refuses_other_flags_and_changed_texts(tmp_path, text, cli):
    out = tmp_path / "run"
    cli("train", text, SMALL, "--steps 2 --out", out)
    for arguments, message in (
        (f"{out} --steps 2", "has trained 2 steps already; give more"),
        (f"{out} --epochs 5", "is set in steps: give steps"),
        (f"{out} --learning-rate 1", "takes all settings from the run"),
        (f"{out} --size nano", "takes all settings from the run"),
        (f"{out} --dry-run", "takes all settings from the run"),
        (f"{tmp_path}", "is not a run: cannot read its config.json"),
    ):
        cli.refuses(message, "train --resume", arguments)
    with open(text, "a", encoding="utf-8") as file:
        file.write("more")
    cli.refuses("has changed since the run", "train --resume", out)


def test_a_resumed_run_that_fails_before_its_first_step_loses_nothing(trained, cli, monkeypatch):
    _, out = trained(12, "model.safetensors")
    for path in (out / "checkpoints").iterdir():
        path.unlink()  # as if it had been killed before its first save
    before = (out / "config.json").read_bytes()

    def fail(*_):
        raise MemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(TransformerModel, "loss_and_gradients", fail)
        cli("train --resume", out, ends=1)
    assert (out / "config.json").read_bytes() == before
    assert (out / "metrics.jsonl").exists()
    cli("train --resume", out)


def test_two_processes_cannot_train_in_one_directory(tmp_path, text):
    out = tmp_path / "run"
    endless = ["--steps", "100000", "--max-rollbacks", "0"]  # whatever becomes of its loss
    with smallmind("train", text, *SMALL, *endless, "--out", str(out)) as process:
        for line in process.stdout:
            if line.startswith("step"):
                break
        second = finished([sys.executable, "-m", "smallmind", "train", "--resume", str(out)])
        kept = {name: (out / name).exists() for name in ("config.json", "metrics.jsonl")}
        process.kill()
        process.stdout.read()
    assert second.returncode == 2
    assert all(kept.values()), kept  # the refused process removes no file of the other
    assert f"is in use by process {process.pid}" in second.stderr

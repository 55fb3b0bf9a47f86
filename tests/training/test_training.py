import itertools
import math
import traceback
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.nn.network import Network
from smallmind.optim.schedule import schedule
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import RandomWindows, draw
from smallmind.training.records import EvaluationRecord, StepRecord
from tests.training import small
from tests.training.small import TEXT

SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"


def small_training(seed=1, **settings):
    return small.small_training(seed, model_seed=seed, n_layer=1, **settings)


def test_the_loss_falls_and_records_report_it():
    config = TrainingConfig(
        steps=60, warmup_steps=5, learning_rate=3e-3, val_every=25, val_batches=2, log_every=20
    )
    records = list(small_training().steps(config))
    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    assert [record.step for record in steps] == [1, 20, 40, 60]
    assert [record.step for record in evaluations] == [25, 50, 60]
    assert steps[0].loss == pytest.approx(math.log(len(set(TEXT))), abs=0.1)
    assert evaluations[-1].val_loss < evaluations[0].val_loss < steps[0].loss
    assert evaluations[-1].val_loss < 1.5
    assert all(record.grad_norm > 0 and record.tokens_per_second > 0 for record in steps)
    elapsed = [record.elapsed_seconds for record in steps]
    assert elapsed == sorted(elapsed)
    assert steps[-1].lr < steps[1].lr


def test_the_same_seed_gives_the_same_bits():
    weights = []
    for seed in (1, 1, 2):
        training = small_training(seed=seed, dropout=0.1)
        training.train(steps=5, val_every=2, val_batches=1)
        weights.append(training.model.flat.data.tobytes())
    assert weights[0] == weights[1] != weights[2]


def test_evaluations_do_not_change_what_is_learnt():
    weights = []
    for every in (0, 1):
        training = small_training(dropout=0.1)
        training.train(steps=5, val_every=every, val_batches=2)
        weights.append(training.model.flat.data.tobytes())
    assert weights[0] == weights[1]


def test_few_frames_lie_between_a_batch_and_the_layers(monkeypatch):
    seen, forward = [], Network.forward_hidden

    def watched(network, *arrays):
        if network.workspace.training:
            seen.append([frame.name for frame in traceback.extract_stack()])
        return forward(network, *arrays)

    monkeypatch.setattr(Network, "forward_hidden", watched)
    training = small_training()
    training.counts_operations = False  # in passes of its own
    training.train(steps=1, val_every=0)
    (names,) = seen
    assert len(names) - 1 - (names.index("accumulate_gradients") + 1) <= 5  # which draws it


def test_the_caller_may_stop_and_keep_the_model():
    training = small_training()
    for record in training.steps(TrainingConfig(steps=1000, log_every=1, val_every=0)):
        if record.step == 3:
            break
    assert training.state().state["passes"] == 3


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_another_run_of_the_same_training_has_other_dropout_masks():
    training = small_training()
    for passes in (3, 6):
        training.train(3, progress=False)
        assert training.state().state["passes"] == passes


def test_a_non_finite_loss_stops_the_run_before_the_weights_change():
    training = small_training()
    training.model.parameters["final_norm.weight"][0] = np.nan
    before = training.model.flat.data.copy()
    with pytest.raises(FloatingPointError, match="loss became nan at step 1: lower the learning"):
        training.train(steps=3)
    np.testing.assert_array_equal(training.model.flat.data, before)


def test_data_that_does_not_fit_the_model_is_refused():
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 32, 1, 2)
    for arguments, settings, message in (
        ((tokenizer, TEXT), {"block_size": 17}, "block_size=17 must be at most the model's, 16"),
        ((tokenizer, "the cat"), {}, "a text needs at least 20 tokens; this one has 7"),
        ((tokenizer, TEXT + "X"), {}, "never seen the character 'X'"),
        ((tokenizer, TEXT), {"batch_size": 0}, "batch_size=0 must be at least 1"),
        ((tokenizer, TEXT), {"seed": -1}, "seed=-1 must be at least 0"),
        ((Tokenizer(kind="byte"), TEXT), {}, "the tokenizer has 256 tokens, the model only"),
        ((tokenizer,), {}, "give a tokenizer and a text, or data"),
        ((), {"data": Dataset(tokenizer.encode(TEXT), 16, 4, 1)}, "the data has no tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            Training(model, *arguments, **settings)


def test_training_on_a_dataset_equals_training_on_its_text():
    tokenizer, weights = Tokenizer(TEXT), []
    for handed_in in (False, True):
        model = TransformerModel(tokenizer.vocab_size, 16, 32, 1, 2, seed=1)
        if handed_in:
            data = Dataset.from_text(TEXT, tokenizer, 12, batch_size=3, seed=7)
            training = Training(model, data=data)
        else:
            training = Training(model, tokenizer, TEXT, 12, batch_size=3, seed=7)
        assert training.data is training.dataset and training.tokenizer is tokenizer
        training.train(steps=5, val_every=2, val_batches=1)
        weights.append(model.flat.data.tobytes())
    assert weights[0] == weights[1]


def test_training_on_shorter_windows_than_the_model_has():
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 32, 1, 2)
    training = Training(model, tokenizer, TEXT, block_size=8, batch_size=2)
    assert draw(RandomWindows(training.data), 0).ids.shape == (2, 8)
    training.train(steps=2, val_batches=1)


def test_every_setting_reaches_the_optimizer(monkeypatch):
    made, steps, limits = [], [], []

    class Recorder(smallmind.AdamW):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            made.append(self)

        def step(self, max_grad_norm=None, loss_scale=1.0, max_grad_value=None):
            limits.append(max_grad_value)
            steps.append((self.learning_rate, max_grad_norm, len(passes)))
            return super().step(max_grad_norm, loss_scale, max_grad_value)

    monkeypatch.setattr("smallmind.optim.adamw.AdamW", Recorder)
    training, passes = small_training(), []
    training.counts_operations = False  # with an optimizer of its own
    compute = training.model.loss_and_gradients
    monkeypatch.setattr(
        training.model, "loss_and_gradients", lambda *a: passes.append(a[3].number) or compute(*a)
    )
    training.model.gradients["final_norm.weight"][...] = 1e6  # left over: must not count
    settings = {"steps": 3, "grad_accum_steps": 4, "warmup_steps": 1, "val_every": 0}
    rates = {"learning_rate": 2e-3, "min_lr": 1e-3, "beta1": 0.8, "beta2": 0.7, "weight_decay": 0.3}
    limited = {"max_grad_norm": 0.5, "max_grad_value": 0.1, "log_every": 1}
    config = TrainingConfig(**settings, **rates, **limited)
    records = [record for record in training.steps(config) if isinstance(record, StepRecord)]
    assert made[-1].betas == (0.8, 0.7) and made[-1].weight_decay == 0.3
    assert [count for _, _, count in steps] == [4, 8, 12] and passes == list(range(12))
    assert {norm for _, norm, _ in steps} == {0.5} and set(limits) == {0.1}
    expected = [schedule(config).lr(step) for step in range(3)]
    assert [rate for rate, _, _ in steps] == [record.lr for record in records] == expected
    assert records[0].grad_norm < 1e3
    assert len({record.lr for record in records}) == 3


def test_a_plateau_lowers_the_rate_after_evaluations(monkeypatch):
    training = small_training()
    monkeypatch.setattr(
        training, "evaluate", lambda step, _: EvaluationRecord(step, 1.0, 2.0, 7.4, 2.9, 2.9, 0.3)
    )
    config = TrainingConfig(
        steps=8,
        schedule="plateau",
        plateau_patience=1,
        lr_decay_factor=0.5,
        warmup_steps=0,
        val_every=2,
        log_every=1,
    )
    for _ in range(2):  # each run starts at the peak, whatever the previous one reached
        rates, reductions = [], []
        for record in training.steps(config):
            if isinstance(record, EvaluationRecord):
                # Set before the record is yielded: a save at this moment includes it.
                reductions.append(training.schedule.state()["reductions"])
            elif isinstance(record, StepRecord):
                rates.append(record.lr)
        assert rates == [1e-3] * 4 + [5e-4] * 2 + [2.5e-4] * 2
        assert reductions == [0, 1, 2, 3]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_record_describes_the_step(precision, monkeypatch):
    # A clock of its own: on a busy machine a test may stop at any moment.
    seconds_so_far = itertools.count()
    monkeypatch.setattr("smallmind.training.clock.clock", lambda: float(next(seconds_so_far)))
    settings = {
        "steps": 30,
        "log_every": 1,
        "grad_accum_steps": 2,
        "learning_rate": 1e-2,
        "precision": precision,
    }
    norms = [record.grad_norm for record in small_training().train(val_every=0, **settings)]
    training, limit, previous, clipped = small_training(), float(np.median(norms)), 0.0, 0
    records = training.train(max_grad_norm=limit, val_every=10, val_batches=1, **settings)
    steps = [record for record in records if isinstance(record, StepRecord)]
    for number, record in enumerate(steps, 1):
        clipped += record.grad_norm > limit
        assert record.clip_share == clipped / number
        assert record.windows == 8 and record.precision == precision
        assert record.loss_scale == (1.0 if precision == "float32" else 65536.0)
        assert 10**7 < record.memory <= record.peak_memory < 10**11
        assert record.elapsed_seconds > previous
        assert record.tokens_per_second * record.step_ms == pytest.approx(1000 * 8 * 16)
        # At most the time since the previous record: evaluations do not count.
        assert record.step_ms <= 1000 * (record.elapsed_seconds - previous) * (1 + 1e-9)
        previous = record.elapsed_seconds
    assert 0 < clipped < 30
    seconds = training.progress.seconds
    assert 0 < seconds["evaluations"] < seconds["total"]
    apart = sum(seconds[kind] for kind in ("evaluations", "last evaluation", "saves"))
    spent = apart + sum(record.step_ms for record in steps) / 1000
    # After the last record a second until its evaluation, and one until the snapshot.
    assert spent == seconds["total"] - 2


def test_without_a_limit_nothing_is_clipped():
    training = small_training()
    records = training.train(steps=3, log_every=1, val_every=0, max_grad_norm=0)
    assert [record.clip_share for record in records] == [0, 0, 0]


def test_train_and_held_out_losses_are_not_confused():
    training = small_training()
    training.dataset.held_out[:] = 0  # one character throughout: far easier than the text
    for _ in training.steps(TrainingConfig(steps=40, learning_rate=3e-3, val_every=0)):
        pass
    record = training.evaluations.evaluate(40, 4)
    expected = np.mean(
        [training.model.loss(*training.data.evaluation_batch("train", i)[:2]) for i in range(4)]
    )
    assert record.train_loss == pytest.approx(expected)
    assert record.val_loss != pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tinyshakespeare.txt is not here")
@pytest.mark.slow
def test_shakespeare_is_learnt():
    text = SHAKESPEARE.read_text(encoding="utf-8")
    tokenizer = Tokenizer(text)
    model = TransformerModel(
        tokenizer.vocab_size, 64, 128, 4, 4, seed=1337, bias=False, tie_weights=True
    )
    training = Training(model, tokenizer, text)
    records = training.train(steps=250, val_every=0, learning_rate=1e-3, min_lr=1e-4)
    assert training.evaluations.evaluate(250, 20).val_loss < 2.45
    assert records[-1].step == 250

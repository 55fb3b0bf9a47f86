"""Loss spikes: distinguished from noise, rolled back, and resumed bit for bit."""

import math

import numpy as np
import pytest

from smallmind import AdamW, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.settings.config import Adapter
from smallmind.text.stories import built_in_text
from smallmind.training import checkpoint as checkpoints
from smallmind.training.records import RollbackRecord, StepRecord
from smallmind.training.spikes import Spikes
from tests.training.small import at_each_pass, small_training
from tests.training.test_resume import Saves, assert_resumes_whole, digest, new_training


def spiking_training(at, **settings):
    """A training whose loss is at[step] at these steps, with a snapshot every 4 steps."""
    training = new_training(n_layer=2, n_embd=16, snapshot_every=4, **settings)
    at_each_pass(training.model, after=lambda _: at.get(training.progress.step + 1))
    return training


def config(**settings):
    return TrainingConfig(
        **{"steps": 12, "val_every": 0, "save_every": 0, "log_every": 1, **settings}
    )


@pytest.mark.parametrize("loss", [1e3, math.nan, math.inf])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_spike_restores_the_last_good_state_at_half_the_rate(loss, precision):
    training, seen, kept = spiking_training({7: loss}), [], None
    for record in training.steps(config(precision=precision)):
        if record.step == 4 and not kept:
            kept = True
        if isinstance(record, StepRecord) and record.step == 5 and kept is True:
            kept = training.spikes.good
            assert kept.step == 4
            expected = {name: value.copy() for name, value in kept.tensors.items()}
        if isinstance(record, StepRecord) and record.step == 6 and training.scaler:
            training.scaler.update(overflowed=True)
        if isinstance(record, RollbackRecord):
            assert record.step == 4 and record.spike_step == 7 and record.lr_factor == 0.5
            assert record.next_lr == training.schedule.lr(4) * 0.5 > 0
            assert record.spike_loss == (loss if math.isfinite(loss) else None)
            now = training.state()
            assert now.step == 4 and now.state["optimizer"]["steps"] == now.state["passes"] == 4
            assert now.state["scaler"] == kept.state["scaler"]
            for name, value in expected.items():
                np.testing.assert_array_equal(now.tensors[name], value, name)
            assert not training.model.flat.grad.any()
            assert training.spikes.average == kept.state["spikes"]["average"] != record.average_loss
        seen.append(record)
    steps = [record for record in seen if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6, 5, 6, 8, 9, 10, 11, 12]
    assert sum(isinstance(record, RollbackRecord) for record in seen) == 1
    assert steps[6].lr == steps[4].lr / 2 and steps[6].loss == steps[4].loss
    assert steps[-1].lr == training.schedule.lr(11) / 2
    assert training.optimizer.steps == 11  # the skipped step made no update


def test_a_spike_restores_an_adapter_and_leaves_its_base(tmp_path):
    def build():
        return spiking_training({7: 1e3}, adapter=Adapter(2, 4.0))

    training, kept = build(), []
    parameters = training.model.parameters
    before = {name: value.copy() for name, value in parameters.items()}
    for record in training.steps(config()):
        if isinstance(record, StepRecord | RollbackRecord) and record.step == 4:
            kept.append({name: value.copy() for name, value in parameters.items()})
    assert len(kept) == 2  # after the step, and after the rollback to it
    for name, value in before.items():
        np.testing.assert_array_equal(*(each[name] for each in kept), name)
        assert np.array_equal(parameters[name], value) == ("lora_" not in name)
    assert_resumes_whole(build, config(save_every=5), (5, 8), tmp_path)


def test_a_run_resumed_between_snapshots_equals_an_uninterrupted_one(tmp_path):
    settings = config(save_every=5, val_every=6, val_batches=1)

    def build():
        return spiking_training({7: 1e3, 9: math.nan})

    *_, records = assert_resumes_whole(build, settings, (2, 5, 6, 8, 11), tmp_path)
    assert [r.step for r in records if isinstance(r, RollbackRecord)] == [6, 8]


def test_a_saved_state_is_also_the_snapshot(tmp_path):
    training = spiking_training({})
    list(training.steps(config(save_every=5), saver=Saves(training, 5, tmp_path)))
    saved, good = checkpoints.newest(tmp_path)[0], training.spikes.good
    assert saved.step == good.step == 5 and saved.tensors.keys() == good.tensors.keys()


def test_a_snapshot_of_an_earlier_step_is_part_of_the_checkpoint(tmp_path):
    first = spiking_training({})
    for record in first.steps(config()):
        if record.step == 6:
            break
    saved = first.state()
    assert saved.state["snapshot"]["step"] == 4
    assert len(saved.tensors) == 2 * len(first.spikes.good.tensors)
    checkpoints.save(tmp_path, saved)
    whole, rest = spiking_training({7: 1e3}), spiking_training({7: 1e3})
    list(whole.steps(config()))
    records = list(rest.steps(config(), checkpoints.newest(tmp_path)[0]))
    assert isinstance(records[0], RollbackRecord) and records[0].step == 4
    assert digest(rest) == digest(whole)


@pytest.mark.parametrize("rollbacks", [1, 3])
def test_after_the_last_rollback_the_run_stops_with_a_reason(rollbacks):
    training = spiking_training(dict.fromkeys(range(5, 99), 1e3))
    records = []
    count = rf"{rollbacks} rollbacks?"
    step, factor = 5 + rollbacks, 0.5**rollbacks
    rate, peak = 1e-3 * step / 101 * factor, 1e-3 * factor
    message = (
        rf"rose to 1000, from 2\.\d+, at step {step} after {count}: lower the learning rate, "
        f"which was {rate:.3g} at that step, with a peak of {peak:.3g}$"
    )
    with pytest.raises(FloatingPointError, match=message):
        for record in training.steps(config(max_rollbacks=rollbacks)):
            records.append(record)
    assert [r.lr_factor for r in records if isinstance(r, RollbackRecord)] == [
        0.5**i for i in range(1, rollbacks + 1)
    ]


def test_without_rollbacks_no_state_is_kept_and_a_non_finite_loss_is_an_error():
    training = spiking_training({5: 1e3, 6: math.nan})
    with pytest.raises(FloatingPointError, match="became nan at step 6: lower the learning rate"):
        list(training.steps(config(max_rollbacks=0)))
    assert training.spikes.good is None and training.progress.step == 5


def test_a_non_finite_loss_at_the_last_step_is_an_error():
    """No later step could show that only the batch was at fault."""
    with pytest.raises(FloatingPointError, match="loss became nan at step 12: lower"):
        list(spiking_training({12: math.nan}).steps(config()))
    records = list(spiking_training({12: 1e3}).steps(config()))
    assert any(isinstance(record, RollbackRecord) for record in records)


@pytest.mark.parametrize("step", [4, 12])  # a step with a snapshot, and the last one
def test_a_non_finite_state_is_never_restored(step, monkeypatch):
    original = AdamW.step

    def spoilt(self, *arguments):
        norm = original(self, *arguments)
        if self.steps == step:
            self.model.parameters["final_norm.weight"][0] = math.nan
        return norm

    monkeypatch.setattr(AdamW, "step", spoilt)
    training = spiking_training({})
    with pytest.raises(FloatingPointError) as error:
        list(training.steps(config()))
    if step == 12:
        assert "model.final_norm.weight has NaN or Inf after step 12" in str(error.value)
    assert all(np.isfinite(value).all() for value in training.spikes.good.tensors.values())
    assert training.spikes.good.step == {4: 0, 12: 8}[step]


MANY = 768  # learned tokens of a usual update


def observed(losses, tokens, spikes=None):
    """Spikes after these losses, none of which is one."""
    spikes = spikes or Spikes(3)
    for loss in losses:
        assert not spikes.is_spike(loss, tokens)
        spikes.observe(loss, tokens)
    return spikes


def test_the_threshold_is_three_times_the_average():
    spikes = Spikes(3)
    assert not spikes.is_spike(1e9, MANY)  # there is no average yet
    observed([2.0] * 10, MANY, spikes)
    assert not spikes.is_spike(5.99, MANY) and spikes.is_spike(6.01, MANY)
    for loss in (math.nan, math.inf):
        assert spikes.is_spike(loss, MANY) and spikes.is_spike(loss, 1)
    observed([0.5] * 200, MANY, spikes)
    assert spikes.is_spike(1.6, MANY)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [16, MANY])
def test_no_false_alarm_in_5000_steps_of_noise(seed, tokens):
    """Losses that fall as usual, with far more noise than a batch has; and those of a memorised
    text, where single batches are ten times above average."""
    random = np.random.default_rng(seed)
    falling = 1.4 + 2.8 * np.exp(-np.arange(5000) / 400)
    learnt = 0.01 + random.exponential(0.02, 5000)
    for losses in (falling * np.exp(0.2 * random.standard_normal(5000)), learnt):
        observed(losses.tolist(), tokens)


@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_in_batches_of_16_tokens_of_which_some_are_all_rare(seed):
    """Such as a line in another script: measured to be 4.6 times the average."""
    random = np.random.default_rng(seed)
    losses = 2.4 * np.exp(0.25 * random.standard_normal(5000))
    rare = random.choice(np.arange(100, 5000), 20, replace=False)
    losses[rare] *= random.uniform(2, 5, 20)
    losses[1317] = 3 * 2.4 + 0.5
    observed(losses.tolist(), 16)


def test_an_update_of_few_tokens_may_be_noise_which_one_of_many_is_not():
    spikes = observed([1.36] * 20, 200)
    assert not spikes.is_spike(5.9, 13) and spikes.is_spike(5.9, 324)
    assert spikes.is_spike(30.0, 13)  # no noise is as high
    spikes.observe(5.9, 13)
    assert spikes.average == pytest.approx(1.36)
    assert not spikes.is_spike(0.0, 0)  # nothing was learned
    spikes.observe(0.0, 0)
    assert spikes.average == pytest.approx(1.36)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("factor", [4, 5])
def test_high_losses_that_last_are_a_spike_after_enough_tokens(tokens, factor):
    spikes = observed([2.0] * 50, tokens)
    count = 0
    while not spikes.is_spike(2.0 * factor, tokens):
        spikes.observe(2.0 * factor, tokens)
        count += 1
    assert count == math.ceil(324 / tokens) - 1


def test_noise_that_has_been_seen_raises_the_threshold_for_few_tokens_only():
    calm, noisy = observed([1.0] * 200, 16), Spikes(3)
    observed([0.2, 1.8] * 20 + [0.2, 1.8, 0.2, 6.0] * 40, 16, noisy)
    assert calm.is_spike(12.0, 16) and not noisy.is_spike(12.0, 16)
    assert noisy.is_spike(12.0, MANY)


def tiny_batches():
    """A training with updates of 16 tokens."""
    training = small_training(batch_size=1)
    training.snapshot_every = 10
    return training


def faster(training, step):
    """Multiplies the learning rate by 100 from a step on, until the run is rolled back."""
    usual = training.schedule.lr

    def lr(number):
        is_fast = number >= step and not training.spikes.rollbacks
        return usual(number) * (100 if is_fast else 1)

    training.schedule.lr = lr


def poisoned(training, step):
    """Multiplies the weights by 30 before a step."""

    def poison(number):
        if number == step:
            names = [name for name in training.model.parameters if name.endswith("weight")]
            training.model.flat.write({x: 30 * training.model.parameters[x] for x in names})

    at_each_pass(training.model, before=poison)


@pytest.mark.parametrize("plant", [faster, poisoned])
def test_a_real_spike_is_found_in_batches_of_16_tokens_and_undone(plant):
    training, records = tiny_batches(), []
    for record in training.steps(config(steps=400, learning_rate=3e-3, warmup_steps=10)):
        records.append(record)
        if not records[1:]:
            plant(training, 215)
    rollbacks = [record for record in records if isinstance(record, RollbackRecord)]
    assert len(rollbacks) == 1
    # Back to before what was planted, though states were due since then.
    assert rollbacks[0].step == 210 and 215 <= rollbacks[0].spike_step <= 215 + 40
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    assert np.mean(losses[-20:]) < np.mean(losses[200:210]) + 0.5


def test_a_run_of_small_batches_resumes_while_it_is_in_doubt(tmp_path):
    """Only seven high losses together are a spike in updates of 48 tokens."""

    def build():
        return spiking_training(dict.fromkeys(range(6, 13), 12.0))

    settings = config(steps=20, save_every=5)
    *_, records = assert_resumes_whole(build, settings, (5, 7, 10, 15), tmp_path)
    assert [r.spike_step for r in records if isinstance(r, RollbackRecord)] == [12]


def test_the_state_of_an_earlier_version_lacks_the_spread():
    spikes = Spikes(3)
    spikes.load_state({"average": 2.0, "rollbacks": 1, "skipped": [7]})
    assert spikes.state() == {
        **{"average": 2.0, "variance": 0.0, "doubtful": 0.0, "rollbacks": 1, "skipped": [7]}
    }


@pytest.mark.slow
def test_no_false_alarm_in_5000_steps_of_training():
    text = built_in_text()
    tokenizer = Tokenizer(text)
    model = TransformerModel(tokenizer.vocab_size, 32, 32, 2, 2)
    training = Training(model, tokenizer, text, batch_size=2)  # small batches are noisy
    records = training.train(steps=5000, val_every=0, learning_rate=3e-3)
    assert training.progress.step == 5000
    assert not any(isinstance(record, RollbackRecord) for record in records)

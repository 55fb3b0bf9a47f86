"""Preference pairs: the loss of DPO and its gradient, and the windows that texts become."""

import functools
import json

import numpy as np
import pytest

import smallmind
from smallmind import (
    AdamW,
    InputError,
    Preferences,
    Tokenizer,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.forecast.memory import why_not_repeated
from smallmind.losses.preferences import encode_answers, encode_pairs
from smallmind.runs.verification import fingerprint
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.chat import LEARNED, MARK_KINDS, Turn, with_tools
from smallmind.text.dataset import Batch
from smallmind.text.samplers import RandomWindows, draw
from smallmind.text.templates import fit_template
from smallmind.text.tools import described_tools, messages_calls
from smallmind.training import checkpoint
from smallmind.training.preflight import preflight
from smallmind.training.records import HealthRecord, RollbackRecord
from tests.training.test_resume import assert_resumes_whole, digest

V, T, N, BETA = 11, 12, 5, 0.3


def make(seed, arch="gpt2", **settings):
    """A model away from its initial values, so that answers differ in their probability."""
    model = TransformerModel(V, T, 16, 2, 2, **ARCHITECTURES[arch], **settings)
    random = np.random.default_rng(seed)
    for value in model.parameters.values():
        value += 0.3 * random.standard_normal(value.shape)
    model.flat.refresh()
    return model


def pairs(seed=7):
    """Pairs of random tokens, whose prompts and answers differ in length."""
    random = np.random.default_rng(seed)
    ids, targets = random.integers(0, V, (2, 2 * N, T)).astype(np.int32)
    first, last = random.integers(1, 5, 2 * N), random.integers(6, T + 1, 2 * N)
    places = np.arange(T)
    weights = (places >= first[:, None]) & (places < last[:, None])
    return Batch(ids, targets, np.zeros(2 * N, np.int64), weights.astype(np.float32))


def log_probabilities(logits, targets, weights):
    """logits (R, T, V) -> the log-probability of each answer (R,), plainly."""
    top = logits.max(axis=-1, keepdims=True)
    logarithms = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(logarithms, targets[..., None].astype(np.int64), axis=-1)
    return (weights * chosen[..., 0]).sum(axis=-1)


LABELS = np.array([True, False, True, True, False])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_formula(model, reference, which=None, method="dpo", baseline=None):
    """The losses as their papers write them; KTO's baseline is not differentiated."""
    chosen = np.arange(N) if which is None else np.array(which)
    ids, targets, _, weights, *_ = pairs()._each(lambda x: x[np.r_[chosen, chosen + N]])
    p, q = (log_probabilities(m.forward(ids), targets, weights) for m in (model, reference))
    tokens = weights.sum(axis=1)
    better, worse = np.split(p - q, 2)
    if method == "dpo":
        return -np.log(sigmoid(BETA * (better - worse))).mean()
    if method == "ipo":
        better, worse = np.split((p - q) / tokens, 2)
        return ((better - worse - 1 / (2 * BETA)) ** 2).mean()
    if method == "kto":
        value = sigmoid(BETA * np.where(LABELS[chosen], 1, -1) * (better - baseline))
        return (1 - value).mean()
    better, worse = (x / (1 - x) for x in np.split(np.exp(p / tokens), 2))
    read = np.arange(T) <= [[np.flatnonzero(row)[-1]] for row in weights[: len(chosen)]]
    half = slice(len(chosen))
    plain = log_probabilities(model.forward(ids[half]), targets[half], read)
    return -plain.sum() / read.sum() - BETA * np.log(sigmoid(np.log(better / worse))).mean()


@pytest.mark.parametrize("method", ["dpo", "ipo", "orpo", "kto"])
@pytest.mark.parametrize("which", [None, [3, 0], [2, 2]], ids=str)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_loss_and_gradients_are_those_of_the_formula(arch, which, method):
    model, reference = (make(seed, arch, backend="numpy", dtype=np.float64) for seed in (1, 2))
    preferences = Preferences(reference, pairs(), BETA, method, LABELS if method == "kto" else None)
    ids, targets, _, weights, *_ = pairs()
    p, q = (log_probabilities(m.forward(ids), targets, weights) for m in (model, reference))
    baseline = max(0.0, (p - q)[N:][slice(None) if which is None else which].mean())

    def formula(*models):
        return plain_formula(*models, which, method, baseline)

    loss = preferences.loss_and_gradients(model, which, scale=2.0)
    assert loss == pytest.approx(formula(model, reference), abs=1e-12)
    gradient, flat = model.flat.grad.copy(), model.flat.data
    for place in np.random.default_rng(0).integers(0, flat.size, 40):
        kept, sides = flat[place], []
        for step in (1e-6, -1e-6):
            flat[place] = kept + step
            sides.append(2.0 * formula(model, reference))
        flat[place] = kept
        assert gradient[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_loss_and_gradients_are_those_of_pytorch(micro_batch_size):
    torch = pytest.importorskip("torch")
    from smallmind.bench.peers.job import Sizes
    from smallmind.bench.peers.torch_gpt2 import Model
    from smallmind.bench.peers.torch_step import load

    model, reference, batch = make(1), make(2), pairs()
    model.micro_batch_size = micro_batch_size
    ids, targets = (torch.from_numpy(x.astype(np.int64)) for x in (batch.ids, batch.targets))
    twins = []
    for each in (model, reference):
        twins.append(Model(Sizes(2 * N, T, 16, 2, 2, V)))
        load(twins[-1], each.parameters)
    mask = torch.ones(T, T, dtype=torch.bool).tril()

    def answers(twin):
        logits = twin.logits(ids, torch.arange(T).expand(2 * N, T), mask)
        chosen = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return (chosen * torch.from_numpy(batch.weights)).sum(-1)

    learned, kept = answers(twins[0]), answers(twins[1]).detach()
    ratios = learned - kept
    expected = -torch.nn.functional.logsigmoid(BETA * (ratios[:N] - ratios[N:])).mean()
    expected.backward()
    loss = Preferences(reference, batch, BETA).loss_and_gradients(model)
    assert abs(loss - expected.item()) < 1e-5
    for name, parameter in twins[0].named_parameters():
        wanted, found = parameter.grad.numpy(), model.gradients[name]
        found = found.T if found.ndim == 2 and "embedding" not in name else found
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


def test_a_model_learns_pairs_away_from_itself():
    model = make(1, dropout=0.5)
    preferences, optimizer = Preferences(model, pairs()), AdamW(model, 1e-2)
    assert preferences.loss_and_gradients(model) == pytest.approx(np.log(2))  # without dropout
    assert not preferences.margins(model).any()
    model.zero_gradients()
    for step in range(30):
        preferences.loss_and_gradients(model, [step % N, (step + 1) % N])
        optimizer.step()
    assert (preferences.margins(model) > 0.1).all()
    assert (
        preferences.margins(model, [4, 1]).tolist() == preferences.margins(model)[[4, 1]].tolist()
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_pairs_of_any_margin_have_finite_losses(sign):
    model, other = make(1), make(2)
    preferences = Preferences(other, pairs(), beta=1e4)
    margins = preferences.margins(model)
    if sign == -1:
        model.parameters["token_embedding.weight"][...] *= 10
        model.flat.refresh()
    assert np.abs(margins).max() > 1000
    loss = preferences.loss_and_gradients(model)
    assert np.isfinite(loss) and np.isfinite(model.flat.grad).all()


TEXTS = [("2+2=", "4", "5!"), ("10-3=", "7", "13")]


def learned(batch, row):
    """The tokens of a window that are learned, and all up to the last of these."""
    targets, weights = batch.targets[row], batch.weights[row]
    last = np.flatnonzero(weights)[-1]
    return targets[weights == 1].tolist(), [batch.ids[row, 0], *targets[: last + 1]]


def test_texts_become_windows_of_chosen_answers_and_then_of_the_others():
    tokenizer = Tokenizer("".join(map("".join, TEXTS)), "char")
    batch = encode_pairs(tokenizer, TEXTS)
    wanted = [(prompt, chosen) for prompt, chosen, _ in TEXTS]
    wanted += [(prompt, rejected) for prompt, _, rejected in TEXTS]
    for row, (prompt, answer) in enumerate(wanted):
        found, whole = learned(batch, row)
        assert tokenizer.decode(np.array(found)) == answer
        assert tokenizer.decode(np.array(whole)) == prompt + answer
    assert batch.ids.shape == (4, len("10-3=13") - 1)
    model = TransformerModel(tokenizer.vocab_size, 64, 16, 2, 2)
    found = Preferences.of_texts(model, tokenizer, TEXTS, beta=0.5)
    assert len(found) == 2 and found.beta == 0.5
    assert found.pairs.ids.tolist() == batch.ids.tolist()


def test_answers_end_where_the_tokenizer_ends_a_text():
    tokenizer = Tokenizer("2+4=5! " * 40, "bpe", vocab_size=260)
    found, _ = learned(encode_pairs(tokenizer, TEXTS), 0)
    assert found == [*tokenizer.encode("4"), tokenizer.end_of_text]


def test_a_template_puts_its_tokens_around_the_turns():
    tokenizer, _ = fit_template(Tokenizer("user assistant 2+4=5!10-37\n", "char"), "chatml")
    end = tokenizer.special["<|im_end|>"]
    batch = encode_pairs(tokenizer, TEXTS)
    found, whole = learned(batch, 2)
    assert found == [*tokenizer.encode("5!"), end]
    assert whole[0] == tokenizer.special["<|im_start|>"] and whole.count(end) == 2


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_calls_are_learned_as_the_template_writes_them(method):
    pytest.importorskip("jinja2")
    tokenizer, template = fit_template(Tokenizer("", "byte"), "hermes")
    asked = with_tools([Turn("user", "Call f.")], described_tools([{"name": "f"}]))
    answers = [
        Turn(role, "", more=json.dumps({"tool_calls": messages_calls([{"name": "f", **said}])}))
        for role, said in (
            ("assistant", {"arguments": {"a": 1}}),
            ("rejected", {"arguments": {"b": 2}}),
        )
    ]
    first = encode_answers(tokenizer, template, [[*asked, *answers]], method)[0]
    assert first.label
    for marked, inner in ((first.first, '{"a": 1}'), (first.second, '{"b": 2}')):
        learned = tokenizer.decode(marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS)
        assert "<tool_call>" in learned and inner in learned and "Call f." not in learned


def test_what_comes_after_the_last_answer_is_not_learned():
    tokenizer, template = fit_template(Tokenizer("", "byte"), "chatml")
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")]
    for method, kept in (("kto", 1), ("dpo", 0)):
        found = encode_answers(tokenizer, template, [turns, [Turn("text", "d")]], method)
        assert len(found) == kept
        for encoded in found:
            assert tokenizer.decode(encoded.first // MARK_KINDS).endswith("b<|im_end|>")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "there are no pairs"),
        ([("2+2=", "4", "5"), ("2", "", "4")], "pair 1 must be three texts"),
        ([("2+2=", "4")], "pair 0 must be three texts"),
    ],
)
def test_texts_that_are_no_pairs_are_refused(texts, words):
    with pytest.raises(InputError, match=words):
        encode_pairs(Tokenizer("2+2=45", "char"), texts)


def test_wrong_arguments_are_refused():
    model, batch = make(1), pairs()
    for wrong, words in (
        (lambda: Preferences(model, batch._replace(weights=None)), "encode_pairs makes them"),
        (lambda: Preferences(model, batch.part(slice(3))), "as many of the rejected ones"),
        (lambda: Preferences(model, batch, 0.0), "beta=0.0 must be above 0"),
        (lambda: Preferences(model, batch).margins(model, [5]), "numbers of pairs, from 0 to 4"),
        (lambda: Preferences(model, batch).margins(model, []), "at least one"),
    ):
        with pytest.raises(InputError, match=words):
            wrong()
    assert repr(Preferences(model, batch)) == "<Preferences: 5 pairs, beta=0.1>"


# In a training: through the same loop as any other loss.

MANY = [(f"{a}+{b}=", str(a + b), f"?{a}") for a in range(6) for b in range(4)]
TOKENIZER = Tokenizer("".join(map("".join, MANY)), "char")
SETTINGS = {"warmup_steps": 2, "log_every": 1, "learning_rate": 5e-3, "val_every": 5}
ADAPTED = {"lora_rank": 2, "lora_on": "attention,mlp"}


def new_training(reference=None, batch_size=4, config=TrainingConfig(), beta=0.5, **settings):  # noqa: B008
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "seed": 3, **settings}
    model = TransformerModel(TOKENIZER.vocab_size, 16, adapter=config.adapter, **shape)
    preferences = Preferences.of_texts(reference or model, TOKENIZER, MANY, beta)
    return Training(model, TOKENIZER, batch_size=batch_size, seed=5, loss=preferences)


def test_a_training_learns_pairs_and_holds_some_out():
    training = new_training()
    assert len(training.data.train) - 1 == 22 * training.data.block_size
    records = training.train(60, **SETTINGS)
    losses = [record.loss for record in records if hasattr(record, "lr")]
    assert losses[0] == pytest.approx(np.log(2)) and losses[-1] < 0.3
    evaluation = [record for record in records if hasattr(record, "val_loss")][-1]
    margins = training.loss.margins(training.model)
    assert evaluation.val_loss == pytest.approx(np.logaddexp(0, -margins[22:]).mean())
    assert evaluation.accuracy == (margins[22:] > 0).mean()
    assert evaluation.train_loss == pytest.approx(
        np.logaddexp(0, -margins[:22]).mean(), abs=0.5 / 22
    )
    whole = training.evaluate_held_out()
    assert (whole.loss, whole.tokens) == (evaluation.val_loss, 2)


@pytest.mark.parametrize("more", [{}, {"micro_batch_size": 3}, {"data_shards": 3}], ids=str)
def test_a_step_is_that_of_the_formula(more):
    training = new_training(batch_size=22)
    loss = training.loss
    twin = TransformerModel(TOKENIZER.vocab_size, 16, n_embd=16, n_layer=2, n_head=2, seed=3)
    other = Preferences(twin, loss.pairs, 0.5)
    optimizer = AdamW(twin, 5e-3, weight_decay=0.0)
    records = training.train(
        3, weight_decay=0.0, warmup_steps=0, schedule="constant", optimizer="adamw",
        max_grad_norm=0.0, learning_rate=5e-3, val_every=0, log_every=1, **more,
    )  # fmt: skip
    for number, record in enumerate(records):
        starts = draw(RandomWindows(training.data, stride=training.data.stride), number).starts
        expected = other.loss_and_gradients(twin, starts // training.data.block_size)
        assert record.loss == pytest.approx(expected, rel=1e-3)
        assert record.grad_norm == pytest.approx(optimizer.step(), rel=1e-3)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, precision, adapted):
    config = TrainingConfig(
        steps=12, precision=precision, grad_accum_steps=2, data_shards=2,
        **(SETTINGS | {"save_every": 5}), **(ADAPTED if adapted else {}),
    )  # fmt: skip
    build = functools.partial(new_training, config=config)
    whole, _, records = assert_resumes_whole(build, config, [5, 7], tmp_path)
    assert whole.model.precision == precision and records[-1].step == 12
    assert all(spec.is_adapter for spec in whole.model.flat.trained) == adapted


def test_a_resumed_training_keeps_the_reference_of_its_checkpoint(tmp_path):
    config = TrainingConfig(steps=8, **SETTINGS)
    whole, first = new_training(), new_training()
    list(whole.steps(config))
    list(first.steps(config, until=4))
    checkpoint.save(tmp_path, first.state())
    state, _ = checkpoint.newest(tmp_path)
    resumed = new_training(reference=first.model)  # all that a person may still have
    list(resumed.steps(config, state))
    assert digest(resumed) == digest(whole)
    assert fingerprint(resumed.state()) == fingerprint(whole.state())
    with pytest.raises(InputError, match="was saved with other pairs, or another beta"):
        list(new_training(beta=0.1).steps(config, state))


def test_checkpoints_of_a_training_are_loaded_and_continued(tmp_path):
    new_training().train(6, checkpoint_dir=tmp_path, schedule="constant", **SETTINGS)
    again = new_training()
    again.train(12, checkpoint_dir=tmp_path, resume=True, schedule="constant", **SETTINGS)
    whole = new_training()
    whole.train(12, schedule="constant", **SETTINGS)
    model, _ = smallmind.load(tmp_path)
    assert model.flat.data.tobytes() == whole.model.flat.data.tobytes()


def test_a_spike_of_the_loss_is_undone():
    training, planted = new_training(), []

    def plant(number):
        if number == 13 and not planted:
            planted.append(number)
            return np.nan

    original = training.loss.loss_and_gradients

    def loss_and_gradients(*arguments):
        plain = original(*arguments)
        return plant(training.progress.step) or plain

    training.loss.loss_and_gradients = loss_and_gradients
    training.snapshot_every = 5
    records = training.train(20, max_rollbacks=1, **SETTINGS)
    rollbacks = [record for record in records if isinstance(record, RollbackRecord)]
    assert [(record.step, record.spike_step) for record in rollbacks] == [(10, 14)]
    assert training.progress.step == 20 and training.spikes.lr_factor == 0.5
    assert (training.loss.margins(training.model) > 0).mean() > 0.7


def test_its_health_is_checked():
    config = TrainingConfig(steps=2, check_gradient_health=True, diagnostic_interval=1, **SETTINGS)
    records = [r for r in new_training(mlp="relu2").steps(config) if isinstance(r, HealthRecord)]
    assert [record.step for record in records] == [1, 2]
    broken = new_training()
    broken.model.parameters["final_norm.bias"][0] = np.nan
    with pytest.raises(FloatingPointError, match="became nan at step 1"):
        list(broken.steps(config))


def test_a_preflight_expects_a_margin_of_zero():
    training = new_training()
    checks = list(preflight(training, TrainingConfig(steps=20, **SETTINGS)))
    first = next(check for check in checks if "preferences" in check.name)
    assert first.passed and "ln 2 = 0.693" in first.expected
    assert [check.name for check in checks if not check.passed] == []
    assert "weight of each answer" in why_not_repeated(training, TrainingConfig())


def test_trainings_on_pairs_are_refused_that_cannot_be():
    few = Preferences.of_texts(make(1), Tokenizer("2+=4501-37!", "char"), TEXTS[:1])
    with pytest.raises(InputError, match="at least 2 pairs"):
        Training(make(1), Tokenizer("2+=4501-37!", "char"), loss=few)
    training = new_training()
    short = TransformerModel(TOKENIZER.vocab_size, 3, 16, 2, 2)
    with pytest.raises(InputError, match="must be at most the model's, 3"):
        Training(short, TOKENIZER, loss=training.loss)
    with pytest.raises(TypeError, match="of Training; did you mean loss"):
        Training(training.model, TOKENIZER, los=training.loss)
    named = Training(training.model, TOKENIZER, preferences=training.loss)
    assert named.loss is training.loss

"""Training a student with a teacher: the loss, its gradients, resumed runs."""

import numpy as np
import pytest

from smallmind import (
    Distillation,
    InputError,
    Precision,
    Tokenizer,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.kernels.codegen.threads import max_threads
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn import head
from smallmind.nn.network import Network
from smallmind.nn.recorded_passes import MIN_PASSES
from smallmind.nn.workspace import Pass
from smallmind.text.dataset import Batch
from smallmind.text.samplers import RandomWindows, draw
from smallmind.training.preflight import copy_model, first_loss
from smallmind.training.records import LossRecord, OverflowRecord, StepRecord
from tests.gradcheck import assert_gradients
from tests.programs import CATS
from tests.threads import on_threads
from tests.training.small import at_each_pass
from tests.training.test_resume import assert_resumes_whole, digest

TEXT = CATS
TOKENIZER = Tokenizer(TEXT)
V, T = TOKENIZER.vocab_size, 16


def new_teacher(seed=1, vocab_size=V, block_size=T, **settings):
    return TransformerModel(vocab_size, block_size, 32, 2, 2, dropout=0.1, seed=seed, **settings)


def new_training(distillation, dropout=0.1, batch_size=3, text=TEXT, **settings):
    model = TransformerModel(V, T, 24, 1, 2, dropout=dropout, seed=3, **settings)
    return Training(
        model, TOKENIZER, text, batch_size=batch_size, seed=5, distillation=distillation
    )


def first_batch(training):
    return draw(RandomWindows(training.data), 0)


def sharp(teacher):
    """Weights so large that the distribution differs from token to token."""
    teacher.parameters["token_embedding.weight"][...] *= 20
    return teacher


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_loss_by_hand(micro_batch_size):
    teacher = sharp(new_teacher())
    training = new_training(Distillation(teacher, temperature=2.5, alpha=0.3), dropout=0.0)
    model = training.model
    model.micro_batch_size = micro_batch_size
    batch = first_batch(training)
    ids, targets = batch.ids, batch.targets

    def log_softmax(logits):
        logits = logits.astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    p, q = log_softmax(teacher.forward(ids) / 2.5), log_softmax(model.forward(ids) / 2.5)
    divergence = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    expected = 0.7 * model.loss(ids, targets) + 0.3 * 2.5**2 * divergence
    actual = training.loss.loss_and_gradients(model, batch)
    assert actual == pytest.approx(expected, rel=1e-5)
    assert divergence > 0.1


@pytest.mark.parametrize("learn", [False, True])
def test_gradients_of_the_whole_loss(learn):
    settings = {"backend": "numpy", "dtype": np.float64}
    teacher = sharp(new_teacher(**settings))
    distillation = Distillation(teacher, 3.0, 0.6, learn_temperature=learn)
    training = new_training(distillation, dropout=0.0, **settings)
    model, batch = training.model, first_batch(training)
    parameter = distillation.parameter
    model.micro_batch_size = 2
    distillation.loss_and_gradients(model, batch)
    gradient, dx = model.flat.grad.copy(), parameter.dx.copy()
    x = parameter.x.copy()

    def f(values, x):
        model.flat.data[...], parameter.x[...] = values, x
        return distillation.loss_and_gradients(model, batch)

    arrays = [model.flat.data.copy(), x]
    if learn:
        assert_gradients(f, [gradient, dx], arrays)
    else:
        assert dx == 0
        assert_gradients(lambda values: f(values, x), [gradient], arrays[:1])


def test_alpha_0_is_training_without_a_teacher():
    alone, taught = (
        new_training(d).train(6, val_every=3, val_batches=1)
        for d in (None, Distillation(new_teacher(), alpha=0.0))
    )
    assert [getattr(r, "loss", r.step) for r in alone] == pytest.approx(
        [getattr(r, "loss", r.step) for r in taught if not isinstance(r, LossRecord)], rel=1e-4
    )


def test_a_taught_student_gets_closer_to_its_teacher():
    teacher = sharp(new_teacher())
    distances = []
    for alpha in (0.0, 0.9):
        training = new_training(Distillation(teacher, alpha=alpha), dropout=0.0)
        training.train(60, val_every=0, learning_rate=5e-3, warmup_steps=5)
        ids = training.data.evaluation_batch("held_out", 0).ids
        logits = [model.forward(ids) for model in (teacher, training.model)]
        shares = [np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) for x in logits]
        distances.append(np.abs(shares[0] - shares[1]).sum(axis=-1).mean())
    assert distances[1] < 0.8 * distances[0]


def test_the_teacher_keeps_nothing_and_does_not_change():
    teacher = sharp(new_teacher())
    before = teacher.flat.data.tobytes()
    training = new_training(Distillation(teacher))
    with TensorPool() as pool:
        teacher.workspace.pool = training.model.workspace.pool = pool
        steps = training.steps(TrainingConfig(steps=12, log_every=1, val_every=0, save_every=0))
        for _ in range(3):
            next(steps)
        misses = pool.statistics().misses
        rest = list(steps)
        assert len(rest) > 8 and pool.statistics().misses == misses
        assert pool.statistics().bytes_rented == 0
        shape, rented = teacher.with_logits(
            first_batch(training).ids, lambda x: (x.shape, len(teacher.workspace.rented()))
        )
        assert shape == (3 * T, V) and rented == 1  # only the logits
    assert not teacher.flat.grad.any() and teacher.passes == 0
    assert teacher.flat.data.tobytes() == before


def test_the_same_bits_on_any_number_of_threads():
    digests = set()
    for _ in on_threads(1, max_threads()):
        distillation = Distillation(sharp(new_teacher()), learn_temperature=True)
        training = new_training(distillation, batch_size=9)
        training.train(4, val_every=0)
        digests.add(digest(training))
    assert len(digests) == 1


def recorded_and_not(**settings):
    """Two trainings of a student by a teacher, of which the second always goes through layers."""
    both = []
    for is_plain in (False, True):
        teacher = sharp(new_teacher(**settings))
        training = new_training(Distillation(teacher, temperature=2.0, alpha=0.6), **settings)
        pool = TensorPool()
        for model in (teacher, training.model):
            model.workspace.pool = pool
        if is_plain:
            training.model.workspace.new_recording = None
        both.append(training)
    return both


def passes_through_layers(function):
    """Counts passes of a model, of student and teacher alike, that go through its layers."""
    calls, forward = [], Network.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
        function()
    return len(calls)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("settings", [{}, {"document_token": 2}])
def test_repeated_passes_of_a_student_give_the_bits_of_the_layers(precision, settings):
    both = recorded_and_not(**settings)
    random = np.random.default_rng(0)
    for training in both:
        training.model.use_precision(precision)

    def step(number, B=5):
        ids, targets = random.integers(0, V, (2, B, T), np.int32)
        firsts = None
        if settings:
            firsts = np.zeros_like(ids)
            firsts[:, 3 + number % 7 :] = 3 + number % 7
        batch = Batch(ids, targets, np.arange(B), firsts=firsts)
        losses = [
            training.loss.loss_and_gradients(
                training.model, batch, 1.0 + number, at=Pass(number, first_row=7 * number)
            )
            for training in both
        ]
        assert losses[0] == losses[1]
        gradients = [training.model.flat.grad.view(np.int32) for training in both]
        np.testing.assert_array_equal(*gradients)

    for number in range(MIN_PASSES + 1):
        step(number)
    assert passes_through_layers(lambda: step(20)) == 2  # only those of the second training
    for training in both:
        training.loss.teacher.flat.data *= np.float32(0.9)
        training.loss.teacher.flat.refresh()
        training.model.flat.data *= np.float32(0.9)
        training.model.flat.refresh()
    for number in range(21, 25):
        step(number)
    assert passes_through_layers(lambda: step(25, B=3)) == 4  # the first pass of another size
    pool = both[0].model.workspace.pool.statistics()
    assert pool.bytes_rented == 0
    assert pool.bytes_held == both[1].model.workspace.pool.statistics().bytes_held


def test_a_repeated_pass_writes_no_array_that_others_have_rented_meanwhile():
    teacher = TransformerModel(V, T, 256, 2, 2, seed=1)  # its arrays are larger than a student's
    training, pool = new_training(Distillation(teacher)), TensorPool()
    teacher.workspace.pool = training.model.workspace.pool = pool
    batch = first_batch(training)
    sizes, rent = [], teacher.workspace.rent
    teacher.workspace.rent = lambda *shape: sizes.append(shape) or rent(*shape)
    for number in range(MIN_PASSES + 2):
        training.loss.loss_and_gradients(training.model, batch, at=Pass(number))
    held = [pool.rent(int(np.prod(shape)), np.float32) for shape in sizes * 2]
    for array in held:
        array.fill(7.0)
    training.loss.loss_and_gradients(training.model, batch, at=Pass(99))
    assert sizes and all((array == 7.0).all() for array in held)


@pytest.mark.parametrize(
    "why", ["learned", "other pool", "layer of another package", "blocks of rows"]
)
def test_passes_that_cannot_be_repeated_go_through_the_layers(why, monkeypatch):
    teacher = new_teacher()
    loss = Distillation(teacher, learn_temperature=why == "learned")
    training = new_training(loss)
    if why == "other pool":
        teacher.workspace.pool = TensorPool()
    elif why == "layer of another package":
        teacher.workspace.new_recording = None
    elif why == "blocks of rows":
        monkeypatch.setattr(head, "MAX_LOGITS", 7 * V)
    batch = first_batch(training)
    for number in range(MIN_PASSES + 3):
        loss.loss_and_gradients(training.model, batch, at=Pass(number))
    assert passes_through_layers(
        lambda: loss.loss_and_gradients(training.model, batch, at=Pass(99))
    )


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, precision, cached):
    settings = {"steps": 12, "grad_accum_steps": 2, "warmup_steps": 2, "learning_rate": 1e-2}
    settings |= {"val_every": 5, "val_batches": 1, "save_every": 5, "log_every": 1}
    config = TrainingConfig(precision=precision, **settings)

    def build():
        cache = tmp_path / "cache" if cached else None
        teacher = sharp(new_teacher())
        return new_training(Distillation(teacher, 3.0, 0.5, True, cache, top_k=4))

    _, resumed, _ = assert_resumes_whole(build, config, [5], tmp_path)
    assert 1 < resumed.loss.temperature < 2.99  # it was learnt


def test_an_update_that_overflows_leaves_the_temperature_alone():
    distillation = Distillation(sharp(new_teacher()), 3.0, learn_temperature=True)
    training = new_training(distillation)
    seen = []

    def plant(number):
        seen.append(distillation.parameter.state())
        if number == 2:
            training.model.gradients["final_norm.bias"][0] = np.inf

    at_each_pass(training.model, after=plant)
    records = training.train(3, precision="float16", val_every=0, log_every=1)
    assert [r.step for r in records if isinstance(r, OverflowRecord)] == [2]
    assert seen[0]["updates"] == 0 and seen[1] == seen[2] and seen[1]["updates"] == 1
    assert distillation.parameter.state()["updates"] == 2


def test_a_stopped_step_leaves_no_gradient_of_the_temperature():
    config = TrainingConfig(steps=3, grad_accum_steps=2, val_every=0, log_every=1)

    def build():
        return new_training(Distillation(sharp(new_teacher()), 3.0, learn_temperature=True))

    unbroken, training = build(), build()
    list(unbroken.steps(config))

    def stop(number):
        if number == 3:  # in the second step
            training.stop()

    at_each_pass(training.model, before=stop)
    list(training.steps(config))
    assert training.progress.step == 1
    list(training.steps(config, training.state()))
    assert digest(training) == digest(unbroken)


def test_a_learnt_temperature_stays_within_its_bounds():
    for sign, bound in ((1, 1.0), (-1, 10.0)):
        distillation = Distillation(new_teacher(), 3.0, learn_temperature=True)
        assert distillation.temperature == pytest.approx(3.0)
        for _ in range(3000):
            distillation.parameter.dx[0] = sign
            distillation.parameter.step(0.5)
        assert distillation.temperature == pytest.approx(bound, rel=1e-3)
        assert 1 <= distillation.temperature <= 10


def test_accumulated_batches_teach_the_temperature_their_mean():
    states = []
    for batch_size, accumulated in ((6, 1), (3, 2)):
        distillation = Distillation(sharp(new_teacher()), 3.0, learn_temperature=True)
        training = new_training(distillation, dropout=0.0)
        whole = first_batch(new_training(None, batch_size=6))
        for i in range(accumulated):
            rows = slice(i * batch_size, (i + 1) * batch_size)
            part = whole.part(rows)
            distillation.loss_and_gradients(training.model, part, share=1 / accumulated)
        distillation.parameter.step(1e-2)
        states.append(distillation.parameter.state())
    assert states[0] == pytest.approx(states[1], rel=1e-4)
    assert states[0]["m"] != 0


@pytest.mark.parametrize("cached", [False, True])
def test_an_epoch_teaches_the_same_in_batches_of_any_size(tmp_path, cached):
    states, losses = [], []
    settings = {"learn_temperature": True, "top_k": V}
    settings["cache"] = tmp_path / "cache" if cached else None
    for batch_size, accumulated in ((6, 1), (2, 3)):
        distillation = Distillation(sharp(new_teacher()), 3.0, **settings)
        training = new_training(distillation, 0.0, batch_size, TEXT[: 16 * 24])
        config = TrainingConfig(epochs=1, grad_accum_steps=accumulated, val_every=0, log_every=1)
        records = [r for r in training.steps(config) if isinstance(r, StepRecord)]
        assert records[-1].windows % 2  # the last update does not consist of whole batches of two
        losses.append([record.loss for record in records])
        states.append(distillation.parameter.state())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert states[0] == pytest.approx(states[1], rel=1e-3)


def test_a_teacher_that_does_not_fit_is_refused():
    def refused(message, distillation):
        with pytest.raises(InputError, match=message) as error:
            new_training(distillation)
        assert "\n" not in str(error.value)

    refused("the teacher has 9 tokens, the student vocab_size", Distillation(new_teacher(1, 9)))
    refused("the teacher sees 15 tokens", Distillation(new_teacher(block_size=15)))
    wide = new_teacher(backend="numpy", dtype=np.float64)
    refused("differ in dtype", Distillation(wide))
    stored = new_teacher()
    stored.use_precision(Precision.BFLOAT16)
    refused("stored as bfloat16", Distillation(stored))
    new_training(Distillation(new_teacher(block_size=T + 1)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be at least 0.1"),
        ({"temperature": np.nan}, "temperature"),
        ({"alpha": 1.5}, "alpha=1.5 must be at least 0 and at most 1"),
        ({"temperature": 1.0, "learn_temperature": True}, "must be above 1 and below 10"),
        ({"top_k": 0}, "teacher_top_k=0 must be at least 1"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(InputError, match=message):
        Distillation(new_teacher(), **settings)


def test_a_checkpoint_of_another_teacher_is_refused():
    config = TrainingConfig(steps=2, val_every=0)
    training = new_training(Distillation(new_teacher()))
    list(training.steps(config))
    saved = training.state()
    others = [Distillation(new_teacher(seed=2)), Distillation(new_teacher(), alpha=0.6)]
    for other, name in (
        (None, "another loss"),
        *((other, "a different teacher") for other in others),
    ):
        with pytest.raises(InputError, match=f"was saved with {name}"):
            list(new_training(other).steps(config, saved))


def test_the_first_nan_of_a_teacher_is_found_in_the_loss():
    teacher = new_teacher()
    teacher.parameters["final_norm.bias"][0] = np.nan
    training = new_training(Distillation(teacher))
    with pytest.raises(FloatingPointError, match=r"pass of loss \(distillation, training pass 1\)"):
        training.train(2, val_every=0, detect_anomaly=True)


def test_a_profile_names_the_teacher():
    training = new_training(Distillation(new_teacher()))
    training.train(2, val_every=0, enable_diagnostics=True)
    report = training.profiler.report()
    assert "Teacher" in report and "distillation" in report


def logits_of(model, ids):
    """The logits of a model, without their mean at each position."""
    logits = model.forward(ids).reshape(-1, V).astype(np.float64)
    return logits - logits.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_correlation_with_the_teacher_by_hand(micro_batch_size):
    teacher = sharp(new_teacher())
    training = new_training(Distillation(teacher))
    training.model.micro_batch_size = micro_batch_size
    # Other offsets of the logits change nothing, as in a softmax.
    batches = [training.data.evaluation_batch("held_out", number) for number in range(2)]
    pairs = [(logits_of(training.model, b.ids), logits_of(teacher, b.ids)) for b in batches]
    student, taught = (np.concatenate(side).ravel() for side in zip(*pairs, strict=True))
    expected = np.corrcoef(student, taught)[0, 1]
    found = training.evaluations.compare(7, 2)
    assert found.step == 7 and found.numbers["teacher_correlation"] == pytest.approx(
        expected, abs=1e-6
    )
    assert abs(found.numbers["teacher_correlation"]) < 0.9  # nothing has been learned


def test_a_student_comes_to_agree_with_its_teacher():
    teacher = sharp(new_teacher())
    training = new_training(Distillation(teacher, alpha=1.0), dropout=0.0)
    config = TrainingConfig(steps=120, val_every=60, val_batches=2, learning_rate=1e-2)
    records = [r for r in training.steps(config) if isinstance(r, LossRecord)]
    assert [record.step for record in records] == [60, 120]
    shares = [record.numbers["teacher_correlation"] for record in records]
    assert shares[1] > max(0.3, shares[0])
    alike = Distillation(copy_model(training.model))
    same = Training(training.model, TOKENIZER, TEXT, batch_size=3, distillation=alike)
    assert same.evaluations.compare(0, 1).numbers["teacher_correlation"] == pytest.approx(1.0)


def test_without_a_teacher_nothing_is_compared(tmp_path):
    assert new_training(None).evaluations.compare(1, 1) is None
    cached = new_training(Distillation(new_teacher(), cache=tmp_path / "cache", top_k=5))
    assert cached.evaluations.compare(1, 1) is None
    config = TrainingConfig(steps=2, val_every=2, val_batches=1)
    assert not any(isinstance(record, LossRecord) for record in cached.steps(config))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("cached", [False, True])
def test_the_first_loss_of_distillation_is_as_expected(tmp_path, temperature, cached):
    cache = {"cache": tmp_path / "cache", "top_k": V} if cached else {}
    settings = {"temperature": temperature, "alpha": 0.7, **cache}
    training = new_training(Distillation(sharp(new_teacher()), **settings))
    check = first_loss(training.model, training.loss, training.data)
    assert check.passed, check
    # A student that is sure of something is far off.
    training.model.parameters["token_embedding.weight"][...] *= 100
    check = first_loss(training.model, training.loss, training.data)
    assert not check.passed, check


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("cached", [False, True])
def test_blocks_of_rows_teach_what_all_rows_teach(tmp_path, monkeypatch, precision, cached):
    found = []
    for most in (2**24, 5 * V, 16 * V):
        monkeypatch.setattr(head, "MAX_LOGITS", most)
        cache = tmp_path / "cache" if cached else None
        distillation = Distillation(sharp(new_teacher()), 3.0, 0.5, True, cache, top_k=4)
        training = new_training(distillation)
        training.model.use_precision(precision)
        distillation.prepare(training.model, training.data)
        model, batch = training.model, training.data.windows(np.arange(3) * T)
        loss = distillation.loss_and_gradients(model, batch, at=Pass(0))
        temperature = distillation.parameter.dx[0]
        found.append((loss, temperature, model.flat.grad.copy()))
    (loss, temperature, gradients), *others = found
    atol = np.abs(gradients).max() * (1e-6 if precision == "float32" else 0.02)
    for other in others:
        assert other[0] == pytest.approx(loss, rel=1e-6)
        assert other[1] == pytest.approx(temperature, rel=1e-4)
        np.testing.assert_allclose(other[2], gradients, rtol=1e-5, atol=atol)

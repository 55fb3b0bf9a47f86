"""Recorded passes of training give the losses and gradients of the layers, to the bit."""

import gc

import numpy as np
import pytest

from smallmind import AdamW, KeyValueCache, TransformerModel, parts
from smallmind.kernels.codegen.recording import Recording
from smallmind.kernels.codegen.threads import max_threads
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn import recorded_passes
from smallmind.nn.mlp import SwiGLU
from smallmind.nn.network import Network
from smallmind.nn.recompute import RecomputePlan
from smallmind.nn.recorded_passes import MAX_RECORDINGS, MIN_PASSES
from smallmind.nn.workspace import Pass
from smallmind.settings.presets import ARCHITECTURES
from tests.architectures import BROUGHT
from tests.threads import in_threads, on_threads

T, V = 12, 31
ENOUGH = MIN_PASSES + 2  # passes after which they are repeated
VARIANTS = {
    **ARCHITECTURES,
    **BROUGHT,
    "untied": {**ARCHITECTURES["llama"], "tie_weights": False},
    "windows": {
        **ARCHITECTURES["modern"],
        "document_token": 3,
        "part_settings": {"window": 5, "window_layers": (1, 0), "window_theta": 50.0},
    },
    "documents": {**ARCHITECTURES["modern"], "document_token": 3, "logit_softcap": 5.0},
}


def new_model(variant="gpt2", **changes):
    model = TransformerModel(V, T, 24, 2, 4, **{"seed": 1, **VARIANTS[variant], **changes})
    model.workspace.pool = TensorPool()
    return model


def without_recordings(model):
    model.workspace.new_recording = None
    return model


def batch(number, rows=5):
    windows = np.random.default_rng(number).integers(0, V, (rows, T + 1), np.int32)
    return windows[:, :-1], windows[:, 1:]


def counted_recordings(model):
    """The recordings that the passes of a model make from now on."""
    made, new_recording = [], model.workspace.new_recording
    model.workspace.new_recording = lambda: made.append(new_recording()) or made[-1]
    return made


class Pair:
    """Two models that are trained alike, one of them without recordings."""

    def __init__(self, *arguments, precision="float32", **changes):
        self.models = [new_model(*arguments, **changes) for _ in range(2)]
        without_recordings(self.models[1])
        for model in self.models:
            model.use_precision(precision)
        self.optimizers = [AdamW(model, 1e-2) for model in self.models]
        self.steps = 0

    def step(self, rows=5, number=None, **named):
        """A step of both, which must do the same."""
        self.steps += 1
        ids, targets = batch(self.steps if number is None else number, rows)
        losses = [model.loss_and_gradients(ids, targets, **named) for model in self.models]
        assert losses[0] == losses[1]
        self.compare()
        self.update()

    def compare(self):
        recorded, plain = (model.flat.grad for model in self.models)
        np.testing.assert_array_equal(recorded.view(np.int32), plain.view(np.int32))

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step(1.0)

    @property
    def is_repeating(self):
        """True if a step of the first model does not go through its layers."""
        return not self.goes_through_layers()

    def goes_through_layers(self, **named):
        """True if a step of the first model goes through its layers."""
        calls, forward = [], Network.forward

        def counted(*given, **options):
            calls.append(1)
            return forward(*given, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Network, "forward", counted)
            self.step(**named)
        return len(calls) == 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_repeated_passes_give_the_bits_of_the_layers(variant, precision):
    pair = Pair(variant, precision=precision)
    for _ in range(ENOUGH):
        pair.step()
    assert pair.is_repeating
    for model in pair.models:
        model.flat.data *= np.float32(0.9)  # by hand
        model.flat.refresh()
    for _ in range(5):
        pair.step()


def test_they_add_to_gradients_and_take_no_memory():
    pair = Pair("modern")
    pools = [model.workspace.pool for model in pair.models]
    for number in range(3 * ENOUGH):
        pair.step()
        for model in pair.models:  # a second micro-batch
            model.loss_and_gradients(*batch(number))
        pair.compare()
        pair.update()
        held = [pool.statistics().bytes_held for pool in pools]
        assert held[0] == held[1]
        assert pools[0].statistics().bytes_rented == 0
    assert pair.is_repeating


def test_each_number_of_threads_has_a_recording_of_its_own():
    if max_threads() == 1:
        pytest.skip("needs two threads")
    pair = Pair("modern")
    for _ in on_threads(1, 2):
        assert pair.goes_through_layers()
        for _ in range(ENOUGH):
            pair.step()
        assert pair.is_repeating
    for _ in on_threads(1, 2, 1, 2):
        assert pair.is_repeating


def test_models_that_share_a_pool_may_be_trained_in_turn():
    pairs = [Pair("gpt2"), Pair("llama"), Pair("gpt2", seed=5)]
    for pair in pairs:
        pair.models[0].workspace.pool = pairs[0].models[0].workspace.pool
    for _ in range(2 * ENOUGH):
        for pair in pairs:
            pair.step()
            pair.models[0].losses(*batch(0, rows=7))
    assert any(pair.is_repeating for pair in pairs)


def test_batches_of_several_shapes_and_scales_take_turns():
    pair = Pair()
    for number in range(3 * ENOUGH):
        pair.step(rows=3 + number % 2)
        pair.step(scale=1.0 if number < ENOUGH else 64.0)
        pair.step(scale=1.0 + number)
    assert pair.is_repeating
    for number in range(3 * ENOUGH * MAX_RECORDINGS):
        pair.step(rows=1 + number % (2 * MAX_RECORDINGS))


def test_another_precision_or_recompute_is_another_pass():
    pair = Pair()
    for change in (
        lambda model: model.use_precision("bfloat16"),
        lambda model: model.use_recompute(RecomputePlan(1)),
        lambda model: model.use_precision("float32"),
    ):
        for model in pair.models:
            change(model)
        for _ in range(ENOUGH):
            pair.step()
        assert pair.is_repeating


def test_a_thread_repeats_only_what_it_has_recorded_itself():
    pair = Pair()
    for _ in range(ENOUGH):
        pair.step()
    found = []
    in_threads(lambda: found.append(pair.is_repeating))
    assert found == [False]
    assert pair.is_repeating


class Doubled(SwiGLU):
    """A layer of a person, which computes something without kernels."""

    def forward(self, x, addend=None):
        y = super().forward(x, addend)
        y *= np.float32(1.25) + np.float32(0.125) * np.sign(y[:1])
        return y


def test_a_model_with_a_layer_of_another_package_is_not_recorded(monkeypatch):
    monkeypatch.setitem(parts.MLPS, "doubled", f"{__name__}:Doubled")
    pair = Pair("llama", mlp="doubled")
    for _ in range(2 * ENOUGH):
        pair.step()
    assert not pair.is_repeating
    model = pair.models[0]
    assert Pair("llama").models[0].workspace.new_recording and not model.workspace.new_recording


def test_the_same_batch_again_and_again_is_repeated():
    pair = Pair()
    for _ in range(ENOUGH):
        pair.step(number=1)
    assert not pair.goes_through_layers(number=1)
    for _ in range(2 * ENOUGH):
        pair.step()
    assert pair.is_repeating


def test_whoever_has_to_see_the_layers_sees_them():
    pair = Pair()
    for _ in range(ENOUGH):
        pair.step()
    model = pair.models[0]
    workspace = model.workspace
    assert pair.is_repeating
    seen = []
    with workspace.wrapped_kernels(lambda name, kernel: seen.append(name) or kernel):
        assert pair.goes_through_layers() and "attention_backward" in seen
    at = Pass(0, poll=lambda: seen.append("poll"))
    assert pair.goes_through_layers(at=at) and "poll" in seen
    at = Pass(0, after_block=lambda: seen.append("block"))
    assert pair.goes_through_layers(at=at) and seen.count("block") == 2 * len(model.blocks)
    profile = workspace.profile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "profile", lambda name: seen.append(name) or profile(name))
        assert pair.goes_through_layers() and "Backward" in seen

    def objective(_windows, *given):
        seen.append("objective")
        workspace.kernels.cross_entropy(*given)

    assert pair.goes_through_layers(objective=objective) and "objective" in seen
    model.inspect(*batch(0))
    assert pair.is_repeating


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("variant", ["gpt2", "modern", "documents"])
def test_repeated_passes_drop_what_the_layers_drop(variant, precision):
    pair = Pair(variant, precision=precision, dropout=0.2)
    for _ in range(2 * ENOUGH):
        pair.step(number=1)  # the masks alone are new
    assert pair.is_repeating
    for number in (7, 3, 3):
        at = Pass(number, first_row=5 * T * number)
        assert not pair.goes_through_layers(at=at)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_weights_and_scales_may_be_others_in_each_pass(dropout):
    pair, random = Pair("modern", dropout=dropout), np.random.default_rng(0)
    mask = np.arange(5)[:, None] * np.ones(T) % 2 < 1  # passes of as many learned targets
    for number in range(2 * ENOUGH):
        weights = random.permutation(mask) * random.random((5, T), np.float32)
        pair.step(weights=weights, scale=1.0 + number)
    assert not pair.goes_through_layers(weights=weights[::-1].copy())  # as many have any


@pytest.mark.parametrize("step", [MIN_PASSES + 1, MIN_PASSES + 2, ENOUGH + 2])
@pytest.mark.parametrize("place", ["before", "after"])
def test_an_interrupt_leaves_everything_as_after_a_pass_of_the_layers(step, place, monkeypatch):
    """While recording, and later."""
    pair = Pair("llama")
    for _ in range(step - 1):
        pair.step()
    model = pair.models[0]
    repeat, finish = Recording.repeat, Recording._finish

    def interrupted(original):
        def run(self):
            if place == "after":
                original(self)
            raise KeyboardInterrupt

        return run

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recording, "repeat", interrupted(repeat))
        patch.setattr(Recording, "_finish", interrupted(finish))
        model.loss_and_gradients(*batch(0))
    assert model.workspace.pool.statistics().bytes_rented == 0
    model.zero_gradients()
    for _ in range(2 * ENOUGH):
        pair.step()
    assert pair.is_repeating


def test_what_others_rent_during_a_repetition_is_theirs(monkeypatch):
    pair = Pair("modern")
    for _ in range(ENOUGH):
        pair.step()
    pool, repeat = pair.models[0].workspace.pool, Recording.repeat
    sizes = [5 * T * width for width in (1, 4, 24, 31, 72, 96, 192)]

    def crowded(self):
        others = [pool.rent(size) for size in sizes for _ in range(9)]
        for other in others:
            other[:] = np.nan
        repeat(self)
        for other in others:
            assert np.isnan(other).all()
            pool.return_(other)

    monkeypatch.setattr(Recording, "repeat", crowded)
    assert pair.is_repeating


def test_large_passes_are_not_recorded(monkeypatch):
    monkeypatch.setattr(recorded_passes, "MAX_BYTES", 1000)
    pair = Pair()
    made = counted_recordings(pair.models[0])
    for _ in range(2 * ENOUGH):
        pair.step()
    assert not pair.is_repeating
    assert len(made) == 1  # which showed how large they are


def test_a_decoding_step_is_repeated_however_large_the_model_is(monkeypatch):
    monkeypatch.setattr(recorded_passes, "MAX_BYTES", 1000)
    model = new_model("llama")
    cache, made = KeyValueCache(model), counted_recordings(model)
    for token in range(6):
        model.decode(np.array([[token]]), cache)
    assert len(made) == 1


def test_after_the_pool_has_freed_its_arrays_a_pass_is_recorded_again():
    pair = Pair("modern")
    pool = pair.models[0].workspace.pool
    for _ in range(3):
        for _ in range(ENOUGH):
            pair.step()
        assert pair.is_repeating
        pool.trim()
        gc.collect()
        assert pool.statistics().bytes_held == 0
    with pool.borrow(5 * T * 24):
        for _ in range(ENOUGH):
            pair.step()

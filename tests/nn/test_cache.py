"""Tokens decoded one by one, from keys and values that are kept, equal whole windows."""

import numpy as np
import pytest

from smallmind import InputError, TransformerModel, parts
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.nn.cache import KeyValueCache, cache_bytes
from smallmind.nn.documents import Documents
from smallmind.nn.mlp import SwiGLU
from smallmind.nn.rmsnorm import RMSNorm
from smallmind.settings.presets import ARCHITECTURES
from tests.architectures import BROUGHT

T, V = 24, 31
VARIANTS = {
    **ARCHITECTURES,
    **BROUGHT,
    "shared keys": {**ARCHITECTURES["llama"], "n_kv_head": 2},
    "wide heads": {**ARCHITECTURES["llama"], "n_kv_head": 2, "head_size": 15},
    "narrow heads": {**ARCHITECTURES["modern"], "head_size": 2},
    "one key": {**ARCHITECTURES["modern"], "n_kv_head": 1},
    "no positions": {**ARCHITECTURES["llama"], "position": "none"},
    "documents": {**ARCHITECTURES["modern"], "document_token": 3},
    "learned, documents": {**ARCHITECTURES["gpt2"], "document_token": 3},
    "windows": {**ARCHITECTURES["llama"], "part_settings": {"window": 4}},
    "windows in one block": {
        **ARCHITECTURES["modern"],
        "document_token": 3,
        "part_settings": {"window": 5, "window_layers": (1, 0), "score_divisor": 4.0},
    },
    "learned, windows": {
        **ARCHITECTURES["gpt2"],
        "part_settings": {"window": 5, "window_layers": (0, 1)},
    },
}


def new_model(variant, backend="numpy", **changes):
    fields = {**VARIANTS[variant], **changes}
    model = TransformerModel(V, T, 40, 2, 4, backend=backend, **{"seed": 1, **fields})
    random = np.random.default_rng(1)
    for values in model.parameters.values():
        values += random.normal(0, 0.2, values.shape).astype(values.dtype)
    model.flat.refresh()
    return model


def tokens(rows, count, seed=0):
    return np.random.default_rng(seed).integers(0, V, (rows, count))


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_in_pieces_equals_one_pass(variant, backend):
    model, ids = new_model(variant, backend), tokens(3, T)
    expected, cache, begin = model.forward(ids), KeyValueCache(model, 3), 0
    for count in (7, 1, 1, 5, 1, 9):
        logits = model.decode(ids[:, begin : begin + count], cache)
        begin += count
        np.testing.assert_allclose(logits, expected[:, begin - 1], atol=1e-5)
        assert cache.start == begin and (cache.previous == ids[:, begin - 1]).all()


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("variant", ["llama", "modern", "documents", "no positions"])
@pytest.mark.parametrize("first", [1, 5, 9, 20])
def test_past_its_length_a_cache_shows_each_token_the_last_ones(
    variant, backend, first, monkeypatch
):
    model, ids, S = new_model(variant, backend), tokens(2, T), 9
    cache = KeyValueCache(model, 2, S)
    found = [model.decode(ids[:, :first], cache)]
    found += [model.decode(ids[:, i : i + 1], cache) for i in range(first, T)]
    visible = np.maximum(0, np.arange(T) - S + 1)

    def find(self, ids, _given=None):
        firsts = self.workspace.rent_ids(*ids.shape)
        firsts[...] = visible
        for row in range(len(ids)):
            for t in range(T):
                begins = np.flatnonzero(ids[row, : t + 1] == self.token)
                firsts[row, t] = max(visible[t], begins[-1] if len(begins) else 0)
        self.workspace.carried[self.name] = firsts

    monkeypatch.setattr(Documents, "find", find)
    expected = model.forward(ids)
    for number, logits in enumerate(found):
        np.testing.assert_allclose(logits, expected[:, first - 1 + number], atol=1e-5)


@pytest.mark.parametrize("variant", ["gpt2", "learned, documents"])
@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_with_learned_positions_the_last_tokens_are_fed_again(variant, length):
    model, ids = new_model(variant), tokens(2, 40)
    cache, begin = KeyValueCache(model, 2, length), 0
    for end in range(1, 41):
        logits = model.decode(ids[:, end - 1 : end], cache)
        if end - begin > length:
            begin = end - 1 - (length - max(1, length // 4))
        assert cache.start == end - begin <= length
        expected = model.forward(ids[:, begin:end])[:, -1]
        np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("part", [1, 2, 7])
@pytest.mark.parametrize("variant", ["windows", "windows in one block", "learned, windows"])
def test_layers_with_a_window_keep_little_more(variant, part, backend, monkeypatch):
    """Also where a prompt is longer than the window, and read in several parts."""
    monkeypatch.setattr("smallmind.nn.cache.WINDOW_PART", part)
    model, ids = new_model(variant, backend), tokens(2, T)
    cache = KeyValueCache(model, 2)
    of_layers = [values.shape[2] for _, values in cache._kept_tokens]
    window = model.config.part_setting("window")
    windows = [model.config.window_of(i) for i in range(2)]
    assert of_layers == [T if x is None else window + part - 1 for x in windows]
    assert 2 * cache_bytes(model.config, T) * model.workspace.dtype().nbytes == 4 * cache.nbytes
    expected, begin = model.forward(ids), 0
    for count in (7, 1, 8, 1, 3, 4):
        logits = model.decode(ids[:, begin : begin + count], cache)
        begin += count
        np.testing.assert_allclose(logits, expected[:, begin - 1], atol=1e-5)
        if begin == 8:
            cache.copy(0, [1])
            ids[1], expected = ids[0], expected[:1].repeat(2, axis=0)
    assert begin == T


def test_a_cache_can_be_continued_in_several_ways():
    model, ids = new_model("modern"), tokens(1, T)
    cache = KeyValueCache(model, 4)
    cache.select([2])
    model.decode(ids[:, :10], cache)
    cache.copy(2, [0, 3])
    assert cache.batch == 1 and cache.start == 10
    cache.select([0, 2, 3])
    next_ones = tokens(3, 4, seed=1)
    logits = model.decode(next_ones, cache)
    whole = np.concatenate([ids[:, :10].repeat(3, axis=0), next_ones], axis=1)
    np.testing.assert_allclose(logits, model.forward(whole)[:, -1], atol=1e-5)
    assert cache.start == 14
    cache.select([1])
    assert cache.start == 0
    cache.select([2])
    cache.clear()
    np.testing.assert_allclose(
        model.decode(ids[:, :3], cache), model.forward(ids[:, :3])[:, -1], atol=1e-5
    )


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_of_several_lengths_are_decoded_together(variant, backend):
    model, ids, S = new_model(variant, backend), tokens(4, 25), 12
    cache, alone = KeyValueCache(model, 4, S), [KeyValueCache(model, 1, S) for _ in range(4)]
    begun = np.zeros(4, int)
    random = np.random.default_rng(5)

    def go_on(sequences, count):
        rows = np.array([ids[i, begun[i] : begun[i] + count] for i in sequences])
        cache.select(sequences)
        found = model.decode(rows, cache)
        for row, i in enumerate(sequences):
            expected = model.decode(rows[row : row + 1], alone[i])
            np.testing.assert_allclose(found[row], expected[0], atol=1e-5)
            begun[i] += count

    go_on([2], 5)
    go_on([0], 11)
    go_on([3, 1], 1)
    while begun.max() < 24:  # some are past the length, others not
        chosen = random.permutation(4)[: random.integers(1, 5)]
        go_on(chosen.tolist(), 1)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_sequence_that_is_released_begins_anew_and_others_continue(backend):
    model, ids = TransformerModel(V, 4096, 256, 1, 1, backend=backend, seed=1), tokens(3, 9)
    cache, plain = KeyValueCache(model, 3), KeyValueCache(model, 3)
    for each in (cache, plain):
        model.decode(ids[:, :4], each)
    cache.select([0, 1])
    cache.release(1)
    cache.release(2)
    assert cache.starts.tolist() == [4, 0]
    cache.select([0, 1, 2])
    assert cache.starts.tolist() == [4, 0, 0]
    plain.select([1, 2])
    plain.clear()
    for rows, start in (([0], 4), ([1, 2], 0)):
        for each in (cache, plain):
            each.select(rows)
        found = [model.decode(ids[rows, start:], each) for each in (cache, plain)]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("chosen", [[], [0, 0], [4], [-1]])
def test_only_different_sequences_of_a_cache_can_be_selected(chosen):
    cache = KeyValueCache(new_model("modern"), 4)
    with pytest.raises(InputError, match="different numbers from 0 to 3"):
        cache.select(chosen)
    assert cache.batch == 4


def through_the_layers(model, ids, cache):
    """Decodes with kernels that cannot be recorded."""
    with model.workspace.wrapped_kernels(lambda _name, kernel: kernel):
        return model.decode(ids, cache)


def assert_decodes_like_the_layers(model, ids, recorded, plain):
    """With the caches of both ways, which are continued."""
    found = model.decode(ids, recorded)
    np.testing.assert_array_equal(found, through_the_layers(model, ids, plain))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_passes_give_the_bits_of_the_layers(variant, precision):
    model, ids = new_model(variant, "numba"), tokens(2, 70)
    model.use_precision(precision)
    recorded, plain = KeyValueCache(model, 2, 20), KeyValueCache(model, 2, 20)
    for begin, end in [(0, 3), *((i, i + 1) for i in range(3, 60)), (60, 64)]:
        assert_decodes_like_the_layers(model, ids[:, begin:end], recorded, plain)
        if end == 30:
            model.flat.data *= 0.9  # as an optimizer does, in place
            model.flat.refresh()


def test_what_a_recording_depends_on_may_change():
    models = [new_model("modern", "numba"), new_model("modern", "numba", seed=2)]
    models[1].flat.data *= 0.5
    ids, count = tokens(1, 60), threads()
    recorded, plain = KeyValueCache(models[0], 2), KeyValueCache(models[0])
    recorded.select([0])
    changes = {
        10: models.reverse,
        20: lambda: [model.use_precision("bfloat16") for model in models],
        30: lambda: set_threads(1),
        40: lambda: [model.use_precision("float32") for model in models],
    }
    try:
        for i in range(60):
            changes.get(i, lambda: None)()
            assert_decodes_like_the_layers(models[0], ids[:, i : i + 1], recorded, plain)
            if i == 50:  # another sequence, in other arrays
                recorded.select([0])
                recorded.copy(0, [1])
                recorded.select([1])
    finally:
        set_threads(count)


def test_an_interrupt_while_recording_leaves_the_earlier_recording_whole(monkeypatch):
    models = [new_model("llama", "numba"), new_model("llama", "numba", seed=2)]
    ids = tokens(1, 12)
    recorded, plain = KeyValueCache(models[0]), KeyValueCache(models[0])
    for i in range(8):
        assert_decodes_like_the_layers(models[0], ids[:, i : i + 1], recorded, plain)

    def interrupted(self, x):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RMSNorm, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models[1].decode(ids[:, 8:9], recorded)
    for i in range(8, 12):
        assert_decodes_like_the_layers(models[0], ids[:, i : i + 1], recorded, plain)


class OwnMLP(SwiGLU):
    """A layer of a person, which computes something without kernels."""

    def forward(self, x, addend=None):
        return super().forward(x, addend) * np.float32(1.5)


class OwnNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) * np.float32(1.5)


@pytest.mark.parametrize(
    ("table", "part"), [(parts.MLPS, OwnMLP), (parts.NORMS, OwnNorm)], ids=["mlp", "norm"]
)
def test_layers_of_another_package_are_not_skipped(table, part, monkeypatch):
    monkeypatch.setitem(table, "own", f"{__name__}:{part.__name__}")
    model = new_model("llama", "numba", **{part.__name__.removeprefix("Own").lower(): "own"})
    ids = tokens(2, 8)
    recorded, plain = KeyValueCache(model, 2), KeyValueCache(model, 2)
    for i in range(ids.shape[1]):
        assert_decodes_like_the_layers(model, ids[:, i : i + 1], recorded, plain)


def test_in_16_bits_decoding_is_as_close_as_a_pass():
    model, ids = new_model("llama", "numba"), tokens(2, T)
    exact = model.forward(ids)[:, -1]
    model.use_precision("bfloat16")
    cache = KeyValueCache(model, 2)
    for i in range(T):
        logits = model.decode(ids[:, i : i + 1], cache)
    error = np.abs(model.forward(ids)[:, -1] - exact).max()
    assert 0 < np.abs(logits - exact).max() < 3 * error


def test_wrong_caches_and_ids_are_refused():
    model = new_model("gpt2")
    cache = KeyValueCache(model, 2)
    for ids in (tokens(1, 3), tokens(2, 0), np.zeros(2, int), np.full((2, 1), V), [[1, 2], [3]]):
        with pytest.raises(InputError):
            model.decode(ids, cache)
    assert cache.start == 0
    with pytest.raises(InputError, match="length=25 must be at least 1 and at most block_size=24"):
        KeyValueCache(model, 1, 25)
    with pytest.raises(InputError, match="batch=0 must be at least 1"):
        KeyValueCache(model, 0)

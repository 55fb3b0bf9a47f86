"""Runs that train an adapter beside a frozen model."""

import hashlib
import json
import shutil

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Run
from smallmind.exchange.stored import digest_of, find
from smallmind.files import safetensors
from smallmind.settings.presets import ARCHITECTURES
from smallmind.training import checkpoint
from smallmind.training.evaluation import evaluate_held_out
from tests.programs import CATS
from tests.runs.small import left

ARCHES = {"gpt2": ARCHITECTURES["gpt2"], "llama": ARCHITECTURES["llama"] | {"n_kv_head": 1}}
TUNING = {"steps": 6, "batch_size": 2, "val_every": 3, "val_batches": 2, "log_every": 1}
TUNING |= {"save_every": 2, "keep": 9, "lora_rank": 3, "precision": "float32"}


@pytest.fixture(scope="module", params=ARCHES)
def base(request, tmp_path_factory):
    """The directory with the run `base`."""
    path = tmp_path_factory.mktemp("lora")
    shape = {"block_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    fields = {**shape, **ARCHES[request.param], "steps": 3, "batch_size": 2, "val_every": 0}
    Run.create(text=CATS, out=path / "base", **fields).train()
    return path


def tuned(base, out, **fields):
    return Run.create(
        text=CATS, out=base / out, **{**TUNING, "init_from": str(base / "base"), **fields}
    )


@pytest.fixture(scope="module")
def adapted(base):
    run = tuned(base, "adapted", lora_dropout=0.2)
    run.train()
    return run


def test_its_files_hold_the_adapter_alone(base, adapted):
    model, _ = smallmind.load(base / "base", "numpy")
    tensors, metadata = safetensors.read(adapted.path / "model.safetensors")
    assert all("lora_" in name for name in tensors)
    digest = hashlib.sha256(model.flat.data.data).hexdigest()
    assert json.loads(metadata["adapter"])["base"]["sha256"] == digest
    assert digest_of(find(base / "base").parameters()) == digest
    state, _ = checkpoint.newest(adapted.path)
    names = [name for name in state.tensors if name.startswith("model.")]
    assert len(names) == len(tensors) and all("lora_" in name for name in names)
    assert state.state["adapter"]["base"]["path"] == str((base / "base").resolve())


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0", "q4_0"])
def test_it_starts_with_the_loss_of_its_base_to_the_bit(base, precision):
    run = tuned(base, f"new-{precision}", precision=precision)
    model, tokenizer = smallmind.load(base / "base", precision=precision)
    tokens = tokenizer.encode(CATS)
    ids, targets = tokens[None, :32], tokens[None, 1:33]
    live = run.training.model
    np.testing.assert_array_equal(live.losses(ids, targets), model.losses(ids, targets))
    run.unlock()


def test_it_learns(base, adapted):
    model, _ = smallmind.load(base / "base")
    assert adapted.final.loss < evaluate_held_out(model, adapted.data).loss


def test_it_loads_as_one_model(base, adapted):
    model, tokenizer = adapted.load()
    live = adapted.training.model
    ids = tokenizer.encode(CATS)[None, :32]
    np.testing.assert_allclose(model.forward(ids), live.forward(ids), atol=2e-5)
    assert model.adapter is None and model.flat.data.size
    assert list(model.parameters) == list(smallmind.load(base / "base")[0].parameters)
    step4, _ = adapted.load(4)
    assert (step4.forward(ids) != model.forward(ids)).any()
    assert smallmind.generate(model, tokenizer, max_tokens=3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0"])
def test_it_resumes_to_the_same_bits(base, precision):
    whole = tuned(base, f"whole-{precision}", precision=precision, lora_dropout=0.2)
    whole.train()
    for step in (1, 4):
        left(tuned(base, f"cut-{precision}-{step}", precision=precision, lora_dropout=0.2), step)
        again = Run.open(base / f"cut-{precision}-{step}")
        again.resume()
        expected, found = (run.training.model.flat.data for run in (whole, again))
        np.testing.assert_array_equal(found, expected)
        assert again.final == whole.final
    assert all(verdict.fault is None for verdict in Run.open(again.path).verify())


def test_several_shards_have_the_same_bits_as_one_process(base):
    runs = [tuned(base, f"shards-{n}", data_shards=2, batch_size=4, threads=n) for n in (1, 2)]
    for run in runs:
        run.train()
    np.testing.assert_array_equal(*(run.training.model.flat.data for run in runs))


def test_a_base_that_is_gone_or_another_is_named(base, adapted, tmp_path):
    moved, adapter = tmp_path / "moved", tmp_path / "adapter"
    shutil.copytree(base / "base", moved)
    run = tuned(base, tmp_path / "run", init_from=moved)
    run.train()
    shutil.copy(run.path / "model.safetensors", adapter)
    expected = run.load()[0].flat.data
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"moved, which does not exist; give .* --adapter"):
        smallmind.load(adapter)
    with pytest.raises(InputError, match="does not exist"):
        Run.open(run.path).load(4)
    found = smallmind.load(tmp_path / "elsewhere", adapter=adapter)[0]
    np.testing.assert_array_equal(found.flat.data, expected)
    with pytest.raises(InputError, match="was not trained on"):
        smallmind.load(adapted.path, adapter=adapter)


def test_an_adapter_needs_a_model_to_start_from(tmp_path):
    with pytest.raises(InputError, match="lora_rank=4 adapts a model: give one with --init-from"):
        Run.create(text=CATS, out=tmp_path / "run", lora_rank=4)
    assert not (tmp_path / "run").exists()


def test_other_adapters_start_from_it(base, adapted):
    again = tuned(base, "again", init_from=adapted.path)
    again.train()
    model, tokenizer = again.load()
    ids = tokenizer.encode(CATS)[None, :32]
    np.testing.assert_allclose(model.forward(ids), again.training.model.forward(ids), atol=2e-5)


def test_it_is_exported_whole(base, adapted):
    model, _ = adapted.load(backend="numpy")
    adapted.export(base / "hf")
    again, _ = smallmind.load(base / "hf", backend="numpy")
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], value)


@pytest.mark.parametrize("damage", ["names", "shape", "value", "rank", "type"])
def test_a_damaged_adapter_is_refused(adapted, damage, tmp_path):
    tensors, metadata = safetensors.read(adapted.path / "model.safetensors")
    facts = json.loads(metadata["adapter"])
    name = next(iter(tensors))
    if damage == "names":
        tensors["other"] = tensors.pop(name)
    elif damage == "shape":
        tensors[name] = tensors[name][:, :-1].copy()
    elif damage == "value":
        tensors[name] = np.full_like(tensors[name], np.nan)
    elif damage == "rank":
        facts["rank"] = 10**9
    else:
        facts = [facts]
    path = tmp_path / "model.safetensors"
    safetensors.write(path, tensors, {**metadata, "adapter": json.dumps(facts)})
    with pytest.raises(InputError, match="is not an adapter saved by smallmind"):
        smallmind.load(path)

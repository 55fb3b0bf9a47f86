"""Adapters as PEFT keeps them: written, read, imported, refused."""

import re
import shutil

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Run, parts
from smallmind.exchange.format import export_adapter
from smallmind.exchange.gguf_file import read as read_gguf
from smallmind.exchange.peft import CONFIG, MODEL, PeftDirectory
from smallmind.files import durable, safetensors
from tests.exchange.adapters import PARTS, adapted, saved
from tests.exchange.full import Full
from tests.exchange.models import MODELS, ids_for, model_of, tokenizer_of
from tests.programs import edited, refusal, refuses

WHOLE = (*PARTS, "head")


def merged(adapter, base):
    """One model of both."""
    parameters = dict(adapter.added(base.parameters.items()))
    return smallmind.TransformerModel.from_tensors(base.config, parameters, "both", "numpy")


def change(directory, **changes):
    """Changes values in the config of an adapter."""
    with edited(directory / CONFIG) as config:
        config |= changes


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model of transformers in base/, and an adapter of it in adapter/."""
    root, tokenizer = tmp_path_factory.mktemp("exported"), tokenizer_of("char")
    model = model_of("Llama", tokenizer)
    smallmind.export(model, tokenizer, root / "base")
    export_adapter(saved(adapted(model)), root / "adapter")
    return root


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copied")


def together(copied):
    """Loads the model with the adapter."""
    return smallmind.load(copied / "base", adapter=copied / "adapter")


@pytest.mark.parametrize("on", [WHOLE, ("attention",), ("mlp",)], ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_again(tmp_path, name, on):
    model = adapted(model_of(name, tokenizer_of("char"), tie_weights=False), on)
    export_adapter(saved(model), tmp_path / "adapter")
    found = PeftDirectory(tmp_path / "adapter").read(model.config)
    assert found.adapter == model.adapter
    assert list(found.tensors) == model.flat.kept
    for tensor, values in found.tensors.items():
        np.testing.assert_array_equal(values, model.parameters[tensor])


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_computes_the_same(name):
    base = model_of(name, tokenizer_of("char"), tie_weights=False)
    model = adapted(base, WHOLE)
    expected = model.forward(ids_for(model))
    found = merged(saved(model), base)
    np.testing.assert_allclose(found.forward(ids_for(model)), expected, rtol=0, atol=2e-4)


def test_pairs_of_other_ranks_and_scales_are_one_adapter(copied):
    """With the values that PEFT computes: alpha / r of each, or alpha over the root of r."""
    tensors, _ = safetensors.read(copied / "adapter" / MODEL, strict=False)
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    removed = [name for name in tensors if ".layers.1.mlp." in name]
    a, b = tensors[f"{q}A.weight"], tensors[f"{q}B.weight"]
    tensors[f"{q}A.weight"], tensors[f"{q}B.weight"] = np.vstack([a, a]), np.hstack([b, b])
    for name in removed:
        del tensors[name]
    safetensors.write(copied / "adapter" / MODEL, tensors, {"format": "pt"})
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 6}}
    patterns |= {"alpha_pattern": {"layers.0.self_attn.q_proj": 4.0}, "use_rslora": True}
    change(copied / "adapter", **patterns)
    model, _ = smallmind.load(copied / "base", "numpy")
    found = PeftDirectory(copied / "adapter").read(model.config)
    assert found.adapter.rank == 6
    sum_of = merged(found, model)
    C = model.config.n_embd
    width = model.config.n_head * model.config.head_channels
    name = "blocks.0.attention.qkv.weight"
    found = sum_of.parameters[name] - model.parameters[name]
    np.testing.assert_allclose(found[:, :width], (4 / 6**0.5 * 2 * b @ a).T, rtol=0, atol=1e-5)
    k = q.replace("q_proj", "k_proj")
    expected = 5 / 3**0.5 * tensors[f"{k}B.weight"] @ tensors[f"{k}A.weight"]
    keys = found[:, width : width + len(expected)]
    np.testing.assert_allclose(keys, expected.T, rtol=0, atol=1e-5)
    untouched = "blocks.1.mlp.projection.weight"
    np.testing.assert_array_equal(sum_of.parameters[untouched], model.parameters[untouched])
    assert found.shape[0] == C


@pytest.mark.parametrize("alpha", [0, -4])
def test_an_alpha_that_removes_or_turns_the_change_is_computed(copied, alpha):
    model, _ = smallmind.load(copied / "base", "numpy")
    change(copied / "adapter", lora_alpha=5)
    plain = merged(PeftDirectory(copied / "adapter").read(model.config), model)
    change(copied / "adapter", lora_alpha=alpha)
    other = merged(PeftDirectory(copied / "adapter").read(model.config), model)
    name = "blocks.0.attention.qkv.weight"
    found, whole = (x.parameters[name] - model.parameters[name] for x in (other, plain))
    np.testing.assert_allclose(found, alpha / 5 * whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
def test_a_config_that_lacks_a_setting_is_refused(copied, name):
    with edited(copied / "adapter" / CONFIG) as config:
        del config[name]
    refuses(f"adapter_config.json has no '{name}'", together, copied)


def test_it_becomes_a_run(copied, monkeypatch):
    path, base = copied / "run", copied / "base"
    with pytest.raises(InputError, match="does not say what it adapts; give its base model"):
        Run.import_model(copied / "adapter", path)
    run = Run.import_model(copied / "adapter", path, base=base)
    expected, _ = smallmind.load(base, adapter=copied / "adapter", backend="numpy")
    for found in (run.load(backend="numpy"), smallmind.load(path, "numpy")):
        np.testing.assert_array_equal(found[0].flat.data, expected.flat.data)
    assert run.settings.training.lora_rank == 3
    assert all("lora" in name for name in safetensors.read(path / "model.safetensors")[0])
    run.export(copied / "again", "peft")
    assert (copied / "again" / CONFIG).exists()
    assert (copied / "again" / MODEL).read_bytes() == (copied / "adapter" / MODEL).read_bytes()
    change(copied / "adapter", base_model_name_or_path=str(base))
    found, _ = smallmind.load(copied / "adapter", "numpy")  # without being told the base
    np.testing.assert_array_equal(found.flat.data, expected.flat.data)


def test_gguf_adapters_have_the_names_of_llama_cpp(exported, tmp_path):
    base, _ = smallmind.load(exported / "base", "numpy")
    export_adapter(saved(adapted(base)), tmp_path / "adapter.gguf", "gguf-adapter")
    metadata, tensors = read_gguf(tmp_path / "adapter.gguf")
    described = {"general.architecture": "llama", "general.type": "adapter"}
    assert metadata == {**described, "adapter.type": "lora", "adapter.lora.alpha": 5.0}
    assert tensors["blk.1.ffn_down.weight.lora_a"].shape == (3, 44)
    assert tensors["blk.1.ffn_down.weight.lora_b"].shape == (24, 3)
    refuses(r"adapter\.gguf: it is an adapter", smallmind.load, tmp_path / "adapter.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    {
        "dora": ({"use_dora": True}, "'use_dora' is True"),
        "kind": ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        "bias": ({"bias": "all"}, "bias='all' is not supported"),
        "modules": ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is"),
        "base changed": ({"init_lora_weights": "pissa_niter_16"}, "has changed its base model"),
        "no rank": ({"r": "8"}, "'8' is not a whole number"),
        "rank 0": ({"r": 0}, "r must be at least 1"),
        "another rank": ({"r": 4}, "has rank 3; adapter_config.json says 4"),
        "alpha": ({"lora_alpha": None}, "None is not a finite number"),
        "dropout": ({"lora_dropout": 1.5}, "lora_dropout must be"),
        "pattern": ({"alpha_pattern": {"(a+)+$": 1.0}}, "it is not a name"),
        "patterns": ({"rank_pattern": [1]}, "a pattern is not"),
        "new": ({"hyper_lora": {"a": 1}}, "'hyper_lora' is"),
        "base": ({"base_model_name_or_path": "gone"}, "adapts gone, which does not exist"),
    }.values(),
)
def test_configs_that_are_not_known_are_refused(copied, changes, words):
    change(copied / "adapter", **changes)
    adapter = copied / "adapter"
    is_alone = "base_model_name_or_path" in changes
    message = refusal(smallmind.load, adapter) if is_alone else refusal(together, copied)
    assert re.search(words, message) and str(adapter) in message


def _renamed(tensors, name):
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = tensors.pop(name)


def _elsewhere(tensors, name):
    tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)


def _set(change):
    def damage(tensors, name):
        tensors[name] = change(tensors[name])

    return damage


DAMAGES = {
    "kind": (_renamed, "has a tensor that is not supported"),
    "place": (_elsewhere, "is incomplete"),
    "alone": (lambda tensors, name: tensors.pop(name), "is incomplete"),
    "shape": (_set(lambda a: a[:, :-1].copy()), "the matrix is"),
    "dimensions": (_set(lambda a: a[None].copy()), "is incomplete"),
    "value": (_set(lambda a: np.full_like(a, np.inf)), "not finite"),
    "integers": (_set(lambda a: a.astype(np.int32)), "is of type int32"),
    "empty": (lambda tensors, _: tensors.clear(), "no adapter of a rank from 1"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_tensors_are_refused(copied, damage, words):
    file = copied / "adapter" / MODEL
    tensors, _ = safetensors.read(file, strict=False)
    damage(tensors, next(name for name in tensors if "layers.0" in name))
    safetensors.write(file, tensors, {"format": "pt"})
    refuses(words, together, copied)


def test_files_that_are_damaged_or_pickles_are_refused(copied):
    file, config = copied / "adapter" / MODEL, copied / "adapter" / CONFIG
    content = file.read_bytes()
    for size in 3, 40, len(content) - 1:
        file.write_bytes(content[:size])
        refuses("not a valid safetensors file", together, copied)
    file.unlink()
    refuses(r"has no adapter_model\.safetensors", together, copied)
    (copied / "adapter" / "adapter_model.bin").write_bytes(b"")
    refuses("a pickle", together, copied)
    config.write_text("[1]")
    refuses("not a JSON object", together, copied)


def test_an_adapter_of_another_model_is_refused(copied):
    other = model_of("Llama", tokenizer_of("char"), n_embd=32)
    smallmind.export(other, tokenizer_of("char"), copied / "other")
    refuses("the matrix is", smallmind.load, copied / "other", adapter=copied / "adapter")
    with pytest.raises(InputError, match="whole model, not an adapter"):
        smallmind.load(copied / "base", adapter=copied / "other")
    refuses("is not a PEFT adapter", Run.import_model, copied / "other", base=copied / "base")


@pytest.mark.parametrize("to", parts.ADAPTER_FORMATS)
def test_a_place_in_use_is_left_as_it_is(exported, tmp_path, to):
    model = adapted(smallmind.load(exported / "base", "numpy")[0])
    place = tmp_path / "place.gguf"
    place.write_text("mine")
    refuses("choose another", export_adapter, saved(model), place, to)
    assert place.read_text() == "mine"


@pytest.mark.parametrize("to", parts.ADAPTER_FORMATS)
@pytest.mark.parametrize("left", [0, 1000, 6_000, 100_000])
def test_a_full_disk_leaves_nothing(exported, tmp_path, monkeypatch, to, left):
    adapter = saved(adapted(smallmind.load(exported / "base", "numpy")[0]))
    monkeypatch.setattr(durable, "files", Full(left))
    if left == 100_000:
        export_adapter(adapter, tmp_path / "adapter.gguf", to)
        return
    with pytest.raises(OSError, match="No space left"):
        export_adapter(adapter, tmp_path / "adapter.gguf", to)
    assert not list(tmp_path.iterdir())


def test_commands_name_an_adapter_beside_its_base(copied, cli):
    base, adapter = copied / "base", copied / "adapter"
    prompt = "--prompt The --max-tokens 8 --temperature 0"
    plain = cli("generate", base, prompt).out
    with_it = cli("generate", base, "--adapter", adapter, prompt).out
    assert with_it != plain
    imported = cli("import", adapter, "--base", base, "--out", copied / "run").flat
    assert "Imported adapter" in imported and "rank 3" in imported
    assert cli("generate", copied / "run", prompt).out == with_it
    cli("export", copied / "run", "--to gguf-adapter", copied / "a.gguf")
    cli("export", base, "--adapter", adapter, "--to hf", copied / "merged")
    assert cli("generate", copied / "merged", prompt).out == with_it
    refused = cli("export", base, "--to peft", copied / "none", ends=2).err
    assert "is not an adapter; train one with --lora-rank" in refused
    refused = cli("export", adapter, "--to peft", copied / "none", ends=2).err
    assert "does not say what it adapts" in refused
    assert not (copied / "none").exists()

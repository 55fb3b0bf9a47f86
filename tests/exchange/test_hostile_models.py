"""Models from anywhere: refused in one clear line, and nothing that they name is executed."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smallmind
from smallmind import InputError
from smallmind.exchange import gguf_file
from smallmind.exchange.format import find_external
from smallmind.files import safetensors
from smallmind.kernels.reference import rotary_frequencies
from smallmind.nn.loading import Stored
from smallmind.nn.rope import scaled
from tests.exchange.models import model_of, shard, tokenizer_of
from tests.programs import edited
from tests.programs import refusal as refused

# As in the files of Llama 3.2.
GEMMA = {"model_type": "gemma3_text", "hidden_act": None}
NEOX = {"model_type": "gpt_neox", "hidden_act": "gelu", "attention_bias": True}
NEO = {"model_type": "gpt_neo", "num_layers": 1, "num_heads": 2, "hidden_act": None}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
SLIDING = {"use_sliding_window": True, "sliding_window": 4}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A directory of transformers, and a GGUF file beside it."""
    root = tmp_path_factory.mktemp("sound")
    tokenizer = tokenizer_of("bpe")
    for name in ("Llama", "GPT-2"):
        fields = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_kv_head": None, "head_size": None}
        model = model_of(name, tokenizer, **fields)
        smallmind.export(model, tokenizer, root / name)
        smallmind.export(model, tokenizer, root / f"{name}.gguf", "gguf")
    return root


@pytest.fixture
def model(sound, tmp_path):
    """A copy of a sound directory."""
    return Path(shutil.copytree(sound / "Llama", tmp_path / "model"))


def edit(model, **changes):
    with edited(model / "config.json") as config:
        config |= changes


def refusal(path):
    """The message to a person who imports it."""
    message = refused(lambda: find_external(path).load("numpy"))
    assert message.isprintable() and len(message) < len(str(path)) + 400
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "cohere"}, "model_type='cohere' is not supported; it must be one of"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe': mixtures of experts are not supported"),
        ({"model_type": "mixtral"}, "'mixtral': mixtures of experts are not supported"),
        ({"model_type": "x", "n_routed_experts": 64}, "'x': mixtures of experts are not"),
        ({"model_type": "mamba2"}, "'mamba2': recurrent layers are not supported"),
        ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl': image models are not supported"),
        ({"model_type": "x", "vision_config": {"a": 1}}, "'x': image models are not"),
        ({"model_type": "whisper"}, "'whisper': audio models are not supported"),
        ({"model_type": "t5"}, "'t5': encoder-decoder models are not supported"),
        ({"model_type": "modernbert"}, "'modernbert': encoders are not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "gpt2"}, "n_positions is missing"),
        ({"model_type": "qwen3"}, "lacks the tensor"),
        ({"auto_map": {"AutoConfig": "code.Config"}}, "custom code, which is never executed"),
        ({"auto_map": {"auto_map": {"auto_map": {}}}}, "custom code, which is never executed"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; Llama has silu or swish"),
        ({"hidden_act": {"__reduce__": 1}}, "is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: 'yarn' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling: 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": ["linear"]}}, "is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling=('linear', None) must be linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "must be linear and a factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "a low and a higher frequency"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling=('llama3', '8', "),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 2}}, "as llama3 it is not supported"),
        ({"rope_parameters": {"full_attention": LLAMA3}}, "as default it is not supported"),
        ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, "is not supported"),
        ({"rope_parameters": {"type": "default", "rope_type": "linear"}}, "is not supported"),
        ({"rope_scaling": {"factor": 8.0}}, "as default it is not supported"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, which may change"),
        ({"rope_scaling": "linear"}, "rope_scaling is not a JSON object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "is 0.5, which may change"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1"),
        ({"layer_types": ["sliding_attention"]}, "'layer_types' is ['sliding_attention'], which"),
        ({"layer_types": 3}, "'layer_types' is 3, which may change"),
        ({"model_type": "mistral", "sliding_window": 0}, "window=0 must be at least 1"),
        ({"model_type": "mistral", "sliding_window": "4"}, "window='4' must be a number"),
        ({"model_type": "smollm3", "no_rope_layers": []}, "[] is not a list of 1 layer"),
        ({"model_type": "smollm3", "no_rope_layers": [2]}, "layers with 2 are not supported"),
        ({"model_type": "smollm3", "no_rope_layers": 10**9}, "is not a list of 1 layer"),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "0 is not a whole number of at least",
        ),
        ({"model_type": "qwen2", **SLIDING, "layer_types": [[]]}, "layers with [] are not"),
        ({"model_type": "qwen2", **SLIDING, "max_window_layers": -1}, "-1 is not a whole number"),
        (
            {"model_type": "qwen2", "layer_types": ["linear"]},
            "layers with 'linear' are not",
        ),
        ({"model_type": "qwen2"}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, "image models are not"),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "score_divisor=0 must be above 0"),
        ({**GEMMA, "query_pre_attn_scalar": "8"}, "score_divisor='8' must be a number"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0, which may"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({**GEMMA, "sliding_window_pattern": 0}, "0 is not a whole number of"),
        ({**GEMMA, "layer_types": ["chunked"]}, "layers with 'chunked' are not supported"),
        ({**GEMMA, "rope_parameters": {"sliding_attention": LLAMA3}}, "scaled rotations in"),
        ({**GEMMA, "rope_parameters": {"full_attention": 3}}, "rope_parameters is not a JSON"),
        ({**NEO, "attention_types": 3}, "attention_types is 3"),
        ({**NEO, "attention_types": [[["global"], 10**12]]}, "as a part of GPT-Neo"),
        ({**NEO, "attention_types": [[["far"], 1]]}, "layers with 'far' are not supported"),
        ({**NEOX, "rotary_pct": 1.5}, "rotary_share=1.5 must be"),
        ({**NEOX, "rotary_pct": 0.25}, "heads with 1 rotated channel are not supported"),
        ({**NEOX, "hidden_act": "relu"}, "hidden_act='relu' is not supported; GPT-NeoX has gelu"),
        ({**NEOX, "use_parallel_residual": "no"}, "parallel_residual='no' must be true or false"),
        ({"head_dim": 64}, "q_proj.weight is 8 x 8; the model that it describes has 128 x 8"),
        ({"head_dim": 0}, "head_size=0 must be at least 1"),
        ({"head_dim": [4]}, "head_size=[4] must be a number"),
        ({"num_key_value_heads": 3}, "n_kv_head=3 must be a divisor"),
        ({"num_hidden_layers": 1000}, "too few for 1000 blocks"),
        ({"num_hidden_layers": 2}, "lacks the tensor model.layers.1."),
        ({"num_hidden_layers": -1}, "n_layer=-1 must be"),
        ({"num_hidden_layers": 10**30}, "n_layer="),
        ({"num_hidden_layers": "2"}, "n_layer='2' must be a number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": 0}, "n_head=0 must be at least 1"),
        ({"hidden_size": 16}, "is 300 x 8; the model that it describes has 300 x 16"),
        ({"hidden_size": 9}, "Llama with n_embd=9 is not supported"),
        ({"vocab_size": 2**24}, "its tokenizer has"),
        ({"vocab_size": 310}, "the model that it describes has 310 x 8"),
        ({"intermediate_size": 2**18}, "the model that it describes has"),
        ({"tie_word_embeddings": "yes"}, "tie_weights='yes' must be true or false"),
        ({"attention_bias": True}, "attention_bias=True, mlp_bias=False: they must be equal"),
        ({"attention_bias": True, "mlp_bias": True}, "lacks the tensor"),
        ({"rms_norm_eps": 0}, "norm_epsilon=0 must be at least 1e-12 and at most 0.1"),
        ({"rms_norm_eps": None}, "norm_epsilon=None must be a number"),
        ({"logit_scale": 0.5}, "'logit_scale' is 0.5, which may change what the model computes"),
        ({"attention_multiplier": 0.1}, "'attention_multiplier' is 0.1, which may change"),
        ({"residual_multiplier": 2.0}, "'residual_multiplier' is 2.0, which may change"),
        ({"embedding_multiplier": 12}, "'embedding_multiplier' is 12, which may change"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ({"sliding_window": 64}, "'sliding_window' is 64"),
        ({"num_local_experts": 8}, "'num_local_experts' is 8"),
        ({"is_causal": False}, "'is_causal' is False"),
        ({"alibi": True}, "'alibi' is True, which may change"),
        ({"\x1b[2J": "x" * 10_000}, "'\\x1b[2J' is 'xxx"),
    ],
)
def test_a_config_that_is_wrong_or_not_known_is_refused(model, changes, reason):
    edit(model, **changes)
    assert reason.replace("300", str(tokenizer_of("bpe").vocab_size)) in refusal(model)


def test_a_config_may_say_what_changes_nothing(model):
    wanted = find_external(model).model("numpy").flat.data
    nothing = {"logit_scale": 1.0, "residual_multiplier": 1, "sliding_window": None, "other": None}
    causal = {"is_causal": True, "num_local_experts": 0, "attn_logit_softcapping": 0.0}
    of_others = {"_name_or_path": "x", "unsloth_version": "1", "torch_dtype": "bfloat16"}
    edit(model, **nothing, **causal, **of_others, attention_dropout=0.1, pretraining_tp=2)
    np.testing.assert_array_equal(find_external(model).model("numpy").flat.data, wanted)


def test_code_in_the_directory_is_never_executed(model):
    edit(model, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (model / "modeling.py").write_text("raise SystemExit('executed')")
    assert "never executed" in refusal(model)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"3", b"{", b"\xff", b'{"model_type": NaN}', b"[" * 100_000, b" " * 1_000_001],
)
def test_a_directory_without_a_config_is_no_model(model, content):
    (model / "config.json").write_bytes(content)
    assert find_external(model) is None


class Harm:
    """Makes a file when it is read as a pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "is_other"),
    [
        ("pytorch_model.bin", False),
        ("pytorch_model-00001-of-00002.bin", False),
        ("model.pt", True),
        ("weights.pth", True),
        ("model.ckpt", True),
    ],
)
def test_pickles_are_refused_and_not_read(model, tmp_path, monkeypatch, name, is_other, cli):
    monkeypatch.chdir(tmp_path)
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    message = refusal(model)
    assert f"only {name}, a pickle, which could run arbitrary code" in message
    assert "is a pickle, which could run arbitrary code" in refusal(model / name)
    cli.refuses("safetensors with" if is_other else "save_pretrained('.')", "import", model / name)
    assert not (tmp_path / "harm").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("edit_map", "reason"),
    [
        (lambda _: {}, "has no weight_map"),
        (lambda _: [], "has no weight_map"),
        (lambda table: {**table, "more": "2.safetensors"}, "lacks 2.safetensors"),
        (lambda table: {**table, "more": "1.safetensors"}, "is the index of another model"),
        (lambda table: dict(list(table.items())[1:]), "is the index of another model"),
        (lambda table: {**table, "x": "../1.safetensors"}, "not a file in this folder"),
        (lambda table: {**table, "x": "/etc/passwd"}, "not a file in this folder"),
        (lambda table: {**table, "x": 3}, "not a file in this folder"),
        (lambda table: {**table, "x": ".."}, "not a file in this folder"),
        (lambda table: {**table, "x": "."}, "not a file in this folder"),
        (lambda table: {**table, "x": ""}, "not a file in this folder"),
        (lambda table: {**table, "x": "config.json"}, "not a file in this folder"),
    ],
)
def test_an_index_that_lies_is_refused(model, edit_map, reason):
    index = shard(model)
    table = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": edit_map(table)}))
    assert reason in refusal(model)


def test_a_missing_shard_is_named(model):
    shard(model)
    (model / "1.safetensors").unlink()
    assert "lacks 1.safetensors, one of 2 weight files" in refusal(model)


def test_a_tensor_in_two_shards_is_refused(model):
    shard(model)
    tensors, _ = safetensors.read(model / "0.safetensors")
    name = next(iter(tensors))
    other, _ = safetensors.read(model / "1.safetensors")
    safetensors.write(model / "1.safetensors", {**other, name: tensors[name]}, {})
    assert "is the index of another model" in refusal(model)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model.norm.weight", None, "lacks the tensor model.norm.weight"),
        ("x", np.zeros(1, "f4"), "a tensor that is not supported: 'x'"),
        ("\x1b[2J", np.zeros(1, "f4"), "a tensor that is not supported: '\\x1b[2J'"),
        ("model.norm.weight", np.zeros((8, 1), "f4"), "is 8 x 1; the model that it describes has"),
        ("model.norm.weight", np.array(1, "f4"), "is a number; the model that it describes has 8"),
        ("model.norm.weight", np.zeros(8, "i4"), "is of type int32, not floating point"),
        ("model.norm.weight", np.full(8, np.nan, "f4"), "is not finite float32"),
        ("model.norm.weight", np.full(8, 1e300), "is not finite float32"),
    ],
)
def test_tensors_of_another_model_are_refused(model, name, value, reason):
    tensors, _ = safetensors.read(model / "model.safetensors")
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    changed = others if value is None else {**others, name: value}
    safetensors.write(model / "model.safetensors", changed, {})
    assert reason in refusal(model)


def test_a_model_without_weights_or_tokenizer_says_what_to_do(model):
    (model / "model.safetensors").rename(model / "elsewhere")
    assert "has no model.safetensors" in refusal(model)
    (model / "elsewhere").rename(model / "model.safetensors")
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer.json; save the tokenizer there" in refusal(model)
    for name in ("model.safetensors", "config.json"):
        assert f"give its directory, {model}" in refusal(model / name)


def test_a_tokenizer_of_another_kind_is_refused(model):
    path = model / "tokenizer.json"
    with edited(path) as tokenizer:
        tokenizer["model"]["type"] = "Trigram"
    assert "its model is of type 'Trigram', not BPE" in refusal(model)


def key(name):
    encoded = name.encode()
    return struct.pack("<Q", len(encoded)) + encoded


EPSILON = "llama.attention.layer_norm_rms_epsilon"


def count(name, before, after):
    """The bytes of a setting with two values."""
    for value in (before, after):
        number = (
            struct.pack("<II", 4, value) if type(value) is int else struct.pack("<If", 6, value)
        )
        yield key(f"llama.{name}") + number


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (key("llama"), key("mamba"), "'mamba': recurrent layers are not supported"),
        (key("llama"), key("olmo2"), "general.architecture='olmo2' is not supported"),
        (key("llama.block_count"), key("llama.block_cownt"), "block_count is missing"),
        (key("gpt2"), key("plam"), "its tokenizer is of the kind 'plam'"),
        (key("gpt-2"), key("gpt-3"), "splits texts by the pattern 'gpt-3'"),
        (key("tokenizer.ggml.merges"), key("tokenizer.ggml.mergez"), "its tokenizer is damaged"),
        (key("tokenizer.ggml.tokens"), key("tokenizer.ggml.tokenz"), "its tokenizer is damaged"),
        (key("output_norm.weight"), key("outpux_norm.weight"), "lacks the tensor output_norm"),
        (key("token_embd.weight"), key("token_embx.weight"), "lacks the tensor token_embd"),
        (key(EPSILON), key(f"{EPSILON[:-1]}m"), "attention.layer_norm_rms_epsilon is missing"),
        (*count("attention.key_length", 4, 5), "they must be equal"),
        (*count("block_count", 1, 1000), "too few for 1000 blocks"),
        (*count("embedding_length", 8, 8.0), "n_embd=8.0 must be a whole number"),
    ],
)
def test_gguf_that_describes_another_model_is_refused(sound, tmp_path, before, after, reason):
    content = (sound / "Llama.gguf").read_bytes()
    assert content.count(before) >= 1
    path = tmp_path / "model.gguf"
    path.write_bytes(content.replace(before, after, 1))
    assert reason in refusal(path)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, ("linear", 2.0)),
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scale_linear": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type: 'yarn' is not supported"),
        ({"rope.scaling.type": np.arange(3)}, "is not supported"),
        ({"rope.scaling.factor": np.ones(3)}, "not a single number"),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, "not a single number"),
        ({"rope.scaling.factor": -2.0}, "must be linear and a factor"),
    ],
)
def test_gguf_may_scale_rotations_linearly(sound, monkeypatch, keys, found):
    metadata, tensors = gguf_file.read(sound / "Llama.gguf")
    metadata |= {f"llama.{key}": value for key, value in keys.items()}
    monkeypatch.setattr(gguf_file, "read", lambda _: (metadata, tensors))
    if isinstance(found, str):
        assert found in refusal(sound / "Llama.gguf")
    else:
        model = find_external(sound / "Llama.gguf").model("numpy")
        assert model.config.part_setting("rope_scaling") == found


@pytest.mark.parametrize(
    ("divisors", "found"),
    [
        ([1.0, 1.0], None),
        ([1.0, 8.0], ("llama3", 8.0, 1.0, 4.0)),
        ([2.0, 8.0], ("llama3", 8.0, 1.0, 4.0)),
        ([0.5, 8.0], "does not scale rotations as Llama 3"),
        ([8.0, 1.0], "does not scale rotations as Llama 3"),
        ([1.0, 0.0], "does not scale rotations as Llama 3"),
        ([1.0, -8.0], "does not scale rotations as Llama 3"),
        ([1.0, np.nan], "does not scale rotations as Llama 3"),
        ([1.0, np.inf], "does not scale rotations as Llama 3"),
        ([1.0, 1.0, 8.0], "does not scale rotations as Llama 3"),
    ],
)
def test_divisors_in_gguf_are_those_of_llama_3_or_refused(sound, monkeypatch, divisors, found):
    metadata, tensors = gguf_file.read(sound / "Llama.gguf")
    tensors = {**tensors, "rope_freqs.weight": Stored.of(np.array(divisors, np.float32))}
    monkeypatch.setattr(gguf_file, "read", lambda _: (metadata, tensors))
    if isinstance(found, str):
        assert found in refusal(sound / "Llama.gguf")
        return
    config = find_external(sound / "Llama.gguf").config
    assert (config.part_setting("rope_scaling") or (None,))[:4] == (found or (None,))
    plain = rotary_frequencies(config.rope_theta, config.rotary_channels)
    np.testing.assert_allclose(np.array(plain) / scaled(plain, config), divisors, rtol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize(
    ("key", "neutral", "others"),
    [
        ("attention.scale", [0.0, 0.5], [1.0, 0.25]),  # heads have 4 channels
        ("logit_scale", [0.0, 1.0], [0.5]),
        ("residual_scale", [1.0], [0.22]),
        ("embedding_scale", [1.0], [12.0]),
        ("attention.sliding_window", [0], [64]),
        ("attention.sliding_window_pattern", [np.zeros(3, bool)], [np.ones(3, bool)]),
        ("attention.causal", [True], [False]),
        ("attention.logit_softcapping", [0.0], [50.0]),
        ("attn_logit_softcapping", [0.0], [50.0]),
        ("final_logit_softcapping", [0.0], [30.0]),
        ("attention.clamp_kqv", [0.0], [8.0]),
        ("attention.max_alibi_bias", [0.0], [8.0]),
        ("expert_count", [0], [8]),
        ("expert_used_count", [0], [2]),
        ("rope.scaling.attn_factor", [1.0], [1.2]),
        ("rope.scaling.yarn_beta_fast", [32.0], []),
        ("rope.dimension_sections", [np.zeros(4, np.int32)], [np.arange(4)]),
        ("tensor_data_layout", ["Meta AI original pth"], []),
        ("something.new", [], [0, 1.0, False, "x", "x" * 10_000, []]),
    ],
)
def test_gguf_keys_that_change_the_computation_are_refused(
    sound, monkeypatch, name, key, neutral, others
):
    metadata, tensors = gguf_file.read(sound / f"{name}.gguf")
    for values, is_refused in ((neutral, False), (others, True)):
        for value in values:
            prefix = metadata["general.architecture"]
            changed = {**metadata, f"{prefix}.{key}": value, "other.key": value}
            monkeypatch.setattr(gguf_file, "read", lambda _, changed=changed: (changed, tensors))
            if is_refused:
                message = refusal(sound / f"{name}.gguf")
                assert f"'{key}' is " in message and "may change what the model computes" in message
            else:
                assert find_external(sound / f"{name}.gguf").model("numpy")


def test_every_key_that_the_gguf_package_knows_is_judged(sound, monkeypatch):
    """None passes because nobody has thought of it: a strange value is refused, or harmless."""
    constants = pytest.importorskip("gguf").constants.Keys
    groups = [constants.LLM, constants.Attention, constants.Rope, constants.SSM, constants.WKV]
    names = [name for group in groups for name in vars(group).values() if isinstance(name, str)]
    keys = {name.removeprefix("{arch}.") for name in names if name.startswith("{arch}.")}
    metadata, tensors = gguf_file.read(sound / "Llama.gguf")
    passed = set()
    for key in keys:
        changed = {**metadata, f"llama.{key}": 7}
        monkeypatch.setattr(gguf_file, "read", lambda _, changed=changed: (changed, tensors))
        try:
            find_external(sound / "Llama.gguf").model("numpy")
        except InputError:
            continue
        passed.add(key)
    rope = "freq_base freq_base_swa dimension_count_swa scaling.original_context_length"
    rope += " scaling.factor scaling.finetuned scaling.yarn_beta_fast scaling.yarn_beta_slow"
    harmless = "vocab_size context_length tensor_data_layout decoder_start_token_id pooling_type"
    harmless += " attention.key_length_swa attention.value_length_swa attention.group_norm_epsilon"
    expected = {*harmless.split(), *(f"rope.{name}" for name in rope.split())}
    assert passed == expected | ({"attention.layer_norm_epsilon"} & keys)


def test_a_file_that_only_says_it_is_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 10)
    assert "is not a valid GGUF file: it does not begin with GGUF" in refusal(path)


def read_or_refuse(path):
    try:
        found = find_external(path)
        if found:
            found.load("numpy")
    except InputError as error:
        assert str(error).replace(str(path), "").isprintable()


QUIETLY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@QUIETLY
@given(data=st.data())
def test_any_value_of_any_setting_is_read_or_refused(model, sound, data):
    name = data.draw(st.sampled_from(["Llama", "GPT-2"]))
    config = json.loads((sound / name / "config.json").read_text())
    chosen = data.draw(st.sampled_from([*config, "rope_scaling", "auto_map", "layer_types"]))
    config[chosen] = data.draw(anything)
    (model / "config.json").write_text(json.dumps(config))
    read_or_refuse(model)


@QUIETLY
@given(data=st.data())
def test_any_changed_gguf_file_is_read_or_refused(sound, tmp_path, data):
    content = bytearray((sound / "Llama.gguf").read_bytes())
    changes = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(changes, min_size=1, max_size=4)):
        content[place if data.draw(st.booleans()) else place % 2000] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    read_or_refuse(path)


@QUIETLY
@given(data=st.data())
def test_any_tokenizer_is_read_or_refused(model, data):
    path = model / "tokenizer.json"
    with edited(path) as tokenizer:
        original = json.dumps(tokenizer)
        table = data.draw(st.sampled_from([tokenizer, tokenizer["model"]]))
        table[data.draw(st.sampled_from(list(table)))] = data.draw(anything)
    read_or_refuse(model)
    path.write_text(original)

"""Against transformers itself, where it is installed: its models here, and ours there."""

import json
import logging
import re
import sys

import numpy as np
import pytest

import smallmind
from smallmind.exchange.architectures import architecture_of
from smallmind.exchange.format import padded
from smallmind.exchange.tensors import tensors_of
from smallmind.files import safetensors
from smallmind.kernels.number_types import BFLOAT16, round_to, to_float32
from tests.exchange import chat
from tests.exchange.models import MODELS, ONLY_TRANSFORMERS, TEXT, ids_for, model_of, tokenizer_of
from tests.exchange.weights import SMOLLM2, real
from tests.programs import edited, printed_by, refusal
from tests.text import published

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = TEXT[:40]
pytestmark = pytest.mark.interop
KINDS = "char", "byte", "bpe"
# Sizes that divide nothing, and fewer tokens than rows.
SIZES = {"hidden_size": 36, "intermediate_size": 91, "num_hidden_layers": 3}
LLAMA = {
    **SIZES,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 53,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 48}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
BIASES = {"attention_bias": True, "mlp_bias": True}
NEOX = {
    **{name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
    "rope_parameters": {**LLAMA["rope_parameters"], "partial_rotary_factor": 1 / 3},
}
GPT2 = {"n_embd": 30, "n_inner": 77, "n_layer": 3, "n_head": 5, "n_positions": 37}
GPT2_RATES = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
THEIRS = {
    "GPT-2": ("GPT2", {**GPT2, **GPT2_RATES}, "layer_norm_epsilon"),
    "Llama": ("Llama", {**LLAMA, "head_dim": 10}, "rms_norm_eps"),
    "Llama with biases": ("Llama", {**LLAMA, **BIASES}, "rms_norm_eps"),
    "Qwen3": ("Qwen3", {**LLAMA, "head_dim": 14}, "rms_norm_eps"),
    "Arcee": ("Arcee", LLAMA, "rms_norm_eps"),
    "Llama 3": ("Llama", {**LLAMA, "head_dim": 16, "rope_parameters": LLAMA3}, "rms_norm_eps"),
    "Qwen2": ("Qwen2", LLAMA, "rms_norm_eps"),
    "Qwen2 with windows": ("Qwen2", {**LLAMA, **WINDOWS, "max_window_layers": 2}, "rms_norm_eps"),
    "Qwen3 with windows": (
        "Qwen3",
        {**LLAMA, **WINDOWS, "max_window_layers": 1, "head_dim": 14},
        "rms_norm_eps",
    ),
    "SmolLM3": ("SmolLM3", {**LLAMA, "num_hidden_layers": 5}, "rms_norm_eps"),
    "SmolLM3 with windows": (
        "SmolLM3",
        {**LLAMA, **WINDOWS, "no_rope_layer_interval": 2},
        "rms_norm_eps",
    ),
    "Mistral": ("Mistral", {**LLAMA, "sliding_window": 7}, "rms_norm_eps"),
    "Mistral without windows": ("Mistral", {**LLAMA, "sliding_window": None}, "rms_norm_eps"),
    "Gemma 3": (
        "Gemma3Text",
        {
            **{**LLAMA, "num_hidden_layers": 7, "head_dim": 10, "query_pre_attn_scalar": 7},
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 7000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "rms_norm_eps",
    ),
    "GPT-NeoX": ("GPTNeoX", {**NEOX, "use_parallel_residual": True}, "layer_norm_eps"),
    "GPT-NeoX with a branch after the other": (
        "GPTNeoX",
        {**NEOX, "use_parallel_residual": False},
        "layer_norm_eps",
    ),
    "GPT-Neo": (
        "GPTNeo",
        {
            **{"hidden_size": 36, "intermediate_size": 91, "num_layers": 3, "num_heads": 6},
            **{"max_position_embeddings": 37, "window_size": 9},
            "attention_types": [[["global", "local", "local"], 1]],
        },
        "layer_norm_epsilon",
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


@pytest.fixture
def messages():
    """Collects the messages that transformers logs as a warning or worse."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids.astype(np.int64))).logits.float().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [*MODELS, *ONLY_TRANSFORMERS])
def test_transformers_runs_our_models(tmp_path, messages, name, tied, kind):
    tokenizer = tokenizer_of(kind)
    model = model_of(name, tokenizer, tied, block_size=256)
    smallmind.export(model, tokenizer, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    # For Qwen2 the other class takes its tokenizer, whatever the files say.
    is_qwen2 = name.startswith("Qwen2")
    kind = transformers.PreTrainedTokenizerFast if is_qwen2 else transformers.AutoTokenizer
    their_tokenizer = kind.from_pretrained(tmp_path / "model")
    ids = ids_for(model)[:, :64]
    np.testing.assert_allclose(logits_of(theirs, ids), model.forward(ids), rtol=0, atol=1e-4)
    encoded = their_tokenizer(PROMPT).input_ids
    assert encoded == tokenizer.encode(PROMPT).tolist()
    assert their_tokenizer.eos_token_id == theirs.config.eos_token_id
    tokens = theirs.generate(torch.tensor([encoded]), max_new_tokens=200, do_sample=False)[0]
    assert len(tokens) == len(encoded) + 200 or int(tokens[-1]) == tokenizer.end_of_text
    ours = smallmind.generate(model, tokenizer, PROMPT, max_tokens=200, temperature=0)
    assert their_tokenizer.decode(tokens, skip_special_tokens=True) == ours
    assert messages == []


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_transformers_reads_published_tokenizers_that_were_here(tmp_path, messages, name):
    tokenizer = padded(smallmind.Tokenizer.from_json(published.file_of(name)), 640)
    model = model_of("Llama", tokenizer, block_size=4096)
    smallmind.export(model, tokenizer, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    original = published.theirs_of(name)
    text = f"{published.TEXT[-3000:]}{published.TURN}  12{published.CALL}\n"
    ids = tokenizer.encode(text).tolist()
    assert original.encode(text, add_special_tokens=False).ids == ids
    begun = tokenizer.prompt(text).tolist()
    assert original.encode(text).ids == begun == theirs(text).input_ids
    assert len(begun) - len(ids) == (name == "Llama 3")
    assert theirs.decode(ids) == tokenizer.decode(ids)
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert len(theirs) == tokenizer.vocab_size == 640
    assert messages == []


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_transformers_reads_16_bit_weights(tmp_path, type):
    tokenizer = tokenizer_of("char")
    model = model_of("Llama", tokenizer)
    smallmind.export(model, tokenizer, tmp_path / "model", type=type)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.dtype == {"f16": torch.float16, "bf16": torch.bfloat16}[type]
    found, _ = smallmind.load(tmp_path / "model", "numpy")
    ids = ids_for(model)
    theirs = theirs.to(torch.float32)
    np.testing.assert_allclose(logits_of(theirs, ids), found.forward(ids), rtol=0, atol=1e-4)


def their_model(name, tied=True, epsilon=1e-5, rows=0, **changes):
    """A model that transformers made, with weights that make each of its parts matter."""
    kind, fields, key = THEIRS[name]
    config = getattr(transformers, f"{kind}Config")(
        **{**fields, **changes, key: epsilon},
        vocab_size=tokenizer_of("bpe").vocab_size + rows,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    heads = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    model = getattr(transformers, heads.get(kind, f"{kind}ForCausalLM"))(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def saved(tmp_path, model, **options):
    model.save_pretrained(tmp_path / "theirs", **options)
    tokenizer_of("bpe").save(tmp_path / "theirs" / "tokenizer.json")
    return tmp_path / "theirs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", THEIRS)
def test_models_of_transformers_run_here(tmp_path, name, tied, epsilon, dtype):
    model = their_model(name, tied, epsilon, rows=7).to(getattr(torch, dtype))
    shards = {"max_shard_size": "30KB"} if dtype == "bfloat16" else {}
    path = saved(tmp_path, model, **shards)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (dtype == "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours, _ = smallmind.load(path, "numpy")
    ids = ids_for(ours)[:, :37]
    np.testing.assert_allclose(ours.forward(ids), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", THEIRS)
def test_fine_tuning_follows_torch(tmp_path, name, tied, epsilon):
    model = their_model(name, tied, epsilon)
    ours, _ = smallmind.load(saved(tmp_path, model), "numpy")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    their_optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    optimizer = smallmind.AdamW(ours, learning_rate=1e-3, weight_decay=0.1)
    tokens = tokenizer_of("bpe").encode(TEXT)
    random = np.random.default_rng(3)
    losses, their_losses = [], []
    for _ in range(20):
        starts = random.integers(0, len(tokens) - 33, 4)
        ids = np.stack([tokens[start : start + 32] for start in starts])
        targets = np.stack([tokens[start + 1 : start + 33] for start in starts])
        losses.append(ours.loss_and_gradients(ids, targets))
        optimizer.step(max_grad_norm=1.0)
        logits = model(torch.tensor(ids.astype(np.int64))).logits
        wanted = torch.tensor(targets.astype(np.int64).reshape(-1))
        loss = torch.nn.functional.cross_entropy(logits.reshape(len(wanted), -1), wanted)
        their_losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        their_optimizer.step()
        their_optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, their_losses, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_long_texts_have_their_logits_and_gradients(tmp_path, name):
    """Before, at and past the end of a window of 512 tokens."""
    context = "n_positions" if name == "GPT-2" else "max_position_embeddings"
    windows = [key for key in ("sliding_window", "window_size") if THEIRS[name][1].get(key)]
    model = their_model(name, **{context: 1500}, **dict.fromkeys(windows, 512))
    ours, _ = smallmind.load(saved(tmp_path, model))
    tokens = np.random.default_rng(1).integers(0, ours.config.vocab_size, (1, 1501), np.int32)
    for length in (1, 2, 511, 512, 513, 1500):
        wanted = logits_of(model, tokens[:, :length])
        found = ours.forward(tokens[:, :length])
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max(), length
    ours.loss_and_gradients(tokens[:, :-1], tokens[:, 1:])
    logits = model(torch.tensor(tokens[:, :-1].astype(np.int64))).logits[0]
    wanted = torch.tensor(tokens[0, 1:].astype(np.int64))
    torch.nn.functional.cross_entropy(logits, wanted).backward()
    theirs = {name: x.grad.numpy() for name, x in model.named_parameters()}
    layout = architecture_of(ours.config).tensors
    for tensor in tensors_of(ours.config, layout):
        gradient = tensor._replace(offset=0.0).of(ours.gradients[tensor.parameter])
        wanted = theirs[tensor.name]
        assert np.abs(gradient - wanted).max() < 1e-4 * np.abs(wanted).max(), tensor.name


def test_a_model_goes_there_and_back_and_there(tmp_path):
    """A model that transformers has saved again is read again, with the same logits."""
    tokenizer = tokenizer_of("bpe")
    model = model_of("Qwen3", tokenizer)
    smallmind.export(model, tokenizer, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    their_tokenizer.save_pretrained(tmp_path / "theirs")
    found, same = smallmind.load(tmp_path / "theirs", "numpy")
    ids = ids_for(model)
    np.testing.assert_array_equal(found.forward(ids), model.forward(ids))
    assert same.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    again = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert again["model_type"] == "qwen3"


MESSAGES = [{"role": "user", "content": "The cat?"}, {"role": "assistant", "content": "A 12!"}]


@pytest.mark.parametrize("has_own_file", [True, False])
@pytest.mark.parametrize("name", chat.ENDS)
def test_a_chat_model_that_was_here_is_used_as_before(tmp_path, name, has_own_file):
    source = chat.made(tmp_path / "source", name, has_own_file)
    with edited(source / "tokenizer_config.json") as config:
        del config["auto_map"]  # transformers would ask whether to execute it
    run = smallmind.Run.import_model(source, tmp_path / "run")
    run.export(tmp_path / "hf")
    run.export(tmp_path / "model.gguf", "gguf")
    again = smallmind.Run.import_model(tmp_path / "model.gguf", tmp_path / "again")
    again.export(tmp_path / "gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    text = TEXT[:50] + chat.ENDS[name][1]
    for place in ("hf", "gguf"):
        ours = transformers.AutoTokenizer.from_pretrained(tmp_path / place)
        for options in ({"tokenize": False}, {"add_generation_prompt": True}):
            wanted = theirs.apply_chat_template(MESSAGES, **options)
            assert ours.apply_chat_template(MESSAGES, **options) == wanted
        assert ours(text).input_ids == theirs(text).input_ids
        # GGUF cannot say that nothing begins a text.
        begins = ("bos_token_id",) if place == "hf" or chat.ENDS[name][0] else ()
        for key in (*begins, "eos_token_id", "pad_token_id"):
            assert getattr(ours, key) == getattr(theirs, key)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert ours.model_max_length == theirs.model_max_length == 8192
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(path).generation_config.to_dict()
        for path in (source, tmp_path / "hf")
    )
    assert before == after


def sent(path, name, tied, says_tied):
    """Writes a model whose config says something else about its head -> it."""
    model = model_of(name, tokenizer := tokenizer_of("bpe"), tied)
    smallmind.export(model, tokenizer, path)
    with edited(path / "config.json") as config:
        config["tie_word_embeddings"] = says_tied
    return model


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen3"])
def test_a_head_counts_although_the_config_says_that_it_is_tied(tmp_path, name):
    """So it does in transformers, which compares the two and warns."""
    path = tmp_path / "model"
    model = sent(path, name, tied=False, says_tied=True)
    with pytest.warns(UserWarning, match="lm_head.weight is not the embedding") as warned:
        run = smallmind.Run.import_model(path, tmp_path / "run")
    assert len(warned) == 1
    found = run.load(backend="numpy")[0]
    assert not found.config.tie_weights and not run.settings.model.tie_weights
    ids = ids_for(model)[:, :40]
    np.testing.assert_array_equal(found.forward(ids), model.forward(ids))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    np.testing.assert_allclose(logits_of(theirs, ids), found.forward(ids), rtol=0, atol=1e-4)


def test_a_head_that_repeats_the_embedding_is_no_head_of_its_own(tmp_path):
    model = model_of("Llama", tokenizer := tokenizer_of("bpe"))
    smallmind.export(model, tokenizer, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors, metadata = safetensors.read(file)
    repeated = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    safetensors.write(file, repeated, metadata)
    assert smallmind.load(tmp_path / "model", "numpy")[0].config.tie_weights


def test_a_head_in_place_of_the_embedding_is_both(tmp_path):
    """So it is in transformers, which ties them whichever of the two is in the file."""
    model = sent(tmp_path / "model", "Llama", tied=True, says_tied=True)
    file = tmp_path / "model" / "model.safetensors"
    tensors, metadata = safetensors.read(file)
    tensors = {**tensors, "lm_head.weight": tensors.pop("model.embed_tokens.weight")}
    safetensors.write(file, tensors, metadata)
    ids = ids_for(model)[:, :40]
    found = smallmind.load(tmp_path / "model", "numpy")[0]
    np.testing.assert_array_equal(found.forward(ids), model.forward(ids))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(logits_of(theirs, ids), found.forward(ids), rtol=0, atol=1e-4)


def test_a_pickle_is_converted_as_its_refusal_says(tmp_path):
    theirs = their_model("Llama")
    path = saved(tmp_path, theirs)
    wanted = smallmind.load(path, "numpy")[0]
    (path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), path / "pytorch_model.bin")
    message = refusal(smallmind.load, path, "numpy")
    (code,) = re.findall('in its directory: python -c "([^"]+)"', message)
    printed_by([sys.executable, "-c", code], cwd=path)
    found = smallmind.load(path, "numpy")[0]
    ids = ids_for(wanted)
    np.testing.assert_array_equal(found.forward(ids), wanted.forward(ids))


@pytest.mark.slow
def test_a_real_chat_model_is_the_same_in_any_form(tmp_path):
    """A GGUF file, and what transformers makes of it: whole or in shards, in 32 or 16 bits."""
    file = real(SMOLLM2)
    found, tokenizer = smallmind.load(file, precision="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = their_tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    wanted = logits_of(theirs, np.array([ids]))
    limit = 1e-5 * np.abs(wanted).max()
    assert np.abs(found.forward(np.array([ids], np.int32)) - wanted).max() < limit
    del theirs.config.quantization_config  # it would save no model that comes from GGUF
    plain = transformers.AutoModelForCausalLM.from_config(theirs.config)
    plain.load_state_dict(theirs.state_dict())
    for dtype, shards in (("float32", {}), ("bfloat16", {"max_shard_size": "60MB"})):
        path = tmp_path / dtype
        plain.to(getattr(torch, dtype)).save_pretrained(path, **shards)
        their_tokenizer.save_pretrained(path)
        again, same = smallmind.load(path, precision="float32")
        for name, values in found.parameters.items():
            rounded = to_float32(round_to(values, BFLOAT16)) if shards else values
            np.testing.assert_array_equal(again.parameters[name], rounded, name)
        chat = smallmind.Chat(again, same, temperature=0, max_tokens=20)
        assert chat.say(asked[0]["content"]) == "The capital of France is Paris."
        assert chat.ended == "end" and same.ends == tokenizer.ends

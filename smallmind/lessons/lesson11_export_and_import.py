# %% [markdown]
# # Export and import
#
# A model that only its own program can run is of little use. After this lesson you will be able to
#
# - export a model for Hugging Face's transformers and for llama.cpp, and import it again;
# - read both file formats yourself, with the standard library and NumPy alone, and run the model
#   from what you have read;
# - say what a program must know besides the weights, and where two programs that run "the same
#   architecture" still differ;
# - explain what quantised weights are, and what they cost.
#
# Nothing is downloaded. Where transformers or llama.cpp are installed, the lesson runs the model in
# them; otherwise it says so and continues.
#
# **Before:** lesson 1; lesson 4 for tokens, lesson 9 for rotary positions. **Time:** 70 minutes;
# the code runs for 12 seconds.

# %%
import importlib.util
import io
import json
import os
import pickle
import struct
import tempfile
import urllib.request
import warnings
from pathlib import Path

import numpy as np

import smallmind
from smallmind.charts.histogram import histogram
from smallmind.files import safetensors
from smallmind.kernels import number_types
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw

smallmind.set_threads(1)
FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
HERE = Path(FOLDER.name)

# %% [markdown]
# ## 1. What another program must know
#
# A trained model is a pile of numbers. To compute the same logits, another program needs
#
# 1. **the numbers**, each array with its name, its shape, and its type;
# 2. **the architecture**: which layers there are, in which order, how many heads, which norm, which
#    activation, the base of the rotary positions, the epsilon of the norms;
# 3. **the tokenizer**: which text each token stands for, and how a text is cut into tokens.
#
# If any of it is slightly different, the program does not fail. It computes something else.
#
# What should a file for this look like? For years the answer was `torch.save`, which writes a
# Python pickle. But a pickle is not data. It is a small program that builds the data, and it can
# call any function when it is read:


# %%
class Harmless:
    """Looks like a weight. Unpickling it calls a function of the author's choice."""

    def __reduce__(self):
        return print, ("  this line was printed by a file",)


print("Loading a pickle:")
pickle.loads(pickle.dumps(Harmless()))

# %% [markdown]
# It could have been `os.system`. This is why there are two formats that hold nothing but data:
# **safetensors**, which Hugging Face uses, and **GGUF**, the format of llama.cpp.
#
# ## 2. A model to export
#
# Only models of a published architecture can be exported, since the other program has to know what
# to do with the numbers. The default recipe makes a Qwen3; without norms of queries and keys,
# `qk_norm=False`, it is a Llama. We train one with two layers on the built-in stories.

# %%
run = smallmind.Run.create(
    out=HERE / "run",
    tokenizer="bpe",
    bpe_vocab_size=400,
    n_layer=2,
    n_embd=64,
    n_head=4,
    block_size=64,
    steps=300,
    val_every=0,
    qk_norm=False,
    optimizer="adamw",
    precision="float32",
    threads=1,
)
run.train()
model, tokenizer = run.load()
PROMPT = "A kind girl"
TEXT = smallmind.generate(model, tokenizer, PROMPT, max_tokens=40, temperature=0)
print(f"{model.config.architecture}, {model.flat.data.size:,} parameters. It writes:\n{TEXT}")

# %% [markdown]
# `served = run.serve()` serves it to other programs in the way of OpenAI's API, and to you: in a
# notebook a cell with `served` shows a page to talk to the run, and how likely each token was. It
# needs `pip install "smallmind[serve]"`, and ends with `served.stop()`.
#
# A model with parts that no published architecture has cannot be exported, and the error says which
# parts they are:

# %%
peculiar = smallmind.TransformerModel(tokenizer.vocab_size, 64, 64, 2, 4, value_residual=True)
try:
    smallmind.export(peculiar, tokenizer, HERE / "peculiar")
except smallmind.InputError as error:
    print(error)

# %% [markdown]
# ## 3. A Hugging Face directory
#
# `smallmind export RUN --to hf DIR` does this on the command line.

# %%
run.export(HERE / "hf")  # smallmind.export(model, tokenizer, path) for a model without a run
for path in sorted((HERE / "hf").iterdir()):
    print(f"{path.stat().st_size:9,} bytes  {path.name}")

CONFIG = json.loads((HERE / "hf" / "config.json").read_text(encoding="utf-8"))
print("\nconfig.json:")
for key in ("model_type", "hidden_size", "num_attention_heads", "rms_norm_eps", "rope_theta"):
    print(f"  {key}: {CONFIG[key]}")

# %% [markdown]
# Three files, one for each item of section 1: `model.safetensors` holds the numbers, `config.json`
# the architecture and `tokenizer.json` the tokenizer. (The others say how to generate text, and
# tell people what the model is.)
#
# A **safetensors** file has three parts:
#
#     8 bytes       the length of the header, an unsigned integer, little-endian
#     the header    JSON: for each tensor its dtype, its shape, and where its bytes begin and end
#     the tensors   their bytes, row by row, one tensor after the other
#
# The offsets count from the end of the header. That is the whole format, so reading it takes ten
# lines.

# %%
DTYPES = {"F32": "<f4", "F16": "<f2"}  # little-endian, as NumPy calls them


def read_safetensors(path):
    """-> the tensors by name, and the metadata, texts by name."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = content[8 + length :]
    tensors = {}
    for name, described in header.items():
        begin, end = described["data_offsets"]
        values = np.frombuffer(data[begin:end], DTYPES[described["dtype"]])
        tensors[name] = values.reshape(described["shape"])
    return tensors, metadata


TENSORS, metadata = read_safetensors(HERE / "hf" / "model.safetensors")
for name in list(TENSORS)[:10]:
    print(f"{name:48} {TENSORS[name].shape}")

# %% [markdown]
# Compare that with the parameters of the model here. The numbers are the same, but
#
# - the names are those of transformers;
# - matrices are transposed: there, a linear layer computes x W^T with W (out, in); here it computes
#   x W with W (in, out);
# - queries, keys and values have three matrices; here these are side by side in one.

# %%
ours = model.parameters["blocks.0.attention.qkv.weight"]
names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
theirs = np.concatenate([TENSORS[name].T for name in names], axis=1)
print(f"ours {ours.shape}, theirs three times {TENSORS[names[0]].shape}")
print("the same numbers:", np.array_equal(ours, theirs))

# %% [markdown]
# ## 4. Running it from the file
#
# Do these files hold all that a program needs? Here is a Llama in NumPy that knows `config.json`
# and the tensors, and nothing of smallmind. Each line is a definition:
#
#     norm        x / sqrt(mean(x^2) + epsilon) * weight
#     attention   softmax(q k^T / sqrt(D)) v, for each head, looking back only
#     rope        before that, q and k of position t are rotated: the channels i and i + D/2 of a
#                 head, taken as a point in the plane, by the angle t * theta^(-2i / D)
#     MLP         (silu(x W_gate^T) * (x W_up^T)) W_down^T, with silu(z) = z / (1 + e^-z)


# %%
def norm(x, weight):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x):
    """x (H, T, D): each head of each position, rotated."""
    T, D = x.shape[1:]
    angles = np.arange(T)[:, None] * CONFIG["rope_theta"] ** (-2 * np.arange(D // 2) / D)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def llama(ids, weights):
    """ids (T,) -> logits (T, V)."""
    T, H, D = len(ids), CONFIG["num_attention_heads"], CONFIG["head_dim"]
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(CONFIG["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
        }
        y = norm(x, own["input_layernorm"])
        q, k, v = (
            (y @ own[f"self_attn.{kind}_proj"].T).reshape(T, H, D).swapaxes(0, 1) for kind in "qkv"
        )
        scores = rotate(q) @ rotate(k).swapaxes(1, 2) / np.sqrt(D)
        future = np.triu(np.ones((T, T), bool), 1)
        heads = softmax(np.where(future, -np.inf, scores)) @ v
        x = x + heads.swapaxes(0, 1).reshape(T, H * D) @ own["self_attn.o_proj"].T
        y = norm(x, own["post_attention_layernorm"])
        gate = y @ own["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


IDS = tokenizer.encode(TEXT)[:64]
LOGITS = model.forward(IDS[None])[0]
difference = np.abs(llama(IDS, TENSORS) - LOGITS).max()
print(f"largest difference between the logits, which go up to {LOGITS.max():.1f}: {difference:.1e}")
assert difference < 1e-3

# %% [markdown]
# The only difference is rounding, from sums in another order. Some forty lines run the model: what
# took effort, the training, is all in the numbers.
#
# ## 5. A GGUF file
#
# llama.cpp wants everything in **one** file. GGUF begins with its name and three numbers, then
# comes the metadata (architecture *and* tokenizer, under fixed keys), then the list of tensors,
# then their bytes:
#
#     "GGUF", version (4 bytes), number of tensors (8), number of keys (8)
#     per key       its name, the number of its type (4 bytes), its value
#     per tensor    its name, number of dimensions (4), sizes (8 each), type (4), offset (8)
#     padding       to a multiple of 32 bytes, also after each tensor
#     the tensors   each at its offset, counted from the end of that padding
#
# A text is its length (8 bytes) and its bytes in UTF-8. A list is the type of its elements (4),
# their number (8), and the elements. Sizes come in reverse order, the number of columns first.

# %%
run.export(HERE / "model.gguf", to="gguf")

NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, LIST = 8, 9
F32, Q8_0 = 0, 8  # types of tensors


def read_gguf(path):
    """-> the metadata by key; and of each tensor its shape, the number of its type, its bytes."""
    content = path.read_bytes()
    file = io.BytesIO(content)

    def number(code):
        return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]

    def string():
        return file.read(number("Q")).decode("utf-8")

    def value(kind):
        if kind == STRING:
            return string()
        if kind == LIST:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return number(NUMBERS[kind])

    assert file.read(4) == b"GGUF" and number("I") == 3
    n_tensors, n_keys = number("Q"), number("Q")
    metadata = {}
    for _ in range(n_keys):
        key = string()
        metadata[key] = value(number("I"))
    described = []
    for _ in range(n_tensors):
        name = string()
        sizes = [number("Q") for _ in range(number("I"))]
        described.append((name, tuple(sizes[::-1]), number("I"), number("Q")))
    start = -(-file.tell() // 32) * 32  # rounded up
    ends = [offset for *_, offset in described[1:]] + [len(content) - start]
    return metadata, {
        name: (shape, kind, content[start + offset : start + end])
        for (name, shape, kind, offset), end in zip(described, ends, strict=True)
    }


METADATA, STORED = read_gguf(HERE / "model.gguf")
for key in ("general.architecture", "llama.block_count", "llama.rope.freq_base"):
    print(f"{key}: {METADATA[key]}")
for key in ("tokens", "merges"):
    found = METADATA[f"tokenizer.ggml.{key}"]
    print(f"tokenizer.ggml.{key}: {len(found)}, the last ones {found[-4:-1]}")
for name in list(STORED)[:4]:
    print(f"{name:24} {STORED[name][0]}, type {STORED[name][1]}")


def gguf_tensor(name):
    """Returns a float32 tensor of the file."""
    shape, kind, data = STORED[name]
    assert kind == F32
    return np.frombuffer(data, "<f4", np.prod(shape)).reshape(shape)


# %% [markdown]
# ## 6. The same, and not the same
#
# Are these the same tensors, under other names? Most of them are. The queries and keys are not:

# %%
PAIRS = {
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
}
for key, name in PAIRS.items():
    ours, theirs = gguf_tensor(key), TENSORS[name]
    same_rows = sorted(map(tuple, ours)) == sorted(map(tuple, theirs))
    print(
        f"{key:22} equal: {np.array_equal(ours, theirs)}, the same rows in some order: {same_rows}"
    )

# %% [markdown]
# The reason is rope. It rotates channels in pairs, and there are two conventions for which channels
# form a pair. transformers takes i and i + D/2, the two halves of a head; llama.cpp, for a Llama,
# takes neighbours, 2i and 2i + 1, as in the original paper.
#
# Neither is more correct. Attention uses q and k only in dot products, the sum of `q_i k_i` over
# all channels i. The order of the channels does not matter there, as long as q and k have the
# *same* order. So we may reorder the rows of W_q and W_k, head by head, so that the channels that
# belong together become neighbours: then llama.cpp rotates the same pairs by the same angles, and
# every score stays the same. Exercise 2 asks you to do that.
#
# This is how things go wrong between programs: with the rows in the wrong order, all shapes fit and
# nothing fails, but the model predicts much worse, and what it writes falls apart.
#
# ## 7. Fewer bits
#
# A trained model can do with fewer bits than training needs. GGUF offers many types; the simplest
# of the small ones is q8_0. It cuts each row into blocks of 32 numbers and stores, for each block,
# one float16 d and 32 integers n from -127 to 127:
#
#     x is stored as n = round(x / d), with d = max |x| / 127 of the block; it is read as n * d
#
# That is 34 bytes for 32 numbers, 8.5 bits each. The error is at most about d / 2, so 1/254 of the
# largest number in the block. A single scale for a whole matrix would be cheaper still, but then a
# single large weight would cost all others their precision.

# %%
held_out = run.data.held_out[:2049]
ids, targets = held_out[:-1].reshape(-1, 64), held_out[1:].reshape(-1, 64)
print("type    bytes      largest error   loss on held-out text")
for kind in ("f32", "f16", "bf16", "q8_0"):
    path = HERE / f"{kind}.gguf"
    run.export(path, to="gguf", type=kind)
    read, _ = smallmind.load(path)
    largest = np.abs(read.flat.data - model.flat.data).max()
    print(f"{kind:6} {path.stat().st_size:8,} {largest:14.1e} {read.loss(ids, targets):15.4f}")
layer = "model.layers.0."
shown = {
    name: TENSORS[f"{layer}{name}.weight"].ravel() for name in ("self_attn.q_proj", "mlp.down_proj")
}
draw("lesson11_weights", histogram("Weights of two matrices", shown, "weight", bins=60))

# %% [markdown]
# The picture shows why it works: nearly all weights are small, and of a similar size.
#
# About a quarter of the size, and the loss hardly changes. (Weights of 4 bits cost more, and are
# still worth it for large models: to write a token, a program has to read every weight, so fewer
# bits are also faster.)
#
# ## 8. In the other programs
#
# Now the real ones, if they are installed (`python -m pip install -e ".[interop]"` installs both).

# %%
os.environ["HF_HUB_OFFLINE"] = "1"  # transformers does not look for anything on the internet


def is_installed(*modules):
    return all(importlib.util.find_spec(module) for module in modules)


if is_installed("torch", "transformers"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages warn about is not our subject
        import torch
        import transformers

        transformers.logging.disable_progress_bar()
        their_tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / "hf")
        their_model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "hf")
        their_ids = their_tokenizer(TEXT, return_tensors="pt").input_ids[:, :64]
        with torch.no_grad():
            their_logits = their_model(their_ids).logits[0].numpy()
        assert their_ids[0].tolist() == IDS.tolist()
        print(
            f"transformers made a {type(their_model).__name__}. It reads the same tokens, and its"
        )
        print(f"logits differ by at most {np.abs(their_logits - LOGITS).max():.1e}.")
else:
    print("transformers is not installed: skipped")

# %% [markdown]
# llama.cpp is a C++ program. The package xllamacpp contains it, as a small web server that listens
# on this machine only.

# %%
if is_installed("xllamacpp"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(HERE / "model.gguf")
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = 64, 1, 0
        settings.warmup, settings.fit_params, settings.verbosity = False, False, 0
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(settings)
        question = {"prompt": PROMPT, "n_predict": 40, "temperature": 0}
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            written = PROMPT + json.load(answer)["content"]
        del server
    print(f"llama.cpp writes:\n{written}\nthe same as smallmind: {written == TEXT}")
else:
    print("xllamacpp, which contains llama.cpp, is not installed: skipped")

# %% [markdown]
# ## 9. And back
#
# The way back is the same translation in reverse. `smallmind.load` reads either format;
# `Run.import_model` makes it a run, which can generate, evaluate, and be the start of another one
# (`Run.create(text, init_from=...)` fine-tunes it). Nothing in the files is executed.

# %%
for source in (HERE / "hf", HERE / "model.gguf"):
    imported = smallmind.Run.import_model(source, HERE / f"from-{source.stem}")
    read, read_tokenizer = imported.load()
    assert np.array_equal(read.flat.data, model.flat.data)
    assert smallmind.generate(read, read_tokenizer, PROMPT, max_tokens=40, temperature=0) == TEXT
    print(
        f"from {source.name}: the same {read.flat.data.size:,} weights, bit by bit; the same text"
    )

# %% [markdown]
# ## Exercises
#
# ### Exercise 1: write safetensors
#
# Write `write_safetensors(path, tensors)`, the reverse of `read_safetensors`, for float32 arrays.
# Write the tensors in the order in which they come, without gaps. Note that an array is not always
# stored row by row: `x.T` is only a view of the bytes of `x`.


# %%
def write_safetensors(path, tensors):
    raise NotImplementedError


def check_write_safetensors(candidate):
    random = np.random.default_rng(0)
    a = random.standard_normal((3, 5)).astype(np.float32)
    b, c = np.array([7.0], np.float32), random.random((2, 3, 4), np.float32)
    tensors: dict[str, np.ndarray] = {"a": a, "b": b, "a.T": a.T, "ü": c}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        candidate(path, tensors)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length <= len(content) - 8, (
            f"the first 8 bytes say that the header has {length:,} bytes, and the file has only "
            f"{len(content):,}: are they little-endian?"
        )
        try:
            header = json.loads(content[8 : 8 + length])
        except ValueError as error:
            raise AssertionError(f"bytes 8 to {8 + length} are not JSON: {error}") from None
        end = 0
        for name, tensor in tensors.items():
            assert name in header, f"the header has no {name!r}, but {sorted(header)}"
            found = header[name]
            assert found.get("dtype") == "F32", f"the dtype of {name!r} is {found.get('dtype')!r}"
            assert found.get("shape") == list(tensor.shape), (
                f"the shape of {name!r} is {found.get('shape')}, not {list(tensor.shape)}"
            )
            wanted = [end, end + tensor.nbytes]
            assert found.get("data_offsets") == wanted, (
                f"the offsets of {name!r} are {found.get('data_offsets')}, not {wanted}: they "
                "count from the end of the header"
            )
            end += tensor.nbytes
        rest = len(content) - 8 - length
        assert rest == end, f"after the header come {rest} bytes; the tensors have {end}"
        read, _ = read_safetensors(path)
        for name, tensor in tensors.items():
            assert np.array_equal(read[name], tensor), (
                f"{name!r} is read with other values: its bytes must be written row by row"
            )
        safetensors.read(path)  # the package agrees


print("Exercise 1:", judge(lambda: check_write_safetensors(write_safetensors)))

# %% [markdown]
# ### Exercise 2: neighbours
#
# `rows` is W_q or W_k as transformers has it, (H D, C): the D rows of the first head, then those of
# the second, and so on. In each head, row i and row i + D/2 belong together. Return it as llama.cpp
# wants it, where they are the rows 2i and 2i + 1 of the same head.


# %%
def as_neighbours(rows, H):
    raise NotImplementedError


def check_as_neighbours(candidate):
    H, D = 2, 6
    rows = np.arange(H * D, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    found = np.asarray(candidate(rows, H))
    assert found.shape == rows.shape, f"the shape must stay {rows.shape}; it is {found.shape}"
    order = found[:, 0].astype(int).tolist()
    assert sorted(order) == list(range(H * D)), f"rows are missing or doubled: {order}"
    assert order != rows[:, 0].tolist(), "the rows are in the order in which they came"
    assert set(order[:D]) == set(range(D)), f"a row has left its head of {D}: the order is {order}"
    assert order[0] == 0 and order[1] == D // 2, (
        f"rows 0 and {D // 2} belong together, so they come first; the order is {order}"
    )
    for name in ("q", "k"):
        theirs = TENSORS[f"model.layers.0.self_attn.{name}_proj.weight"]
        ours = np.asarray(candidate(theirs, CONFIG["num_attention_heads"]))
        assert np.array_equal(ours, gguf_tensor(f"blk.0.attn_{name}.weight")), (
            f"applied to {name}_proj, it is not attn_{name} of the GGUF file; with 2 heads of 6 "
            f"rows the order is {order}"
        )


print("Exercise 2:", judge(lambda: check_as_neighbours(as_neighbours)))

# %% [markdown]
# ### Exercise 3: read q8_0
#
# Each block of 34 bytes is a float16 d, little-endian, and 32 signed integers of 8 bits. Given the
# bytes of a tensor, return its values, (number of blocks, 32), float32.


# %%
def read_q8_0(data):
    raise NotImplementedError


def check_read_q8_0(candidate):
    def values(*blocks):
        packed = (struct.pack("<e32b", d, *integers) for d, integers in blocks)
        found = np.asarray(candidate(b"".join(packed)))
        assert found.shape == (len(blocks), 32), (
            f"the shape is {found.shape}, not {len(blocks), 32}"
        )
        assert found.dtype == np.float32, f"return float32, not {found.dtype}"
        return found

    found = values((0.5, range(32)))
    assert found[0, 1] == 0.5, f"d = 0.5 and the integer 1 make 0.5, not {found[0, 1]}"
    assert np.array_equal(found[0], 0.5 * np.arange(32)), f"the block reads {found[0]}"
    found = values((1.0, range(-32, 0)))
    assert found[0, 0] == -32, f"d = 1 and the integer -32 make {found[0, 0]}: they are signed"
    found = values((1.0, [1] * 32), (2.0, [1] * 32))
    assert found[1, 0] == 2, "the second block has a scale of its own"
    weights = TENSORS["model.layers.0.mlp.up_proj.weight"]
    stored = number_types.round_to(weights, number_types.DTYPES["q8_0"])
    read = np.asarray(candidate(stored.tobytes())).reshape(weights.shape)
    largest = np.abs(weights).max()
    assert np.abs(read - weights).max() <= largest / 200, (
        f"a matrix of this model is off by {np.abs(read - weights).max():.2g}, with weights up to "
        f"{largest:.2g}"
    )


print("Exercise 3:", judge(lambda: check_read_q8_0(read_q8_0)))

# %%
FOLDER.cleanup()

# %% [markdown]
# ## Where to read on
#
# - safetensors: https://github.com/huggingface/safetensors, "Format", half a page.
# - GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the specification, with the
#   keys of each architecture.
# - Python's documentation of `pickle`, the warning at its top.
# - Su et al. (2021), *RoFormer: Enhanced Transformer with Rotary Position Embedding*,
#   arXiv:2104.09864, section 3: which pairs of channels are rotated, and why.
# - Touvron et al. (2023), *LLaMA: Open and Efficient Foundation Language Models*, arXiv:2302.13971,
#   section 2.2: the architecture that our forty lines run.
# - Dettmers et al. (2022), *LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale*,
#   arXiv:2208.07339: what a few large numbers do to a shared scale.
# - In this package: `settings/architectures.py` (each architecture, described once for all
#   formats), `exchange/gguf_file.py` and `safetensors.py` (the formats, and what can be wrong with
#   a file).
#
# ## What you can do now
#
# You can move a model into and out of the programs that everyone uses, and read their files when
# something does not fit; before, a model was tied to what had made it. Next: lesson 12, *Adapting a
# model*, including one that you have just imported.

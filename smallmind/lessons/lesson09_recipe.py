# %% [markdown]
# # The recipe
#
# After this lesson you know what each part of a modern training recipe does, and why. You can
# measure whether a change helps, and you know how far to trust such a measurement.
#
# **Before:** lesson 1, for the transformer and Adam. **Time:** 55 minutes; the code runs for 30
# seconds.
#
# ## 1. The question
#
# A well-known recipe for small models on a CPU is that of nanoGPT: GPT-2's layers, AdamW with a
# rate of 0.001 that falls along a cosine to a tenth, and gradients clipped to a norm of 1. With 4
# layers of 128 channels it takes 2000 steps to bring the loss on tiny Shakespeare down to 1.88 nats
# per character. The recipe of this package gets there with about a ninth of the text. Why?
#
# We look for the answer at a size that takes a second per run, 2 layers of 64 channels, on the
# built-in stories. The rules:
#
# - one change at a time, and everything else as it was;
# - the same number of steps, the same batches, and the same evaluation for all;
# - we compare *held-out* losses at the end. Times depend on how busy the machine is, and are
#   printed for information only.
#
# A seeded grammar writes the stories, so their entropy is known: no model can get below it.

# %%
from typing import Any

import numpy as np

import smallmind
from smallmind.charts.figure import lines
from smallmind.lessons.pictures import draw
from smallmind.text.stories import ENTROPY_PER_CHARACTER, built_in_text
from smallmind.training.records import EvaluationRecord, StepRecord

STEPS = 100
smallmind.set_threads(1)  # a model this small gains little from a second one
text = built_in_text(300_000)
tokenizer = smallmind.Tokenizer(text)
print(f"Knowing nothing: {np.log(tokenizer.vocab_size):.2f} nats per character")
print(f"The entropy of the stories: {ENTROPY_PER_CHARACTER:.2f}")


def run(parts, rule, steps=STEPS, seed=1):
    """Parts of the model, settings of the training -> the evaluations, the updates."""
    shape = {"block_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = smallmind.TransformerModel(tokenizer.vocab_size, **shape, **parts, seed=seed)
    training = smallmind.Training(model, tokenizer, text, batch_size=12, seed=seed)
    records = training.train(steps, **rule, val_every=min(20, steps), val_batches=5)
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    return evaluations, [record for record in records if isinstance(record, StepRecord)]


# %% [markdown]
# `parts` and `rule` collect the changes so far. The baseline is nanoGPT's recipe, except that its
# warmup is shorter: 100 steps of warmup would be the whole run.

# %%
parts: dict[str, Any] = {}
rule: dict[str, Any] = {"warmup_steps": 10}
curves: dict[str, list[float]] = {}


def try_change(name, new_parts=None, **new_rule):
    """Runs with a change on top of those before, and keeps it."""
    parts.update(new_parts or {})
    rule.update(new_rule)
    evaluations, updates = run(parts, rule)
    before = [curve[-1] for curve in curves.values()][-1:]
    curves[name] = [evaluation.val_loss for evaluation in evaluations]
    loss, ms = curves[name][-1], np.median([update.step_ms for update in updates])
    change = f"({loss - before[0]:+.3f})" if before else ""
    print(f"{name:22} {loss:.3f} {change:8}  {ms:.0f} ms per step")


try_change("nanoGPT's recipe")

# %% [markdown]
# ## 2. The rate, and its end
#
# Near its minimum, the loss is a parabola along each direction: `a w² / 2`, whose gradient is
# `a w`. The step `w - rate * a w` multiplies `w` by `1 - rate * a`. This converges if
# `rate < 2 / a`, and up to `1 / a` a higher rate converges faster. Adam rescales every direction,
# but the trade-off remains: the best rate is not far below the highest one that works. The only way
# to find it is to try. It is higher for small models than for large ones, so settings that come
# from large models are often too cautious.


# %%
try_change("rate 0.004", learning_rate=4e-3)

# %% [markdown]
# But the gradient of a batch is not the gradient of the whole text: it has noise, say of variance
# `s²`. With `a = 1`, a step is `w = (1 - rate) w - rate * noise`. Once the variance of `w` has
# stopped changing, `var = (1 - rate)² var + rate² s²`, hence
#
#     var = s² rate / (2 - rate)
#
# With a constant rate, `w` never settles: its distance from the minimum stays at about
# `s √(rate / 2)`. A lower rate comes closer but takes longer to arrive. So the rate should be high
# for most of the run, and zero at its end.

# %%
random = np.random.default_rng(0)


def distance(rates):
    """Returns the root mean square of 1000 parabolas' w, after one step at each of the rates."""
    w = np.full(1000, 5.0)
    for rate in rates:
        w -= rate * (w + random.standard_normal(w.shape))
    return np.sqrt((w * w).mean())


n = 200
print(f"constant 0.3:    {distance(np.full(n, 0.3)):.3f}, theory {np.sqrt(0.3 / 1.7):.3f}")
print(f"constant 0.01:   {distance(np.full(n, 0.01)):.3f}, which has not even arrived")
print(f"0.3 to a tenth:  {distance(np.linspace(0.3, 0.03, n)):.3f}")
print(f"0.3 to zero:     {distance(np.linspace(0.3, 0, n)):.3f}")
try_change("straight line to zero", schedule="linear", min_lr=0.0)

# %% [markdown]
# So short a run is still far from its minimum, and noise does not limit it yet. Longer runs gain
# more, and it costs nothing, so we keep it.
#
# ## 3. Positions as angles
#
# Attention compares a query with keys by their dot products, and needs to know *how far back* a key
# is. GPT-2 adds a learned vector for each absolute position, and has to learn from examples that
# positions 7 and 9 relate as 37 and 39 do. Rotary embeddings (Su et al. 2021) build that in. Take
# two channels of a query as a complex number, and rotate it by its position times an angle. Do the
# same with keys. Their product then depends on the positions `m` and `n` only by the difference:
#
#     (q e^(i m angle)) · conjugate(k e^(i n angle)) = q · conjugate(k) · e^(i (m - n) angle)
#
# The real part of that is the dot product of the two channels. Each pair of channels has an angle
# of its own, from large ones for neighbours to small ones for distant tokens.

# %%
q, k = random.standard_normal((2, 8)) + 1j * random.standard_normal((2, 8))
angles = 10000.0 ** (-np.arange(8) / 8)


def score(m, n):
    """Returns the dot product of q at position m and k at position n."""
    return ((q * np.exp(1j * m * angles)) @ np.conj(k * np.exp(1j * n * angles))).real


print(f"positions 7 and 9: {score(7, 9):.6f}; 37 and 39: {score(37, 39):.6f}")
distances = np.arange(65)
turned = {f"pair {i}": np.cos(distances * angles[i]) for i in (0, 2, 4)}
draw("lesson09_angles", lines("What a pair adds, by distance", turned, distances, "tokens back"))
try_change("rotary positions", {"position": "rope"})

# %% [markdown]
# ## 4. Norms and gates
#
# **RMSNorm** (Zhang & Sennrich 2019) leaves out the mean of LayerNorm and its shift, and linear
# layers lose their biases. That is less to compute and to export, and should not change the loss
# much either way.
#
# **SwiGLU** (Shazeer 2020) replaces `gelu(x W)` by `silu(x W) * (x U)`. Each hidden channel is the
# product of two functions of `x`: one can switch the other on and off.
#
# **Norms of queries and keys** (Henry et al. 2020). A score is a product of two vectors that both
# grow as their matrices grow. At a high rate scores can become so large that softmax gives one key
# all the weight. Its derivative, `p (1 - p)`, is then zero, and the head no longer learns. If each
# query and key is divided by its root mean square, no score can exceed `√D` (times a learned gain).
#
# **A head of its own.** GPT-2 uses the token vectors as output matrix too. With a matrix of its
# own, either one can have the scale that suits it.

# %%
try_change("RMSNorm, no biases", {"norm": "rmsnorm", "bias": False})
try_change("SwiGLU", {"mlp": "swiglu"})
try_change("norms of q and k", {"qk_norm": True})
try_change("head of its own", {"tie_weights": False})

# %% [markdown]
# Not every one of these lowers the loss, and yet we keep them all: such a list only says what each
# change brings on top of those before it. Section 7 looks from the other end.
#
# ## 5. Muon
#
# Adam treats the elements of a matrix as unrelated numbers. Muon (Jordan et al. 2024) asks what the
# matrix does: it maps inputs to outputs. An update `dW` changes the output for an input of length 1
# by at most the largest singular value of `dW`. Among all updates that change no such output by
# more than the rate, which one lowers the loss most?
#
# Write the gradient as `G = U S Vᵀ`, with singular values `s_i` and vectors `u_i`, `v_i`. The loss
# changes by
#
#     sum of G * dW = sum over i of s_i (u_iᵀ dW v_i)
#
# and no `u_iᵀ dW v_i` can be below `-rate`. All of them are equal to `-rate` for
#
#     dW = -rate U Vᵀ
#
# This is the gradient with all its singular values replaced by 1. The few directions that dominate
# a gradient no longer drown out the others.
#
# Singular values are expensive to compute, but here they need not be known. As `X Xᵀ X = U S³ Vᵀ`,
# an odd polynomial of a matrix acts on each singular value alone, and takes nothing but products.
# Muon applies `3.4445 s - 4.7750 s³ + 2.0315 s⁵` five times (a *Newton-Schulz* iteration), which
# takes anything from 0.01 to 1 close to 1. It does so to a running mean of the gradient.

# %%
from smallmind.kernels.reference_optimizers import newton_schulz

model = smallmind.TransformerModel(tokenizer.vocab_size, 64, 64, 2, 2, **parts)
tokens = tokenizer.encode(text)[: 12 * 64 + 1]
model.loss_and_gradients(tokens[:-1].reshape(12, 64), tokens[1:].reshape(12, 64))
G = model.gradients["blocks.0.mlp.projection.weight"]
chosen = np.array([1, 4, 16, 32, 64])
before, after = (np.linalg.svd(matrix, compute_uv=False) for matrix in (G, newton_schulz(G)))
print("singular value   " + "".join(f"{i:8}" for i in chosen))
print("of the gradient  " + "".join(f"{s:8.3f}" for s in before[chosen - 1] / before[0]))
print("of Muon's update " + "".join(f"{s:8.3f}" for s in after[chosen - 1]))
try_change("Muon", optimizer="muon", learning_rate=1e-2)

# %% [markdown]
# The rate of the hidden matrices is 0.02, a setting of its own; embeddings, the head and gains are
# still left to AdamW, now at 0.01. A step takes longer: the products of the iteration depend on the
# size of the matrices and not on that of the batch, so they weigh less in larger batches.
#
# Clipping scales down a gradient whose norm is above a bound, so that one unusual batch cannot
# throw the weights far off. Muon's update has the same size whatever the gradient's, and needs no
# such protection.

# %%
try_change("no clipping", max_grad_norm=0.0)

# %% [markdown]
# ## 6. Pairs of tokens
#
# The simplest language model counts pairs: which character follows which? A transformer has to
# learn that by gradient descent like anything else. A table with a row for each pair of the last
# two tokens, added to the embedding, lets it look such things up.

# %%
try_change("pairs of tokens", {"bigram_rows": 2**14})

# %% [markdown]
# All curves:

# %%
count = len(curves["Muon"])
print(
    f"{'held-out loss at step':22}"
    + "".join(f"{STEPS * i // count:8}" for i in range(1, count + 1))
)
for name, curve in curves.items():
    print(f"{name:22}" + "".join(f"{loss:8.3f}" for loss in curve))
steps = [STEPS * i // count for i in range(1, count + 1)]
shown = {name: curves[name] for name in ("nanoGPT's recipe", "rotary positions", "Muon")}
shown["all changes"] = curves["pairs of tokens"]
draw("lesson09_losses", lines("Held-out loss", shown, steps))

# %% [markdown]
# ## 7. The other way round
#
# What is each change worth *now*? Take one out of the finished recipe, and leave all others in.

# %%
without: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("learned positions", {"position": "learned"}, {}),
    ("LayerNorm, biases", {"norm": "layernorm", "bias": True}, {}),
    ("GELU", {"mlp": "gelu"}, {}),
    ("squared ReLU", {"mlp": "relu2"}, {}),
    ("q and k as they are", {"qk_norm": False}, {}),
    ("tied head", {"tie_weights": True}, {}),
    ("AdamW", {}, {"optimizer": "adamw", "learning_rate": 4e-3}),
    ("no weight decay", {}, {"weight_decay": 0.0}),
]
final = list(curves.values())[-1][-1]
for name, other_parts, other_rule in without:
    evaluations, _ = run(parts | other_parts, rule | other_rule)
    loss = evaluations[-1].val_loss
    print(f"{name:22} {loss:.3f}  ({loss - final:+.3f})")

# %% [markdown]
# Compare the two lists. A change is not good or bad by itself: it depends on what else is there.
# SwiGLU raised the loss with AdamW, and lowers it now that Muon trains its matrices.
# Tried alone on top of the old recipe, it would have been rejected. (Squared ReLU, from So et al.
# 2021, is simpler, has no gate, and does about as well here.)
#
# Weight decay multiplies matrices by `1 - rate * 0.1` at each step. At a rate of 0.02 that takes
# `1 / 0.002 = 500` steps to matter, more than we have taken.
#
# How much of a difference is chance? Another seed gives other initial weights, batches and
# evaluation windows. A difference smaller than those between seeds means nothing until it is
# averaged over many of them.

# %%
for name, its_parts, its_rule in (
    ("nanoGPT's recipe", {}, {"warmup_steps": 10}),
    ("all changes", parts, rule),
):
    seeds = [run(its_parts, its_rule, seed=seed)[0][-1].val_loss for seed in (2, 3)]
    known = curves["nanoGPT's recipe" if not its_parts else "pairs of tokens"][-1]
    print(f"{name:22} seeds 1, 2, 3: " + ", ".join(f"{loss:.3f}" for loss in (known, *seeds)))

# %% [markdown]
# ## 8. A tenth of the steps
#
# Now the question of section 1: not how low, but how soon. A run that is meant to be short is not
# the beginning of a longer one, since its rate has to reach zero. So we train from scratch.

# %%
long, updates = run({}, {"warmup_steps": 10}, steps=4 * STEPS)
print(f"nanoGPT's recipe, {4 * STEPS} steps: {long[-1].val_loss:.3f}")
for name, extra in (("all but pairs", {"bigram_rows": 0}), ("all changes", {})):
    short, _ = run(parts | extra, rule | {"warmup_steps": 2}, steps=4 * STEPS // 10)
    print(f"{name}, {4 * STEPS // 10} steps: {short[-1].val_loss:.3f}")

# %% [markdown]
# ## 9. At full size
#
# These were runs of a second with tiny models, and some changes matter less in longer ones. In a
# clone, bench/README.md compares at full size, on tiny Shakespeare, and includes what this lesson
# leaves out: how long a step takes. To a loss of 1.88, smallmind reads 0.17 to 0.18 million
# characters instead of 1.54: a factor of about nine is due to the recipe, the rest to the speed
# of a step. These runs have one or two layers and windows of 128 characters (also where the loss
# is measured; nanoGPT's have 64), which were found in the same way: by trying.
#
# In a clone of the repository, `python -m bench recipe` compares recipes over seeds, and
# `bench/LOG.md` lists what was tried, failures included. Two things can be learned from it.
# Settings that are best at one size are often not best at another. And what pays in the first
# hundred steps, like the table of pairs, can be worth next to nothing after two thousand. That is
# why the default recipe makes all of the changes above except that one, which `--arch modern` adds.
#
# ## Exercises
#
# **1. A schedule.** Write the rate of each step, counted from 0. In the warmup it grows in equal
# increments, the first of which is at step 0, and reaches the peak at step `warmup`. From there it
# falls in a straight line, which would reach zero at step `steps`.


# %%
from smallmind.lessons import judge
from smallmind.optim.schedule import schedule


def rate_of(step, steps, peak, warmup):
    """step from 0 to steps - 1 -> its rate."""
    raise NotImplementedError


def check_rate(candidate):
    for steps, peak, warmup in ((10, 1.0, 3), (10, 0.5, 0), (7, 2.0, 6)):
        config = smallmind.TrainingConfig(
            steps=steps, learning_rate=peak, warmup_steps=warmup, schedule="linear", min_lr=0.0
        )
        for step in range(steps):
            found, expected = candidate(step, steps, peak, warmup), schedule(config).lr(step)
            assert found is not None, "the function returns None"
            part = "warmup" if step < warmup else "decay"
            assert abs(found - expected) < 1e-9, (
                f"steps={steps}, peak={peak}, warmup={warmup}: step {step}, in the {part}, has a "
                f"rate of {expected:.4f}, not {found:.4f}"
            )


print("Exercise 1:", judge(lambda: check_rate(rate_of)))

# %% [markdown]
# **2. Orthogonal, slowly.** The classical Newton-Schulz iteration is `X = 1.5 X - 0.5 X Xᵀ X`. It
# takes singular values between 0 and √3 to exactly 1, but needs more iterations than Muon's. Write
# it for any matrix that is not zero; divide by a norm first, so that no singular value is above 1.


# %%
def orthogonalise(G, iterations):
    """G (M, N) -> U Vᵀ of its singular value decomposition, if there are enough iterations."""
    raise NotImplementedError


def check_orthogonalise(candidate):
    random = np.random.default_rng(0)
    for M, N, size in ((4, 6, 1.0), (6, 4, 1.0), (5, 5, 1000.0), (3, 8, 1e-4)):
        G = size * random.standard_normal((M, N))
        U, _, Vt = np.linalg.svd(G, full_matrices=False)
        with np.errstate(all="ignore"):
            X = candidate(G.copy(), 60)
        assert np.shape(X) == (M, N), f"the shape is {np.shape(X)}, not {(M, N)}"
        assert np.isfinite(X).all(), (
            f"the iteration diverges for a matrix with numbers of size {size:g}: divide by its norm"
        )
        error = abs(X - U @ Vt).max()
        assert error < 1e-3, f"a matrix {M} x {N} is off from U Vᵀ by {error:.2g}"
    once, norm = candidate(np.eye(2), 1), 2**0.5
    expected = 1.5 / norm - 0.5 / norm**3
    assert np.allclose(once, expected * np.eye(2)) or np.allclose(once, np.eye(2)), (
        "one iteration on the identity, divided by its norm, is not 1.5 X - 0.5 X Xᵀ X"
    )


print("Exercise 2:", judge(lambda: check_orthogonalise(orthogonalise)))

# %% [markdown]
# **3. Is it better?** Two recipes were run with the same `n` seeds. As a seed fixes the weights and
# batches for both, compare them *in pairs*: return the mean of the differences and its standard
# error, the standard deviation of the differences (with `n - 1`) over `√n`. A difference of less
# than two standard errors proves nothing.


# %%
def paired_difference(before, after):
    """Losses by seed (n,), (n,) -> mean of after - before, its standard error."""
    raise NotImplementedError


def check_paired_difference(candidate):
    before, after = np.array([1.90, 1.95, 1.80, 1.85]), np.array([1.88, 1.94, 1.77, 1.83])
    given = candidate(before, after)
    assert np.shape(given) == (2,), f"return two numbers, not {given!r}"
    mean, error = given
    assert mean < 0, "after is lower than before: the difference after - before is negative"
    assert abs(mean + 0.02) < 1e-9, f"the mean difference is -0.02, not {mean:.4f}"
    assert error < 0.02, (
        f"{error:.4f} is too large: take the deviation of the differences, not that of the losses"
    )
    differences = after - before
    assert abs(error - differences.std() / 2) > 1e-9, "divide by n - 1 in the deviation: ddof=1"
    assert abs(error - differences.std(ddof=1)) > 1e-9, "divide the deviation by the root of n"
    assert abs(error - differences.std(ddof=1) / 2) < 1e-9, f"the error is 0.0041, not {error:.4f}"


print("Exercise 3:", judge(lambda: check_paired_difference(paired_difference)))

# %% [markdown]
# ## Where to read on
#
# - Goyal et al., *Accurate, Large Minibatch SGD* (2017), section 2.2: warmup.
# - Loshchilov & Hutter, *Decoupled Weight Decay Regularization* (2019), section 2: AdamW.
# - Su et al., *RoFormer* (2021), section 3.2: rotary positions.
# - Shazeer, *GLU Variants Improve Transformer* (2020), section 2.
# - Henry et al., *Query-Key Normalization for Transformers* (2020).
# - Jordan et al., *Muon: An optimizer for hidden layers in neural networks* (2024), a web page;
#   Bernstein & Newhouse, *Old Optimizer, New Norm: An Anthology* (2024), on its derivation.
# - In this package: `smallmind/settings/presets.py` is the recipe, `smallmind/optim/muon.py` and
#   `schedule.py` its optimizer and schedules, `smallmind/nn/rope.py` and `rmsnorm.py` its parts.
#
# ## What you can do now
#
# You can take somebody's recipe apart, say which part earns what, and tell a result from luck; you
# need not believe any of it. Next: lesson 10, *Runs that survive*, for recipes that take longer
# than a battery.

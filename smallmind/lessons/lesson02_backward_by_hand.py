# %% [markdown]
# # Backward by hand
#
# After this lesson you can derive the backward pass of a layer from its forward pass, write it in
# NumPy, and prove that it is right. You will have done so for the four layers of a transformer
# where most people slip: layer norm, attention, the embedding, and the head that shares its matrix
# with the embedding.
#
# **Before:** lesson 1, which puts all of this into a model. **Time:** 65 minutes; the code runs for
# 1 second.

# %%
import numpy as np

from smallmind import TransformerModel, gradient_check
from smallmind.charts.heat_map import heat_map
from smallmind.kernels import compiled, reference
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw

random = np.random.default_rng(0)

# %% [markdown]
# ## 1. Three rules
#
# A layer `y = f(x)` never sees the loss. It is handed `dy`, the derivative of the loss with respect
# to `y`, and has to return `dx`. Three rules are enough.
#
# 1. **Chain.** If `x` reaches the loss only through `y`, then `dx_i` is the sum over all `j` of
#    `dy_j` times the derivative of `y_j` with respect to `x_i`.
# 2. **Fan-out.** If `x` is used in several places, the contributions of all places are added.
# 3. **Shapes.** `dx` has the shape of `x`. If an operation broadcasts or repeats `x`, then its
#    backward pass sums; that is rule 2 again.
#
# A matrix product `y = x W` shows all of them. An element of `x` is used in a row of `y`, one of
# `W` in every row: as products, `dx = dy Wᵀ` and `dW = xᵀ dy`. Only one side for each transpose
# gives the right shapes.


# %%
def product(x, weight):
    """x (R, C), weight (C, N) -> y (R, N)."""
    return x @ weight


def product_backward(dy, x, weight):
    """dy (R, N) -> dx (R, C), dweight (C, N)."""
    return dy @ weight.T, x.T @ dy


# %% [markdown]
# ## 2. The judge
#
# A layer is checked by finite differences as the model of lesson 1 was. Take a random `u` of the
# shape of `y` and pretend that the loss is `sum(u * y)`; then `dy` is `u`. Take a random direction
# `v` of the shape of `x`. If we move `x` by a small `h` along `v`, then two numbers must agree:
#
#     sum(dx * v)    and    (sum(u * f(x + h v)) - sum(u * f(x - h v))) / (2 h)
#
# In a random direction, a wrong `dx` practically never agrees; a right one does, in float64, to
# nine digits or so. `gradient_check` does this for every input.

# %%
x, weight = random.standard_normal((6, 4)), random.standard_normal((4, 3))
print(gradient_check(product, x, weight, backward=product_backward))

# %% [markdown]
# Now a mistake: a factor of 1.001, far too small to be noticed in training.

# %%
wrong = gradient_check(
    product, x, weight, backward=lambda dy, x, weight: (dy @ weight.T, 1.001 * x.T @ dy)
)
print(wrong)
assert wrong.wrong == ["weight"]

# %% [markdown]
# ## 3. Layer norm
#
# Layer norm makes each row of `x` have mean 0 and variance 1, then scales and shifts its channels
# (Ba et al. 2016). For one row of C numbers:
#
#     mean = sum(x) / C
#     var  = sum((x - mean)²) / C
#     rstd = 1 / sqrt(var + 1e-5)
#     xhat = (x - mean) rstd
#     y    = xhat weight + bias
#
# The last line is easy. `weight` and `bias` are used by every row, so their gradients are sums over
# rows (rule 3):
#
#     dxhat = dy weight        dweight = sum of dy xhat over rows        dbias = sum of dy over rows
#
# The trap is `x`: `x_i` reaches the loss on **three paths**, directly, through the mean, and
# through the variance. A change of one element moves all C elements of `xhat`.
#
# *Directly*: `xhat_i` contains `x_i` with the factor `rstd`. Contribution: `rstd dxhat_i`.
#
# *Through the mean*: if the mean rises by 1, every `xhat_j` falls by `rstd`. So `dmean` is
# `-rstd sum(dxhat)`. (The variance does not change then: its derivative with respect to the mean is
# `-2 sum(x - mean) / C`, which is 0.) If `x_i` rises by 1, the mean rises by 1/C. Contribution:
# `-rstd mean(dxhat)`.
#
# *Through the variance*: three small steps.
#
# - `xhat_j = (x_j - mean) rstd`, so `drstd = sum(dxhat (x - mean)) = sum(dxhat xhat) / rstd`.
# - The derivative of `(var + 1e-5)^(-1/2)` is `-1/2 (var + 1e-5)^(-3/2)`, which is `-rstd³ / 2`. So
#   `dvar = -drstd rstd³ / 2 = -sum(dxhat xhat) rstd² / 2`.
# - If `x_i` rises by 1, the variance rises by `2 (x_i - mean) / C = 2 xhat_i / (rstd C)`.
#
# The product of the last two is the contribution: `-rstd xhat_i mean(dxhat xhat)`. All three paths:
#
#     dx = rstd (dxhat - mean(dxhat) - xhat mean(dxhat xhat))
#
# This needs `xhat` and `rstd` from the forward pass. We keep both. The package keeps `x`, which it
# has anyway, and two numbers per row, the mean and `rstd`, and computes `xhat` again.


# %%
def layernorm(x, weight, bias):
    """x (R, C), weight, bias (C,) -> y (R, C), and what the backward pass needs."""
    mean = x.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * weight + bias, xhat, rstd, weight


def layernorm_backward(dy, xhat, rstd, weight):
    """dy (R, C) -> dx (R, C), dweight, dbias (C,)."""
    # forward: y = xhat weight + bias
    dxhat = dy * weight
    dweight, dbias = (dy * xhat).sum(axis=0), dy.sum(axis=0)
    # forward: xhat = (x - mean) rstd
    mean_dxhat = dxhat.mean(axis=1, keepdims=True)
    mean_dxhat_xhat = (dxhat * xhat).mean(axis=1, keepdims=True)
    return rstd * (dxhat - mean_dxhat - xhat * mean_dxhat_xhat), dweight, dbias


R, C = 5, 8
x, dy = random.standard_normal((2, R, C))
weight, bias = random.standard_normal((2, C))
print(gradient_check(layernorm, x, weight, bias, backward=layernorm_backward))

# %% [markdown]
# The two terms that are subtracted have a meaning. Adding a constant to a row does not change `y`,
# and neither, but for the 1e-5, does stretching the row. The loss cannot depend on either, so `dx`
# is at right angles to both directions: to a row of ones and, almost, to `xhat`.

# %%
y, xhat, rstd, _ = layernorm(x, weight, bias)
dx, dweight, dbias = layernorm_backward(dy, xhat, rstd, weight)
print("dx along a constant:", np.abs(dx.sum(axis=1)).max())
print("dx along xhat:      ", np.abs((dx * xhat).sum(axis=1)).max())

# %% [markdown]
# All derivatives of one row are a picture: how much each input moves each output. The diagonal is
# the direct path. What is off the diagonal went through the mean, which is the same for all pairs,
# and through the variance, which is larger where both numbers are far from the mean.

# %%
row = np.repeat(x[:1], C, axis=0)
_, xhat, rstd, _ = layernorm(row, np.ones(C), np.zeros(C))
jacobian = layernorm_backward(np.eye(C), xhat, rstd, np.ones(C))[0]  # row j: of output j
title = "Layer norm: how inputs (columns) move outputs"
draw("lesson02_layernorm", heat_map(title, jacobian.tolist(), kinds=("output", "input")))
y, xhat, rstd, _ = layernorm(x, weight, bias)

# %% [markdown]
# The package has this function twice: in plain NumPy in `kernels/reference.py`, and compiled. Both
# write `dx` and **add** to the gradients of the parameters: a parameter may be used elsewhere too
# (rule 2), and a batch may come in several parts.


# %%
def difference(mine, theirs):
    """Returns the largest difference, relative to the largest element."""
    return np.abs(np.asarray(theirs) - mine).max() / np.abs(mine).max()


for kernels, dtype in ((reference, np.float64), (compiled, np.float32)):
    arguments = [array.astype(dtype) for array in (dy, x, x.mean(axis=1), rstd[:, 0], weight)]
    their_dx, their_dweight, their_dbias = (np.zeros(shape, dtype) for shape in ((R, C), C, C))
    kernels.layernorm_backward(their_dx, their_dweight, their_dbias, *arguments)
    found = max(
        difference(dx, their_dx), difference(dweight, their_dweight), difference(dbias, their_dbias)
    )
    print(f"{kernels.__name__}: {found:.0e}")
    assert found < 1e-5

# %% [markdown]
# ## 4. Attention
#
# One head of attention (Vaswani et al. 2017) has queries, keys and values `q`, `k`, `v` of shape
# (T, D), a row per token. Each query looks at the keys up to its own place:
#
#     s = q kᵀ / sqrt(D)      scores (T, T), minus infinity where the key is after the query
#     p = softmax(s)          each row is positive and sums to 1
#     o = p v                 means of the values (T, D)
#
# Backward, the last line comes first. It is a product:
#
#     dv = pᵀ do        dp = do vᵀ
#
# **Softmax.** In one row, `p_j = exp(s_j) / sum(exp(s))`. Let `s_i` rise by a small e. Then
# `exp(s_i)` grows by the factor 1 + e, and the sum in the denominator by the factor 1 + e p_i. So
# `p_i` rises by e p_i (1 - p_i), and every other `p_j` falls by e p_j p_i. Rule 1 adds all of it
# up:
#
#     ds_i = p_i dp_i - p_i sum over j of p_j dp_j = p_i (dp_i - sum(p dp))
#
# The last sum is the mean of `dp` under the probabilities `p`. So `ds_i` says how much more than on
# average the loss rises if the query looks at key `i`, times how much it looks there already. A
# masked key has `p_i = 0` and therefore `ds_i = 0`: the mask needs no backward pass of its own.
#
# **Scores.** Again a product, with a factor:
#
#     dq = ds k / sqrt(D)        dk = dsᵀ q / sqrt(D)


# %%
def softmax(s):
    """Each row s -> exp(s) / sum(exp(s)), without overflow."""
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def attention(q, k, v):
    """q, k, v (T, D) -> o (T, D), and what the backward pass needs."""
    T, D = q.shape
    p = softmax(np.where(np.tri(T, dtype=bool), q @ k.T / np.sqrt(D), -np.inf))
    return p @ v, p, q, k, v


def attention_backward(do, p, q, k, v):
    """do (T, D) -> dq, dk, dv (T, D)."""
    # forward: o = p v
    dv, dp = p.T @ do, do @ v.T
    # forward: p = softmax(s)
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    # forward: s = q k^T / sqrt(D)
    ds /= np.sqrt(q.shape[1])
    return ds @ k, ds.T @ q, dv


T, D = 7, 4
q, k, v = random.standard_normal((3, T, D))
print(gradient_check(attention, q, k, v, backward=attention_backward))

# %% [markdown]
# The package's kernel computes all heads of all sequences at once. Its input is one matrix `qkv`,
# with a row per token and the columns of all queries, then all keys, then all values. It does not
# keep `p`, which is large: T² numbers per head. It keeps the logarithm of the softmax's
# denominator, one number per row, and computes `p` again. And it does not need `sum(p dp)`: because
# `dp_j = do · v_j`, that sum is `do · sum(p_j v_j)`, which is `do · o` (Dao et al. 2022).

# %%
do = random.standard_normal((T, D)).astype(np.float32)
qkv = np.concatenate([q, k, v], axis=1).astype(np.float32)
out, logsumexp, dqkv = np.empty_like(do), np.empty((1, 1, T), np.float32), np.empty_like(qkv)
compiled.attention(out, logsumexp, qkv)
compiled.attention_backward(dqkv, do, out, logsumexp, qkv)

o, *kept = attention(q, k, v)
assert difference(o, out) < 1e-5
assert difference(np.concatenate(attention_backward(do, *kept), axis=1), dqkv) < 1e-5
print("The gradients agree with those of the compiled kernel")

# %% [markdown]
# ## 5. The embedding
#
# The first layer looks up a row of a matrix for each token: `x = weight[ids]`. That is a product
# too: `x = onehot weight`, where row `r` of `onehot` has a single 1, in column `ids[r]`. So by
# section 1 `dweight = onehotᵀ dx`. Nobody multiplies by all those zeros; what remains is
#
#     for r in range(R): dweight[ids[r]] += dx[r]
#
# A gather forward is a scatter backward. By rule 2, a token that occurs five times in a batch adds
# five gradients.
#
# `dweight[ids] += dx` computes `dweight[ids] + dx` and then assigns, so only the last of the five
# survives. `np.add.at` does what we want.


# %%
def look_up(weight, ids):
    """weight (V, C), ids (B, T) -> x (B, T, C)."""
    return weight[ids]


def look_up_backward(dx, weight, ids):
    """dx (B, T, C) -> dweight (V, C)."""
    # forward: x = weight[ids]
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids, dx)
    return dweight


V = 6
ids = np.array([[0, 3, 3, 1], [5, 3, 0, 0]], np.int32)
weight = random.standard_normal((V, C))
print(gradient_check(look_up, weight, ids, backward=look_up_backward))

dx = random.standard_normal((*ids.shape, C)).astype(np.float32)
theirs = np.zeros((V, C), np.float32)
compiled.embedding_backward(theirs, None, dx.reshape(-1, C), ids)
assert difference(look_up_backward(dx, weight, ids), theirs) < 1e-6

# %% [markdown]
# Rows 2 and 4 belong to tokens that are not in this batch. Their gradient is zero.
#
# ## 6. The tied head
#
# The last layer turns each row of `x` into a score per token: `logits = x Wᵀ`. In many models `W`
# is the embedding's own matrix (Press & Wolf 2017): a token's vector serves to read it and to
# predict it. The gradients of this product are
#
#     dx = dlogits W        dW = dlogitsᵀ x
#
# But `W` is used **twice**, so by rule 2 its gradient is the sum of this product and the scatter of
# section 5. If one is missing, there is no error message: the model learns from the other alone.
#
# To see both we need a loss, the mean cross-entropy of R rows, whose gradient lesson 1 has derived:
#
#     dlogits = (p - onehot(target)) / R


# %%
def tied_loss(weight, ids, targets):
    """A model with nothing between embedding and head but a tanh -> its mean loss."""
    x = np.tanh(weight[ids.reshape(-1)])
    p = softmax(x @ weight.T)
    hit = targets.reshape(-1, 1) == np.arange(len(weight))
    return -np.log(p[hit]).mean(), x, (p - hit) / targets.size, weight, ids


def tied_backward(dloss, x, dlogits, weight, ids):
    """-> dweight (V, C): the sum of two gradients."""
    # forward: logits = x weight^T
    dx = dlogits @ weight
    dweight = dlogits.T @ x
    # forward: x = tanh(e), whose derivative is 1 - tanh(e)²
    de = dx * (1 - x * x)
    # forward: e = weight[ids]
    np.add.at(dweight, ids.reshape(-1), de)
    return dloss * dweight


targets = np.roll(ids, -1, axis=1)
print(gradient_check(tied_loss, weight, ids, targets, backward=tied_backward))

# %% [markdown]
# Now in a real model. `model.inspect` returns what every layer computed for a batch, with its
# gradients. From these we compute the two parts, and compare their sum with the model's own.

# %%
model = TransformerModel(vocab_size=V, block_size=4, n_embd=C, n_layer=2, n_head=2)
seen = model.inspect(ids, targets)
dlogits = seen.activation_gradients["head"].reshape(-1, V)
at_the_end = dlogits.T @ seen.activations["final_norm"].reshape(-1, C)
at_the_start = look_up_backward(seen.activation_gradients["embedding"], at_the_end, ids)
both = seen.gradients["token_embedding.weight"]

assert difference(at_the_start + at_the_end, both) < 1e-5
print(f"Norm of the gradient: {np.linalg.norm(both):.3f}")
print(f"  of its use at the start {np.linalg.norm(at_the_start):.3f}")
print(f"  of its use at the end   {np.linalg.norm(at_the_end):.3f}")

# %% [markdown]
# Neither part is negligible.
#
# ## 7. A whole model
#
# The backward pass of a transformer is these four, the product of section 1, and an activation, in
# reverse order. A residual connection, `y = x + f(x)`, is rule 2: `dx = dy + (what f returns)`.
# Open `smallmind/nn/block.py`: its `backward` mirrors its `forward`, and you know every line.
#
# The judge takes whole models too.

# %%
exact = TransformerModel(V, 4, C, 1, 2, backend="numpy", dtype=np.float64)
print(gradient_check(exact))

# %% [markdown]
# ## Exercises
#
# The first three come with a common mistake. Write it right, and run the cell again.

# %%
inputs, gain, shift = (random.standard_normal(shape) for shape in ((R, C), C, C))
table = random.standard_normal((V, C))

# %% [markdown]
# **1.** The gradients of this layer norm's weight and bias are right, but `dx` is not:
#
#     dxhat = dy * weight
#     dx = rstd * dxhat
#     return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


# %%
def exercise_1(dy, xhat, rstd, weight):
    """dy (R, C) -> dx (R, C), dweight, dbias (C,)."""
    raise NotImplementedError


def check_1(backward):
    found = gradient_check(layernorm, inputs, gain, shift, backward=backward)
    assert found.ok, found


print("Exercise 1:", judge(lambda: check_1(exercise_1)))

# %% [markdown]
# **2.** This scatter works only for batches in which no token occurs twice:
#
#     dweight = np.zeros_like(weight)
#     dweight[ids] = dx
#     return dweight


# %%
def exercise_2(dx, weight, ids):
    """dx (B, T, C) -> dweight (V, C)."""
    raise NotImplementedError


def check_2(backward):
    found = gradient_check(look_up, table, ids, backward=backward)
    assert found.ok, found


print("Exercise 2:", judge(lambda: check_2(exercise_2)))

# %% [markdown]
# **3.** In this tied model the matrix learns only as the head:
#
#     return dloss * dlogits.T @ x


# %%
def exercise_3(dloss, x, dlogits, weight, ids):
    """-> dweight (V, C)."""
    raise NotImplementedError


def check_3(backward):
    found = gradient_check(tied_loss, table, ids, targets, backward=backward)
    assert found.ok, found


print("Exercise 3:", judge(lambda: check_3(exercise_3)))

# %% [markdown]
# **4.** RMS norm leaves out the mean (Zhang & Sennrich 2019):
#
#     rms = sqrt(mean(x²) + 1e-5)
#     y   = weight x / rms
#
# On how many paths does `x_i` reach the loss? Derive `dx` as in section 3, and write it.


# %%
def rmsnorm(x, weight):
    """x (R, C), weight (C,) -> y (R, C)."""
    return weight * x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)


def exercise_4(dy, x, weight):
    """dy (R, C) -> dx (R, C), dweight (C,)."""
    raise NotImplementedError


def check_4(backward):
    found = gradient_check(rmsnorm, inputs, gain, backward=backward)
    assert found.ok, found


print("Exercise 4:", judge(lambda: check_4(exercise_4)))

# %% [markdown]
# ## Where to read on
#
# - Baydin, Pearlmutter, Radul & Siskind (2018), *Automatic Differentiation in Machine Learning: a
#   Survey*: how frameworks do automatically what you have just done by hand, and why it costs so
#   little.
# - Ba, Kiros & Hinton (2016), *Layer Normalization*; section 5 is about the directions in which a
#   norm does not change.
# - Vaswani et al. (2017), *Attention Is All You Need*, section 3.2.
# - Dao, Fu, Ermon, Rudra & Ré (2022), *FlashAttention*, appendix B.2: attention's backward pass
#   without keeping `p`.
# - Press & Wolf (2017), *Using the Output Embedding to Improve Language Models*, section 3: what
#   the two gradients of a tied matrix do to it.
# - In this package: `kernels/reference.py`, in which every backward function quotes the lines that
#   it differentiates, and `nn/`, which calls them. The page `writing_a_layer.py` turns all this
#   into a layer of a model, and trains it.
#
# ## What you can do now
#
# You can derive the gradient of a layer that nobody has derived for you, and you do not have to
# hope that it is right. Next: lesson 3, *Derivatives by machine*, in which a program does the same.

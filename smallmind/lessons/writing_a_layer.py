# %% [markdown]
# # Write a layer of your own
#
# At the end of this page a model trains with a layer that you have written: its parameters, its
# forward pass and its backward pass, checked by finite differences, first in NumPy and then as a
# compiled kernel.
#
# **Before:** lesson 2, for backward passes and how they are checked; lesson 6 for layers. **Time:**
# 40 minutes; the code runs for 4 seconds.
#
# The layer is a norm that computes no mean and no variance: Dynamic Tanh (Zhu et al. 2025), here
# with one slope per channel,
#
#     y = weight tanh(slope x)

# %%
import numpy as np
from numba import prange

from smallmind import AdamW, Precision, TransformerModel, gradient_check, parts
from smallmind.charts.figure import lines
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import LANES, broadcast, fma, load_up_to, sigmoid, store_up_to
from smallmind.kernels.reduce import CHUNK_ROWS, add_column_sums
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw
from smallmind.nn.backend import add_kernel
from smallmind.nn.layer import Layer, Norm
from smallmind.nn.parameters import Constant, Role

# %% [markdown]
# ## Derive
#
# Name the steps: `u = slope x`, `t = tanh(u)`, `y = weight t`. Write `dx` for the derivative of the
# loss with respect to `x`. The derivative of tanh is `1 - t²`, so from the last step to the first
#
#     dt = dy weight          dweight = sum of dy t over rows
#     du = dt (1 - t²)
#     dx = du slope           dslope  = sum of du x over rows
#
# The gradients of the parameters are sums over rows, because every row uses the same parameters.
#
# ## Write it in NumPy
#
# The arithmetic is in kernels, functions of arrays, outputs first. The profiler, `--detect-anomaly`
# and `model.inspect` see what they do. The backward pass overwrites the gradients of inputs, and
# **adds** to those of parameters.
#
# A norm begins a branch of the residual stream, so its backward pass may also get an `addend`, the
# gradient that bypasses the branch, which is often the array to write to.


# %%
def tanh_norm(y, x, slope, weight):
    """x (R, C), slope, weight (C,) -> y (R, C) = weight tanh(slope x). Writes y."""
    y[...] = weight * np.tanh(slope * x)


def tanh_norm_backward(dx, dslope, dweight, dy, x, slope, weight, addend=None):
    """dy, x (R, C) -> dx (R, C) [+ addend, may be dx]; adds to dslope and dweight (C,)."""
    # forward: y = weight tanh(slope x)
    t = np.tanh(slope * x)
    du = dy * weight * (1 - t * t)
    dslope += (du * x).sum(axis=0)
    dweight += (dy * t).sum(axis=0)
    dx[...] = du * slope if addend is None else du * slope + addend


add_kernel("tanh_norm", tanh_norm)
add_kernel("tanh_norm_backward", tanh_norm_backward)

# %% [markdown]
# A layer takes a `Scope`, declares its parameters, keeps what its backward pass needs and calls
# kernels:
#
# - `declare` gives a name, a shape, initial values and a role. The role says which optimizer and
#   which weight decay a parameter gets. Memory comes later, when the whole model is declared.
# - A parameter has `compute`, the values to read, and `grad`, the gradient to add to.
# - `workspace.rent` gives an array whose contents are undefined. What a layer returns belongs to
#   the caller; `x` stays as it is until the backward pass.
# - Rows are tokens, columns channels: `x` is (R, C).
#
# Norms also take the value that their gain starts at, and `gradient_of` says where they write `dx`.


# %%
class TanhNorm(Norm):
    """y = weight tanh(slope x), channel by channel."""

    def __init__(self, scope, gain=1.0):
        shape = (scope.config.n_embd,)
        super().__init__(scope)
        self.slope = scope.declare("slope", shape, Constant(0.5), Role.GAIN)
        self.weight = scope.declare("weight", shape, Constant(gain), Role.GAIN)

    def forward(self, x):
        """x (R, C) -> y (R, C); keeps x."""
        self.x = x
        y = self.workspace.rent(*x.shape)
        self.kernels.tanh_norm(y, x, self.slope.compute, self.weight.compute)
        return y

    def backward(self, dy, addend=None):
        """dy (R, C) -> dx (R, C) or, in place of addend, addend + dx; adds to gradients."""
        # forward: y = weight tanh(slope x)
        slope, weight = self.slope, self.weight
        dx = self.gradient_of(self.x, addend)
        self.kernels.tanh_norm_backward(
            dx, slope.grad, weight.grad, dy, self.x, slope.compute, weight.compute, addend
        )
        return dx


# %% [markdown]
# ## Check it
#
# `gradient_check` builds the layer in float64, moves each input and parameter a little along a
# random direction, and compares the change of the output with what `backward` predicts.

# %%
print(gradient_check(TanhNorm))

# %% [markdown]
# A mistake is named. Here the slope is missing from `dx`:


# %%
class WithoutSlope(TanhNorm):
    def backward(self, dy, addend=None):
        return super().backward(dy, addend) / self.slope.compute


print(gradient_check(WithoutSlope))

# %% [markdown]
# ## Plug it in
#
# Parts have names, and a table says where each is. From this line on, `norm="tanh"` is a setting
# like any other; a saved model with this norm needs the line before it can be loaded.

# %%
parts.NORMS["tanh"] = f"{__name__}:TanhNorm"

shape = {"vocab_size": 16, "block_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
exact = TransformerModel(**shape, norm="tanh", backend="numpy", dtype=np.float64)
check = gradient_check(exact)
print(f"All {len(check.rows)} gradients of the model are right: {check.ok}")

# %% [markdown]
# It learns. The task: after each token comes the next number, modulo 16.

# %%
random = np.random.default_rng(0)


def counting(batch_size):
    """Batches of ids, targets (B, T): sequences that count up from a random number."""
    numbers = (random.integers(0, 16, (batch_size, 1)) + np.arange(17)) % 16
    return numbers[:, :-1], numbers[:, 1:]


def train(model, steps=40):
    """-> the losses of all steps."""
    optimizer = AdamW(model, learning_rate=1e-2)
    losses = []
    for _ in range(steps):
        losses.append(model.loss_and_gradients(*counting(8)))
        optimizer.step(max_grad_norm=1.0)
    return losses


ours = train(TransformerModel(**shape, norm="tanh", backend="numpy"))
print(f"Loss {ours[0]:.3f}, after 40 steps {ours[-1]:.3f}")
usual = train(TransformerModel(**shape, norm="rmsnorm", backend="numpy"))
both = {"tanh(slope x)": ours, "RMSNorm": usual}
draw("writing_a_layer_loss", lines("Loss while it learns to count", both, range(len(ours))))

# %% [markdown]
# ## Compile it
#
# So far both back ends call NumPy, in float32: in a model of 16 bits, which NumPy cannot read, the
# kernel gets copies. A compiled one goes through memory once, and reads and writes 16 bits itself.
# The plain form stays: it is easy to read, and what the fast one is tested against. The layer does
# not change.
#
# The compiled form computes with vectors of `LANES` numbers, which `load_up_to` reads from an array
# of any precision, at an index counted in elements. Its outer loop runs on all threads, and no two
# threads write to the same place: in the backward pass each chunk of rows has sums of its own,
# which are then added in order. So the bits do not depend on the number of threads.


# %%
@jit
def tanh(x):
    return sigmoid(x + x) * np.float32(2) - np.float32(1)


@parallel_jit
def forward_rows(y, x, slope, weight):
    R, C = x.shape
    for r in prange(R):
        for c in range(0, C, LANES):
            place, count = np.int64(r) * C + c, min(LANES, C - c)
            t = tanh(load_up_to(slope, c, count) * load_up_to(x, place, count))
            store_up_to(y, place, load_up_to(weight, c, count) * t, count)


@parallel_jit
def backward_chunks(dx, sums, dy, x, slope, weight, addend):
    for chunk in prange(ceil_div(x.shape[0], CHUNK_ROWS)):
        backward_rows(dx, sums, dy, x, slope, weight, addend, np.int64(chunk))


@jit
def backward_rows(dx, sums, dy, x, slope, weight, addend, chunk):
    R, C = x.shape
    dslope = chunk * sums.shape[1]
    dweight = dslope + C
    sums[chunk, : 2 * C] = np.float32(0)
    for r in range(chunk * CHUNK_ROWS, min(R, chunk * CHUNK_ROWS + CHUNK_ROWS)):
        for c in range(0, C, LANES):
            place, count = r * C + c, min(LANES, C - c)
            a, g = load_up_to(x, place, count), load_up_to(dy, place, count)
            s, w = load_up_to(slope, c, count), load_up_to(weight, c, count)
            # forward: y = w t, t = tanh(s a)
            t = tanh(s * a)
            du = g * w * (broadcast(np.float32(1)) - t * t)
            store_up_to(sums, dslope + c, fma(du, a, load_up_to(sums, dslope + c, count)), count)
            store_up_to(sums, dweight + c, fma(g, t, load_up_to(sums, dweight + c, count)), count)
            d = du * s
            if addend.size > 0:
                d = d + load_up_to(addend, place, count)
            store_up_to(dx, place, d, count)


# %% [markdown]
# Python calls them through functions with the arguments of the plain form.

# %%
NOTHING = np.empty((0, 0), np.float32)


def fast_tanh_norm(y, x, slope, weight):
    forward_rows(y, x, slope, weight)


def fast_tanh_norm_backward(dx, dslope, dweight, dy, x, slope, weight, addend=None):
    C = x.shape[1]
    sums = scratch(ceil_div(len(x), CHUNK_ROWS), 2 * C)
    backward_chunks(dx, sums, dy, x, slope, weight, NOTHING if addend is None else addend)
    add_column_sums(dslope, sums, 0)
    add_column_sums(dweight, sums, C)


add_kernel("tanh_norm", tanh_norm, fast_tanh_norm)
add_kernel("tanh_norm_backward", tanh_norm_backward, fast_tanh_norm_backward)

# %% [markdown]
# Both forms of the kernel are checked: the plain one in float64, the compiled one in float32, where
# finite differences are good to a thousandth. In a whole model the compiled gradients are compared
# with a copy of the model in float64.

# %%
for backend in ("numpy", "numba"):
    print(gradient_check(TanhNorm, backend=backend))
compiled = TransformerModel(**shape, norm="tanh")
assert gradient_check(compiled).ok

compiled.use_precision(Precision.BFLOAT16)  # 16 bits work too
losses = train(compiled)
print(f"Loss {losses[0]:.3f}, after 40 steps in bfloat16 {losses[-1]:.3f}")

# %% [markdown]
# ## In the package
#
# The same pieces, each in its place: the plain kernels go to `kernels/reference.py`, described by
# `@kernel`, the compiled ones to a file of their own in `kernels/`, the layer to `nn/`, its name to
# `parts.py`. Then `--norm tanh`, the memory estimate, `smallmind check` and the file
# formats know it, and kernels are compiled once instead of at every start.
#
# A perceptron (`parts.MLPS`) ends a branch: its `forward(x, addend=None)` adds. See `nn/mlp.py`,
# and `nn/layer.py` for what layers share. Any layer is checked in the same way:
# `gradient_check(make, x)`, where `make(scope)` returns the layer.
#
# ## Exercises
#
# ### Exercise 1: a shift
#
# Zhu et al. also have a shift: `y = weight tanh(slope x) + shift`. Write the backward kernel: write
# `dx`, and add to the gradients of the three parameters.


# %%
def shifted_backward(dx, dslope, dweight, dshift, dy, x, slope, weight):
    """dy, x (R, C) -> dx (R, C); adds to dslope, dweight and dshift (C,)."""
    raise NotImplementedError


def check_shifted_backward(candidate):
    def forward(x, slope, weight, shift):
        return weight * np.tanh(slope * x) + shift, x, slope, weight

    def backward(dy, x, slope, weight):
        found = [
            np.full(x.shape, np.nan),
            *(np.full(weight.shape, start) for start in (1.0, 2.0, 3.0)),
        ]
        candidate(*found, dy, x, slope, weight)
        return found[0], found[1] - 1, found[2] - 2, found[3] - 3

    numbers = np.random.default_rng(0)
    x, rows = numbers.standard_normal((5, 4)), numbers.standard_normal((3, 4))
    found = gradient_check(forward, x, *rows, backward=backward)
    assert found.ok, f"{found}\n(dx is written; the others are added to what is there)"


print("Exercise 1:", judge(lambda: check_shifted_backward(shifted_backward)))

# %% [markdown]
# ### Exercise 2: a layer without parameters
#
# Write a layer that computes softsign, `y = x / (1 + |x|)`. Rent what you return, and keep in
# `forward` what `backward` needs. The derivative is `1 / (1 + |x|)²`. (NumPy in the layer itself is
# good enough here.)


# %%
class Softsign(Layer):
    """y = x / (1 + |x|)."""

    def forward(self, x):
        """x (R, C) -> y (R, C), rented."""
        raise NotImplementedError

    def backward(self, dy):
        """dy (R, C) -> dx (R, C), rented."""
        raise NotImplementedError


def check_softsign(candidate):
    found = gradient_check(candidate)
    assert found.ok, found
    layers = []

    def built(scope):
        layers.append(candidate(scope))
        return layers[-1]

    x = np.array([[1.0, -3.0]])
    gradient_check(built, x)
    workspace = layers[-1].workspace
    y = layers[-1].forward(x)
    assert id(y) in workspace.rented(), "rent y from the workspace, and write into it"
    assert np.allclose(y, [[0.5, -0.75]]), f"softsign of [1, -3] is [0.5, -0.75], not {y[0]}"


print("Exercise 2:", judge(lambda: check_softsign(Softsign)))

# %% [markdown]
# ## Read on
#
# - Zhu, Chen, He, LeCun & Liu (2025), *Transformers without Normalization*, section 4: the layer.
# - Lesson 2 derives the backward passes of the layers that a transformer is made of.
# - `nn/layernorm.py` and `kernels/norms.py` are a norm that is tuned.
#
# ## What you can do now
#
# You can try an idea for a layer in a real model, the same afternoon, at the speed of compiled
# code, and nothing in the package had to change. Next: a layer that nobody has written.

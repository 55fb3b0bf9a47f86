# %% [markdown]
# # A block, a model
#
# After this lesson you can read every layer in `smallmind/nn` and write your own. You can predict
# the memory of a training step from the shape of a model, and you know three ways to need less of
# it, and what each of them costs.
#
# **Before:** lesson 1, for the backward passes of a product and of attention. **Time:** 80 minutes;
# the code runs for 6 seconds.

# %% [markdown]
# ## 1. Why a layer is more than a function
#
# The gradients of a product `y = x W` are
#
#     dx = dy Wᵀ        dW = xᵀ dy
#
# The second one needs `x`, which must be kept until `dy` arrives: until all later layers have run
# forward and backward. That is true of every layer at once. So most of the memory of training goes
# not to the weights, but to what the forward pass keeps for the backward pass.
#
# So a layer is an object rather than a pair of functions, and owns four things: its parameters,
# `forward`, `backward`, and what it keeps from one to the other.


# %%
import numpy as np

from smallmind.nn.layer import Layer
from smallmind.nn.parameters import Normal, Role


class Product(Layer):
    """y = x weight."""

    def __init__(self, scope, shape):
        super().__init__(scope)  # keeps the workspace and the name
        self.weight = scope.declare("weight", shape, Normal(0.02), Role.MATRIX)

    def forward(self, x):
        """x (R, in) -> y (R, out); keeps x."""
        self.x = x
        y = self.workspace.rent(len(x), self.weight.compute.shape[1])
        self.kernels.matmul(y, x, self.weight.compute)
        return y

    def backward(self, dy):
        """dy (R, out) -> dx (R, in); adds to the gradient of weight."""
        # forward: y = x weight
        kernels, x = self.kernels, self.x
        dx = self.workspace.rent(*x.shape)
        kernels.matmul_transpose_b(dx, dy, self.weight.compute)
        kernels.matmul_transpose_a(self.weight.grad, x, dy, self.weight.grad)
        return dx


# %% [markdown]
# A batch of `B` windows of `T` tokens has `R = B T` rows, which most layers treat alike. The
# gradient of the input is written to a new array, but the gradient of the weight is *added* to what
# is there (the last argument of the kernel). So the gradients of two batches, or of two uses of one
# matrix, add up without further work.
#
# ## 2. What all layers share
#
# A layer is built from a `Scope`, which holds all that it shares with the others:
#
# - a `Workspace`, which has the *kernels* (the functions that compute) and lends memory;
# - the `Parameters` of the model, where the layer *declares* what it needs. Once all layers are
#   built, `allocate` makes one flat vector of all values and one of all gradients, and every
#   parameter becomes a view into both. An optimizer can then treat the model as one long vector;
# - the `ModelConfig`, and the name of the layer.
#
# Here is a scope with plain NumPy kernels and memory of its own, and in it one product.

# %%
import smallmind
from smallmind import ModelConfig, TensorPool
from smallmind.charts.figure import lines
from smallmind.kernels import reference
from smallmind.lessons.pictures import draw
from smallmind.nn.backend import Backend
from smallmind.nn.layer import Scope
from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Workspace


def new_scope(config):
    backend = Backend("numpy", reference, TensorPool())
    return Scope(Workspace(backend, np.float32, dropout=0.0, seed=0), Parameters(), config)


scope = new_scope(ModelConfig())
product = Product(scope.inner("product"), (64, 128))
parameters, workspace = scope.parameters, scope.workspace
parameters.allocate()
parameters.initialise(seed=0)
print("declared:", parameters.shapes, "in a vector of", parameters.data.size)

random = np.random.default_rng(0)
R = 512
for number in (1, 2):
    x, dy = workspace.rent(R, 64), workspace.rent(R, 128)
    x[...], dy[...] = random.standard_normal(x.shape), random.standard_normal(dy.shape)
    y = product.forward(x)
    dx = product.backward(dy)
    workspace.release(x, y, dy, dx)
    statistics = workspace.pool.statistics()
    print(f"after pass {number}: {statistics.rents} arrays rented, {statistics.misses} allocated")

print(smallmind.gradient_check(lambda scope: Product(scope, (scope.config.n_embd, 8))))

# %% [markdown]
#
# The gradients are right, and the second pass allocates nothing. Fresh memory is slow: the
# operating system has to find pages and fill them with zeros. So a `TensorPool` keeps what is
# returned, and hands it out again when an array of that size is rented. Sizes are rounded up to a
# limited number of *buckets*, and every array begins at a cache line, a multiple of 64 bytes.
#
# Whoever rents an array must write all of it, as its contents are undefined. And every array must
# be released exactly once: what a layer returns by its caller, what it keeps for its backward pass
# by itself.
#
# ## 3. A block
#
# A transformer block has four layers. With the two shortcuts it reads
#
#     x = x + attention(norm(x))
#     x = x + mlp(norm(x))
#
# What does each need for its backward pass? Count the numbers per token, for `C` channels and `H`
# heads:
#
# | layer | keeps | why | numbers per token |
# |---|---|---|---|
# | norm | its input `x`, a mean and a scale | the gradient depends on all three | C + 2 |
# | | its output | the next product needs its input | C |
# | attention | queries, keys, values | `q kᵀ` and `p v` are products | 3 C |
# | | its output | the projection is a product | C |
# | | log of the sum of exp of the scores | to compute each `p` again | H |
# | norm | the same as the first | | 2 C + 2 |
# | mlp | the preactivation | the slope of the activation | 4 C |
#
# In total, a block keeps `K = 12 C + H + 4` numbers per token.
#
# Note what is *not* in the table. The output of the block is the input of the next one, and is
# counted there. Attention's weights `p` would be `T` numbers per head and token, far more than all
# the rest at long windows; from the queries, the keys and one sum per row they can be computed
# again. So can the activation of the perceptron, another `4 C`, which is one function of the
# preactivation, element by element. Arithmetic is cheap, and memory is not.
#
# Now we measure a real block, layer by layer as `Block.forward` runs. (The constructor also takes
# what some architectures add, here `None`, and the number of the block.)

# %%
from smallmind.nn.block import Block
from smallmind.nn.documents import Documents
from smallmind.nn.position import Position

B, T, C, H = 8, 64, 64, 4
R = B * T
scope = new_scope(ModelConfig(block_size=T, n_embd=C, n_head=H, n_layer=1))
workspace = scope.workspace
shared = Position(scope.inner("position")), Documents(scope.inner("documents"))
block = Block(scope.inner("block"), *shared, None, None, 0)
scope.parameters.allocate()
scope.parameters.initialise(seed=0)


def rented():
    """Numbers of float32 that are rented now, per token."""
    return workspace.pool.statistics().bytes_rented / 4 / R


x = workspace.rent(R, C)
x[...] = random.standard_normal(x.shape)
print(f"{'':22} {'formula':>8} {'measured':>9}")
print(f"{'input':22} {C:8} {rented():9.2f}")
workspace.T = T
block.normed = block.attention_norm.forward(x)
print(f"{'+ norm':22} {2 * C + 2:8} {rented():9.2f}")
block.middle = block.attention.forward(block.normed, addend=x)
print(f"{'+ attention, middle':22} {7 * C + H + 2:8} {rented():9.2f}")
block.normed_middle = block.mlp_norm.forward(block.middle)
print(f"{'+ norm':22} {8 * C + H + 4:8} {rented():9.2f}")
y = block.mlp.forward(block.normed_middle, addend=block.middle)
K = 12 * C + H + 4
print(f"{'+ mlp, output':22} {K + C:8} {rented():9.2f}")
assert abs(rented() - (K + C)) < 1
block.backward(y)  # with any gradient of y: y itself will do
print(f"{'after backward':22} {2 * C:8} {rented():9.2f}")

# %% [markdown]
# Each array takes 64 bytes more, to align it with a cache line. After the backward pass only what
# belongs to the caller is left: the input, and its gradient in the array that was the gradient of
# the output.
#
# ## 4. A model
#
# A model is an embedding, `N` blocks, a norm and a head. Its forward pass fills the memory up to `N
# K` numbers per token. The peak comes when the backward pass enters the last block: everything is
# still there, and in addition the gradient of the output (`C`), that of the activation (`4 C`), and
# one loss per token:
#
#     peak = N K + 5 C + 1    numbers per token
#
# (With a large vocabulary the peak comes before that, because the logits are `V` numbers per
# token.) We give a `TransformerModel` a pool of its own, to see how much it rents at most.

# %%
from smallmind.text.stories import built_in_text

smallmind.set_threads(1)  # times vary less than with more of them
text = built_in_text(100_000)
tokenizer = smallmind.Tokenizer(text)
B, T, C, H, N = 32, 64, 64, 4, 8
R, K = B * T, 12 * C + H + 4
model = smallmind.TransformerModel(tokenizer.vocab_size, T, C, N, H)
tokens = tokenizer.encode(text)
starts = 1000 * np.arange(B)
ids, targets = (np.stack([tokens[start + i :][:T] for start in starts]) for i in (0, 1))


def gradients_and_peak():
    """-> a copy of the gradients of one batch, and the most bytes that were rented at one time."""
    model.zero_gradients()
    pool = TensorPool()
    with model.workspace.using_pool(pool):
        model.loss_and_gradients(ids, targets)
    return model.flat.grad.copy(), pool.statistics().high_water_mark


def megabytes(numbers):
    """float32 numbers per token of the batch -> MB, millions of bytes."""
    return 4 * R * numbers / 1e6


plain, peak = gradients_and_peak()
print(f"formula  {megabytes(N * K + 5 * C + 1):6.2f} MB\nmeasured {peak / 1e6:6.2f} MB")
assert abs(peak / 1e6 / megabytes(N * K + 5 * C + 1) - 1) < 0.001
print(f"weights  {model.flat.data.nbytes / 1e6:6.2f} MB, and as much for their gradients")

# %% [markdown]
# A rule of thumb for training: 16 bytes per parameter (the weight, its gradient, and two running
# means of AdamW, 4 bytes each), plus `4 K` bytes for each token of the batch and each block. The
# second part soon dominates. A run in this package also keeps a copy of the weights and the means,
# another 12 bytes per parameter, to return to if the loss spikes.
#
# A formula like ours must be worked out again for every new layer. So `estimate` runs the real
# model with kernels that do nothing and a pool that only counts, and is right to the byte. (A pool
# holds a bit more than was ever rented at one time, since idle arrays of one size are of no use for
# another.)

# %%
from smallmind.forecast.memory import estimate

settings = smallmind.TrainingConfig(steps=1, val_every=0)
trained = smallmind.TransformerModel(model.config)
pool = TensorPool()
with trained.workspace.using_pool(pool):
    list(smallmind.Training(trained, tokenizer, text, batch_size=B).steps(settings))
estimated = estimate(model.config, settings, batch_size=B).activations
held = pool.statistics().bytes_held
print(f"estimated {estimated:,} bytes, held {held:,}")
assert estimated == held

# %% [markdown]
# ## 5. Recompute: less memory for more arithmetic
#
# Instead of keeping `K` numbers per token, a block can keep only its input, `X = C` of them, a
# twelfth. When the backward pass arrives, the block runs forward once more and then backward (Chen
# et al. 2016). Divide the `N` blocks into segments of `k`, keep the input of each segment, and
# recompute segment by segment. The last segment can keep everything at once, because its backward
# pass follows immediately:
#
#     kept = (N / k - 1) X + k K
#
# Longer segments mean fewer inputs, but more to keep while one segment is processed. The sum is
# smallest where its derivative with respect to `k` is zero: `N X / k² = K`, so `k = √(N X / K)`.
# The well-known rule of `√N` blocks per segment assumes layers that keep nothing but their input,
# `X = K`. Here `K` is about twelve times `X`, so `k = √(N / 12)`: up to about 24 blocks, segments
# of a single block are best.
#
# What does it cost? In a step, products with weights take one unit of arithmetic forward and two
# backward (`dx` and `dW`). Running everything forward again would make it 4 units instead of 3. But
# the last segment runs forward only once, and the last product of a segment is not repeated,
# because nothing needs its result. Instead of guessing, we wrap the kernels and count
# multiplications.

# %%
import time

products: list[int] = []  # the multiplications of each


def counting(name, kernel):
    """Wraps a kernel so that it notes its multiplications if it is a product."""

    def counted(*arguments):
        if name.startswith("matmul"):
            out, a = arguments[0], arguments[2 if name == "matmul_gelu" else 1]
            products.append(out.size * a.shape[0 if name == "matmul_transpose_a" else 1])
        return kernel(*arguments)

    return counted


def median_ms(repeats=5):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        model.loss_and_gradients(ids, targets)
        times.append(time.perf_counter() - begin)
    return 1000 * np.median(times)


def memory_over_time():
    """-> the MB that are rented as each kernel of a step begins."""
    held: list[float] = []
    pool = TensorPool()

    def watching(_name, kernel):
        def watched(*arguments):
            held.append(pool.statistics().bytes_rented / 1e6)
            return kernel(*arguments)

        return watched

    with model.workspace.using_pool(pool), model.workspace.wrapped_kernels(watching):
        model.loss_and_gradients(ids, targets)
    return np.array(held)


curves = {}
print(f"{'':18} {'formula':>8} {'measured':>9} {'products':>9} {'time':>8}  gradients")
baseline = 0
for k in (N, 1, 2, 4):
    model.use_checkpointing(smallmind.CheckpointManager(k, enabled=k < N))
    gradients, peak = gradients_and_peak()
    products.clear()
    with model.workspace.wrapped_kernels(counting):
        model.loss_and_gradients(ids, targets)
    baseline = baseline or sum(products)
    formula = megabytes((N / k - 1) * C + k * K + 5 * C + 1)
    assert abs(peak / 1e6 / formula - 1) < 0.01
    assert np.array_equal(gradients, plain)
    name = "keep everything" if k == N else f"segments of {k}"
    print(
        f"{name:18} {formula:5.1f} MB {peak / 1e6:6.1f} MB {sum(products) / baseline:8.2f}x "
        f"{median_ms():5.0f} ms  the same bits"
    )
    if k in (N, 1):
        held = memory_over_time()
        curves[name] = np.interp(np.linspace(0, 1, 201), np.linspace(0, 1, len(held)), held)
percent = np.linspace(0, 100, 201)
draw("lesson06_memory", lines("Memory of a step in MB", curves, percent, "percent of the step"))
model.use_checkpointing(smallmind.CheckpointManager(enabled=False))

# %% [markdown]
# The picture shows both: keeping everything is one mountain, which the forward pass climbs and the
# backward pass descends; with recompute, each block is a hill of its own.
#
# The gradients are the same to the last bit: the same kernels run on the same numbers in the same
# order. That holds with dropout too, because which activations are dropped follows from a counter
# and not from the state of a random generator. So recompute is purely a matter of memory and time.
#
# Times depend on the machine and on what else it is doing. Often they grow less than the
# arithmetic, since what has just been computed again is still in the cache.
#
# On the command line it is `--use-gradient-checkpointing --checkpoint-strategy every_layer`.
#
# ## 6. Micro-batches: less memory for the same arithmetic
#
# The loss of a batch is the mean over its windows, and the gradient of a mean is the mean of the
# gradients. So a batch may go through the model in parts, one after another, each of which adds its
# share to the gradients: a part of `b` windows counts `b / B`. The activations of a part are
# released before the next one begins.

# %%
print(f"{'windows at once':18} {'formula':>8} {'measured':>9} {'time':>8}  gradients differ by")
for size in (32, 16, 8, 4):
    model.micro_batch_size = size
    gradients, peak = gradients_and_peak()
    formula = megabytes(size / B * (N * K + 5 * C + 1))
    difference = abs(gradients - plain).max() / abs(plain).max()
    assert difference < 1e-5
    print(
        f"{size:<18} {formula:5.1f} MB {peak / 1e6:6.1f} MB {median_ms():5.0f} ms  {difference:.0e}"
    )
model.micro_batch_size = None

# %% [markdown]
# Memory falls in proportion (with 4 windows a little less, as small arrays are rounded up to powers
# of two). Time grows slowly, as the kernels get less to do at each call. Beyond 2048 tokens, as
# many as the batch above has, nothing gets faster, so that is the default of `--micro-batch-size`.
#
# These gradients are *not* the same bits. Sums in another order are rounded differently, in the
# seventh digit. But for the same sizes they are always the same, on any number of threads.
#
# A third way is 16-bit numbers: `--precision bfloat16` halves what is kept, at two or three digits
# instead of seven. The three ways can be combined, and `smallmind estimate` says what a run would
# take with any flags.
#
# ## Exercises
#
# **1. Other parts.** Llama's block has RMSNorm, which keeps a scale but no mean; `G` heads of keys
# and of values instead of `H`, each of `D = C / H` channels; and a perceptron whose activation is
# made of *two* preactivations of `W` channels each. How many numbers per token does it keep?


# %%
from smallmind.lessons import judge
from smallmind.nn.backend import dry_run_backend
from smallmind.nn.rope import RotaryPosition


def llama_block_keeps(C, H, G, W):
    """-> the numbers per token that a block of Llama keeps, its input included."""
    raise NotImplementedError


def measured_keeps(C, H, G, W, R=2048):
    """Returns the numbers per token that the real block keeps, from a dry run."""
    config = ModelConfig(
        block_size=R,
        n_embd=C,
        n_head=H,
        n_kv_head=G,
        norm="rmsnorm",
        position="rope",
        mlp="swiglu",
        mlp_width=W,
        bias=False,
    )
    scope = Scope(Workspace(dry_run_backend(), np.float32, 0.0, 0), Parameters(), config)
    shared = RotaryPosition(scope.inner("position")), Documents(scope.inner("documents"))
    block = Block(scope.inner("block"), *shared, None, None, 0)
    scope.parameters.allocate()
    scope.workspace.T = R
    block.forward(scope.workspace.rent(R, C))
    return round(scope.workspace.pool.statistics().bytes_rented / 4 / R) - C  # less the output


def check_llama_block(candidate):
    hints = {
        (64, 4, 4, 128): "go through the table again, layer by layer",
        (64, 4, 2, 128): "keys and values have G heads each of C / H channels, queries have H",
        (64, 8, 4, 128): "one number for each head of queries remains from the softmax",
        (128, 4, 1, 256): "the perceptron keeps 2 W",
    }
    for sizes, hint in hints.items():
        expected, found = measured_keeps(*sizes), candidate(*sizes)
        assert found == expected, (
            f"C, H, G, W = {sizes}: the block keeps {expected}, not {found}; {hint}"
        )


print("Exercise 1:", judge(lambda: check_llama_block(llama_block_keeps)))

# %% [markdown]
# **2. The best segments.** Write a function that finds the length of segments with the smallest
# `(ceil(N / k) - 1) X + k K`; the smallest such `k` if there are several. Why does the formula of
# section 5 not suffice?


# %%
import math


def best_segment(N, K, X):
    """Blocks, numbers that a block keeps, numbers of its input -> the best k, from 1 to N."""
    raise NotImplementedError


def check_best_segment(candidate):
    def kept(k, N, K, X):
        return (math.ceil(N / k) - 1) * X + k * K

    for sizes in (
        (8, 776, 64),
        (100, 776, 64),
        (16, 64, 64),
        (3, 1, 100),
        (60, 100, 80),
        (2, 5, 5),
    ):
        N = sizes[0]
        found, best = candidate(*sizes), min(range(1, N + 1), key=lambda k: kept(k, *sizes))
        assert isinstance(found, int), f"k must be an int, not {found!r}"
        assert 1 <= found <= N, f"k={found} is not from 1 to N={N}"
        assert found == best, (
            f"N, K, X = {sizes}: k={found} keeps {kept(found, *sizes)}, "
            f"k={best} only {kept(best, *sizes)}"
            if kept(found, *sizes) > kept(best, *sizes)
            else f"N, K, X = {sizes}: k={best} keeps as little as k={found}, and is smaller"
        )


print("Exercise 2:", judge(lambda: check_best_segment(best_segment)))

# %% [markdown]
# **3. A layer of your own.** Write a layer that multiplies each channel by a gain of its own:
# `y = x * gain`, with `gain` (C,), which starts at 1 and has the role `Role.GAIN`. Use NumPy, but
# rent every array of R rows. `x` and `dy` belong to the caller, as does what you return.


# %%
class Scale:
    """y = x gain."""

    def __init__(self, scope):
        raise NotImplementedError

    def forward(self, x):
        """x (R, C) -> y (R, C), rented; keeps x."""
        raise NotImplementedError

    def backward(self, dy):
        """dy (R, C) -> dx (R, C), rented; adds to the gradient of gain."""
        raise NotImplementedError


def check_scale(candidate):
    scope, R, C = new_scope(ModelConfig(n_embd=8, n_head=2)), 6, 8
    workspace, parameters = scope.workspace, scope.parameters
    layer = candidate(scope.inner("scale"))
    specs = parameters.specs
    assert [spec.shape for spec in specs] == [(C,)], "declare one parameter of shape (C,)"
    assert specs[0].role == Role.GAIN, f"the role of the parameter is {specs[0].role}, not gain"
    name = specs[0].name
    assert name.startswith("scale."), f"declare it with scope.declare: its name is {name!r}"
    parameters.allocate()
    parameters.initialise(seed=0)
    gain, dgain = parameters.views[name], parameters.grad_views[name]
    assert np.array_equal(gain, np.ones(C)), "the gain starts at 1: see Constant or ONES"
    gain[...] = np.arange(1, C + 1)
    expected = np.zeros(C)
    for _ in range(2):
        x, dy = workspace.rent(R, C), workspace.rent(R, C)
        x[...], dy[...] = random.standard_normal((R, C)), random.standard_normal((R, C))
        given, expected = dy.copy(), expected + (dy * x).sum(axis=0)
        y = layer.forward(x)
        assert np.allclose(y, x * gain), "forward does not return x * gain"
        assert id(y) in workspace.rented(), "rent y from the workspace, and write into it"
        dx = layer.backward(dy)
        assert np.allclose(dx, given * gain), "dx is not dy * gain"
        assert np.allclose(dgain, expected, atol=1e-5), (
            "the gradient of gain is the sum over rows of dy * x, added to what was there"
        )
        rented = workspace.rented()
        assert id(dx) in rented, "rent dx from the workspace, and write into it"
        given = {id(array): array for array in (x, y, dy)}
        assert given.keys() <= rented, "x, y and dy belong to the caller: do not release them"
        workspace.release(*(given | {id(dx): dx}).values())
        assert not workspace.rented(), "something is still rented after the backward pass"


print("Exercise 3:", judge(lambda: check_scale(Scale)))

# %% [markdown]
# **4. Micro-batches by hand.** `model.loss_and_gradients(ids, targets, scale=s)` adds the gradient
# of `s` times the mean loss, and returns the mean loss. Use it on parts of the given sizes, in
# order, so that gradients and loss are those of the whole batch.


# %%
def accumulate(model, ids, targets, sizes):
    """ids, targets (B, T), sizes that sum to B -> the mean loss; adds to the gradients."""
    raise NotImplementedError


def check_accumulate(candidate):
    shape = {"block_size": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = smallmind.TransformerModel(11, **shape, backend="numpy", dtype=np.float64)
    ids, targets = np.random.default_rng(0).integers(0, 11, (2, 6, 8))
    loss = model.loss_and_gradients(ids, targets)
    expected = model.flat.grad.copy()
    for sizes in ((6,), (3, 3), (1, 2, 3)):
        model.zero_gradients()
        found = candidate(model, ids, targets, sizes)
        ratio = np.vdot(model.flat.grad, expected) / np.vdot(expected, expected)
        assert np.allclose(model.flat.grad, expected, rtol=0, atol=1e-9), (
            f"sizes {sizes}: the gradients are not those of the whole batch, but about "
            f"{ratio:.2f} times as large; a part of b windows counts b / B"
        )
        assert found is not None, "the function returns None instead of the loss"
        assert abs(found - loss) < 1e-9, f"sizes {sizes}: the loss is {loss:.4f}, not {found:.4f}"


print("Exercise 4:", judge(lambda: check_accumulate(accumulate)))

# %% [markdown]
# ## Where to read on
#
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016), section 4: recompute.
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (2022),
#   section 4: the same count as ours, for a model in 16 bits that keeps attention's weights.
# - Dao et al., *FlashAttention* (2022), section 3: attention that never stores its weights.
# - Radford et al., *Language Models are Unsupervised Multitask Learners* (2019), section 2.3: the
#   block.
# - In this package: `smallmind/nn/block.py`, `attention.py`, `mlp.py` and `network.py`, each a page
#   long; `recompute.py`; `smallmind/memory/tensor_pool.py`. `smallmind/lessons/writing_a_layer.py`
#   puts a layer of your own into a model, and compiles its kernels.
#
# ## What you can do now
#
# You can open any layer of the package and know each of its lines, write one, and say before a run
# how much memory it takes, and what to give up for less. Next: lesson 7, *How fast is fast*, on
# time.

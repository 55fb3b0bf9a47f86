# %% [markdown]
# # Half the bits
#
# Models are usually trained in 16 bits instead of 32: half the memory, half the traffic, and on
# many processors at least twice the multiplications per second. This lesson shows what can go
# wrong, and three techniques that prevent it. You will be able to
#
# - read a float16 and a bfloat16 bit by bit, and say which numbers they can hold;
# - make the gradients of a real model underflow and overflow, and explain both from the formats;
# - write a training step with loss scaling that recovers from an overflow by itself;
# - say why the weights are kept in float32 nevertheless, and why bfloat16 needs no scaling.
#
# **Before:** lesson 1, for gradients and learning rates. **Time:** 65 minutes; the code runs for 5
# seconds.

# %%
import math

import numpy as np

import smallmind
from smallmind.charts.histogram import histogram
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw
from smallmind.text.stories import built_in_text

# %% [markdown]
# ## 1. Three formats
#
# A floating-point number is written like 6.02 x 10^23, but in base two. It has three fields:
#
# - a sign s, one bit;
# - an exponent e, which says how large the number is, roughly;
# - a fraction m of p bits, the digits after the point. The digit before the point needs no bit: in
#   base two the first digit of a number that is not zero is always 1.
#
# With E bits for the exponent, the exponents run from 0 to 2^E - 1. A fixed bias, 2^(E-1) - 1, is
# subtracted from e so that small numbers are possible too:
#
#     value = (-1)^s * 2^(e - bias) * (1 + m / 2^p)
#
# The two ends of the range of e are special. The largest e means infinity (m = 0) or NaN. e = 0
# means that the first digit is 0, not 1, and the exponent is that of e = 1:
#
#     value = (-1)^s * 2^(1 - bias) * m / 2^p
#
# These are the **subnormal** numbers, which include zero. They fill the gap between zero and the
# smallest normal number, evenly, with fewer and fewer digits.
#
#     format     sign   exponent E   fraction p
#     float32      1        8           23
#     float16      1        5           10
#     bfloat16     1        8            7
#
# float16 spends its bits on digits, bfloat16 on range: it is a float32 without its last 16 bits.


# %%
def value_of(bits, E, p):
    """bits: an integer that holds the 1 + E + p bits of a number -> the number."""
    m = bits % 2**p
    e = bits >> p & (2**E - 1)
    sign = -1.0 if bits >> (E + p) else 1.0
    bias = 2 ** (E - 1) - 1
    if e == 2**E - 1:
        return sign * math.inf if m == 0 else math.nan
    if e == 0:
        return sign * 2.0 ** (1 - bias) * (m / 2**p)
    return sign * 2.0 ** (e - bias) * (1 + m / 2**p)


# %% [markdown]
# There are only 65,536 numbers of 16 bits, so we can check them all. NumPy has no bfloat16, so this
# package keeps the bits of one in an int16 (and those of a float16 in a uint16, so that the two are
# not mixed up). `to_float32` and `round_to` convert them.

# %%
every = np.arange(2**16, dtype=np.uint16)
ours = np.array([value_of(int(bits), 5, 10) for bits in every])
assert np.array_equal(ours, every.view(np.float16), equal_nan=True)
ours = np.array([value_of(int(bits), 8, 7) for bits in every])
assert np.array_equal(ours, to_float32(every.view(BFLOAT16)), equal_nan=True)
print("All 65,536 numbers of both formats are what the formula says.")

FORMATS = {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
print(f"\n{'':9} {'largest':>10} {'smallest normal':>16} {'smallest':>10} {'step above 1':>13}")
for name, (E, p) in FORMATS.items():
    top, bottom = value_of(((2**E - 2) << p) + 2**p - 1, E, p), value_of(1 << p, E, p)
    print(f"{name:9} {top:10.3g} {bottom:16.3g} {value_of(1, E, p):10.3g} {2.0**-p:13.3g}")


def shown(x, dtype, E):
    """Returns the number that x becomes in 16 bits, and its three fields."""
    bits = round_to(np.array([x], np.float32), dtype)
    text = f"{int(bits.view(np.uint16)[0]):016b}"
    return f"{to_float32(bits)[0]:<12.6g} {text[0]} {text[1 : E + 1]} {text[E + 1 :]}"


print(f"\n{'':8} {'float16':32} bfloat16")
for x in (1.0, -2.5, 1 / 3, 1 / 1024, 1e-7, 1e-8, 70000.0):
    print(f"{x:8.3g} {shown(x, FLOAT16, 5):32} {shown(x, BFLOAT16, 8)}")

# %% [markdown]
# In the last three rows, float16 has little left of 1e-7, a subnormal number; 1e-8 is gone; and
# 70,000 is infinite. bfloat16 has all of them, to two or three digits.
#
# **How large is the rounding error?** Between 2^k and 2^(k+1), numbers are 2^(k-p) apart. Rounding
# to the nearest one is off by at most half of that, which relative to the number is
#
#     |error| / |x|  <=  2^(k-p) / 2 / 2^k  =  2^-(p+1)
#
# That is 0.05 % for float16 and 0.4 % for bfloat16, for any number within the normal range. Below
# that range the error stops being relative: all float16 below 2^-14 are 2^-24 apart.
#
# **Sums need more.** Adding a small number to a large one drops whatever is below half a step of
# the large one. Add up ones, rounding after every addition:


# %%
def sum_of_ones(count, dtype):
    total = np.zeros(1, np.float32)
    for _ in range(count):
        total = to_float32(round_to(total + np.float32(1), dtype))
    return total[0]


print(f"5000 ones, added up in float16: {sum_of_ones(5000, FLOAT16):g}")
print(f"5000 ones, added up in bfloat16: {sum_of_ones(5000, BFLOAT16):g}")

# %% [markdown]
# From 2048 = 2^11 on, float16 numbers are 2 apart. 2048 + 1 lies halfway between two of them, the
# tie goes to the one whose last bit is 0, which is 2048, and the sum never moves again. In bfloat16
# that happens at 256. This is why 16 bits are a format for *storing* numbers: this package, like
# the matrix units of processors, multiplies 16-bit numbers but adds the products in float32.
#
# ## 2. Where gradients are small
#
# We need a model that has learned something: two layers of 64 channels, trained in float32 for 150
# steps. (In a fresh installation, the many kernels compile for a minute or two, once.)

# %%
smallmind.set_threads(1)
TEXT = built_in_text()[:200_000]
TOKENIZER = smallmind.Tokenizer(TEXT)
TOKENS = TOKENIZER.encode(TEXT)
T = 64


def batch(number, B=8):
    """Returns batch `number`: ids and targets, (B, T)."""
    starts = np.random.default_rng(number).integers(0, len(TOKENS) - T, B)
    windows = TOKENS[starts[:, None] + np.arange(T + 1)]
    return windows[:, :-1], windows[:, 1:]


PARTS = {"norm": "rmsnorm", "mlp": "relu2", "bias": False}  # with few kernels to compile


def new_model():
    return smallmind.TransformerModel(TOKENIZER.vocab_size, T, 64, 2, 2, seed=1, **PARTS)


model = new_model()
optimizer = smallmind.AdamW(model, learning_rate=3e-3)
for number in range(150):
    loss = model.loss_and_gradients(*batch(number))
    optimizer.step(max_grad_norm=1.0)
print(f"loss after 150 steps: {loss:.3f} nats per token")
TRAINED = model.flat.data.copy()  # all weights, one after the other

# %% [markdown]
# The backward pass begins at the logits z. The loss is the mean, over all B T tokens of the batch,
# of -log p(target), where p = softmax(z). Its derivative is
#
#     dz = (p - 1) / (B T)   for the target
#     dz = p / (B T)         for every other token
#
# So a token that the model considers unlikely, say p = 1e-5, gets a gradient of 1e-5 / (B T): with
# 2048 tokens 5e-9. The smallest positive float16 is 6e-8. And the more tokens a batch has, the
# smaller each gradient.

# %%
ids, targets = batch(999, B=32)
dlogits = model.inspect(ids, targets).activation_gradients["head"] * targets.size

print("share of the gradients of the logits that become zero:")
for tokens in (2**11, 2**15, 2**19):
    stored = {
        name: round_to(dlogits / np.float32(tokens), dtype)
        for name, dtype in (("float16", FLOAT16), ("bfloat16", BFLOAT16))
    }
    lost = {name: np.mean(to_float32(bits) == 0) for name, bits in stored.items()}
    print(f"  {tokens:7,} tokens: float16 {lost['float16']:6.1%}, bfloat16 {lost['bfloat16']:.1%}")

sizes = np.log2(np.abs(dlogits[dlogits != 0]))
draw(
    "lesson08_gradients",
    histogram(
        "Sizes of the gradients of the logits",
        {f"{tokens:,} tokens per batch": sizes - np.log2(tokens) for tokens in (2**11, 2**19)},
        "log2 of the size; float16 ends at -24",
    ),
)

# %% [markdown]
# A gradient of zero says "this token is as likely as it should be", which is not quite true. With
# half a million tokens per batch, as is common for large models, most gradients are gone.
#
# ## 3. Loss scaling
#
# The remedy costs nothing. The backward pass is linear in dz: multiply the loss by a constant S,
# and every gradient in the whole network is multiplied by S. If S is a power of two, this changes
# exponents only, not a single digit. So:
#
# 1. multiply dz by S, which moves all gradients to where float16 has its digits;
# 2. run the backward pass in 16 bits;
# 3. divide the gradients of the weights, which are float32, by S.
#
# `model.loss_and_gradients(ids, targets, scale)` does the first two. We compare its gradients in 16
# bits with those in float32, over a wide range of scales.


# %%
def gradient(precision, scale, of=(ids, targets)):
    """Returns the gradient (n,) of all weights in this precision, divided by the loss scale."""
    model.use_precision(precision)
    model.zero_gradients()
    model.loss_and_gradients(*of, scale)
    found = model.flat.grad / np.float32(scale)
    model.zero_gradients()
    model.use_precision("float32")
    return found


def difference(a, b):
    """Returns |a - b| / |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def shown_error(precision, scale):
    found = gradient(precision, scale)
    if not np.isfinite(found).all():
        return f"{np.sum(~np.isfinite(found)):,} of {found.size:,} inf or NaN"
    return f"{difference(found, exact):.2%} off, {np.mean(found == 0):.1%} of it zero"


exact = gradient("float32", 1.0)
print(f"{'scale':>6} {'float16':36} bfloat16")
for k in (-16, -12, -8, -4, 0, 8, 16, 20, 24, 28, 32):
    columns = (shown_error(precision, 2.0**k) for precision in ("float16", "bfloat16"))
    print(f"  2^{k:<3} {next(columns):36} {next(columns)}")

other = gradient("float32", 1.0, of=batch(998, B=32))
print(f"\nFor comparison, the gradient of another batch: {difference(other, exact):.0%} off")

# %% [markdown]
# Read the float16 column from top to bottom.
#
# - **Underflow.** Small scales stand for large batches: 2^-8 is what a batch of 256 times as many
#   tokens, half a million, would do to each gradient. The error can even exceed 100 %: when the
#   many small positive gradients of unlikely tokens are gone, nothing balances the large negative
#   ones of the targets.
# - **A wide plateau**, where the error is that of the rounding, 2^-11 per number. Any scale on it
#   is as good as any other.
# - **Overflow.** Some gradient exceeds 65504 and becomes infinite. Then inf - inf or 0 * inf turns
#   up, which is NaN, and spreads.
#
# The bfloat16 column does not depend on the scale at all. It has the exponents of float32: what
# fits there fits here. **That is why bfloat16 needs no loss scaling.** The price is that its error
# is about eight times that of float16, as its fraction has three bits less. Compare it with the
# last line: a gradient is an estimate from a random batch anyway, and that uncertainty is far
# larger.
#
# ## 4. Overflow, and recovery
#
# The right scale depends on the model, the batch and the progress of training. Nobody has to find
# it by hand: if it is too large, gradients are not finite. `smallmind.LossScaler` uses that:
#
# - if a gradient is not finite, skip the update and halve the scale;
# - after 1000 clean steps in a row, double it, to stay as high as possible.
#
# A step then takes a few lines. Mind the order: the gradient is divided by the scale *before* it is
# clipped, or the limit on its norm would be a limit on S times the norm. `optimizer.step` does
# both, and leaves everything as it is when the norm is not finite.


# %%
def train_step(model, optimizer, scaler, ids, targets):
    loss = model.loss_and_gradients(ids, targets, scaler.scale)
    norm = optimizer.step(max_grad_norm=1.0, loss_scale=scaler.scale)
    overflowed = not math.isfinite(norm)
    if overflowed:
        model.zero_gradients()
    scaler.update(overflowed)
    return loss, norm


model = new_model()
model.use_precision("float16")
optimizer = smallmind.AdamW(model, learning_rate=3e-3)
scaler = smallmind.LossScaler(2.0**30)  # far too large, on purpose
before = model.flat.data.copy()
for number in range(12):
    scale = scaler.scale
    loss, norm = train_step(model, optimizer, scaler, *batch(number))
    changed = not np.array_equal(before, model.flat.data)
    before[:] = model.flat.data
    verdict = "updated" if changed else "skipped"
    shown_scale = f"scale 2^{math.log2(scale):.0f}"
    print(f"step {number:2}: {shown_scale}, norm {norm:6.3f}, loss {loss:.3f}, {verdict}")
print(scaler)

for _ in range(1000):
    scaler.update(overflowed=False)
print(f"after 1000 more clean steps: {scaler}")

# %% [markdown]
# The run loses a few steps at its start, and then about one in 1000, when the scale has been
# doubled once too often. If ten steps in a row are lost, something else is not finite:
# `scaler.is_lost` is then true, and a run ends.
#
# ## 5. Why the weights stay in float32
#
# So gradients survive 16 bits. Can the weights have 16 bits too? An update is w - r u, where r is
# the learning rate and, with Adam, u is of the order of 1. Take w = 1 in float16. The next number
# below it is 1 - 2^-11, and an update of less than half of that step, 0.00024, is rounded away. Not
# only once: every time.

# %%
for name, dtype in (("float16", FLOAT16), ("bfloat16", BFLOAT16)):
    w = np.ones(1, np.float32)
    for _ in range(1000):
        w = to_float32(round_to(w - np.float32(2e-4), dtype))
    print(f"1 minus 1000 times 0.0002 in {name}: {w[0]:.4f}; it should be 0.8")

# %% [markdown]
# In general an update is lost if it is smaller than half a step, which is between 2^-(p+2) and
# 2^-(p+1) times the weight. Learning rates decay to zero, so towards the end of training most
# updates are that small. Let us measure it. We continue training the same model three times, at a
# low rate: in float32; as this package does it, with passes in bfloat16 but the weights, the
# **masters**, in float32; and with weights that are rounded to bfloat16 after every update.


# %%
def continued(precision, rounded, learning_rate=3e-5, steps=150):
    """-> the loss before and after, and the share of weights that the last step changed."""
    model = new_model()
    model.flat.data[:] = TRAINED
    if rounded:
        model.flat.data[:] = to_float32(round_to(model.flat.data, BFLOAT16))
    model.use_precision(precision)
    optimizer = smallmind.AdamW(model, learning_rate=learning_rate)
    first = model.loss(*batch(5000, B=64))
    for number in range(steps):
        model.loss_and_gradients(*batch(1000 + number))
        before = model.flat.data.copy()
        optimizer.step(max_grad_norm=1.0)
        if rounded:
            model.flat.data[:] = to_float32(round_to(model.flat.data, BFLOAT16))
        model.flat.refresh()  # passes in 16 bits read a rounded copy of the weights
    return first, model.loss(*batch(5000, B=64)), np.mean(before != model.flat.data)


for name, precision, rounded in (
    ("float32", "float32", False),
    ("bfloat16 passes, float32 masters", "bfloat16", False),
    ("bfloat16 passes and weights", "bfloat16", True),
):
    first, last, moved = continued(precision, rounded)
    print(f"{name:33} loss {first:.4f} -> {last:.4f}, last step moved {moved:.0%} of the weights")

# %% [markdown]
# With masters, bfloat16 learns what float32 learns. Without them, most weights do not move and most
# of the progress is gone, without a warning. The masters cost little: the optimizer keeps two more
# float32 numbers per weight anyway, and most of the memory goes to activations, which do have 16
# bits.
#
# To sum up:
#
#     problem                       remedy                   float16   bfloat16
#     small gradients become zero   loss scaling             needed    not needed
#     small updates are lost        float32 masters          needed    needed
#     long sums stop growing        add products in float32  needed    needed
#
# `smallmind train --precision float16` or `bfloat16` applies whatever its format needs. The
# default, `auto`, is bfloat16 where the processor multiplies it faster than float32. On this one:

# %%
print("precision auto:", new_model().use_precision("auto"))

# %% [markdown]
# ## Exercises
#
# ### Exercise 1: round to bfloat16
#
# Given float32 values, return the 16 bits of the nearest bfloat16, as uint16. Ties go to the number
# whose last bit is 0. Only integer arithmetic on `values.view(np.uint32)` is needed: cutting off
# the last 16 bits rounds toward zero; so what must be added first? Then think about NaN, whose
# fraction may have bits only in the part that is cut off. (Subnormal numbers do not occur in the
# check.)


# %%
def to_bfloat16(values):
    raise NotImplementedError


def check_to_bfloat16(candidate):
    def bits(*values):
        found = np.asarray(candidate(np.array(values, np.float32)))
        assert found.dtype == np.uint16, f"return uint16, not {found.dtype}"
        return [f"{int(b):016b}" for b in found]

    def expect(value, wanted, hint):
        (found,) = bits(value)
        assert found == wanted, f"{value!r} became {found}, not {wanted}: {hint}"

    expect(1.0, "0011111110000000", "1 is a bfloat16; nothing is to be rounded")
    expect(1 + 2**-7 * 0.75, "0011111110000001", "the nearest number is the one above it")
    expect(1 + 2**-8, "0011111110000000", "a tie, and the number below has a last bit of 0")
    expect(1 + 3 * 2**-8, "0011111110000010", "a tie, and the number above has a last bit of 0")
    expect(-(1 + 2**-7 * 0.75), "1011111110000001", "the sign is a bit of its own")
    expect(1.9999, "0100000000000000", "it rounds up to 2; the carry goes into the exponent")
    expect(3.4e38, "0111111110000000", "it is nearer to the next power of two: infinity")
    expect(math.inf, "0111111110000000", "infinity stays infinity")
    for pattern in (0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF):
        (nan,) = np.array([pattern], np.uint32).view(np.float32)
        (found,) = bits(nan)
        assert math.isnan(value_of(int(found, 2), 8, 7)), (
            f"the NaN with the bits {pattern:08x} became {value_of(int(found, 2), 8, 7)}"
        )
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    same = np.asarray(candidate(values)) == round_to(values, BFLOAT16).view(np.uint16)
    assert same.all(), f"{np.mean(~same):.1%} of random numbers differ from round_to"


print("Exercise 1:", judge(lambda: check_to_bfloat16(to_bfloat16)))

# %% [markdown]
# ### Exercise 2: a step with loss scaling
#
# Write plain gradient descent with all safeguards. `gradient` is that of `scaler.scale` times the
# loss. Return the new weights, w - learning_rate * g, where g is the gradient of the loss itself,
# scaled down to the norm `max_norm` if it is longer than that. If it is not finite, return the
# weights as they were. Tell the scaler what happened.


# %%
def scaled_step(weights, gradient, scaler, learning_rate, max_norm):
    raise NotImplementedError


def check_scaled_step(candidate):
    weights = np.array([1.0, 2.0], np.float32)

    def step(gradient, scale, max_norm=10.0):
        scaler = smallmind.LossScaler(scale)
        given = np.array(gradient, np.float32)
        with np.errstate(invalid="ignore"):  # inf * 0 must not warn here
            found = candidate(weights.copy(), given, scaler, 0.5, max_norm)
        return np.asarray(found), scaler

    found, scaler = step([3.0 * 256, 4.0 * 256], 256.0)
    assert not np.allclose(found, weights - 0.5 * np.array([6.0, 8.0], np.float32)), (
        "a gradient of norm 5 was clipped to 10: divide it by the scale before you clip it"
    )
    assert np.allclose(found, [-0.5, 0.0]), (
        "from the weights [1, 2], a gradient [3, 4] times the scale 256 and a learning rate of "
        f"0.5 must lead to [-0.5, 0]; got {found}"
    )
    assert scaler.clean_steps == 1, "tell the scaler about steps without an overflow too"
    found, _ = step([30.0 * 256, 40.0 * 256], 256.0)
    assert np.allclose(found, weights - 0.5 * np.array([6.0, 8.0], np.float32)), (
        f"a gradient [30, 40] of norm 50 must be scaled down to norm 10, [6, 8]; got {found}"
    )
    for bad in (math.inf, -math.inf, math.nan):
        found, scaler = step([bad, 1.0], 256.0)
        assert np.array_equal(found, weights), (
            f"a gradient with {bad} in it must leave the weights as they are; got {found}"
        )
        assert scaler.scale == 128.0, (
            f"after a gradient with {bad} the scale must be halved, once; it is {scaler.scale}"
        )


print("Exercise 2:", judge(lambda: check_scaled_step(scaled_step)))

# %% [markdown]
# ### Exercise 3: doing without masters
#
# There is another way to keep small updates, stochastic rounding. A number that is a quarter of the
# way from one bfloat16 to the next is rounded up with probability 1/4 and down with probability
# 3/4. Its expected value is then the number itself, so what single roundings lose, many keep on
# average.
#
# Given float32 values and a NumPy generator, return such roundings, as float32 whose last 16 bits
# are zero. (Cutting off bits rounds toward zero. What could you add to the bits first, at random?)
# If you like, use it in `continued` and see how much of the progress comes back.


# %%
def round_at_random(values, random):
    raise NotImplementedError


def check_round_at_random(candidate):
    random = np.random.default_rng(0)
    exact = to_float32(round_to(random.standard_normal(1000).astype(np.float32), BFLOAT16))
    found = np.asarray(candidate(exact, random))
    assert found.dtype == np.float32, f"return float32, not {found.dtype}"
    assert np.array_equal(found, exact), "a number that is a bfloat16 already must stay as it is"
    step = 2.0**-7  # between 1 and 2
    for share in (0.25, 0.9):
        value = np.float32(1 + share * step)
        for sign in (1, -1):
            found = np.asarray(candidate(np.full(100_000, sign * value), random))
            assert not np.any(found.view(np.uint32) & 0xFFFF), "the last 16 bits must be 0"
            outside = set(np.abs(found).tolist()) - {1.0, 1 + step}
            assert not outside, (
                f"{sign * value} was rounded to {min(outside)}, which is not a neighbour of it"
            )
            mean = float(np.abs(found).mean(dtype=np.float64))
            assert abs(mean - value) < 0.02 * step, (
                f"{value} lies {share:.0%} of the way from 1 to the next number; it was rounded up "
                f"{(mean - 1) / step:.0%} of the time"
            )


print("Exercise 3:", judge(lambda: check_round_at_random(round_at_random)))

# %% [markdown]
# ## Where to read on
#
# - Micikevicius et al. (2018), *Mixed Precision Training*, arXiv:1710.03740: section 3.1 on
#   masters, 3.2 on loss scaling, 3.3 on sums.
# - Kalamkar et al. (2019), *A Study of BFLOAT16 for Deep Learning Training*, arXiv:1905.12322.
# - Gupta et al. (2015), *Deep Learning with Limited Numerical Precision*, arXiv:1502.02551:
#   stochastic rounding.
# - Goldberg (1991), *What Every Computer Scientist Should Know About Floating-Point Arithmetic*,
#   ACM Computing Surveys 23(1); and IEEE 754, section 3, which defines float16 ("binary16").
# - In this package: `kernels/number_types.py` (the conversions), `optim/loss_scaler.py`, and
#   `nn/parameters.py` (masters and their rounded copy).
#
# ## What you can do now
#
# You can train in 16 bits, and when a loss turns into NaN, or stops falling for no reason, you know
# where to look first. Next: lesson 9, *The recipe*, on what else makes a model learn.

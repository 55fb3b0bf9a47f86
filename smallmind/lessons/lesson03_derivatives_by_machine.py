# %% [markdown]
# # Derivatives by machine
#
# After this lesson you can write a program that differentiates other programs, in fewer than 60
# lines, and say why the layers of this package do not use one.
#
# **Before:** lessons 1 and 2. **Time:** 55 minutes; the code runs for 1 second.

# %%
import math
import sys
import time

import numpy as np

from smallmind.charts.figure import lines
from smallmind.kernels import reference
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw

random = np.random.default_rng(0)

# %% [markdown]
# ## 1. A number that remembers
#
# In lesson 2 you took layers apart until each step had a derivative that you knew, and then you
# walked back from the loss with three rules. Nothing in that needs a person. A program that
# computes a loss is a long list of additions, products and a few functions of one number. If each
# number remembers *from which numbers it was made*, and the derivative of that one step, the walk
# back is a loop.
#
# So a `Scalar` has a value, its parents, and for each parent the slope: how much the number changes
# when that parent does. There are only two kinds of steps with two parents, `a + b` with the slopes
# 1 and 1, and `a b` with the slopes `b` and `a`. All others have one parent.
#
# `backward` gives each number its gradient, the derivative of the last number with respect to it:
#
# - a number adds `gradient * slope` to the gradient of each parent: rule 1, the chain;
# - it *adds*, because a number may be used in several places: rule 2, fan-out;
# - and it must do so only when its own gradient is complete, after everything that was made from
#   it. So numbers are visited in the reverse of an order in which parents come before children.


# %%
class Scalar:
    """A value, the numbers that it was made from, and its slope in the direction of each."""

    def __init__(self, value, parents=(), slopes=()):
        self.value, self.parents, self.slopes = value, parents, slopes
        self.gradient = 0.0

    def __add__(self, other):
        other = scalar(other)
        return Scalar(self.value + other.value, (self, other), (1.0, 1.0))

    def __mul__(self, other):
        other = scalar(other)
        return Scalar(self.value * other.value, (self, other), (other.value, self.value))

    def __pow__(self, power):
        slope = power * self.value ** (power - 1)
        return Scalar(self.value**power, (self,), (slope,))

    def exp(self):
        value = math.exp(self.value)
        return Scalar(value, (self,), (value,))

    def log(self):
        return Scalar(math.log(self.value), (self,), (1 / self.value,))

    def tanh(self):
        value = math.tanh(self.value)
        return Scalar(value, (self,), (1 - value * value,))

    def backward(self):
        """Adds to the gradient of every number that this one was made from."""
        self.gradient = 1.0
        for child in reversed(in_order(self)):
            for parent, slope in zip(child.parents, child.slopes, strict=True):
                parent.gradient += child.gradient * slope

    # The rest is made of these.

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + -scalar(other)

    def __truediv__(self, other):
        return self * scalar(other) ** -1

    def sqrt(self):
        return self**0.5


def scalar(x):
    return x if isinstance(x, Scalar) else Scalar(float(x))


def in_order(last):
    """Returns all that a number was made from, parents before children, and the number itself."""
    order, seen, left = [], set(), [(last, False)]
    while left:
        node, has_parents = left.pop()
        if has_parents:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            left += [(node, True), *((parent, False) for parent in node.parents)]
    return order


# %% [markdown]
# That is all of it. Try it on a function that would be tedious by hand, and compare with finite
# differences.


# %%
def f(x):
    return (x * x + 1.0) ** 0.5 * (x * 3.0 - 1.0).tanh() / (1.0 + x.exp())


def derivative(function, at):
    x = Scalar(at)
    y = function(x)
    y.backward()
    return x.gradient


for at in (-1.0, 0.5, 2.0):
    h = 1e-6
    slope = (f(Scalar(at + h)).value - f(Scalar(at - h)).value) / (2 * h)
    print(f"f'({at:4}) = {derivative(f, at):.9f}, by finite differences {slope:.9f}")
    assert abs(derivative(f, at) - slope) < 1e-8

xs = np.linspace(-4, 4, 161)
curves = {
    "f(x)": [f(Scalar(x)).value for x in xs],
    "its derivative, by machine": [derivative(f, x) for x in xs],
}
draw("lesson03_derivative", lines("A function and its derivative", curves, xs, "x"))

# %% [markdown]
# No formula for f' was ever written down. This is not symbolic algebra, and it is not finite
# differences either: it is the chain rule on numbers, exact up to rounding. It is called
# *reverse-mode automatic differentiation* (Linnainmaa 1970; Speelpenning 1980).
#
# ## 2. Why the order matters
#
# The obvious `backward` is recursive: tell each parent its share, which at once tells its own
# parents. That is correct, and useless. A number that is used twice would pass on two halves of its
# gradient instead of one sum, each parent of it four quarters, and so on.


# %%
def calls_of_recursion(node):
    """Returns how many times a recursive backward would visit numbers."""
    return 1 + sum(calls_of_recursion(parent) for parent in node.parents)


for doublings in (4, 8, 16):
    y = Scalar(1.0)
    for _ in range(doublings):
        y = y + y
    visits = calls_of_recursion(y)
    print(f"{doublings:2} doublings: {len(in_order(y)):2} numbers, {visits:7,} recursive visits")

# %% [markdown]
# In a transformer every half of a block uses its input twice, directly and through the residual
# connection. In 24 blocks, that alone would make 2^48 visits.
#
# ## 3. It learns
#
# A perceptron with one hidden layer, in Scalars. Note that the training loop is the one of lesson
# 1, except that there is no backward pass to write.

# %%
HIDDEN, POINTS, STEPS, RATE = 8, 24, 250, 0.03
inputs = np.linspace(-3, 3, POINTS)
wanted = np.sin(inputs)
weights = [Scalar(w) for w in random.normal(0, 0.8, 3 * HIDDEN)]


def predict(x):
    a, b, c = weights[:HIDDEN], weights[HIDDEN : 2 * HIDDEN], weights[2 * HIDDEN :]
    return sum((c[i] * (a[i] * x + b[i]).tanh() for i in range(HIDDEN)), Scalar(0.0))


start, losses = time.perf_counter(), []
moments = np.zeros(len(weights))
for _ in range(STEPS):
    loss = sum(((predict(x) - y) ** 2 for x, y in zip(inputs, wanted, strict=True)), Scalar(0.0))
    loss = loss / POINTS
    losses.append(loss.value)
    for w in weights:
        w.gradient = 0.0
    loss.backward()
    for i, w in enumerate(weights):  # with momentum
        moments[i] = 0.9 * moments[i] + w.gradient
        w.value -= RATE * moments[i]
print(f"mean squared error {losses[0]:.3f} -> {losses[-1]:.5f}")
print(f"{len(in_order(loss)):,} numbers per step, {(time.perf_counter() - start) / STEPS:.3f} s")

fit = {"sin(x)": list(wanted), "the perceptron": [predict(x).value for x in inputs]}
draw("lesson03_fit", lines("Learned from 24 points", fit, inputs, "x"))

# %% [markdown]
# ## 4. A layer of lesson 2, by machine
#
# NumPy arrays may hold any objects, and pass `+`, `*` and `np.sqrt` on to them. So a function that
# is written for arrays also takes arrays of Scalars, and we can differentiate the layer norm of
# lesson 2 without a word about its three paths.


# %%
def layernorm(x, weight, bias):
    """x (R, C), weight, bias (C,) -> y (R, C)."""
    mean = x.sum(axis=1, keepdims=True) / x.shape[1]
    var = ((x - mean) ** 2).sum(axis=1, keepdims=True) / x.shape[1]
    return (x - mean) / np.sqrt(var + 1e-5) * weight + bias


def scalars(array):
    """Returns an array of Scalars with these values."""
    return np.array([Scalar(value) for value in array.ravel()], object).reshape(array.shape)


def gradients(array):
    return np.array([each.gradient for each in array.ravel()]).reshape(array.shape)


R, C = 4, 6
x, weight, bias, dy = (random.standard_normal(shape) for shape in ((R, C), C, C, (R, C)))
tracked = [scalars(array) for array in (x, weight, bias)]
loss = (layernorm(*tracked) * dy).sum()  # its derivative with respect to y is dy
loss.backward()

dx, dweight, dbias = (np.zeros(shape) for shape in ((R, C), C, C))
mean = x.mean(axis=1)
rstd = 1 / np.sqrt(x.var(axis=1) + 1e-5)
reference.layernorm_backward(dx, dweight, dbias, dy, x, mean, rstd, weight)
by_hand = {"x": dx, "weight": dweight, "bias": dbias}
for (name, ours), theirs in zip(by_hand.items(), tracked, strict=True):
    difference = np.abs(ours - gradients(theirs)).max()
    print(f"d{name}: by hand and by machine differ by {difference:.0e}")
    assert difference < 1e-9

# %% [markdown]
# The same numbers. So why did you have to learn it by hand?
#
# ## 5. What it costs
#
# Count what the machine remembers of that small layer, and how long a product takes.

# %%
nodes = in_order(loss)
size = sum(map(sys.getsizeof, (nodes[-1], nodes[-1].value, nodes[-1].parents, nodes[-1].slopes)))
print(f"Layer norm of {R} x {C}: {len(nodes)} numbers remembered, about {size} bytes each")
print(f"The package keeps {R * C + 2 * R}: x, a mean and a scale per row, 4 bytes each")

N = 24
a, b = random.standard_normal((2, N, N))
start = time.perf_counter()
loss = (scalars(a) @ scalars(b)).sum()
loss.backward()
by_machine = time.perf_counter() - start
start = time.perf_counter()
for _ in range(100):
    ones = np.ones((N, N))
    product, da, db = a @ b, ones @ b.T, a.T @ ones
in_numpy = (time.perf_counter() - start) / 100
print(f"{N} x {N} times {N} x {N} and its gradients: {1e3 * by_machine:.0f} ms in Scalars,")
print(f"{1e6 * in_numpy:.0f} us in NumPy: {by_machine / in_numpy:,.0f} times as fast")

# %% [markdown]
# Nobody trains like that. PyTorch and JAX remember *arrays*: one node is a whole product, with its
# derivative, two more products, written by a person. The tape then has a few hundred entries
# instead of millions, and the arithmetic runs in fast kernels. The idea is still this lesson's.
#
# What is left of the cost is what a tape cannot know.
#
# - **What to keep.** A tape keeps the inputs of every step: for a layer norm in five steps several
#   arrays of the size of x. By hand you see that `x` and two numbers per row are enough, that
#   attention's probabilities can be computed again, and that softmax and cross-entropy together
#   need only `p - onehot`. Lesson 6 counts how much memory that is.
# - **What to do at once.** Every step of a tape reads and writes memory. A backward pass of your
#   own reads `x` and `dy` once and writes `dx` once. Lesson 7 shows that this is what takes time.
# - **In which order to add.** The bits of a result depend on it. Lesson 10 needs them to be the
#   same on any number of threads.
#
# The price is that somebody has to derive each layer, and may be wrong. That is why
# `gradient_check` exists, and why each layer of this package is a page: its backward pass is below
# its forward pass, and quotes it. With some twenty layers, that is a good trade. In research, where
# the model changes every day, it is a bad one. Then let the machine do it.
#
# ## Exercises
#
# ### Exercise 1: a step of your own
#
# Write SiLU, `x / (1 + e^-x)`, as **one** step: a Scalar whose only parent is `x`, with the slope
# that you derive. Remember that `e^-x` overflows for a large negative x: `math.exp(1000)` raises an
# OverflowError.


# %%
def silu(x):
    """A Scalar -> a Scalar."""
    raise NotImplementedError


def check_silu(candidate):
    for at in (-2.0, 0.0, 0.3, 5.0):
        x = Scalar(at)
        y = candidate(x)
        assert isinstance(y, Scalar), f"return a Scalar, not {type(y).__name__}"
        expected = at / (1 + math.exp(-at))
        assert abs(y.value - expected) < 1e-12, f"silu({at}) is {expected:.6f}, not {y.value:.6f}"
        assert y.parents == (x,), "one step: x is the only parent, and the slope is a plain number"
        y.backward()
        h = 1e-6
        slope = (candidate(Scalar(at + h)).value - candidate(Scalar(at - h)).value) / (2 * h)
        assert abs(x.gradient - slope) < 1e-6, (
            f"the slope at {at} is {slope:.6f}, not {x.gradient:.6f}"
        )
    try:
        far = candidate(Scalar(-1000.0))
    except OverflowError:
        raise AssertionError("silu(-1000) is 0: e^1000 overflows, so use e^x for x < 0") from None
    assert abs(far.value) < 1e-9, f"silu(-1000) is 0, not {far.value}"


print("Exercise 1:", judge(lambda: check_silu(silu)))

# %% [markdown]
# ### Exercise 2: forward
#
# There is another way to apply the chain rule, from the first step to the last. A `Dual` carries a
# value and its slope with respect to *one* input: `Dual(a, s) + Dual(b, t)` is
# `Dual(a + b, s + t)`. Write `+`, `*` (also with plain numbers on the right) and `exp`. There is
# nothing to remember: the slope is there at once.
#
# Then think about which of both ways suits a model with a million inputs and one loss.


# %%
class Dual:
    """A value, and how fast it changes with the input."""

    def __init__(self, value, slope=0.0):
        self.value, self.slope = value, slope

    def __add__(self, other):
        raise NotImplementedError

    def __mul__(self, other):
        raise NotImplementedError

    def exp(self):
        raise NotImplementedError


def check_dual(candidate):
    x = candidate(0.7, 1.0)
    cases = (
        ("x + x", lambda x: x + x, 1.4, 2.0),
        ("x + 3", lambda x: x + 3.0, 3.7, 1.0),
        ("x * x", lambda x: x * x, 0.49, 1.4),
        ("x * 3", lambda x: x * 3.0, 2.1, 3.0),
        ("exp(x)", lambda x: x.exp(), math.exp(0.7), math.exp(0.7)),
        ("exp(x * x)", lambda x: (x * x).exp(), math.exp(0.49), 1.4 * math.exp(0.49)),
    )
    for name, function, value, slope in cases:
        found = function(x)
        assert isinstance(found, candidate), f"{name} returns a {type(found).__name__}, not a Dual"
        assert abs(found.value - value) < 1e-9, f"{name} is {value:.4f}, not {found.value:.4f}"
        assert abs(found.slope - slope) < 1e-9, (
            f"the slope of {name} at 0.7 is {slope:.4f}, not {found.slope:.4f}"
        )
    assert (x.value, x.slope) == (0.7, 1.0), "an operation must leave its operands as they are"


print("Exercise 2:", judge(lambda: check_dual(Dual)))

# %% [markdown]
# ### Exercise 3: how much is remembered
#
# Return how many *different* Scalars a result was made from, itself included. A number that is used
# twice counts once, and a chain may be longer than Python's recursion goes.


# %%
def count_numbers(last):
    """A Scalar -> how many Scalars are behind it, itself included."""
    raise NotImplementedError


def check_count_numbers(candidate):
    x = Scalar(2.0)
    assert candidate(x) == 1, f"a number alone counts 1, not {candidate(x)}"
    found = candidate(x * 3.0)
    assert found == 3, f"x * 3 has the numbers x, 3 and the product: 3, not {found}"
    found = candidate(x + x)
    assert found == 2, f"x + x has two numbers, x and the sum, not {found}: count x once"
    y = x
    for _ in range(5000):
        y = y * y.tanh()
    try:
        found = candidate(y)
    except RecursionError:
        raise AssertionError(
            "a chain of 5000 steps is too deep for recursion: use a list"
        ) from None
    assert found == 10_001, f"a chain of 5000 times two steps has 10,001 numbers, not {found:,}"


print("Exercise 3:", judge(lambda: check_count_numbers(count_numbers)))

# %% [markdown]
# ## Where to read on
#
# - Baydin, Pearlmutter, Radul & Siskind (2018), *Automatic Differentiation in Machine Learning: a
#   Survey*: forward and reverse mode, and their history.
# - Griewank & Walther (2008), *Evaluating Derivatives*, chapters 3 and 12: the cost of a gradient,
#   and how to remember less.
# - Karpathy (2020), *micrograd*: the same idea in a hundred lines.
# - In this package: `nn/layernorm.py` beside `kernels/norms.py`, one layer by hand.
#
# ## What you can do now
#
# You can differentiate any program of numbers, and you know what a framework does when you call
# `backward`. You could not say before what it keeps, and what it cannot know. Next: lesson 4,
# *Tokens*, on what a model reads.

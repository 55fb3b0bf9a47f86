# %% [markdown]
# # A language model in 100 lines
#
# After this lesson you can write a transformer language model in NumPy alone: the model, its
# gradients, the optimizer, training and sampling. You know what every line is for, and how to prove
# that the gradients are right.
#
# **Before:** Python, NumPy arrays and the chain rule: if `y = f(x)` and `z = g(y)`, then `dz/dx =
# g'(y) f'(x)`. **Time:** 55 minutes; the code runs for 5 seconds.
#
# Sections 2 to 8 are the complete algorithm, in at most 100 lines without comments. Everything else
# in this package makes it faster, smaller or safer; section 10 measures the speed.

# %% [markdown]
# ## 1. Data
#
# A language model learns to predict the next token of a text. Our text is a list of given names,
# and a token is a letter. Replace the list by a book, and everything below still works.
#
# (The first two lines restrict NumPy to one thread, which makes times comparable.)

# %%
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # takes effect before NumPy is imported
LIST = """
    ada adam aisha alan alba alex alice amara amina amir ana andrea anika anna anton aria arthur
    asha astrid aurora ava ben bella bianca boris bruno camila carla carlos cecilia celia chiara
    chloe clara daniel daria david diana diego dina dmitri edith elena elias elif eliza ella elsa
    emil emilia emma enzo eric erika esther ethan eva fatima felix finn flora franco freya gabriel
    george gina giulia grace greta gustav hana hannah hans harriet hasan hector heidi helen helena
    henry hugo ian ida igor ilse imani ines ingrid irene iris isaac isabel ivan jack jacob jakob
    james jana jane janek jasmin javier jonas jorge josef josephine juan julia julian kai kamal
    karim karin karl kasia katarina kenji kira klara kofi lara laila lars laura lea leila lena leo
    leon leona lila lilian lina linus lisa livia lola louis lucas lucia luis luna lydia magda malik
    malin mara marco maria marie marina mario marius marta martin mary matteo max maya mei mia milan
    milena mina mira miriam mohamed mona nadia naomi nathan nia nico nicolas nina noah noel nora
    nuria olaf olga olivia omar oscar otto pablo paul paula pedro petra philip pia priya rafael raj
    ramon rania rosa rosalie ruben ruth sabine salim samir samuel sandra sara sarah sasha selma
    sergio sofia simon sonia stefan stella sven tamara tara teresa theo thomas tim tina tomas uma
    ursula valentina vera victor viktor vincent viola walter wanda yara yasmin yuki yusuf zara zoe
"""
names = LIST.split()
print(f"{len(names)} names, {sum(map(len, names)):,} letters")

# %% [markdown]
# ## 2. Tokens
#
# Every letter gets a number. A line break ends a name, and is a token like any other. The names are
# shuffled, and the last tenth of the text is *held out*: the model never learns from it, so its
# loss there shows what it has understood rather than memorised.
#
# A training example is a *window*: `T` tokens in a row from anywhere in the text. The target of
# each is the token after it, so one window is `T` predictions. A batch has `B` windows.
#
# Capitals name dimensions in all lessons: `V` distinct tokens, `C` numbers per token inside the
# model (its *channels*), `H` attention heads, `L` layers.

# %%
import numpy as np

random = np.random.default_rng(1)
random.shuffle(names)
text = "\n".join(names) + "\n"
letters = sorted(set(text))
tokens = np.array([letters.index(letter) for letter in text])
train, held_out = np.split(tokens, [len(tokens) - len(tokens) // 10])
B, T, V, C, H, L = 32, 16, len(letters), 48, 4, 2


def draw_batch():
    starts = random.integers(0, len(train) - T, B)
    windows = train[starts[:, None] + np.arange(T + 1)]
    return windows[:, :-1], windows[:, 1:]


# %% [markdown]
# ## 3. Parameters
#
# The model is a dictionary of arrays. Each token has a vector of `C` channels, and so does each
# position in a window. A layer has two halves of the same form, one after the other:
#
#     x = x + function(normalise(x) in) out
#
# where `in` and `out` are matrices. In the first half the function is attention, which takes
# queries, keys and values (3 C columns) and lets tokens look at each other; in the second, a
# nonlinear function of the 4 C columns of one token. At the end, `head` turns channels into a score
# for each of the `V` tokens. The vectors called `norm` are gains.
#
# Matrices start as small random numbers, for a reason that section 4 gives; gains start at 1.


# %%
def new(*shape):
    matrix = 0.02 * random.standard_normal(shape, np.float32)
    return matrix if len(shape) == 2 else np.ones(shape, np.float32)


model = {"token": new(V, C), "position": new(T, C)}
for i in range(2 * L):
    inner, outer = ((3 * C, C), (4 * C, 4 * C))[i % 2]
    model |= {f"norm.{i}": new(C), f"in.{i}": new(C, inner), f"out.{i}": new(outer, C)}
model |= {"norm": new(C), "head": new(C, V)}

# %% [markdown]
# ## 4. From scores to a loss
#
# For each position the model gives `V` scores, the *logits* `s`. *Softmax* turns them into
# probabilities, which are positive and add up to 1:
#
#     p_i = exp(s_i) / (sum over k of exp(s_k))
#
# The *loss* is `-log p_t` nats, where `t` is the token that really comes next: 0 if the model was
# certain of it, large if it thought it nearly impossible. Parameters near zero give equal
# probabilities and a loss of `log V`. That is why matrices start small: an untrained model should
# admit that it knows nothing.
#
# Throughout, `dx` is the gradient of the loss with respect to `x`, an array of the same shape: it
# says how the loss changes with each number in `x`.
#
# Raising the score `s_i` raises `p_i` at the expense of all others. The quotient rule gives
#
#     dp_k / ds_i = p_k (1 - p_i)   if k = i
#                   -p_k p_i        otherwise
#
# The derivative of the loss `-log p_t` with respect to `p_t` is `-1 / p_t`. Multiplied by the
# `dp_t / ds_i` above, that is `p_i - 1` for the target and `p_i` for every other token. So the
# gradient of the logits is simply the probabilities, less 1 at the target. (Subtracting the largest
# score first keeps `exp` from overflowing and changes nothing else.)


# %%
def softmax(scores):
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def loss_and_gradient(logits, targets):
    # logits (B, T, V), targets (B, T) -> the mean loss, dlogits (B, T, V)
    p, hit = softmax(logits), targets[..., None] == np.arange(V)
    return float(-np.log(p[hit]).mean()), (p - hit) / targets.size


# %% [markdown]
# ## 5. The pieces and their gradients
#
# **A product** `y = x W` does most of the work. Spelled out for one row of `x`, it says
# `y_j = sum over i of x_i W_ij`. Nudging `x_i` moves every `y_j`, by `W_ij` times as much. Adding
# up what each of these does to the loss gives `dx_i = sum over j of dy_j W_ij`, or `dx = dy Wᵀ`.
# Nudging `W_ij` moves `y_j` by `x_i` times as much, in every row. Adding up over the rows gives
# `dW = xᵀ dy`.
#
# **A norm** keeps the vectors at the same size however many layers have added to them: `y = x r g`,
# where `r` is 1 over the root of the mean square of `x`, and `g` a gain for each channel. A channel
# of `x` acts directly, and also through `r`, which all channels share. From
# `r = (mean(x²) + e)^(-1/2)` follows `dr/dx_j = -r³ x_j / C`. With `xhat = x r` and
# `dxhat = dy g`, the sum of both effects is
#
#     dx_j = r (dxhat_j - xhat_j mean(dxhat xhat))
#
# **Attention** lets a token look at itself and at those before it. Each token has a query `q`, a
# key `k` and a value `v`, and receives a weighted mean of the values: `y = p v`, where
# `p = softmax(q kᵀ / √D)`. The scores of later tokens are set to minus infinity, which makes their
# weight zero: a model that could see the next token would not have to predict it. `H` heads do
# this side by side, each on its own `D = C / H` channels. A sum of `D` products of unrelated
# numbers of size 1 has a size of about `√D`. Dividing by that keeps softmax from becoming all or
# nothing.
#
# Backward, `p v` and `q kᵀ` are products. For the softmax between them, the derivatives of section
# 4 add up to `ds_i = p_i (dp_i - sum over k of p_k dp_k)`.
#
# **The square** of `max(x, 0)` is the nonlinear function of the second half. Its derivative is
# `2 max(x, 0)`.
#
# Each function also returns what its gradient needs. The gradient is right below it, and its
# comments quote the line that is differentiated.


# %%
def product_backward(dy, x, weight):
    # forward: y = x weight
    return dy @ weight.T, x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def normalise(x, gain):
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    return x * r * gain, (x * r, r)


def normalise_backward(dy, gain, kept):
    xhat, r = kept
    # forward: y = xhat gain
    dxhat, dgain = dy * gain, (dy * xhat).sum(axis=(0, 1))
    # forward: xhat = x r
    return r * (dxhat - xhat * (dxhat * xhat).mean(axis=-1, keepdims=True)), dgain


def split_heads(x):
    # (B, T, any number of heads * D) -> (B, heads, T, D)
    return x.reshape(*x.shape[:2], -1, C // H).swapaxes(1, 2)


def join_heads(x):
    # (B, heads, T, D) -> (B, T, heads * D)
    return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)


def attend(qkv):
    # (B, T, 3 C) -> (B, T, C)
    q, k, v = np.split(split_heads(qkv), 3, axis=1)
    scores = q @ k.swapaxes(2, 3) / (C // H) ** 0.5
    p = softmax(np.where(np.tri(scores.shape[-1]), scores, -np.inf))
    return join_heads(p @ v), (q, k, v, p)


def attend_backward(dy, kept):
    (q, k, v, p), dheads = kept, split_heads(dy)
    # forward: heads = p v
    dp, dv = dheads @ v.swapaxes(2, 3), p.swapaxes(2, 3) @ dheads
    # forward: p = softmax(q kᵀ / √D)
    dscores = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / (C // H) ** 0.5
    dq, dk = dscores @ k, dscores.swapaxes(2, 3) @ q
    return join_heads(np.concatenate([dq, dk, dv], axis=1))


def square(x):
    return np.maximum(x, 0) ** 2, x


def square_backward(dy, x):
    return dy * 2 * np.maximum(x, 0)


# %% [markdown]
# ## 6. The model
#
# `forward` adds to `x`, the *residual stream*, half a layer at a time. `backward` walks through
# `forward` from its last line to its first. Two rules are enough for it:
#
# - The gradient of a function's output gives that of its input, by the formulas above.
# - Where a value is used twice, its gradients add up. In `x = x + f(x)`, the gradient of `x` is
#   what arrives from above plus what comes back through `f`.
#
# The second rule also gives the gradient of the token vectors: a token that occurs three times in
# a batch collects three gradients. `np.add.at` adds them all, whereas `d["token"][ids] += dx` would
# keep only one of the three.

# %%
FORWARD, BACKWARD = (attend, square), (attend_backward, square_backward)


def forward(model, ids):
    # ids (B, T) -> logits (B, T, V), and what backward needs
    x, saved = model["token"][ids] + model["position"][: ids.shape[1]], []
    for i in range(2 * L):
        a, norm = normalise(x, model[f"norm.{i}"])
        b, inside = FORWARD[i % 2](a @ model[f"in.{i}"])
        x = x + b @ model[f"out.{i}"]
        saved.append((a, norm, b, inside))
    a, norm = normalise(x, model["norm"])
    return a @ model["head"], [*saved, (a, norm)]


def backward(model, ids, dlogits, saved):
    # -> the gradient of every array in the model, by name
    d, (a, norm) = {name: np.zeros_like(value) for name, value in model.items()}, saved[-1]
    # forward: logits = normalise(x) head
    da, d["head"] = product_backward(dlogits, a, model["head"])
    dx, d["norm"] = normalise_backward(da, model["norm"], norm)
    for i in reversed(range(2 * L)):
        a, norm, b, inside = saved[i]
        # forward: x = x + b out
        db, d[f"out.{i}"] = product_backward(dx, b, model[f"out.{i}"])
        # forward: b = function(a in)
        da, d[f"in.{i}"] = product_backward(BACKWARD[i % 2](db, inside), a, model[f"in.{i}"])
        # forward: a = normalise(x)
        through, d[f"norm.{i}"] = normalise_backward(da, model[f"norm.{i}"], norm)
        dx = dx + through
    # forward: x = token[ids] + position
    d["position"][: ids.shape[1]] = dx.sum(axis=0)
    np.add.at(d["token"], ids, dx)
    return d


# %% [markdown]
# ## 7. Adam
#
# A step against the gradient, `value -= rate * gradient`, lowers the loss if the rate is small
# enough. But a rate that is right for one parameter is far too large or too small for another.
# Adam (Kingma & Ba 2015) divides each gradient by its own usual size. It keeps two running means
# for each parameter, `m` of the gradient and `v` of its square, and steps by `rate * m / √v`. That
# is about `rate`, whatever the size of the gradient. Both means start at zero and are too small at
# first: after `n` steps their weights add up to `1 - betaⁿ`, and dividing by that makes up for it.
#
# The rate falls in a straight line to zero: large steps find a good region, small ones settle
# there.

# %%
STEPS, RATE = 200, 5e-3


def adam(model, gradients, moments, step):
    for name, g in gradients.items():
        m, v = moments[name]
        m, v = moments[name] = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        m, v = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.99 ** (step + 1))
        model[name] -= RATE * (1 - step / STEPS) * m / (np.sqrt(v) + 1e-8)


# %% [markdown]
# ## 8. Training and sampling
#
# A training step is a batch, forward, loss, backward, update. To sample a name, start from a line
# break and draw letters with the probabilities that the model gives them, up to the next line
# break.


# %%
def train_model(model):
    losses, moments = np.zeros(STEPS), dict.fromkeys(model, (0.0, 0.0))
    for step in range(STEPS):
        ids, targets = draw_batch()
        logits, saved = forward(model, ids)
        losses[step], dlogits = loss_and_gradient(logits, targets)
        adam(model, backward(model, ids, dlogits, saved), moments, step)
    return losses


def sample(model):
    ids = [letters.index("\n")]
    for _ in range(T - 1):
        logits, _ = forward(model, np.array([ids]))
        ids.append(int(random.choice(V, p=softmax(logits[0, -1].astype(float)))))
    return "".join(letters[i] for i in ids).split("\n")[1]


# %% [markdown]
# That is the complete algorithm. Let it run. (Section 10 needs a copy of the untrained model.)

# %%
import math
import time

untrained = {name: value.copy() for name, value in model.items()}
windows = np.lib.stride_tricks.sliding_window_view(held_out, T + 1)
exam = windows[:, :-1], windows[:, 1:]  # every window of the held-out names


def exam_loss(model):
    logits, _ = forward(model, exam[0])
    return loss_and_gradient(logits, exam[1])[0]


print(f"{sum(value.size for value in model.values()):,} parameters")
print(f"Knowing nothing: log V = {math.log(V):.2f} nats. Untrained: {exam_loss(model):.2f}")
begin = time.perf_counter()
losses = train_model(model)
numpy_ms = (time.perf_counter() - begin) / STEPS * 1000
for part in np.array_split(np.arange(STEPS), 5):
    print(f"Steps {part[0]:3} to {part[-1]:3}: mean loss {losses[part].mean():.2f}")
print(f"On names that it has never seen: {exam_loss(model):.2f}")
drawn = {sample(model) for _ in range(40)}
print("New names:", ", ".join(sorted(drawn - set(names))))
print("From the list:", ", ".join(sorted(drawn & set(names))))

# %% [markdown]
# Two pictures, each of which is also a file beside this lesson: how the loss fell, and where the
# letters of a name look. In the second, a row is a query and a column a key, and each row adds up
# to 1; the upper half is empty because nobody sees what comes later.

# %%
from smallmind.charts.figure import lines
from smallmind.charts.heat_map import heat_map
from smallmind.lessons.pictures import draw

means = np.array([losses[max(0, step - 9) : step + 1].mean() for step in range(STEPS)])
draw(
    "lesson01_loss",
    lines("Loss", {"of each batch": losses, "of the last ten": means}, range(STEPS)),
)
name = "valentina"
_, saved = forward(model, np.array([[letters.index(letter) for letter in name]]))
p = saved[2][3][3][0]  # of the second layer's attention: (H, T, T)
title = f"The first head of the second layer reads {name}"
draw("lesson01_attention", heat_map(title, p[0].tolist(), name, name, ("query", "key")))

# %% [markdown]
# Most of these names are new, and some could be real. The loss on held-out names is higher than on
# the others: there are only a few hundred, and the model has begun to learn them by heart. More
# data would be the best remedy, fewer steps the cheapest.
#
# ## 9. Is it right?
#
# A wrong gradient seldom raises an error: the model learns a little worse, and nobody notices. So
# we check gradients against the definition of a derivative, in double precision.
#
# Move one array of the model by a tiny step `h` along a direction `u`. The loss must change by `h`
# times the sum of `gradient * u`. Moving both ways, `(loss(+h) - loss(-h)) / 2h`, cancels the error
# that is proportional to `h`. With a random `u`, mistakes hardly ever cancel out, and two forward
# passes check a whole array.

# %%
precise = {name: value.astype(np.float64) for name, value in model.items()}
ids, targets = draw_batch()
logits, saved = forward(precise, ids)
loss, dlogits = loss_and_gradient(logits, targets)
gradients = backward(precise, ids, dlogits, saved)


def slope(name, u, h=1e-5):
    """Returns how much the loss changes per unit that an array moves along u, by differences."""
    results = []
    for sign in (1, -1):
        logits, _ = forward(precise | {name: precise[name] + sign * h * u}, ids)
        results.append(loss_and_gradient(logits, targets)[0])
    return (results[0] - results[1]) / (2 * h)


worst = 0.0
for name, gradient in gradients.items():
    u = random.standard_normal(gradient.shape)
    usual = np.linalg.norm(gradient)  # such a slope is about as large as the gradient is long
    worst = max(worst, abs(slope(name, u) - (gradient * u).sum()) / usual)
print(f"Largest relative error of {len(gradients)} gradients: {worst:.0e}")
assert worst < 1e-5

# %% [markdown]
# `smallmind.gradient_check` does the same for functions, layers and whole models; here, for
# attention alone. A second check: the same model made of the layers of this package must have the
# same loss and the same gradients.

# %%
import smallmind

qkv = random.standard_normal((2, 5, 3 * C))
print(smallmind.gradient_check(attend, qkv, backward=attend_backward))

PARTS = {"norm": "rmsnorm", "mlp": "relu2", "bias": False, "tie_weights": False}
twin = smallmind.TransformerModel(V, T, C, L, H, **PARTS, backend="numpy", dtype=np.float64)
for name, value in zip(twin.parameters, precise.values(), strict=True):
    twin.parameters[name][...] = value
twin_loss = twin.loss_and_gradients(ids, targets)
pairs = zip(gradients.values(), twin.gradients.values(), strict=True)
difference = max(abs(own - other).max() for own, other in pairs)
print(f"Loss: {loss:.12f} here, {twin_loss:.12f} in smallmind")
print(f"Largest difference between gradients: {difference:.0e}")
assert abs(loss - twin_loss) < 1e-10 and difference < 1e-10

# %% [markdown]
# ## 10. Everything else is efficiency
#
# `smallmind.Training` now trains the same model from the same initial weights, on the same text,
# with the same optimizer and rates, also on one thread. It draws other batches, so the losses agree
# only roughly. (The first start compiles the kernels for your CPU, which takes up to a minute.)

# %%
from smallmind.training.records import StepRecord


def train_with_smallmind(model, text, batch_size, steps):
    """-> the losses, the median time of a step in ms."""
    training = smallmind.Training(model, smallmind.Tokenizer(text), text, batch_size=batch_size)
    records = training.train(
        steps,
        learning_rate=RATE,
        schedule="linear",
        min_lr=0.0,
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        val_every=0,
        log_every=1,
    )
    updates = [record for record in records if isinstance(record, StepRecord)]
    return [update.loss for update in updates], np.median([update.step_ms for update in updates])


smallmind.set_threads(1)
fast = smallmind.TransformerModel(V, T, C, L, H, **PARTS)
for name, value in zip(fast.parameters, untrained.values(), strict=True):
    fast.parameters[name][...] = value
fast_losses, fast_ms = train_with_smallmind(fast, text, B, STEPS)
last = STEPS // 5
print(f"Mean loss of the last {last} steps: {np.mean(fast_losses[-last:]):.2f}")
print(f"On names that it has never seen: {fast.loss(*exam):.2f}")
print(f"NumPy: {numpy_ms:.1f} ms per step; smallmind: {fast_ms:.1f} ms")

# %% [markdown]
# The same for a model and a batch of a more usual size: `backend="numpy"` runs the layers of the
# package with plain NumPy functions like ours.

# %%
for backend, steps in (("numpy", 4), ("numba", 20)):
    larger = smallmind.TransformerModel(V, 64, 128, 4, 4, **PARTS, backend=backend)
    _, ms = train_with_smallmind(larger, text, 12, steps)
    print(f"4 layers of 128 channels, {backend}: {ms:.0f} ms per step")

# %% [markdown]
# Our functions write a new array for every intermediate result, and read it again on the next line.
# The package makes fewer passes over memory: it reuses arrays, keeps less for the backward pass,
# and compiles every function to the vector instructions of the CPU. The other lessons explain how.
#
# ## Exercises
#
# Fill in the functions. Each `check_...` says what is still wrong.
#
# **1. A baseline.** Is the transformer better than counting pairs of letters? Compute the mean loss
# in nats of the best model that sees only one letter: after a letter `a`, the probability of `b` is
# the share of `b` among all the tokens that follow an `a` in the text. Then compare
# `pair_loss(train, V)` with the losses above.


# %%
from smallmind.lessons import judge


def pair_loss(tokens, V):
    """tokens (n,), below V -> the mean loss of tokens[1:], each predicted from the one before."""
    raise NotImplementedError


def check_pair_loss(candidate):
    def expect(expected, tokens, hint):
        found = candidate(np.array(tokens), 3)
        assert found is not None, "the function returns None"
        assert abs(found - expected) < 1e-9, (
            f"for the tokens {tokens} the loss is {expected:.4f}, not {found:.4f}: {hint}"
        )

    certain = "each token decides the next one, and pairs that never occur must not count"
    even = "after 0 and after 1, both are equally frequent; use the natural logarithm"
    skewed = (
        "divide the count of each pair by how often anything follows its first token, and take "
        "the mean over all places in the text, not over the different pairs"
    )
    expect(0, [0, 1, 2, 0, 1, 2], certain)
    expect(math.log(2), [0, 0, 1, 1, 0], even)
    expect(-(3 * math.log(3 / 4) + math.log(1 / 4)) / 5, [0, 0, 0, 0, 1, 0], skewed)


print("Exercise 1:", judge(lambda: check_pair_loss(pair_loss)))

# %% [markdown]
# **2. Temperature.** Dividing the logits by a temperature before softmax makes the model bolder
# (above 1) or more cautious (below 1). As the temperature goes to 0, only the most likely token is
# left. Write that function, for 0 as well, then use it in `sample`.


# %%
def probabilities(logits, temperature):
    """logits (V,), temperature at least 0 -> the probability of each token (V,)."""
    raise NotImplementedError


def check_probabilities(candidate):
    logits = np.array([1.0, 3.0, 2.0])
    with np.errstate(all="ignore"):
        p = {t: np.asarray(candidate(logits, t)) for t in (0, 0.5, 1, 2)}
        large = np.asarray(candidate(1000 * logits, 1))
    for t, values in p.items():
        assert values.shape == (3,), f"the shape is {values.shape}, not (3,)"
        assert np.isfinite(values).all(), f"temperature {t} gives {values}: do not divide by zero"
        assert abs(values.sum() - 1) < 1e-9, f"at temperature {t} the sum is {values.sum()}, not 1"
    assert np.allclose(p[1], softmax(logits)), "temperature 1 changes nothing: that is softmax"
    assert p[0.5][1] > p[1][1], "a low temperature favours the most likely token: divide"
    assert np.allclose(p[2], softmax(logits / 2)), "at temperature 2, halve the logits"
    assert np.allclose(p[0], [0, 1, 0]), f"at temperature 0 the largest logit wins: not {p[0]}"
    assert np.isfinite(large).all(), "exp overflows for large logits: subtract the largest first"


print("Exercise 2:", judge(lambda: check_probabilities(probabilities)))

# %% [markdown]
# ## Where to read on
#
# - Bengio et al., *A Neural Probabilistic Language Model* (2003), section 2: the idea, with a
#   perceptron instead of attention.
# - Vaswani et al., *Attention Is All You Need* (2017), section 3.2: attention and its heads.
# - Radford et al., *Language Models are Unsupervised Multitask Learners* (2019), section 2.3: norms
#   at the start of each half, as here.
# - Kingma & Ba, *Adam: A Method for Stochastic Optimization* (2015), sections 2 and 3.
# - Zhang & Sennrich, *Root Mean Square Layer Normalization* (2019): the norm.
# - In this package: `smallmind/kernels/reference.py` has every function in plain NumPy, each
#   gradient below its function; `smallmind/nn/transformer.py` is the model's interface.
#
# ## What you can do now
#
# You can write, train and sample from a transformer with nothing but NumPy, and prove that its
# gradients are right; before, a language model was a black box. Next: lesson 2, *Backward by hand*,
# where these gradients come from.

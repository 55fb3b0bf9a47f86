# %% [markdown]
# # A model that learns to add by reward
#
# So far somebody knew what the model should have said. Here nobody tells it: it tries, and hears
# only whether it was right. After this lesson you will be able to
#
# - write REINFORCE, which learns from rewards, in ten lines on top of a loss with weights;
# - explain what a baseline is for, and measure what it does;
# - say why a model has to know a little before reward can teach it the rest;
# - learn from pairs of a better and a worse answer instead, with the same weights.
#
# You need to know what a loss per token is; lessons 1 and 9 have it. The lesson takes a minute
# or two on two cores.

# %%
import math
import time

import numpy as np

import smallmind
from smallmind.randomness import hash64_each
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.dataset import Batch

SEED = 1
random = np.random.default_rng(SEED)

# %% [markdown]
# ## 1. Sums
#
# There are 10,000 sums of two numbers with two digits each. A hash of its number decides whether a
# sum may be used for learning. The others, a tenth, are *unseen*: they only measure.

# %%
tokenizer = smallmind.Tokenizer("0123456789+=", "char")
sums = [(a, b) for a in range(100) for b in range(100)]
prompts = tokenizer.encode("".join(f"{a:02}+{b:02}=" for a, b in sums)).reshape(-1, 6)
answers = tokenizer.encode("".join(f"{a + b:03}" for a, b in sums)).reshape(-1, 3)
is_unseen = hash64_each((0,), np.arange(len(sums))) % 10 == 0
seen, unseen = np.flatnonzero(~is_unseen), np.flatnonzero(is_unseen)
print(f"{len(seen)} sums to learn from, {len(unseen)} unseen, such as:")
for row in unseen[1:4]:
    print(tokenizer.decode(prompts[row]) + tokenizer.decode(answers[row]))

# %% [markdown]
# All prompts are equally long, so that a cache takes any number of them side by side, and a model
# answers a thousand in three steps. At temperature 1 each digit is drawn with the probability that
# the model gives it: adding Gumbel noise to the logits and taking the largest does just that.


# %%
def write(model, which, temperature=1.0):
    """The numbers of sums (R,) -> the answers that the model writes (R, 3)."""
    cache = smallmind.KeyValueCache(model, batch=len(which))
    last, written = prompts[which], []
    for _ in range(answers.shape[1]):
        logits = model.decode(last, cache)
        noise = temperature * random.gumbel(size=logits.shape)
        last = (logits + noise).argmax(axis=1).astype(np.int32)[:, None]
        written.append(last)
    return np.concatenate(written, axis=1)


def is_right(which, written):
    return (written == answers[which]).all(axis=1)


def accuracy(model):
    """Returns the share of unseen sums of which the model's likeliest answer is right."""
    return is_right(unseen, write(model, unseen, temperature=0)).mean()


# %% [markdown]
# ## 2. A warm-up with right answers
#
# First the ordinary way: the loss is on the answers, each target weighs 1, those of the prompt 0.


# %%
def gradients(model, which, written, weights):
    """Adds the gradient of the mean over answers of weights (R,) times -log p(answer)."""
    whole = np.concatenate([prompts[which], written], axis=1)
    each = np.zeros(whole[:, 1:].shape)
    each[:, prompts.shape[1] - 1 :] = weights[:, None]
    model.loss_and_gradients(whole[:, :-1], whole[:, 1:], weights=each, divisor=len(which))


ENOUGH_RIGHT, RATE = 0.2, 0.01
shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 9, "tie_weights": False}
shape |= ARCHITECTURES["modern"]
model = smallmind.TransformerModel(tokenizer.vocab_size, **shape, seed=SEED)
optimizer = smallmind.Muon(model, learning_rate=RATE, matrix_learning_rate=RATE)
start = time.perf_counter()
while accuracy(model) < ENOUGH_RIGHT:
    which = random.choice(seen, 256)
    gradients(model, which, answers[which], np.ones(256))
    optimizer.step(max_grad_norm=1.0)
before, warm, seconds = accuracy(model), model.flat.data.copy(), time.perf_counter() - start
print(f"{optimizer.steps} updates in {seconds:.0f} s: {before:.1%} of unseen sums are right")

# %% [markdown]
# From here on the model sees no right answer any more.
#
# ## 3. From reward to gradient
#
# Let r be the reward of an answer: 1 if it is right, 0 if not. What we want is a larger expected
# reward, the sum over all answers of p(answer) r(answer). The reward has no gradient: it is a
# verdict. But p has one, and since dp = p d(log p),
#
# d E[r] = sum of p r d(log p) = E[r d(log p)]
#
# On the right is an expectation, which samples estimate: draw answers from the model, and take the
# gradient of each one's log-probability times its reward. This is REINFORCE (Williams 1992). For us
# it is the loss that we had, with the model's own answers as targets and their rewards as weights.
#
# It is a noisy estimate, and how noisy depends on something that should not matter. Pay 3 for right
# and 2 for wrong, and the best model is the same. A number b that does not depend on the answer may
# be added or taken away, since E[d(log p)] = 0 (probabilities sum to 1, whatever the weights):
#
# E[(r - b) d(log p)] = E[r d(log p)]
#
# But now each answer is pushed up, by nearly the same; that this cancels out is true on average and
# of no batch. So take b as what the prompt usually earns: then only surprises count. This is a
# *baseline*, and r - b is an *advantage*. Here several answers to each prompt are drawn, and b is
# their mean reward (Shao et al. 2024 call it GRPO). The right answers of a group get weights above
# zero, the wrong ones below; a prompt that is always right or always wrong teaches nothing.

# %%
PROMPTS, GROUP = 256, 4


def rewards_of(model):
    """Numbers of sums, answers and rewards, of a batch of GROUP answers to each prompt."""
    which = random.choice(seen, PROMPTS).repeat(GROUP)
    written = write(model, which)
    return which, written, is_right(which, written).astype(float)


def advantages(rewards):
    groups = rewards.reshape(-1, GROUP)
    return (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)


def noise(weights_of, batches=10):
    """Returns how much the gradients of batches differ from their mean, over its length."""
    found = []
    for _ in range(batches):
        which, written, rewards = rewards_of(model)
        gradients(model, which, written, weights_of(rewards))
        found.append(model.flat.grad.copy())
        model.zero_gradients()
    return np.linalg.norm(np.std(found, axis=0)) / np.linalg.norm(np.mean(found, axis=0))


print("Noise over signal:")
for add in (0, 2):
    bare, ours = noise(lambda r, add=add: r + add), noise(lambda r, add=add: advantages(r + add))
    print(f"rewards of {1 + add} and {add}: {bare:.1f}, with a baseline {ours:.1f}")

# %% [markdown]
# With a baseline both are the same. Without one, 1 and 0 happen to be a good choice: what is wrong
# counts nothing. With 3 and 2 most of the gradient is noise.
#
# And why not from the start, without the warm-up? An untrained model writes any of 12 tokens three
# times: it is right in one of 1,728 cases. Nearly all groups have only wrong answers, whose
# advantages are zero: there is nothing to learn from. Reward makes likelier what sometimes happens;
# it cannot show what never does.

# %%
new = smallmind.TransformerModel(tokenizer.vocab_size, **shape)
for name, each in (("Untrained", new), ("After the warm-up", model)):
    rewards = rewards_of(each)[2]
    useful = np.any(advantages(rewards).reshape(-1, GROUP), axis=1).mean()
    print(f"{name}: {rewards.mean():.1%} of answers are right, {useful:.1%} of prompts teach")

# %% [markdown]
# ## 4. Reward alone
#
# The rate falls to zero: near the end few answers are wrong, and their gradient is mostly noise.

# %%
UPDATES = 1200
start = time.perf_counter()
for update in range(UPDATES):
    which, written, rewards = rewards_of(model)
    gradients(model, which, written, advantages(rewards))
    optimizer.learning_rate = RATE * (1 - update / UPDATES)
    optimizer.step(max_grad_norm=1.0)
    if update % 100 == 0:
        print(f"update {update:3}: {rewards.mean():.1%} of answers were right")
after, seconds = accuracy(model), time.perf_counter() - start
print(f"{seconds:.0f} seconds of reward: {before:.1%} -> {after:.1%} of unseen sums are right")
assert after > before

# %% [markdown]
# The model has found every answer that it has learned from here. The unseen sums were not even
# asked: it adds.
#
# ## 5. Pairs instead of rewards
#
# Often nobody can say whether an answer is right, but people can say which of two is better. DPO
# (Rafailov et al. 2023) learns from such pairs, without drawing any answers:
#
# loss = -log sigmoid(beta (log p(chosen) / q(chosen) - log p(rejected) / q(rejected)))
#
# q are the probabilities in a *reference*, the model as it was, of which only these numbers are
# kept: the loss asks for a change of odds. `beta` is what moving away from the reference costs. The
# gradient is an old acquaintance: that of log p(chosen) - log p(rejected), times a number between
# 0 and beta that is large where the pair is still in the wrong order. So chosen answers have
# weights above zero again, and rejected ones below.
#
# We go back to the model after the warm-up, and let it write the pairs: for each prompt a right
# answer of its own and a wrong one, if there are both.

# %%
TRIES, EPOCHS, BETA = 40, 4, 2.0
model.flat.data[...] = warm
model.flat.refresh()
chosen: dict[int, np.ndarray] = {}
rejected: dict[int, np.ndarray] = {}
for _ in range(TRIES):
    which, written, rewards = rewards_of(model)
    for number, answer, reward in zip(which.tolist(), written, rewards, strict=True):
        (chosen if reward else rejected)[number] = answer
both = np.array(sorted(chosen.keys() & rejected.keys()))
written = np.array([each[number] for each in (chosen, rejected) for number in both])
whole = np.concatenate([np.tile(prompts[both], (2, 1)), written], axis=1)
starts, marks = np.zeros(len(whole), np.int64), np.zeros(whole[:, 1:].shape)
marks[:, prompts.shape[1] - 1 :] = 1
preferences = smallmind.Preferences(model, Batch(whole[:, :-1], whole[:, 1:], starts, marks), BETA)
optimizer = smallmind.Muon(model, learning_rate=RATE / 3, matrix_learning_rate=RATE / 3)
for epoch in range(EPOCHS):
    optimizer.learning_rate = RATE / 3 * (1 - epoch / EPOCHS)
    for some in np.array_split(random.permutation(len(both)), math.ceil(len(both) / 128)):
        preferences.loss_and_gradients(model, some)
        optimizer.step(max_grad_norm=1.0)
apart, by_pairs = (preferences.margins(model) > 0).mean(), accuracy(model)
print(f"{len(both)} pairs, of which {apart:.1%} have moved the right way")
print(f"{before:.1%} -> {by_pairs:.1%} of unseen sums are right")
assert apart > 0.5

# %% [markdown]
# Pairs teach, and cost less: nothing was drawn after the first forty batches. But the model hears
# of the mistakes that it made before, not of those that it makes now. And nothing in the loss wants
# the chosen answer to become *likely*: it may lose as long as the other loses more.
#
# Pairs of texts become such windows with `smallmind.Preferences.of_texts`, in the template of a
# model that answers.
#
# ## 6. Try it
#
# - Set `ENOUGH_RIGHT` to 0.05. Does reward still get there? With 0.01?
# - Leave out the baseline: use `rewards` as weights, and then `rewards + 2`.
# - Give half a reward for each right digit. Is that faster? What else might it teach?
# - Set `BETA = 0.1`. The pairs are told apart as well, but look at the unseen sums.
#
# ## Where to read on
#
# - Williams (1992), *Simple Statistical Gradient-Following Algorithms*: REINFORCE.
# - Shao et al. (2024), *DeepSeekMath*: a group's mean as the baseline.
# - Rafailov et al. (2023), *Direct Preference Optimization*.
# - In this package: `losses/preferences.py`, and `weights` of
#   `TransformerModel.loss_and_gradients`.

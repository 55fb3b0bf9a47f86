# %% [markdown]
# # Rewards and preferences
#
# A model can learn from less than the right answer: from rewards for its own answers, or from pairs
# of a better and a worse one. After this lesson you will be able to
#
# - say how a reward, which has no gradient, becomes one, and measure what a baseline is for;
# - write the loss of a group of answers (GRPO), and that of a pair (DPO), in a few lines of NumPy,
#   and see that `smallmind train --reward` and `--loss dpo` compute the same numbers;
# - train with both, and tell what each of them can teach, and what neither can.
#
# **Before:** lesson 1, for losses and sampling; lesson 13, for questions and answers. **Time:** 80
# minutes; the code runs for 2 minutes.

# %%
import json
import random
import tempfile
from pathlib import Path

import numpy as np

import smallmind
from smallmind.charts.figure import lines
from smallmind.lessons import judge, pictures
from smallmind.losses.preferences import encode_pairs
from smallmind.losses.question_data import QuestionsDataset
from smallmind.losses.rewards import Rewards, advantages_of, grpo
from smallmind.training.records import LossRecord

FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
HERE = Path(FOLDER.name)
draw = np.random.default_rng(1)

# %% [markdown]
# ## 1. From a reward to a gradient
#
# Let r be the reward of an answer. What we want is a larger expected reward, the sum over all
# answers of p(answer) r(answer). The reward has no gradient: it is a verdict. But p has one, and
# since dp = p d(log p),
#
# d E[r] = sum of p r d(log p) = E[r d(log p)]
#
# On the right is an expectation, which samples estimate: let the model write answers, and take the
# gradient of each one's log-probability times its reward. This is REINFORCE (Williams 1992). It is
# the loss that we know, with the model's own answers as targets and their rewards as weights.
#
# Here is a small model to try it on. A question is two letters, an answer three; the reward is the
# share of letters of the answer that equal the first one of the question.

# %%
LETTERS, LONG, GROUP = "abcdefgh", 3, 8
letters = smallmind.Tokenizer(LETTERS, "char")
questions = [a + b for a in LETTERS for b in LETTERS]
toy = smallmind.TransformerModel(len(LETTERS), block_size=8, n_embd=32, n_layer=1, n_head=2, seed=1)


def reward(question, answer, wanted=None):
    return answer.count(question[0]) / len(answer)


def write(model, asked):
    """Questions (R, P) -> sampled answers (R, LONG), as tokens."""
    cache = smallmind.KeyValueCache(model, batch=len(asked))
    last, written = asked, []
    for _ in range(LONG):
        logits = model.decode(last, cache)
        # The largest sum of a logit and Gumbel noise is a sample of the softmax.
        last = (logits + draw.gumbel(size=logits.shape)).argmax(axis=1).astype(np.int32)[:, None]
        written.append(last)
    return np.concatenate(written, axis=1)


def add_gradient(model, asked, written, weights):
    """Adds the gradient of the mean over answers of weights (R,) times -log p per token."""
    whole = np.concatenate([asked, written], axis=1)
    each = np.zeros(whole[:, 1:].shape)
    each[:, -LONG:] = weights[:, None] / LONG
    model.loss_and_gradients(whole[:, :-1], whole[:, 1:], weights=each, divisor=len(asked))


def tried(model, count=32):
    """Questions, answers and rewards of `count` questions, each of them asked GROUP times."""
    asked = np.stack([letters.encode(q) for q in draw.choice(questions, count)]).repeat(GROUP, 0)
    written = write(model, asked)
    texts = zip(map(letters.decode, asked), map(letters.decode, written), strict=True)
    return asked, written, np.array([reward(*pair) for pair in texts])


asked, written, rewards = tried(toy)
for row in range(3):
    print(letters.decode(asked[row]), letters.decode(written[row]), f"{rewards[row]:.2f}")

# %% [markdown]
# It is a noisy estimate, and how noisy depends on something that should not matter. Add 2 to every
# reward, and the best model is the same. A number b that does not depend on the answer may be added
# or subtracted, since E[d(log p)] = 0 (probabilities sum to 1, whatever the weights):
#
# E[(r - b) d(log p)] = E[r d(log p)]
#
# But with 2 more, all answers are pushed up by nearly the same amount, which cancels out on
# average, but not in any single batch. So let b be the usual reward for the question: then only
# surprises count. This is a *baseline*, and r - b is an *advantage*. Several answers to each
# question are written, and b is their mean reward: a *group* (Shao et al. 2024).


# %%
def above_the_group(rewards):
    groups = rewards.reshape(-1, GROUP)
    return (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)


WEIGHTS = {
    "rewards from 0 to 1": lambda r: r,
    "rewards from 2 to 3": lambda r: r + 2,
    "both, above the mean of their group": above_the_group,
}
gradients: dict[str, list[np.ndarray]] = {name: [] for name in WEIGHTS}
for _ in range(20):
    asked, written, rewards = tried(toy)
    for name, weights_of in WEIGHTS.items():
        add_gradient(toy, asked, written, weights_of(rewards))
        gradients[name].append(toy.flat.grad.copy())
        toy.zero_gradients()
for name, found in gradients.items():
    print(f"{name}: gradients of batches deviate by {np.linalg.norm(np.std(found, axis=0)):.3f}")

# %% [markdown]
# ## 2. What `--reward` computes
#
# Two things are added to this. Advantages are divided by the deviation of their group, so that the
# scale of the reward does not matter. And answers are expensive, so that several updates may learn
# from the same ones (`--reward-updates`). From the second update on, these are the answers of an
# earlier model. Weighting each token by its probability now over that when it was written corrects
# for this. And since the samples say little about a model that is far from the one that wrote them,
# a token no longer counts once its ratio has left 1 ± clip in the direction in which its advantage
# pushes it (`--reward-clip`).


# %%
def group_advantages(rewards):
    """rewards (N, G) -> advantages (N, G)."""
    above = rewards - rewards.mean(axis=1, keepdims=True)
    return above / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)


def group_loss(logp, old, advantages, clip=0.2):
    """Log-probabilities of tokens, now and when written (n,) -> losses, d losses / d logp."""
    ratio = np.exp(logp - old)
    free, clipped = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
    # forward: losses = -min(free, clipped), and d ratio / d logp = ratio
    return -np.minimum(free, clipped), np.where(free <= clipped, -free, 0.0)


earned = draw.random((4, GROUP))
assert np.allclose(group_advantages(earned), advantages_of(earned))
old, changed = draw.normal(-2, 1, 1000), draw.normal(0, 0.3, 1000)
A = group_advantages(draw.random((1, 1000))).reshape(-1)
losses, dlogp = group_loss(old + changed, old, A)
package = grpo(old + changed, old, None, A, clip=0.2, beta=0.0)
assert np.allclose(losses, package.losses) and np.allclose(dlogp, package.dlogp)
slopes = (group_loss(old + changed + 1e-6, old, A)[0] - losses) / 1e-6
print(f"{(dlogp == 0).mean():.0%} of these tokens are clipped")
print(f"Derivatives differ from finite differences by {np.abs(slopes - dlogp).max():.1e}")

# %% [markdown]
# Now a whole step of the package, beside ours. `Rewards` writes the answers itself; the reward is a
# function, which here notes what it hears. In the first update of a round all ratios are 1: the
# loss is then the mean of the advantages, 0, and its gradient is that of section 1.

# %%
heard: list[tuple[str, str]] = []


def listening(question, answer, wanted):
    heard.append((question, answer))
    return reward(question, answer)


data = QuestionsDataset.of_texts(
    letters, [(question, None) for question in questions], GROUP, batch_size=4, most=LONG
)
loss = Rewards(listening, answers=GROUP)
loss.prepare(toy, data)
value = loss.loss_and_gradients(toy, data.windows(np.arange(4) * data.block_size))
theirs = toy.flat.grad.copy()
toy.zero_gradients()

asked, written = (np.stack([letters.encode(text) for text in x]) for x in zip(*heard, strict=True))
rewards = np.array([reward(*pair) for pair in heard]).reshape(-1, GROUP)
add_gradient(toy, asked, written, group_advantages(rewards).reshape(-1))
apart = np.abs(toy.flat.grad - theirs).max() / np.abs(theirs).max()
toy.zero_gradients()
print(f"{len(heard)} answers, loss {abs(value):.1f}")
print(f"Both gradients differ by {apart:.0e} of their largest element")
assert apart < 1e-4

# %% [markdown]
# ## 3. Three files, three runs
#
# To see what this is good for, a model learns to add. There are 10,000 sums of two numbers with two
# digits each. It begins with ordinary training on 400 of them, half of which end in a question
# mark, as if their author had been unsure. For 200 more there are pairs, in which the answer
# without the question mark is the better one. All the others are only questions, a tenth of which
# is held out for evaluation.

# %%
FEW_STEPS, REWARD_STEPS, ASKED = 400, 300, 100
shuffled = [(a, b) for a in range(100) for b in range(100)]
random.Random(1).shuffle(shuffled)
rows = [{"prompt": f"{a:02}+{b:02}", "answer": f"{a + b:03}"} for a, b in shuffled]
few = [row | {"answer": row["answer"] + "?" * (i % 2)} for i, row in enumerate(rows[:400])]
pairs = [
    {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"] + "?"}
    for row in rows[400:600]
]
for name, records in (("few", few), ("pairs", pairs), ("sums", rows[600:])):
    (HERE / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in records))

imitating = smallmind.Run.create(
    text=HERE / "few.jsonl",
    out=HERE / "imitating",
    recipe="chat",
    chat_template="qa",
    tokenizer="char",
    n_layer=2,
    n_embd=64,
    n_head=4,
    block_size=32,
    batch_size=64,
    dropout=0.0,
    steps=FEW_STEPS,
    early_stopping_patience=0,
    val_every=0,
)
imitating.train()
model, tokenizer = imitating.load()


def judged(model):
    """Asks the last sums -> the share of right answers; prints it, and how many are in doubt."""
    said = [
        smallmind.Chat(model, tokenizer, temperature=0, max_tokens=8).say(row["prompt"]).strip()
        for row in rows[-ASKED:]
    ]
    right = np.mean([one == row["answer"] for one, row in zip(said, rows[-ASKED:], strict=True)])
    print(f"{right:.0%} are right, {np.mean(['?' in one for one in said]):.0%} in doubt")
    return right


imitated = judged(model)

# %% [markdown]
# ## 4. What `--loss dpo` computes
#
# Often nobody can say what an answer is worth, but people can say which of two is better. DPO
# (Rafailov et al. 2023) learns from such pairs, for which the model writes no answers:
#
# loss = -log sigmoid(margin)
#
# margin = beta (log p(chosen) / q(chosen) - log p(rejected) / q(rejected))
#
# q are the probabilities in a *reference*, the model as it was, of which only these numbers are
# kept. Why are they there? The goal is a large reward without moving far from q, and the best model
# for that has p = q exp(reward / beta) / Z. Solve for the reward: up to a constant, beta log p / q
# is the reward that the model implies for an answer. The margin is a difference of two such
# rewards, in which Z cancels, and the loss is that of guessing which of them is larger. `beta` is
# the penalty for moving away. The gradient is a familiar one, that of log p(chosen) - log
# p(rejected), times a number between 0 and beta that is large where the pair is still in the wrong
# order.


# %%
def pair_loss(chosen, rejected, q_chosen, q_rejected, beta):
    """Log-probabilities of whole answers (N,) -> losses (N,), d losses / d chosen (N,)."""
    margins = beta * ((chosen - q_chosen) - (rejected - q_rejected))
    # forward: losses = log(1 + exp(-margins))
    return np.log1p(np.exp(-margins)), -beta / (1 + np.exp(margins))


texts = [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in pairs[:16]]
batch = encode_pairs(tokenizer, texts)  # windows of the chosen answers, then of the rejected ones


def log_probabilities(model):
    """Returns log p of each answer of the batch (2 N,)."""
    return -(model.losses(batch.ids, batch.targets) * batch.weights).sum(axis=1)


BETA = 0.1
preferences = smallmind.Preferences(model, batch, BETA)  # the reference is the model as it is now
q = log_probabilities(model)
optimizer = smallmind.Muon(model, learning_rate=1e-3, matrix_learning_rate=1e-3)
for _ in range(3):
    print(f"loss {preferences.loss_and_gradients(model):.4f}")
    optimizer.step()

value = preferences.loss_and_gradients(model)
theirs = model.flat.grad.copy()
model.zero_gradients()
(chosen, rejected), (q_chosen, q_rejected) = (np.split(x, 2) for x in (log_probabilities(model), q))
losses, dchosen = pair_loss(chosen, rejected, q_chosen, q_rejected, BETA)
weights = np.concatenate([-dchosen, dchosen])[:, None] * batch.weights  # of -log p of each token
model.loss_and_gradients(batch.ids, batch.targets, weights=weights, divisor=len(texts))
apart = np.abs(model.flat.grad - theirs).max() / np.abs(theirs).max()
print(f"Losses {losses.mean():.6f} and {value:.6f}; gradients differ by {apart:.0e} of the largest")
assert abs(losses.mean() - value) < 1e-4 and apart < 1e-3

# %% [markdown]
# The first loss is ln 2: the model is its own reference, and all margins are 0. From a file, the
# same takes one line: records of a prompt, a chosen and a rejected answer are recognised if the run
# starts from a model.

# %%
preferring = smallmind.Run.create(
    text=HERE / "pairs.jsonl",
    out=HERE / "preferring",
    init_from=imitating.path,
    learning_rate=2e-4,
)
preferring.train()
preferred = judged(preferring.load()[0])

# %% [markdown]
# The doubt is gone, although not a single sum was explained: most of what is right now was right
# before, except for the question mark. Pairs choose among the answers that a model already gives.
# They are poor at teaching new ones: nothing in the loss wants the chosen answer to become
# *likely*; it may lose probability as long as the other one loses more. (At a rate of 1e-3 this
# model wins every pair too, and hardly a sum is right.) `--loss orpo` adds the ordinary loss of the
# chosen answers.
#
# ## 5. Rewards from a file
#
# Now the model answers questions to which it has never seen an answer, and is told only which of
# its own are right. `reward="exact"` compares with the expected answer; any other reward is a
# function that you write in a Python file.

# %%
adding = smallmind.Run.create(
    text=HERE / "sums.jsonl",
    out=HERE / "adding",
    init_from=preferring.path,
    reward="exact",
    batch_size=64,
    steps=REWARD_STEPS,
    log_every=max(1, REWARD_STEPS // 10),
    val_every=0,
)
steps: list[int] = []
shares: dict[str, list[float]] = {"answers that are right": [], "groups that teach": []}
for record in adding.train():
    if isinstance(record, LossRecord) and "teaching" in record.numbers:
        right, teaching = record.numbers["sampled_reward"], record.numbers["teaching"]
        print(f"step {record.step:3}: {right:.0%} of answers right, {teaching:.0%} of groups teach")
        steps.append(record.step)
        for share, now in zip(shares.values(), (right, teaching), strict=True):
            share.append(now)
pictures.draw("lesson14_rewards", lines("Shares while it learns from rewards", shares, steps))
rewarded = judged(adding.load()[0])
print(
    f"Right: {imitated:.0%} by imitation, {preferred:.0%} with pairs, {rewarded:.0%} with rewards"
)

# %% [markdown]
# With `REWARD_STEPS = 1000`, in a few minutes, more than nine of ten sums are right. Why not from
# the start, without imitation? A group teaches if its answers earn different rewards, so one of
# them has to be right. A new model draws four tokens out of 36, and is right in one of a million
# cases: nothing to learn from. A reward makes more likely what sometimes happens; it cannot teach
# what never does. Nor does a group teach if all of its answers are right, so towards the end fewer
# do.
#
# The same from the command line, with the three files:
#
#     smallmind train few.jsonl --recipe chat ... --out runs/few
#     smallmind train pairs.jsonl --init-from runs/few --learning-rate 2e-4 --out runs/sure
#     smallmind train sums.jsonl --init-from runs/sure --reward exact --out runs/adds
#
# `smallmind guide preferences` has all of it, and the other flags.
#
# ## Exercises
#
# **1. Leave one out.** The mean of a group contains the answer that is compared with it, which
# makes its advantage a little too small. Compare each answer with the mean of the *others* instead.
# Do not divide by the deviation.


# %%
def leave_one_out(rewards):
    """rewards (N, G) -> advantages (N, G): each minus the mean of the other G - 1."""
    raise NotImplementedError


def check_leave_one_out(candidate):
    given = np.array([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 2.0]])
    found = candidate(given.copy())
    assert np.shape(found) == given.shape, f"the shape is {np.shape(found)}, not {given.shape}"
    assert not np.allclose(found, given - given.mean(axis=1, keepdims=True)), (
        "each answer is still in the mean that it is compared with"
    )
    for row in range(2):
        for g in range(4):
            others = np.delete(given[row], g)
            assert abs(found[row][g] - (given[row, g] - others.mean())) < 1e-9, (
                f"of the rewards {given[row].tolist()}, number {g} is {given[row, g]:g} and the "
                f"others have a mean of {others.mean():.2f}: not {found[row][g]:.2f}"
            )
    more = candidate(given + 5)
    assert np.allclose(more, found), "5 more for every answer change the advantages"


print("Exercise 1:", judge(lambda: check_leave_one_out(leave_one_out)))

# %% [markdown]
# **2. A margin that is large enough.** DPO always wants a larger margin. IPO (Azar et al. 2023)
# wants it to be 1 / (2 beta), and no more: its margin is log p(chosen) / q(chosen) - log
# p(rejected) / q(rejected), without beta, and its loss the squared distance to that. Write it, and
# its derivative.


# %%
def ipo_loss(margins, beta):
    """margins (N,) -> losses (N,), d losses / d margins (N,)."""
    raise NotImplementedError


def check_ipo(candidate):
    margins, step = np.array([-3.0, 0.0, 1.0, 5.0, 9.0]), 1e-6
    for beta in (0.1, 0.5):
        losses, slopes = candidate(margins.copy(), beta)
        for margin, loss, slope in zip(margins, losses, slopes, strict=True):
            expected = (margin - 0.5 / beta) ** 2
            assert abs(loss - expected) < 1e-9, (
                f"a margin of {margin:g} with beta={beta:g} has a loss of {expected:g}, "
                f"not {loss:g}"
            )
            above = (margin + step - 0.5 / beta) ** 2
            assert abs(slope - (above - expected) / step) < 1e-4, (
                f"at a margin of {margin:g} the loss changes by {(above - expected) / step:.2f} "
                f"per unit, not by {slope:.2f}"
            )


print("Exercise 2:", judge(lambda: check_ipo(ipo_loss)))

# %% [markdown]
# **3. A reward that cannot be cheated.** A model finds whatever a reward pays for, including what
# you did not mean: with `contains`, an answer that lists all numbers earns 1. Write a reward for
# sums that is 1 if the wanted number is the only number in the answer, whatever text is around it
# and with or without leading zeros, and 0 otherwise. A number is a run of digits.


# %%
def only_number(question, answer, wanted):
    """Returns 1.0 if the number `wanted` is the only one in the answer, else 0.0."""
    raise NotImplementedError


def check_only_number(candidate):
    for answer, wanted, expected, why in (
        ("046", "046", 1, "it is the wanted answer"),
        ("The sum is 46.", "046", 1, "zeros in front do not change a number"),
        ("46!", "46", 1, "what is around a number does not matter"),
        ("45, 46, 47", "46", 0, "it lists several numbers"),
        ("46 or 46", "46", 0, "it has two numbers"),
        ("146", "46", 0, "146 is another number, in which 46 is"),
        ("460", "46", 0, "460 is another number, in which 46 is"),
        ("I do not know.", "46", 0, "it has no number"),
        ("", "46", 0, "it is empty"),
    ):
        found = candidate("12+34", answer, wanted)
        assert found is not None, "the function returns None"
        assert float(found) == expected, (
            f"{answer!r} earns {float(found):g}, not {expected}: {why}, and {wanted} is wanted"
        )


print("Exercise 3:", judge(lambda: check_only_number(only_number)))

# %% [markdown]
# **4. How far away?** `--reward-beta` charges for the distance to the model before the first step,
# KL(p, q) = E[log p / q] over answers of p. A single sample of log p / q is often negative, which
# pays for moving away. Find an estimate with the same mean that is never negative: add a term whose
# mean is 0. Hint: E[q / p - 1] = 0, and log x ≤ x - 1.


# %%
def distance(logp, logq):
    """Log-probabilities of sampled tokens (n,) in both models -> estimates of the KL (n,)."""
    raise NotImplementedError


def check_distance(candidate):
    random = np.random.default_rng(0)
    for size in (0.1, 1.0):
        logits = random.normal(size=(2, 20)) * size
        logp, logq = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        found = np.asarray(candidate(logp.copy(), logq.copy()))
        exact, mean = (np.exp(logp) * (logp - logq)).sum(), (np.exp(logp) * found).sum()
        assert abs(mean - exact) < 1e-9, f"its mean over p is {mean:.4f}, the KL is {exact:.4f}"
        assert found.min() > -1e-12, f"an estimate is negative: {found.min():.4f}"


print("Exercise 4:", judge(lambda: check_distance(distance)))

# %%
FOLDER.cleanup()

# %% [markdown]
# ## Try it
#
# - Start from `imitating.path` instead of `preferring.path`: the reward then has to remove the
#   question marks too. Is that slower?
# - Give a share of the reward for each right digit, in a file of your own. Is that faster? What
#   else might it teach?
# - Make pairs of right sums and sums that are wrong by a digit. Compare `loss="dpo"` and `"orpo"`,
#   with `learning_rate=1e-3`.
#
# ## Where to read on
#
# - Williams (1992), *Simple Statistical Gradient-Following Algorithms*: REINFORCE.
# - Shao et al. (2024), *DeepSeekMath*: the group's advantage, GRPO.
# - Rafailov et al. (2023), *Direct Preference Optimization*.
# - In this package: `losses/rewards.py`, `losses/preferences.py`, and `weights` of
#   `TransformerModel.loss_and_gradients`, through which both learn.
#
# ## What you can do now
#
# You have a model that adds, and nobody told it how; before, you could only teach what you could
# write down. Next: the page *Write a layer of your own* (`smallmind lessons writing_a_layer`).

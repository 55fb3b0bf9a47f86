# %% [markdown]
# # Data
#
# After this lesson you can turn a pile of texts into batches: windows that use every token equally
# often, a held-out part that is honest, several documents in one window that do not see each other,
# and almost no padding.
#
# **Before:** lessons 1 and 4. **Time:** 50 minutes; the code runs for 1 second.

# %%
import math

import numpy as np

import smallmind
from smallmind.charts.heat_map import heat_map
from smallmind.charts.histogram import histogram
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw
from smallmind.text import packing
from smallmind.text.stories import built_in_text

smallmind.set_threads(1)
random = np.random.default_rng(1)
text = built_in_text(400_000)
tokenizer = smallmind.Tokenizer(text, "bpe", vocab_size=600)

# %% [markdown]
# ## 1. Windows
#
# A model reads `T` tokens at a time, and predicts the one after each of them. So a training example
# is `T + 1` tokens in a row: all but the last are the input, all but the first are the targets.

# %%
ids = tokenizer.encode(text)
T = 8
window = ids[1000 : 1000 + T + 1]
for t in range(T):
    print(
        f"{tokenizer.decode(window[: t + 1])!r:>46} -> {tokenizer.decode(window[t + 1 : t + 2])!r}"
    )

# %% [markdown]
# One window is `T` predictions, each with another length of context. That comes for free: attention
# only looks back, so one pass computes all of them.
#
# Where should windows begin? Lesson 1 drew a random place for each. That is simple, and unfair: in
# as many draws as there are windows, a token is seen once on average, but some three times and
# others never. The probability of being missed by all of `n` draws is `(1 - 1/n)^n`, about `1/e`:
# 37 %.
#
# The other way is to cut the text into windows, shuffle them, and use each once. One round is an
# *epoch*. Its windows always begin at the same places, unless each epoch cuts at another offset.

# %%
T, n = 64, len(ids) // 64
EPOCHS = 4


def times_seen(starts):
    """Returns how often each token was an input, of windows that begin at starts."""
    seen = np.zeros(len(ids), int)
    for start in starts:
        seen[start : start + T] += 1
    return seen


drawn = random.integers(0, len(ids) - T, EPOCHS * n)
cut = [random.integers(0, T) + T * np.arange(n - 1) for _ in range(EPOCHS)]
counts = {"random places": times_seen(drawn), "each window once": times_seen(np.concatenate(cut))}
for name, seen in counts.items():
    print(f"{name}: {np.mean(seen == 0):.1%} of the tokens never seen in {EPOCHS} epochs,")
    print(f"  {np.mean(seen == EPOCHS):.1%} exactly {EPOCHS} times, at most {seen.max()} times")
draw("lesson05_times_seen", histogram("How often a token is seen", counts, "times", bins=24))

# %% [markdown]
# With a large text and less than one epoch the difference is small. With a small text that is read
# many times it matters: `smallmind train --epochs 4` takes each window once per epoch, whereas
# `--steps 1000` draws random places.
#
# ## 2. What is held out
#
# The loss on tokens that were trained on says how well they were learned by heart. So a part of
# the text is *held out*. It is easy to do that wrong. Suppose that we cut overlapping windows
# first, and hold out a random tenth of these:

# %%
starts = np.arange(0, len(ids) - T, 16)  # every 16 tokens: they overlap
random.shuffle(starts)
held, trained = np.split(starts, [len(starts) // 10])
is_trained = np.zeros(len(ids), bool)
for start in trained:
    is_trained[start : start + T] = True
leaked = np.mean([is_trained[start : start + T].mean() for start in held])
print(f"{leaked:.0%} of the held-out tokens are in windows that are trained on")

# %% [markdown]
# The "held-out" loss would be a training loss. **Split the text first, then cut windows**, at a
# border between documents, and make sure that no document is in both parts: the internet has many
# copies of everything (Lee et al. 2022).
#
# ## 3. Documents
#
# A real corpus is many documents. They are written one after another, with a token between them
# that says that one has ended. A window then has the end of one and the beginning of the next. What
# should the model do there? It may look at the last document while it predicts the next. That is
# mostly noise to it, and it will never have that noise when it is used. The remedy is a *mask*:
# attention may look at a token if it is not later **and** in the same document.

# %%
lengths = [5, 9, 3, 7]  # of the documents in a window
firsts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)  # where the document of a token begins
places = np.arange(sum(lengths))
mask = (places[None, :] <= places[:, None]) & (places[None, :] >= firsts[:, None])
print("the first place of each token's document:", firsts)
draw("lesson05_mask", heat_map("Where each token (row) may look", mask.astype(float).tolist()))

# %% [markdown]
# Causal attention is the whole triangle; documents cut it into smaller ones along the diagonal. For
# each row the allowed keys are an interval, from `firsts` to the token itself. So no matrix is
# needed: one number per token is enough, and a kernel skips all blocks outside of the interval.
#
# Positions begin at zero in each document, too. With rotary positions (lesson 9) that makes no
# difference, as only distances count; learned positions have to be told.
#
# Does it work? A window of several stories must give each story the same losses as a window of its
# own.

# %%
stories = [tokenizer.encode(story + "\n\n") for story in text.split("\n\n")[:400] if story]
T = 512
model = smallmind.TransformerModel(tokenizer.vocab_size, T, 32, 2, 2, seed=1)
first, second = stories[:2]
together = np.concatenate([first, second])[: T + 1]
beginning = np.repeat([0, len(first)], [len(first), len(together) - 1 - len(first)])
beginning = beginning[None].astype(np.int32)
packed = model.losses(together[None, :-1], together[None, 1:], firsts=beginning)[0]
unmasked = model.losses(together[None, :-1], together[None, 1:])[0]
own = second[: len(together) - len(first)]
alone = model.losses(own[None, :-1], own[None, 1:])[0]
part = slice(len(first), None)
print(f"The second story, masked: its losses differ by {abs(packed[part] - alone).max():.0e}")
print(f"not masked: by {abs(unmasked[part] - alone).max():.0e}")
assert abs(packed[part] - alone).max() < 1e-4 < abs(unmasked[part] - alone).max()

# %% [markdown]
# The last token of the first story is still an input, and its target is the first of the second.
# Nobody can predict that. Section 5 says how such a target is left out.
#
# ## 4. Packing
#
# Some data must not be cut: a question without its answer teaches nothing. So each window has whole
# documents, and the rest of it is empty. Real documents differ in length far more than our stories,
# so let us draw some lengths: many are short, and a few long. A window for each of them, or padding
# to the longest, wastes most of the work:

# %%
lengths = np.clip(random.lognormal(4.5, 0.9, 1000).astype(int), 8, T)
print(f"{len(lengths)} documents of {lengths.min()} to {lengths.max()} tokens")
print(f"one in each window of {T}: {1 - lengths.sum() / (T * len(lengths)):.0%} is empty")


def next_fit(lengths, capacity):
    """Fills windows in the order of the documents -> the number of windows."""
    windows, room = 0, 0
    for length in lengths:
        if length > room:
            windows, room = windows + 1, capacity
        room -= length
    return windows


order, ends = packing.pack(lengths, T)
for name, windows in (("in their order", next_fit(lengths, T)), ("best fit", len(ends))):
    print(f"several, {name}: {windows} windows, {1 - lengths.sum() / (T * windows):.1%} is empty")
used = np.diff(ends, prepend=0)
print(f"A window has {used.min()} to {used.max()} documents")
draw("lesson05_lengths", histogram("Lengths", {"documents": lengths}, "tokens"))

# %% [markdown]
# Finding the fewest windows is hard in general (it is called *bin packing*). But a greedy rule is
# never far off: take the longest document first, and put each where it leaves the least room. It
# needs at most 11/9 of the minimum plus a few (Johnson et al. 1974). With many short documents it
# is nearly perfect.
#
# ## 5. What counts
#
# Not every target should be learned. Padding must not count, nor the first token of a document,
# which cannot be known, nor, in lesson 13, what the user says. So each target has a *weight*, 0 or
# 1, and the loss is the sum of weights times losses, divided by the sum of the weights. That sum is
# the one **of the whole update**: lesson 13 shows what goes wrong otherwise.

# %%
weights = np.ones(len(together) - 1, np.float32)
weights[len(first) - 1] = 0  # the target of the last token of the first story
print(f"The mean loss of all targets {packed.mean():.4f},")
print(f"of those that count {(weights * packed).sum() / weights.sum():.4f}")

# %% [markdown]
# ## Exercises
#
# ### Exercise 1: windows
#
# Cut `tokens` into windows, without loops. Row i has the inputs that begin at `starts[i]`.


# %%
def cut_windows(tokens, starts, T):
    """tokens (n,), starts (B,) -> ids, targets (B, T)."""
    raise NotImplementedError


def check_cut_windows(candidate):
    tokens = np.arange(100, 130)
    found = candidate(tokens, np.array([0, 7]), 4)
    assert found is not None and len(found) == 2, "return two arrays, the inputs and the targets"
    ids, targets = map(np.asarray, found)
    assert ids.shape == (2, 4), f"the inputs have the shape {ids.shape}, not (2, 4)"
    assert ids[1].tolist() == [107, 108, 109, 110], f"the inputs from 7 on are {ids[1]}"
    assert targets.shape == (2, 4), f"the targets have the shape {targets.shape}, not (2, 4)"
    assert (targets != ids).any(), "the target of a token is the token after it, not itself"
    assert targets[1].tolist() == [108, 109, 110, 111], f"the targets from 7 on are {targets[1]}"
    ids, targets = candidate(tokens, np.array([25]), 4)
    assert targets[0, -1] == 129, "the last window ends with the last token as a target"


print("Exercise 1:", judge(lambda: check_cut_windows(cut_windows)))

# %% [markdown]
# ### Exercise 2: a mask
#
# Documents of these lengths are one after another in a window of T tokens; what is left of it is
# empty. Return the mask of section 3. An empty place may look at itself, and no other place at it:
# a row without any key would make softmax divide by zero.


# %%
def document_mask(lengths, T):
    """-> (T, T), True where the query of a row may look at the key of a column."""
    raise NotImplementedError


def check_document_mask(candidate):
    def expect(lengths, T, rows, hint):
        found = np.asarray(candidate(lengths, T))
        assert found.shape == (T, T), f"the shape is {found.shape}, not {(T, T)}"
        shown = ["".join("x" if cell else "." for cell in row) for row in found]
        assert shown == rows, f"lengths {lengths} in {T}: {' '.join(shown)}; {hint}"

    expect([3], 3, ["x..", "xx.", "xxx"], "one document: everything up to the token itself")
    expect([2, 1], 3, ["x..", "xx.", "..x"], "a document must not look into the one before")
    expect([1], 3, ["x..", ".x.", "..x"], "an empty place looks at itself alone")
    expect([2, 2], 5, ["x....", "xx...", "..x..", "..xx.", "....x"], "both at once")


print("Exercise 2:", judge(lambda: check_document_mask(document_mask)))

# %% [markdown]
# ### Exercise 3: packing
#
# Put documents into as few windows as you can: return a list of windows, each a list of the numbers
# of its documents, such that no window has more than `capacity` tokens. The longest first, each
# into the first window that has room, is good enough.


# %%
def pack_documents(lengths, capacity):
    """lengths, at most capacity each -> lists of document numbers, a list for each window."""
    raise NotImplementedError


def check_pack_documents(candidate):
    sizes = np.random.default_rng(3).integers(1, 65, 300).tolist()
    for lengths, capacity in (([3, 3, 3], 6), ([2, 5, 4, 7, 1, 3, 8], 10), (sizes, 64)):
        found = candidate(list(lengths), capacity)
        assert found is not None, "the function returns None"
        flat = sorted(document for window in found for document in window)
        assert flat == list(range(len(lengths))), (
            f"each of the {len(lengths)} documents has to be in one window; you have {len(flat)}, "
            f"{len(set(flat))} different ones"
        )
        for window in found:
            total = sum(lengths[document] for document in window)
            assert total <= capacity, f"a window has {total} tokens, more than {capacity}"
        least = math.ceil(sum(lengths) / capacity)
        assert len(found) <= 11 / 9 * least + 1, (
            f"{len(found)} windows for {len(lengths)} documents that could fit into {least}: take "
            "the longest first, and fill windows that you already have"
        )


print("Exercise 3:", judge(lambda: check_pack_documents(pack_documents)))

# %% [markdown]
# ## Where to read on
#
# - Lee et al. (2022), *Deduplicating Training Data Makes Language Models Better*.
# - Johnson, Demers, Ullman, Garey & Graham (1974), *Worst-Case Performance Bounds for Simple
#   One-Dimensional Packing Algorithms*.
# - Krell, Kosec, Perez & Fitzgibbon (2021), *Efficient Sequence Packing without
#   Cross-contamination*: packing with masks.
# - Ding et al. (2024), *Fewer Truncations Improve Language Modeling*: what cutting costs.
# - In this package: `text/samplers.py`, `text/packing.py`, `text/conversations.py`, and `firsts` in
#   `nn/documents.py`.
#
# ## What you can do now
#
# You can say of any batch where its tokens come from, what each may look at and which of them
# count, and you will notice when a held-out loss is too good to be true. Next: lesson 6, *A block,
# a model*, on what happens to a batch inside.

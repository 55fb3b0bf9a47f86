# %% [markdown]
# # Tokens
#
# After this lesson you can turn any text into the numbers that a model reads, with a vocabulary
# that you have learned from a text yourself, and say what a larger vocabulary gains and costs.
#
# **Before:** lesson 1. **Time:** 50 minutes; the code runs for 10 seconds.

# %%
import itertools
import math
import re
import time
from collections import Counter

import numpy as np

import smallmind
from smallmind.charts.figure import lines
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw
from smallmind.text.stories import built_in_text

smallmind.set_threads(1)
text = built_in_text(200_000)

# %% [markdown]
# ## 1. Bytes
#
# In lesson 1 a token was a letter, and the vocabulary was whatever letters the text had. That
# breaks with the first letter that is new. There is an alphabet without new letters: a file is
# bytes, and a byte is one of 256. UTF-8 writes the letters of English as one byte each and all
# others as two to four.

# %%
for letters in ("cat", "Zoë", "猫", "🐈"):
    print(f"{letters!r}: {list(letters.encode('utf-8'))}")

# %% [markdown]
# A byte-level model can read and write everything, and never meets an unknown token. But a byte
# says little. The model spends a whole pass, all its layers, on each letter of "therefore", and a
# window of 64 tokens is a line and a half.
#
# ## 2. Pairs, by hand
#
# So let common sequences be tokens of their own. *Byte-pair encoding* finds them greedily (Gage
# 1994; for words, Sennrich et al. 2016): find the pair of neighbouring tokens that occurs most
# often, make it a token, replace it everywhere, and repeat.
#
# Two details make it practical. The text is first cut into *words*, and no pair reaches from one
# into the next: otherwise ". The" and " of the" would become tokens, and the tokens of a word would
# depend on the word before it. A space belongs to the word that it comes before, so that no token
# is spent on it. And since words repeat, it is enough to count each different word once.

# %%
WORD = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")


def count_words(text):
    """-> the words of a text as tuples of bytes objects, one for each byte, and their counts."""
    counts = Counter(WORD.findall(text))
    return {tuple(bytes([b]) for b in word.encode()): count for word, count in counts.items()}


def merge(word, pair):
    """Replaces each occurrence of a pair of tokens in a word by one token, from the left."""
    merged, i = [], 0
    while i < len(word):
        if word[i : i + 2] == pair:
            merged.append(pair[0] + pair[1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)


def learn(words, count):
    """-> the pairs that were merged, in order."""
    merges = []
    for _ in range(count):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        best = max(pairs, key=pairs.__getitem__)
        merges.append(best)
        words = {merge(word, best): times for word, times in words.items()}
    return merges


words = count_words(text)
print(f"{sum(words.values()):,} words, {len(words)} different ones")
start = time.perf_counter()
merges = learn(words, 300)
by_hand = time.perf_counter() - start
for number in (0, 1, 2, 3, 10, 30, 100, 299):
    left, right = merges[number]
    print(f"merge {number:3}: {left.decode()!r} + {right.decode()!r}")

# %% [markdown]
# The first merges are pairs of letters, the later ones whole words: the vocabulary has learned what
# this text repeats. Nobody told it what a word means; frequency is all that it knows.
#
# ## 3. Encoding and decoding
#
# To encode a word, apply the merges **in the order in which they were learned**, not the longest
# token first: a later merge was counted in a text in which the earlier ones were already made.
# Decoding needs no merges at all. The bytes of the tokens, one after another, are the text.


# %%
def encode_word(word, merges):
    """A word as text -> its tokens, as bytes objects."""
    tokens = tuple(bytes([b]) for b in word.encode())
    for pair in merges:
        tokens = merge(tokens, pair)
    return tokens


def encode(text, merges):
    return [token for word in WORD.findall(text) for token in encode_word(word, merges)]


SENTENCE = "The brave girl found a lamp, and 1984 kangaroos."
tokens = encode(SENTENCE, merges)
print(" | ".join(token.decode() for token in tokens))
assert b"".join(tokens).decode() == SENTENCE

# %% [markdown]
# Words of the text are one token. A word that it never had falls into pieces, and a number into
# digits, but nothing is impossible: in the end there are the bytes.
#
# ## 4. The same in the package
#
# `smallmind.Tokenizer(text, "bpe")` does this in compiled code, with counts that are updated and
# not counted again after each merge. Its pattern for words is that of GPT-2 (Radford et al. 2019),
# which also keeps "'s" and letters of all alphabets together. The first 256 tokens are the bytes,
# the last one says that a text has ended.

# %%
start = time.perf_counter()
tokenizer = smallmind.Tokenizer(text, "bpe", vocab_size=256 + len(merges) + 1)
seconds = time.perf_counter() - start
theirs = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
ours = {left + right for left, right in merges}
print(f"{len(ours & theirs)} of our {len(ours)} tokens are in its vocabulary too")
print(f"learned in {seconds:.2f} s; by hand it took {by_hand:.2f} s")
ids = tokenizer.encode(SENTENCE)
print(" | ".join(tokenizer.decode(ids[i : i + 1]) for i in range(len(ids))))
assert tokenizer.decode(ids) == SENTENCE

# %% [markdown]
# ## 5. What a vocabulary gains
#
# The more merges, the more text in a token, but with diminishing returns: frequent words are merged
# first. On text of the same kind that was held out:

# %%
held_out = built_in_text(300_000)[-50_000:]
sizes = (257, 300, 350, 400, 500, 600, 700, 800)
tokenizers = {size: smallmind.Tokenizer(text, "bpe", vocab_size=size) for size in sizes}
per_token = [len(held_out) / len(tokenizers[size].encode(held_out)) for size in sizes]
for size, length in zip(sizes, per_token, strict=True):
    print(f"{size:4} tokens: {length:.2f} letters in each")
draw(
    "lesson04_vocabulary",
    lines("Letters per token", {"letters per token": per_token}, sizes, "size of the vocabulary"),
)

# %% [markdown]
# Twice the letters in a token are half the passes for the same text, both in training and in
# writing, and a window sees twice as far.
#
# ## 6. What it costs
#
# Each token has a row in the embedding and a column in the head, `2 V C` weights, or `V C` if they
# are tied. And each prediction is a softmax over all `V`. In a small model that is soon most of it.

# %%
C, N = 128, 4
blocks = N * 12 * C * C
print("vocabulary  share of the weights in embedding and head")
for V in (256, 1024, 8192, 50_257):
    print(f"{V:10,}  {2 * V * C / (2 * V * C + blocks):6.0%}")

# %% [markdown]
# Rare tokens also learn slowly: a row of the embedding moves only when its token occurs. This is
# why a small text needs a small vocabulary. GPT-2 has 50,257 tokens for 40 GB of text; the default
# here is a few hundred to a few thousand, by the size of the text.
#
# Which size is best? **Losses per token cannot tell.** A model of longer tokens has more to guess
# in each and fewer of them: its loss per token is higher even if it is the better model. What can
# be compared is the loss for the same *text*: the sum over all tokens, divided by its letters (or
# its bytes).
#
# We train the same model with three vocabularies, on the same number of letters.

# %%
LETTERS = 400_000  # to learn from
shape = {"block_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}


def loss_per_letter(tokenizer):
    """-> the losses on held-out text, in nats per token and per letter."""
    ids = tokenizer.encode(held_out)
    letters = len(held_out) / len(ids)
    steps = round(LETTERS / letters / (12 * 64))
    model = smallmind.TransformerModel(tokenizer.vocab_size, **shape)
    training = smallmind.Training(model, tokenizer, text, batch_size=12)
    training.train(steps, learning_rate=4e-3, min_lr=0.0, schedule="linear", val_every=0)
    ids = ids[: (len(ids) - 1) // 64 * 64 + 1]
    losses = model.losses(ids[:-1].reshape(-1, 64), ids[1:].reshape(-1, 64))
    return steps, float(losses.mean()), float(losses.mean()) / letters


print("vocabulary  steps  nats per token  nats per letter")
for size in (257, 400, 800):
    steps, loss, per_letter = loss_per_letter(tokenizers[size])
    print(f"{size:10}  {steps:5}  {loss:14.3f}  {per_letter:15.3f}")

# %% [markdown]
# By the loss per token bytes would be best, by the loss per letter they are not. (These stories
# have only a few hundred different words, so that 800 tokens are nearly one for each. In a real
# language most words are rare, and the gain ends earlier.)
#
# ## 7. What a model cannot see
#
# To the model a token is a number. It does not see the letters in it. That explains much of what
# looks like stupidity:
#
# - how many letters a word has, or how it is spelled backwards, has to be learned by heart for each
#   token;
# - " lamp" and "lamp" are different tokens, as are "Lamp" and "LAMP";
# - a number may be cut anywhere: of "1984" and "1985" one may be a token and the other two;
# - a language that the vocabulary was not learned from takes many more tokens for the same
#   sentence, and so costs more and fits less in a window (Petrov et al. 2023).

# %%
for sentence in ("a lamp", "a LAMP", "the brave girl", "das mutige Mädchen", "勇敢な女の子"):
    count = len(tokenizers[800].encode(sentence))
    print(f"{sentence}: {len(sentence)} letters, {count} tokens")

# %% [markdown]
# ## Exercises
#
# ### Exercise 1: the most frequent pair
#
# `words` has tuples of tokens and how often each occurs. Return the pair of neighbours that occurs
# most often, over all words and all places in them; if several do, the smallest. (A pair may
# overlap with itself: "aaa" has the pair "a", "a" twice.)


# %%
def best_pair(words):
    """{a word, as a tuple of bytes: its count} -> a pair of bytes."""
    raise NotImplementedError


def check_best_pair(candidate):
    def expect(words, pair, hint):
        found = candidate({tuple(bytes([b]) for b in w.encode()): n for w, n in words.items()})
        assert found == pair, f"in {words} it is {pair}, not {found}: {hint}"

    expect({"ab": 1, "cd": 3}, (b"c", b"d"), "count a word as often as it occurs")
    expect({"zbcbc": 1}, (b"b", b"c"), "count every place in a word")
    expect({"xab": 2, "aby": 2, "xx": 3}, (b"a", b"b"), "add up over words")
    expect({"ba": 1, "ab": 1}, (b"a", b"b"), "on a tie, take the smallest")
    expect({"c": 9, "ab": 1}, (b"a", b"b"), "a word of one token has no pair")


print("Exercise 1:", judge(lambda: check_best_pair(best_pair)))

# %% [markdown]
# ### Exercise 2: faster encoding
#
# `encode_word` above goes through all merges for each word. Instead, look at the pairs that the
# word *has*, merge the one that was learned first, and repeat until none of them was learned.
# `ranks` has the place of each pair in the list of merges.


# %%
def encode_by_rank(word, ranks):
    """A word as text, {pair: its place} -> its tokens, as a tuple of bytes objects."""
    raise NotImplementedError


def check_encode_by_rank(candidate):
    pairs = [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"c", b"c")]
    ranks = {pair: place for place, pair in enumerate(pairs)}

    def expect(word, tokens, hint):
        found = candidate(word, ranks)
        assert found is not None, "the function returns None"
        assert tuple(found) == tokens, f"{word!r} is {tokens}, not {tuple(found)}: {hint}"

    expect("x", (b"x",), "a word of one byte has no pair")
    expect("xyz", (b"x", b"y", b"z"), "none of its pairs was learned")
    expect("ab", (b"ab",), "")
    expect("abc", (b"abc",), "b + c was learned before a + b; then a + bc follows")
    expect("bcbc", (b"bc", b"bc"), "merge every occurrence of the pair")
    expect("ccc", (b"cc", b"c"), "from the left, without overlaps")
    expect("é", ("é".encode()[:1], "é".encode()[1:]), "a letter may have several bytes")
    learned = {pair: place for place, pair in enumerate(merges)}
    for word in (" brave", " lamp", " kangaroos", "Mädchen"):
        expected = encode_word(word, merges)
        found = tuple(candidate(word, learned))
        assert found == expected, f"{word!r} is {expected}, not {found}"


print("Exercise 2:", judge(lambda: check_encode_by_rank(encode_by_rank)))

# %% [markdown]
# ### Exercise 3: bits per byte
#
# What papers compare is bits per byte: the sum of the losses of all tokens of a text, in bits (a
# bit is log 2 nats), divided by the bytes of the text in UTF-8.


# %%
def bits_per_byte(losses, text):
    """losses (n,) in nats, one for each token of a text -> bits per byte."""
    raise NotImplementedError


def check_bits_per_byte(candidate):
    found = candidate(np.full(4, math.log(2)), "abcd")
    assert found is not None, "the function returns None"
    assert abs(found - 1) < 1e-9, f"4 tokens of one bit each for 4 bytes are 1, not {found:.4f}"
    found = candidate(np.full(2, math.log(2)), "abcd")
    assert abs(found - 0.5) < 1e-9, (
        f"2 tokens of one bit each for 4 bytes are 0.5, not {found:.4f}: add up, do not average"
    )
    found = candidate(np.full(2, math.log(2)), "éé")
    assert abs(found - 0.5) < 1e-9, f"'éé' has 4 bytes: 0.5, not {found:.4f}"


print("Exercise 3:", judge(lambda: check_bits_per_byte(bits_per_byte)))

# %% [markdown]
# ## Where to read on
#
# - Gage (1994), *A New Algorithm for Data Compression*, The C Users Journal: the idea, for files.
# - Sennrich, Haddow & Birch (2016), *Neural Machine Translation of Rare Words with Subword Units*,
#   section 3.2: for words.
# - Radford et al. (2019), *Language Models are Unsupervised Multitask Learners*, section 2.2: on
#   bytes, with a pattern for words.
# - Kudo (2018), *Subword Regularization*: another way, which keeps the likeliest pieces.
# - Petrov, La Malfa, Torr & Bibi (2023), *Language Model Tokenizers Introduce Unfairness Between
#   Languages*.
# - In this package: `text/bpe_tokenizer.py`, and `kernels/bpe/merges.py`, which updates the counts.
#
# ## What you can do now
#
# You can make a vocabulary for any text and any language, and compare models that do not have the
# same one, which a loss per token does not allow. Next: lesson 5, *Data*, on how tokens become
# batches.

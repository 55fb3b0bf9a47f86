"""Lessons 1, 6 and 9: typical wrong solutions are refused, and unusual right ones are not.

A refusal must help: each wrong solution comes with words that its verdict contains.
"""

import math

import numpy as np

from smallmind.lessons.solutions import lesson01_language_model as language_model
from smallmind.lessons.solutions import lesson06_block_and_model as block
from smallmind.lessons.solutions import lesson09_recipe as recipe
from smallmind.nn.parameters import ONES, ZEROS, Constant, Role
from tests.lessons.judging import assert_judged, lesson, source_of

# Lesson 1


def test_the_algorithm_has_at_most_100_lines():
    """Sections 2 to 8, without comments and blank lines."""
    source = source_of(1)
    start, end = source.index("# ## 2. Tokens"), source.index("# That is the complete algorithm.")
    lines = (line.strip() for line in source[start:end].splitlines())
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= 100


def pair_counts(tokens, V):
    counts = np.zeros((V, V))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return counts


def test_pair_loss():
    pair_loss = language_model.pair_loss

    def over_pairs(tokens, V):
        counts = pair_counts(tokens, V)
        p = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        return -np.log(p[counts > 0]).mean()

    def of_all_tokens(tokens, V):
        p = pair_counts(tokens, V) / np.bincount(tokens, minlength=V)[:, None].clip(1)
        return -np.log(p[tokens[:-1], tokens[1:]]).mean()

    wrong = [
        (lambda *_: None, "returns None"),
        (lambda tokens, V: pair_loss(tokens, V) / math.log(2), "natural logarithm"),
        (over_pairs, "not over the different pairs"),
        (of_all_tokens, "the loss is"),
        (lambda _, V: math.log(V), "each token decides the next one"),
    ]
    assert_judged(lesson(1).check_pair_loss, wrong)


def test_probabilities():
    softmax = lesson(1).softmax

    def probabilities(logits, temperature):
        if temperature == 0:
            return (logits == logits.max()).astype(float)
        return softmax(logits / temperature)

    def overflowing(logits, temperature):
        if temperature == 0:
            return probabilities(logits, 0)
        p = np.exp(logits / temperature)
        return p / p.sum()

    def multiplied(logits, temperature):
        return softmax(logits * temperature) if temperature else probabilities(logits, 0)

    wrong = [
        (lambda logits, temperature: softmax(logits / temperature), "do not divide by zero"),
        (multiplied, "divide"),
        (overflowing, "exp overflows"),
        (lambda logits, _: softmax(logits), "favours"),
        (lambda logits, t: np.exp(probabilities(logits, t)), "the sum is"),
    ]
    assert_judged(lesson(1).check_probabilities, wrong, probabilities)


# Lesson 6


def test_llama_block_keeps():
    keeps = block.llama_block_keeps
    wrong = [
        (lambda C, H, _, W: keeps(C, H, H, W), "keys and values have G heads"),
        (lambda C, H, G, W: keeps(C, H, G, W) - W, "layer by layer"),
        (lambda C, H, G, W: keeps(C, H, G, W) - H + 4, "each head of queries"),
        (lambda C, H, *_: 12 * C + H + 4, "not 776"),
    ]
    assert_judged(lesson(6).check_llama_block, wrong)


def test_best_segment():
    def last_of_the_best(N, K, X):
        return min(range(N, 0, -1), key=lambda k: (math.ceil(N / k) - 1) * X + k * K)

    wrong = [
        (lambda N, *_: round(math.sqrt(N)), "k=1 only"),
        (lambda N, K, X: min(N, max(1, round(math.sqrt(N * X / K)))), "only"),
        (lambda N, K, X: math.sqrt(N * X / K), "must be an int"),
        (lambda *_: 0, "is not from 1 to"),
        (last_of_the_best, "and is smaller"),
    ]
    assert_judged(lesson(6).check_best_segment, wrong)


def new_scale(**changes):
    """The solution of the exercise, with other methods."""
    return type("Scale", (block.Scale,), changes)


def test_scale():
    right = block.Scale

    def declaring(initialisation, role, size=None):
        def init(self, scope):
            self.workspace = scope.workspace
            shape = (size or scope.config.n_embd,)
            self.gain = scope.declare("gain", shape, initialisation, role)

        return new_scale(__init__=init)

    def not_rented(self, x):
        self.x = x
        return x * self.gain.compute

    def in_place(self, dy):
        self.gain.grad += (dy * self.x).sum(axis=0)
        dy *= self.gain.compute
        return dy

    def overwriting(self, dy):
        dx = self.workspace.rent(*dy.shape)
        np.multiply(dy, self.gain.compute, out=dx)
        self.gain.grad[...] = (dy * self.x).sum(axis=0)
        return dx

    def greedy(self, dy):
        dx = right.backward(self, dy)
        self.workspace.release(dy)
        return dx

    def careless(self, dy):
        dx = right.backward(self, dy)
        self.workspace.release(self.x)
        return dx

    def forgetful(self, dy):
        self.workspace.rent(*dy.shape)
        return right.backward(self, dy)

    wrong = [
        (declaring(ZEROS, Role.GAIN), "starts at 1"),
        (declaring(Constant(1.0), Role.MATRIX), "not gain"),
        (declaring(ONES, Role.GAIN, size=1), "of shape (C,)"),
        (new_scale(forward=not_rented), "rent y"),
        (new_scale(forward=lambda self, x: right.forward(self, -x)), "x * gain"),
        (new_scale(backward=overwriting), "added to what was there"),
        (new_scale(backward=careless), "belong to the caller"),
        (new_scale(backward=greedy), "belong to the caller"),
        (new_scale(backward=forgetful), "still rented"),
    ]
    assert_judged(lesson(6).check_scale, wrong, new_scale(backward=in_place))


def test_accumulate():
    def accumulating(share, total=np.dot):
        def accumulate(model, ids, targets, sizes):
            losses, begin = [], 0
            for size in sizes:
                part = slice(begin, begin + size)
                scale = share(size, sizes)
                losses.append(model.loss_and_gradients(ids[part], targets[part], scale=scale))
                begin += size
            return total(losses, [share(size, sizes) for size in sizes])

        return accumulate

    def by_size(size, sizes):
        return size / sum(sizes)

    wrong = [
        (accumulating(lambda *_: 1.0), "about 2.00 times as large"),
        (accumulating(lambda _, sizes: 1 / len(sizes)), "a part of b windows"),
        (accumulating(by_size, lambda *_: None), "None instead of the loss"),
        (accumulating(by_size, lambda losses, _: sum(losses)), "the loss is"),
    ]
    assert_judged(lesson(6).check_accumulate, wrong, accumulating(by_size))


# Lesson 9


def test_rate_of():
    rate_of = recipe.rate_of

    def from_zero(step, steps, peak, warmup):
        return peak * step / warmup if step < warmup else rate_of(step, steps, peak, warmup)

    def to_the_last_step(step, steps, peak, warmup):
        if step < warmup:
            return rate_of(step, steps, peak, warmup)
        return peak * (steps - 1 - step) / max(1, steps - 1 - warmup)

    def from_the_start(step, steps, peak, warmup):
        return rate_of(step, steps, peak, warmup) if step < warmup else peak * (1 - step / steps)

    wrong = [
        (from_zero, "in the warmup"),
        (to_the_last_step, "in the decay"),
        (from_the_start, "in the decay"),
        (lambda *_: None, "returns None"),
    ]
    assert_judged(lesson(9).check_rate, wrong)


def test_orthogonalise():
    def iterate(X, iterations, step=lambda X: 1.5 * X - 0.5 * X @ X.T @ X):
        for _ in range(iterations):
            X = step(X)
        return X

    def of_muon(G, iterations):
        def step(X):
            gram = X @ X.T
            return 3.4445 * X + (-4.7750 * gram + 2.0315 * gram @ gram) @ X

        return iterate(G / np.linalg.norm(G), iterations, step)

    def transposed(G, iterations):
        return recipe.orthogonalise(G, iterations).T

    def by_decomposition(G, iterations):
        U, _, Vt = np.linalg.svd(G, full_matrices=False)
        return 0.9 * U @ Vt if iterations == 1 else U @ Vt

    def by_spectral_norm(G, iterations):
        return iterate(G / np.linalg.norm(G, 2), iterations)

    wrong = [
        (iterate, "divide by its norm"),
        (of_muon, "is off from U Vᵀ"),
        (transposed, "the shape is"),
        (by_decomposition, "one iteration"),
    ]
    assert_judged(lesson(9).check_orthogonalise, wrong, by_spectral_norm)


def test_paired_difference():
    paired = recipe.paired_difference

    def unpaired(before, after):
        error = math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / len(before))
        return after.mean() - before.mean(), error

    wrong = [
        (unpaired, "the deviation of the differences"),
        (lambda before, after: paired(after, before), "negative"),
        (lambda before, after: (paired(before, after)[0], (after - before).std() / 2), "ddof=1"),
        (lambda before, after: (-0.02, (after - before).std(ddof=1)), "the root of n"),
        (lambda before, after: paired(before, after)[0], "return two numbers"),
    ]
    assert_judged(lesson(9).check_paired_difference, wrong)

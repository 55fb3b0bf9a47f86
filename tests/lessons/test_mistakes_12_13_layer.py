"""Lessons 12 and 13 and the page on a layer: typical wrong solutions are refused."""

import numpy as np

from smallmind.lessons.solutions import writing_a_layer as layer
from tests.lessons.judging import assert_judged, checks

# 12. Adapting a model


def test_adding_adapters():
    def add(W, adapters):
        return W + sum((s * A @ B for A, B, s in adapters), np.zeros_like(W))

    def in_place(W, adapters):
        for A, B, s in adapters:
            W += s * A @ B
        return W

    wrong = [
        (lambda W, adapters: W + sum(A @ B for A, B, _ in adapters), "multiplied by its s"),
        (lambda W, adapters: add(W, adapters[:1]), "add all"),
        (lambda W, adapters: add(W, adapters).T if adapters else W, "the shape is"),
        (in_place, "W has changed"),
        (lambda *_: None, "returns None"),
    ]
    assert_judged(checks(12).check_add_adapters, wrong, add)


def test_the_best_adapter():
    def of_rank(D, r, largest=True):
        U, s, Vt = np.linalg.svd(D, full_matrices=False)
        kept = slice(0, r) if largest else slice(len(s) - r, len(s))
        return U[:, kept] * s[kept], Vt[kept]

    wrong = [
        (lambda D, r: of_rank(D, r, largest=False), "is possible"),
        (lambda D, r: (D[:, :r], np.eye(r, 9)), "is possible"),
        (lambda D, r: of_rank(D, r)[::-1], "the shape"),
        (lambda D, r: (of_rank(D, r)[0], of_rank(D, 6)[1]), "the shape"),
        (lambda *_: None, "returns None"),
    ]
    assert_judged(checks(12).check_best_adapter, wrong, of_rank)


def test_the_largest_rank():
    wrong = [
        (lambda shapes, most: most // sum(n * m for n, m in shapes), "in + out"),
        (lambda shapes, most: round(most / sum(map(sum, shapes))), "round down"),
        (lambda shapes, most: max(1, most // sum(map(sum, shapes))), "not even a rank of 1"),
        (lambda shapes, most: most // sum(shapes[0]), "add up first"),
    ]
    assert_judged(checks(12).check_largest_rank, wrong)


# 13. A model that answers


def test_rendering():
    def render(turns, begins_answer, end="<|im_end|>\n", asks=True):
        text = "".join(f"<|im_start|>{role}\n{said}{end}" for role, said in turns)
        return text + "<|im_start|>assistant\n" * (begins_answer and asks)

    wrong = [
        (lambda turns, begins: render(turns, begins, end="<|im_end|>"), "the text is"),
        (lambda turns, begins: render(turns, begins, asks=False), "has begun, not ended"),
        (lambda turns, _: [*turns], "return a text"),
    ]
    assert_judged(checks(13).check_render, wrong, render)


def test_weights_of_targets():
    wrong = [
        (lambda learned: learned[:-1].astype(np.float32), "the weights of the inputs"),
        (lambda learned: learned.astype(np.float32), "7 tokens have 6 targets"),
        (lambda learned: learned[1:], "return float32"),
        (lambda learned: 1 - learned[1:].astype(np.float32), "the weights are"),
        (lambda _: None, "returns None"),
    ]
    assert_judged(checks(13).check_target_weights, wrong)


def test_the_loss_of_an_update():
    def mean(losses, weights):
        return (losses * weights).sum() / max(1e-9, weights.sum())

    def of_all(parts):
        return sum(losses.sum() for losses, _ in parts) / sum(len(losses) for losses, _ in parts)

    wrong = [
        (lambda parts: np.mean([mean(*part) for part in parts]), "is not the mean"),
        (of_all, "only the first loss counts"),
        (lambda parts: sum(mean(*part) for part in parts), "is not the mean"),
        (lambda _: None, "returns None"),
    ]
    assert_judged(checks(13).check_update_loss, wrong)


# Write a layer of your own


def test_a_shifted_layer():
    solution = layer.shifted_backward

    def without_slope(dx, *given):
        solution(dx, *given)
        dx /= given[-2]

    def overwriting(dx, *given):
        for gradient in given[:3]:
            gradient[...] = 0
        solution(dx, *given)

    def of_one_row(*given):
        solution(*given)
        given[3][...] = 3 + given[4][0]

    wrong = [
        (without_slope, "WRONG"),
        (overwriting, "added to what is there"),
        (of_one_row, "WRONG"),
    ]
    assert_judged(checks("writing_a_layer").check_shifted_backward, wrong)


def test_a_layer_without_parameters():
    class WithoutSquare(layer.Softsign):
        def backward(self, dy):
            dx = super().backward(dy)
            dx *= 1 + np.abs(self.x)
            return dx

    class NotRented(layer.Softsign):
        def forward(self, x):
            self.x = x
            return x / (1 + np.abs(x))

    wrong = [(WithoutSquare, "WRONG"), (NotRented, "rent y")]
    assert_judged(checks("writing_a_layer").check_softsign, wrong)

"""Lesson 2: typical wrong solutions of the exercises are refused, and other right ones are not."""

import numpy as np

from smallmind.lessons.solutions.lesson02_backward_by_hand import exercise_4
from tests.lessons.judging import assert_judged, lesson, source_of


def centred(rows):
    return rows - rows.mean(axis=1, keepdims=True)


def only_directly(dy, xhat, rstd, weight):
    return rstd * dy * weight, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def without_the_variance(dy, xhat, rstd, weight):
    return rstd * centred(dy * weight), (dy * xhat).sum(axis=0), dy.sum(axis=0)


def without_the_mean(dy, xhat, rstd, weight):
    dxhat = dy * weight
    dx = rstd * (dxhat - xhat * (dxhat * xhat).mean(axis=1, keepdims=True))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def with_sums_of_other_rows(dy, xhat, rstd, weight):
    dxhat = dy * weight
    dx = rstd * (dxhat - dxhat.mean(axis=0) - xhat * (dxhat * xhat).mean(axis=0))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def scatter_in_a_loop(dx, weight, ids):
    dweight = np.zeros_like(weight)
    for b, row in enumerate(ids):
        for t, token in enumerate(row):
            dweight[token] += dx[b, t]
    return dweight


def scatter_that_sets(dx, weight, ids):
    dweight = np.zeros_like(weight)
    dweight[ids] = dx
    return dweight


def scatter_that_counts_once(dx, weight, ids):
    dweight = np.zeros_like(weight)
    dweight[ids] += dx
    return dweight


def gather(dx, weight, ids):
    return dx


def only_at_the_end(dloss, x, dlogits, weight, ids):
    return dloss * dlogits.T @ x


def only_at_the_start(dloss, x, dlogits, weight, ids):
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids.reshape(-1), (dlogits @ weight) * (1 - x * x))
    return dloss * dweight


def without_the_tanh(dloss, x, dlogits, weight, ids):
    dweight = dlogits.T @ x
    np.add.at(dweight, ids.reshape(-1), dlogits @ weight)
    return dloss * dweight


def with_a_mean(dy, x, weight):
    dx, dweight = exercise_4(dy, x, weight)
    return centred(dx), dweight


def with_a_constant_root(dy, x, weight):
    rstd = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    return dy * weight * rstd, (dy * x * rstd).sum(axis=0)


def test_the_backward_pass_of_a_norm():
    wrong = [
        (solution, "WRONG: x\n")
        for solution in (
            only_directly,
            without_the_variance,
            without_the_mean,
            with_sums_of_other_rows,
        )
    ]
    assert_judged(lesson(2).check_1, wrong)


def test_the_gradient_of_an_embedding():
    mistakes = scatter_that_sets, scatter_that_counts_once, gather
    wrong = [(solution, "WRONG: weight\n") for solution in mistakes]
    assert_judged(lesson(2).check_2, wrong, scatter_in_a_loop)


def test_the_gradient_of_tied_weights():
    mistakes = only_at_the_end, only_at_the_start, without_the_tanh
    assert_judged(lesson(2).check_3, [(solution, "WRONG: weight\n") for solution in mistakes])


def test_the_backward_pass_of_rms_norm():
    wrong = [(solution, "WRONG: x\n") for solution in (with_a_mean, with_a_constant_root)]
    assert_judged(lesson(2).check_4, wrong)


def test_the_lesson_does_not_depend_on_its_random_numbers(tmp_path, monkeypatch):
    source = source_of(2)
    assert source.count("default_rng(0)") == 1
    monkeypatch.chdir(tmp_path)  # where its picture goes
    for seed in (1, 2, 3):
        exec(
            compile(source.replace("default_rng(0)", f"default_rng({seed})"), "lesson2", "exec"), {}
        )

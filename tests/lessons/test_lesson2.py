"""Lesson 2: right solutions of the exercises are accepted, and typical wrong ones refused."""

import runpy

import numpy as np
import pytest

from smallmind.lessons import judge, lessons


@pytest.fixture(scope="module")
def lesson():
    (path,) = (path for path in lessons() if path.stem.startswith("lesson2_"))
    return runpy.run_path(str(path))


def verdict(lesson, number, solution):
    return judge(lambda: lesson[f"check_{number}"](solution))


def centred(rows):
    return rows - rows.mean(axis=1, keepdims=True)


def layernorm_backward(dy, xhat, rstd, weight):
    dxhat = dy * weight
    dx = rstd * (centred(dxhat) - xhat * (dxhat * xhat).mean(axis=1, keepdims=True))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


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


def scatter(dx, weight, ids):
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids, dx)
    return dweight


def scatter_in_a_loop(dx, weight, ids):
    dweight = np.zeros_like(weight)
    for b, row in enumerate(ids):
        for t, token in enumerate(row):
            dweight[token] += dx[b, t]
    return dweight


def scatter_that_counts_once(dx, weight, ids):
    dweight = np.zeros_like(weight)
    dweight[ids] += dx
    return dweight


def gather(dx, weight, ids):
    return dx


def tied_backward(dloss, x, dlogits, weight, ids):
    dweight = dlogits.T @ x
    np.add.at(dweight, ids.reshape(-1), (dlogits @ weight) * (1 - x * x))
    return dloss * dweight


def only_at_the_start(dloss, x, dlogits, weight, ids):
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids.reshape(-1), (dlogits @ weight) * (1 - x * x))
    return dloss * dweight


def without_the_tanh(dloss, x, dlogits, weight, ids):
    dweight = dlogits.T @ x
    np.add.at(dweight, ids.reshape(-1), dlogits @ weight)
    return dloss * dweight


def rmsnorm_backward(dy, x, weight):
    rstd = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    xhat, dxhat = x * rstd, dy * weight
    dx = rstd * (dxhat - xhat * (dxhat * xhat).mean(axis=1, keepdims=True))
    return dx, (dy * xhat).sum(axis=0)


def with_a_mean(dy, x, weight):
    dx, dweight = rmsnorm_backward(dy, x, weight)
    return centred(dx), dweight


def with_a_constant_root(dy, x, weight):
    rstd = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    return dy * weight * rstd, (dy * x * rstd).sum(axis=0)


@pytest.mark.parametrize(
    ("number", "solution"),
    [
        (1, layernorm_backward),
        (2, scatter),
        (2, scatter_in_a_loop),
        (3, tied_backward),
        (4, rmsnorm_backward),
    ],
)
def test_a_right_solution_is_accepted(lesson, number, solution):
    assert verdict(lesson, number, solution) == "solved"


@pytest.mark.parametrize(
    ("number", "solution", "named"),
    [
        (1, without_the_variance, "x"),
        (1, without_the_mean, "x"),
        (1, with_sums_of_other_rows, "x"),
        (2, scatter_that_counts_once, "weight"),
        (2, gather, "weight"),
        (3, only_at_the_start, "weight"),
        (3, without_the_tanh, "weight"),
        (4, with_a_mean, "x"),
        (4, with_a_constant_root, "x"),
    ],
)
def test_a_wrong_solution_is_refused_by_name(lesson, number, solution, named):
    first = verdict(lesson, number, solution).split("\n")[0]
    assert first.startswith("not right yet: Gradient check of ")
    assert first.endswith(f": WRONG: {named}")


def test_the_exercises_are_shipped_with_their_mistakes(lesson):
    for number in (1, 2, 3):
        shipped = verdict(lesson, number, lesson[f"exercise_{number}"])
        assert shipped.startswith("not right yet: ")
    assert verdict(lesson, 4, lesson["exercise_4"]) == "not tried yet"


def test_the_lesson_does_not_depend_on_its_random_numbers():
    (path,) = (path for path in lessons() if path.stem.startswith("lesson2_"))
    source = path.read_text(encoding="utf-8")
    assert source.count("default_rng(0)") == 1
    for seed in (1, 2, 3):
        exec(
            compile(source.replace("default_rng(0)", f"default_rng({seed})"), path.name, "exec"), {}
        )

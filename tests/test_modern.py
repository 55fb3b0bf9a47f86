"""A model with every part, trained by Muon: everything that a run can do works with it too."""

import numpy as np
import pytest

from smallmind import Run
from smallmind.forecast.threads import set_threads
from smallmind.settings.presets import ARCHITECTURES
from smallmind.training.records import HealthRecord
from tests.runs.small import TEXT, create, left

MODERN = {
    **ARCHITECTURES["modern"],
    "x0_scalars": True,
    "zero_init": True,
    "n_layer": 3,
    "n_kv_head": 1,
    "logit_softcap": 15.0,
    "optimizer": "muon",
    "dropout": 0.1,
    "backend": "numba",
}


def final_weights(run):
    return run.training.model.flat.data.copy()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = create(tmp_path_factory.mktemp("modern") / "run", **MODERN)
    run.train()
    return run


def test_a_resumed_run_equals_an_unbroken_one(unbroken, tmp_path):
    run = left(create(tmp_path / "run", **MODERN), step=3)
    again = Run.open(run.path)
    again.resume()
    np.testing.assert_array_equal(final_weights(again), final_weights(unbroken))
    assert unbroken.sample.startswith(again.sample)  # which may be shorter in tests


def test_every_checkpoint_is_verified(unbroken):
    assert all(verdict.fault is None for verdict in unbroken.verify())


@pytest.mark.parametrize(
    "changes",
    [{"use_gradient_checkpointing": True, "checkpoint_strategy": "every_layer"}, {"threads": 1}],
    ids=["recompute", "one thread"],
)
def test_recompute_and_threads_change_no_bit(unbroken, tmp_path, changes):
    run = create(tmp_path / "run", **{**MODERN, **changes})
    run.train()
    set_threads(2)
    np.testing.assert_array_equal(final_weights(run), final_weights(unbroken))


def test_a_student_learns_from_a_teacher_of_the_same_kind(unbroken, tmp_path):
    cache = str(tmp_path / "cache")
    for fields in ({}, {"teacher_cache": cache}):
        out = tmp_path / f"run {len(fields)}"
        student = create(out, **MODERN, teacher=str(unbroken.path), alpha=0.9, **fields)
        student.train()
        assert student.final.loss < np.log(len(set(TEXT)))


def test_a_healthy_start_has_no_findings(tmp_path):
    run = create(tmp_path / "run", **MODERN, check_gradient_health=True, diagnostic_interval=1)
    problems = {
        (finding.problem, finding.name)
        for record in run.train()
        if isinstance(record, HealthRecord)
        for finding in record.findings
        if finding.problem not in ("sparse", "dead")  # of 16 tokens and 32 hidden units
    }
    assert not problems


def test_the_command_line_checks_estimates_and_shows_it(text, tmp_path, cli):
    flags = "--arch modern --mlp relu2 --n-layer 1 --n-embd 16 --n-head 2 --block-size 8"
    cli("check", text, flags)
    cli("estimate", text, flags)
    shown = cli("train", text, flags, "--steps 2 --out", tmp_path / "run").flat
    assert "rmsnorm, rope positions, relu2, 2 heads" in shown
    assert "bigram embedding" in shown

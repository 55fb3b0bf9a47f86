"""The main jobs end to end, as users run them: python -m pytest -m slow (five minutes)."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.programs import printed_by

pytestmark = pytest.mark.slow
SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"


def train(directory, *arguments):
    """The output of `smallmind train`, and the record of its last evaluation, if it has one."""
    words = [sys.executable, "-m", "smallmind", "train", *arguments, "--out", str(directory)]
    printed = printed_by(words)
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    evaluations = [record for record in records if "val_loss" in record]
    return printed, evaluations[-1] if evaluations else None


def test_stories_are_learned_to_near_their_entropy(tmp_path):
    printed, _ = train(tmp_path / "run")
    excess = float(re.search(r"([\d.]+)\s+nats\s+above\s+that\s+limit", printed)[1])
    assert 0 < excess <= 0.15


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tinyshakespeare.txt is not here")
def test_shakespeare_is_learned_as_well_as_by_nanogpt(tmp_path):
    flags = ["--recipe", "gpt2", "--no-bias", "--tie-weights"]
    _, last = train(tmp_path / "run", str(SHAKESPEARE), *flags)
    assert last["step"] == 2000
    assert last["val_loss"] <= 1.92


def test_a_one_layer_student_learns_more_with_a_four_layer_teacher(tmp_path):
    gpt2 = ["--recipe", "gpt2"]  # with the default both come nearer to the entropy of the stories
    train(tmp_path / "teacher", *gpt2, "--val-every", "0")
    for seed in ("1337", "1", "2"):
        student = [*gpt2, "--n-layer", "1", "--steps", "1000", "--seed", seed]
        _, alone = train(tmp_path / f"alone-{seed}", *student)
        teacher = ["--teacher", str(tmp_path / "teacher"), "--temperature", "1", "--alpha", "0.9"]
        _, taught = train(tmp_path / f"taught-{seed}", *student, *teacher)
        assert alone["step"] == taught["step"] == 1000
        assert taught["val_loss"] < alone["val_loss"] - 0.03, seed

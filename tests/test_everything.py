"""All features in one run."""

import json

import pytest

SHAPE = "--block-size 16 --n-head 2 --batch-size 4 --val-batches 2"
EVERYTHING = """
    --n-layer 4 --n-embd 16 --dropout 0.1 --log-every 1 --epochs 9 --grad-accum-steps 3
    --max-grad-norm 0.1 --max-grad-value 0.1 --use-gradient-checkpointing --schedule plateau
    --plateau-patience 1 --val-every 5 --warmup-steps 2 --early-stopping-patience 2
    --early-stopping-min-delta 5 --save-every 4 --keep 9 --profile --check-gradient-health
    --diagnostic-interval 5 --learn-temperature --alpha 0.7
"""


@pytest.mark.parametrize(("precision", "cached"), [("float16", False), ("bfloat16", True)])
def test_all_features_work_in_one_run(text, tmp_path, cli, precision, cached):
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    cli("train", text, SHAPE, "--n-layer 2 --n-embd 24 --steps 9 --out", teacher)
    cache = ["--teacher-cache", tmp_path / "cache"] if cached else []
    flags = EVERYTHING, "--precision", precision, "--teacher", teacher, cache
    printed = cli("train", text, SHAPE, *flags, "--out", run).out
    for words in ("PERFORMANCE REPORT", "stopped early", "Temperature at the end", "clipped"):
        assert words in printed, words
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    # The first evaluation is the best: the two after it are not lower by 5 nats.
    assert [line["step"] for line in steps] == list(range(1, 16))
    assert {line["precision"] for line in steps} == {precision}
    assert steps[-1]["loss_scale"] == (65536 if precision == "float16" else 1)
    assert steps[0]["windows"] == 12 and 0 < steps[-1]["clip_share"] <= 1
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 15]
    cli("verify", run)
    assert "is finished" in cli("train --resume", run).out

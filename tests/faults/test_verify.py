"""`smallmind verify`: wrong checkpoints are found and named, and nothing is written."""

import json
import re
import shlex
import shutil
import signal

import numpy as np
import pytest

from smallmind.cli import main
from smallmind.files import durable, safetensors
from smallmind.runs import verification
from smallmind.training.training import Training
from tests.faults.disk import Quick

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 60
FLAGS = shlex.split(
    "--block-size 16 --n-embd 16 --n-layer 2 --n-head 2 --batch-size 4 --steps 14 "
    "--val-every 4 --val-batches 2 --warmup-steps 5 --log-every 5 --save-every 5 "
    "--dropout 0.1 --schedule plateau --plateau-patience 1 --grad-accum-steps 2 "
    "--use-gradient-checkpointing"
)
FILES = [
    "step-00000014.safetensors",
    "step-00000012.safetensors",
    "step-00000010.safetensors",
    "best.safetensors",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    (root / "cats.txt").write_text(TEXT, encoding="utf-8")
    assert main(["train", str(root / "cats.txt"), *FLAGS, "--out", str(root / "run")]) == 0
    return root / "run"


@pytest.fixture
def run(finished, tmp_path, capsys):
    capsys.readouterr()
    return shutil.copytree(finished, tmp_path / "run")


def everything(directory):
    """Name, modification time and content of everything in a directory."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted([directory, *directory.rglob("*")])
    }


def verified(capsys, run, *flags, status=0):
    """Verifies a run -> the printed lines. No byte of the directory may change."""
    before = everything(run)
    assert main(["verify", str(run), *flags]) == status
    assert everything(run) == before
    printed = capsys.readouterr().out
    return printed.replace("\n        ", " ").splitlines()  # long lines are joined again


def change(run, name, edit):
    """Edits a checkpoint and gives it a matching digest."""
    path = run / "checkpoints" / name
    tensors, metadata = safetensors.read(path)
    state = json.loads(metadata["state"])
    edit(tensors, state)
    safetensors.write(path, tensors, {**metadata, "state": safetensors.to_json(state)})


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_an_unchanged_run_passes(run, capsys):
    assert verified(capsys, run) == [
        *(f"ok      {name}: sound" for name in FILES),
        "ok      retrained from step 10 to 12: identical",
        "ok      retrained from step 12 to 14: identical",
        "All 6 checks passed",
    ]
    lines = verified(capsys, run, "--digests-only")
    assert lines == [*(f"ok      {name}: sound" for name in FILES), "All 4 checks passed"]


def test_damage_is_named_and_retraining_skips_over_it(run, capsys):
    flip(run / "checkpoints" / FILES[1])
    flip(run / "checkpoints" / "best.safetensors")
    for flags in ([], ["--digests-only"]):
        lines = verified(capsys, run, *flags, status=1)
        assert [line[:6] for line in lines[:4]] == ["ok    ", "FAILED", "ok    ", "FAILED"]
        assert FILES[1] in lines[1] and "does not match its SHA-256" in lines[1]
        assert lines[4:-1] == ([] if flags else ["ok      retrained from step 10 to 14: identical"])
        assert lines[-1].startswith("2 of ")


def edit_weight(tensors, state):
    weight = tensors["model.blocks.1.mlp.expansion.weight"]
    weight[3, 4] = np.nextafter(weight[3, 4], np.float32(9))


def edit_moment(tensors, state):
    tensors["optimizer.v"][7] *= 2


def edit_counter(tensors, state):
    state["passes"] += 1


def edit_best(tensors, state):
    state["progress"]["best_loss"] /= 2


def edit_seed(tensors, state):
    state["data"]["seed"] += 1


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_weight, "1 of N hashes differ, the first is model.blocks.1.mlp.expansion.weight"),
        (edit_moment, "1 of N hashes differ, the first is optimizer.v"),
        (edit_counter, "1 of N hashes differ, the first is passes"),
        (edit_best, "1 of N hashes differ, the first is progress"),
        (edit_seed, "the checkpoint of step 14 was saved with a different batch size or seed"),
    ],
)
def test_changes_with_a_matching_digest_are_found(run, capsys, edit, words):
    change(run, FILES[0], edit)
    assert verified(capsys, run, "--digests-only")[-1] == "All 4 checks passed"
    lines = verified(capsys, run, status=1)
    assert lines[4] == "ok      retrained from step 10 to 12: identical"
    line = re.sub(r"1 of \d+ hashes", "1 of N hashes", lines[5])
    assert line.startswith(f"FAILED  retrained from step 12 to 14: {words}")
    assert lines[6] == "1 of 6 checks failed"


def test_a_run_stopped_during_an_evaluation_passes(tmp_path, capsys, monkeypatch):
    """Its checkpoint was saved before the evaluation, which retraining includes."""
    (tmp_path / "cats.txt").write_text(TEXT, encoding="utf-8")
    original = Training.evaluate

    def stop(training, step, batches):
        if step == 12:
            signal.raise_signal(signal.SIGINT)
        return original(training, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "files", Quick())
        patch.setattr(Training, "evaluate", stop)
        flags = [str(tmp_path / "cats.txt"), *FLAGS, "--out", str(tmp_path / "run")]
        assert main(["train", *flags]) == 130
    capsys.readouterr()
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "step-00000012.safetensors" in names
    lines = verified(capsys, tmp_path / "run")
    assert "ok      retrained from step 10 to 12: identical" in lines


def test_an_interrupted_verification_changes_nothing(run, capsys, monkeypatch):
    before = everything(run)
    calls = []

    def interrupt(checkpoint):
        calls.append(checkpoint)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verification, "fingerprint", interrupt)
        assert main(["verify", str(run)]) == 130
    assert calls and everything(run) == before
    assert verified(capsys, run)[-1] == "All 6 checks passed"


def test_a_run_that_cannot_be_verified_is_refused(run, tmp_path, capsys):
    def refused(path, message, *flags):
        assert main(["verify", str(path), *flags]) == 2
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1

    refused(tmp_path / "none", "is not a run")
    refused(tmp_path / "none", "is not a run", "--digests-only")
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "other.txt").write_text(TEXT + "more", encoding="utf-8")
    config["run"]["text"] = str(tmp_path / "other.txt")
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(run, "other has changed since the run")
    assert verified(capsys, run, "--digests-only")[-1] == "All 4 checks passed"
    shutil.rmtree(run / "checkpoints")
    refused(run, "holds no checkpoint yet", "--digests-only")

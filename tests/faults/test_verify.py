"""`smallmind verify`: wrong checkpoints are found and named, and nothing is written."""

import json
import re
import shlex
import shutil
import signal

import numpy as np
import pytest

import smallmind
from smallmind.cli import main
from smallmind.files import durable, safetensors
from smallmind.runs import verification
from smallmind.training.evaluation import Evaluations
from tests.faults.disk import Quick
from tests.programs import CATS, edited, refuses

TEXT = CATS
FLAGS = shlex.split(
    "--block-size 16 --n-embd 16 --n-layer 2 --n-head 2 --batch-size 4 --steps 14 "
    "--val-every 4 --val-batches 2 --warmup-steps 5 --log-every 5 --save-every 5 "
    "--dropout 0.1 --schedule plateau --plateau-patience 1 --grad-accum-steps 2 "
    "--use-gradient-checkpointing"
)
FILES = [
    f"{name}.safetensors" for name in ("step-00000014", "step-00000012", "step-00000010", "best")
]


KEPT = ["tokenizer.json", "model.safetensors"]
SOUND = [f"ok      {name}: intact" for name in (*KEPT, *FILES)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    (root / "cats.txt").write_text(TEXT, encoding="utf-8")
    assert main(["train", str(root / "cats.txt"), *FLAGS, "--out", str(root / "run")]) == 0
    return root / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def everything(directory):
    """Name, modification time and content of everything in a directory."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted([directory, *directory.rglob("*")])
    }


@pytest.fixture
def verified(cli):
    """Verifies a run -> the printed lines. No byte of the directory may change."""

    def verified(run, *flags, ends=0):
        before = everything(run)
        printed = cli("verify", run, *flags, ends=ends).out
        assert everything(run) == before
        return printed.replace("\n        ", " ").splitlines()  # long lines are joined again

    return verified


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


def test_an_unchanged_run_passes(run, verified):
    retrained = [
        f"ok      retrained from step {a} to {b}: identical" for a, b in ((10, 12), (12, 14))
    ]
    assert verified(run) == [*SOUND, *retrained, "All 8 checks passed"]
    assert verified(run, "--digests-only") == [*SOUND, "All 6 checks passed"]


def test_damage_is_named_and_retraining_skips_over_it(run, verified):
    flip(run / "checkpoints" / FILES[1])
    flip(run / "checkpoints" / "best.safetensors")
    for flags in ("", "--digests-only"):
        lines = verified(run, flags, ends=1)
        assert [line[:6] for line in lines[2:6]] == ["ok    ", "FAILED", "ok    ", "FAILED"]
        assert FILES[1] in lines[3] and "does not match its SHA-256" in lines[3]
        assert lines[6:-1] == ([] if flags else ["ok      retrained from step 10 to 14: identical"])
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
def test_changes_with_a_matching_digest_are_found(run, verified, edit, words):
    change(run, FILES[0], edit)
    assert verified(run, "--digests-only")[-1] == "All 6 checks passed"
    lines = verified(run, ends=1)
    assert lines[6] == "ok      retrained from step 10 to 12: identical"
    line = re.sub(r"1 of \d+ hashes", "1 of N hashes", lines[7])
    assert line.startswith(f"FAILED  retrained from step 12 to 14: {words}")
    assert lines[8] == "1 of 8 checks failed"


def test_a_run_stopped_during_an_evaluation_passes(text, tmp_path, cli, verified, monkeypatch):
    """Its checkpoint was saved before the evaluation, which retraining includes."""
    original = Evaluations.evaluate

    def stop(training, step, batches):
        if step == 12:
            signal.raise_signal(signal.SIGINT)
        return original(training, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "files", Quick())
        patch.setattr(Evaluations, "evaluate", stop)
        cli("train", text, FLAGS, "--out", tmp_path / "run", ends=130)
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "step-00000012.safetensors" in names
    assert "ok      retrained from step 10 to 12: identical" in verified(tmp_path / "run")


def test_an_interrupted_verification_changes_nothing(run, verified, monkeypatch):
    calls = []

    def interrupt(*checkpoints):
        calls.append(checkpoints)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verification, "fingerprint", interrupt)
        verified(run, ends=130)
    assert calls and verified(run)[-1] == "All 8 checks passed"


def test_a_run_that_cannot_be_verified_is_refused(run, tmp_path, cli, verified):
    for flags in ("", "--digests-only"):
        cli.refuses("is not a run", "verify", tmp_path / "none", flags)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "other.txt").write_text(TEXT + "more", encoding="utf-8")
    config["run"]["text"] = str(tmp_path / "other.txt")
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    cli.refuses("other has changed since the run", "verify", run)
    assert verified(run, "--digests-only")[-1] == "All 6 checks passed"
    shutil.rmtree(run / "checkpoints")
    cli.refuses("has no checkpoint yet", "verify", run, "--digests-only")


@pytest.fixture(scope="module")
def other(finished, tmp_path_factory):
    """Another run, of another text with the same number of characters."""
    root = tmp_path_factory.mktemp("other")
    (root / "dogs.txt").write_text(TEXT.replace("c", "k"), encoding="utf-8")
    assert main(["train", str(root / "dogs.txt"), *FLAGS, "--out", str(root / "run")]) == 0
    return root / "run"


@pytest.mark.parametrize("name", KEPT)
def test_a_file_of_another_run_is_found_and_not_used(run, other, cli, verified, name):
    shutil.copy(other / name, run)
    lines = verified(run, "--digests-only", ends=1)
    fault = "it was changed, or belongs to another run; restore it from a copy"
    assert f"FAILED  {name}: {fault}" in lines and lines[-1] == "1 of 6 checks failed"
    cli.refuses(f"{name}: {fault}", "generate", run, "--max-tokens 3")
    refuses(fault, smallmind.load, run)


def test_a_model_that_was_changed_and_has_a_matching_digest_is_found(run, cli, verified):
    tensors, metadata = safetensors.read(run / "model.safetensors")
    tensors["final_norm.weight"][0] += 1
    safetensors.write(run / "model.safetensors", tensors, metadata)
    lines = verified(run, "--digests-only", ends=1)
    assert "FAILED  model.safetensors: it was changed, or belongs to another run" in lines[1]
    cli.refuses("model.safetensors: it was changed", "generate", run, "--max-tokens 3")


@pytest.mark.parametrize("name", KEPT)
def test_a_file_that_is_damaged_or_missing_is_found(run, cli, verified, name):
    """A model that is missing is in the checkpoint too, and both hold a tokenizer."""
    whole = (run / name).read_bytes()
    flip(run / name)
    assert f"FAILED  {name}: " in verified(run, "--digests-only", ends=1)[KEPT.index(name)]
    assert name in cli("generate", run, "--max-tokens 3", ends=2).err
    (run / name).unlink()
    missing = f"FAILED  {name}: it is missing; restore it from a copy"
    assert missing in verified(run, "--digests-only", ends=1)
    cli("generate", run, "--max-tokens 3")
    (run / name).write_bytes(whole)
    assert verified(run, "--digests-only")[-1] == "All 6 checks passed"


def test_a_run_of_an_earlier_version_has_no_digests_and_loads(run, other, cli, verified):
    with edited(run / "config.json") as config:
        del config["sha256"]
    shutil.copy(other / "tokenizer.json", run)
    assert verified(run, "--digests-only")[-1] == "All 4 checks passed"
    cli("generate", run, "--max-tokens 3")


def test_a_run_that_was_made_longer_has_the_digest_of_its_new_model(run, cli, verified):
    before = (run / "model.safetensors").read_bytes()
    cli("train --resume", run, "--steps 16")
    assert verified(run, "--digests-only")[-1].startswith("All ")
    cli("generate", run, "--max-tokens 3")
    # A process that is killed before the new one is in its place leaves the last one.
    (run / "model.safetensors").write_bytes(before)
    assert verified(run, "--digests-only")[-1].startswith("All ")


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_an_imported_run_is_verified_by_its_files(finished, tmp_path, cli, verified, to):
    cli("export", finished, "--to", to, tmp_path / "model.gguf")
    cli("import", tmp_path / "model.gguf", "--out", tmp_path / "run")
    assert verified(tmp_path / "run")[-1].startswith("All ")
    (name,) = (path.name for path in (tmp_path / "run").glob("model.*"))
    flip(tmp_path / "run" / name)
    verified(tmp_path / "run", ends=1)
    assert name in cli("generate", tmp_path / "run", "--max-tokens 3", ends=2).err

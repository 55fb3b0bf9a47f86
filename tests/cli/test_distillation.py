"""`smallmind train --teacher`, as a user types it."""

import json
import re
import shlex
import shutil

import pytest

from smallmind import TransformerModel
from smallmind.cli import main
from smallmind.files import safetensors
from tests.programs import last_of_each
from tests.training.test_resume import TEXT, losses, tensors_of

SHAPE = ["--block-size", "16", "--n-head", "2", "--batch-size", "4", "--val-batches", "2"]
STUDENT = [
    *SHAPE,
    *shlex.split(
        "--n-layer 1 --n-embd 16 --steps 12 --save-every 5 --val-every 6 --warmup-steps 2 "
        "--log-every 1 --keep 9"
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a text, another one, and the run of a teacher."""
    root = tmp_path_factory.mktemp("distillation")
    (root / "cats.txt").write_text(TEXT, encoding="utf-8")
    (root / "cows.txt").write_text(TEXT.replace("cat", "cow"), encoding="utf-8")
    teacher = ["--n-layer", "2", "--n-embd", "24", "--steps", "20", "--val-every", "0"]
    out = ["--out", str(root / "teacher")]
    assert main(["train", str(root / "cats.txt"), *SHAPE, *teacher, *out]) == 0
    return root


def train(root, out, *flags):
    given = [str(root / "cats.txt"), *STUDENT, "--teacher", str(root / "teacher"), *flags]
    return main(["train", *given, "--out", str(out)])


LEARNT = ["--temperature", "3", "--alpha", "0.7", "--learn-temperature"]


def without_the_end(whole, out):
    """A copy of a run as if it had been killed after step 5."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").iterdir():
        if "00000005" not in path.name:
            path.unlink()


@pytest.mark.parametrize("cached", [False, True])
def test_a_student_is_trained_and_its_run_resumes(root, tmp_path, capsys, monkeypatch, cached):
    monkeypatch.chdir(root)
    cache = ["--teacher-cache", str(tmp_path / "cache"), "--teacher-top-k", "5"] if cached else []
    given = ["cats.txt", *STUDENT, "--teacher", "teacher", *LEARNT, *cache]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert main(["train", *given, "--out", str(whole)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    source = "the 5 most likely tokens, from a cache" if cached else "2 layers of 24 channels"
    for words in ("Distillation", source, "weight in the loss", "0.7", "3, learned"):
        assert words in printed, words
    end = float(re.search(r"Temperature at the end: ([\d.]+)", printed)[1])
    assert 1 < end < 10 and end != 3
    assert ("Running the teacher over the text once" in printed) == cached
    without_the_end(whole, out)
    monkeypatch.chdir(tmp_path)  # the teacher was named relative to another directory
    if cached:
        (tmp_path / "cache").unlink()  # it is created again
    assert main(["train", "--resume", str(out)]) == 0
    assert "Resuming after step 5" in capsys.readouterr().out
    assert losses(out) == losses(whole) and tensors_of(out) == tensors_of(whole)


def test_a_run_does_not_resume_with_another_teacher(root, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "run"
    file = tmp_path / "teacher.safetensors"
    shutil.copy(root / "teacher" / "model.safetensors", file)
    given = [str(root / "cats.txt"), *STUDENT, "--teacher", str(file)]
    assert main(["train", *given, "--out", str(whole)]) == 0
    without_the_end(whole, out)
    tensors, metadata = safetensors.read(file)
    tensors["final_norm.weight"][0] += 1
    safetensors.write(file, tensors, metadata)
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 2
    assert f"{file} has changed since the run" in capsys.readouterr().err
    file.unlink()
    assert main(["train", "--resume", str(out)]) == 2
    assert f"cannot read {file}" in capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--alpha", "0.2"]) == 2
    assert "takes all settings from the run" in capsys.readouterr().err


def test_a_cache_is_made_once_and_never_by_a_check(root, tmp_path, capsys):
    cache = tmp_path / "cache"
    flags = ["--teacher-cache", str(cache)]
    given = [str(root / "cats.txt"), *STUDENT, "--teacher", str(root / "teacher"), *flags]
    assert main(["check", *given]) in (0, 1)
    assert not cache.exists()
    for out, made in (("first", True), ("second", False)):
        capsys.readouterr()
        assert train(root, tmp_path / out, *flags) == 0
        assert ("Running the teacher over the text once" in capsys.readouterr().out) == made
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    assert train(root, tmp_path / "third", *flags, "--teacher-top-k", "3") == 2
    assert "was made for another top k" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_unsuitable_teachers_are_refused(root, tmp_path, capsys):
    tokenless = tmp_path / "tokenless.safetensors"
    TransformerModel(5, 16, 8, 1, 1).save(tokenless)
    cows, cats = str(root / "cows.txt"), str(root / "cats.txt")
    teacher = ["--teacher", str(root / "teacher")]
    for arguments, message in (
        ([cows, *teacher], "are not those of this text"),
        ([cats, "--teacher", str(tmp_path / "none")], "cannot read"),
        ([cats, "--teacher", str(tokenless)], "has no tokenizer in its metadata"),
        ([cats, "--teacher", cats], "is not a valid safetensors file"),
        ([cats, "--temperature", "3"], "temperature=3.0 needs a teacher"),
        ([cats, "--learn-temperature"], "learn_temperature=True needs a teacher"),
        ([cats, *teacher, "--alpha", "2"], "alpha=2.0 must be at least 0 and at most 1"),
        ([cats, *teacher, "--block-size", "17"], "the teacher sees 16 tokens"),
        (
            [cats, *teacher, "--teacher-cache", str(tmp_path)],
            "is not a valid safetensors file: not a regular file",
        ),
        ([cats, *teacher, "--teacher-cache", str(tmp_path / "a" / "b")], "cannot write"),
    ):
        out = tmp_path / "run"
        flags = last_of_each(arguments[0], *STUDENT, *arguments[1:], "--out", str(out))
        assert main(["train", *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not out.exists()


def test_distillation_settings_are_saved_and_reused(root, tmp_path, capsys):
    assert train(root, tmp_path / "first", *LEARNT) == 0
    config = json.loads((tmp_path / "first" / "config.json").read_text(encoding="utf-8"))
    assert config["distillation"]["teacher"] == str(root / "teacher")
    assert config["distillation"]["alpha"] == 0.7 and len(config["teacher_sha256"]) == 64
    again = ["--config", str(tmp_path / "first" / "config.json"), "--out", str(tmp_path / "second")]
    assert main(["train", *again]) == 0
    assert losses(tmp_path / "first") == losses(tmp_path / "second")


def test_estimate_counts_the_teacher(root, capsys):
    def rows(*flags):
        text = [str(root / "cats.txt")]
        assert main(["estimate", *text, *STUDENT, "--memory", "1TB", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
        return {
            cell[0]: float(cell[1].split()[0].replace(",", ""))
            for cell in cells
            if len(cell) == 2 and cell[1][:1].isdigit()
        }

    alone, taught = rows(), rows("--teacher", str(root / "teacher"))
    cached = rows("--teacher", str(root / "teacher"), "--teacher-cache", "cache")
    assert "teacher" not in alone and "teacher" not in cached
    assert taught["teacher"] > 0 and taught["activations"] > alone["activations"]
    assert taught["activations"] > cached["activations"] >= alone["activations"]

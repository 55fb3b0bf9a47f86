"""`smallmind train --teacher`, as a user types it."""

import json
import re
import shutil

import pytest

from smallmind import TransformerModel
from smallmind.cli import main
from smallmind.files import safetensors
from tests.programs import CATS, status
from tests.training.test_resume import losses, tensors_of

SHAPE = "--block-size 16 --n-head 2 --batch-size 4 --val-batches 2"
STUDENT = (
    f"{SHAPE} --n-layer 1 --n-embd 16 --steps 12 --save-every 5 --val-every 6 --warmup-steps 2 "
    "--log-every 1 --keep 9"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a text, another one, and the run of a teacher."""
    root = tmp_path_factory.mktemp("distillation")
    (root / "cats.txt").write_text(CATS, encoding="utf-8")
    (root / "cows.txt").write_text(CATS.replace("cat", "cow"), encoding="utf-8")
    teacher = f"{SHAPE} --n-layer 2 --n-embd 24 --steps 20 --val-every 0 --out {root}/teacher"
    assert main(["train", str(root / "cats.txt"), *teacher.split()]) == 0
    return root


@pytest.fixture
def learn(root, cli):
    """Trains a student of the teacher."""

    def learn(out, *flags, ends=0):
        teacher = "--teacher", root / "teacher"
        return cli("train", root / "cats.txt", STUDENT, *teacher, *flags, "--out", out, ends=ends)

    return learn


LEARNT = "--temperature 3 --alpha 0.7 --learn-temperature"


def without_the_end(whole, out):
    """A copy of a run as if it had been killed after step 5."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").iterdir():
        if "00000005" not in path.name:
            path.unlink()


@pytest.mark.parametrize("cached", [False, True])
def test_a_student_is_trained_and_its_run_resumes(root, tmp_path, cli, monkeypatch, cached):
    monkeypatch.chdir(root)
    cache = f"--teacher-cache {tmp_path}/cache --teacher-top-k 5" if cached else ""
    whole, out = tmp_path / "whole", tmp_path / "run"
    given = "cats.txt", STUDENT, "--teacher teacher", LEARNT, cache
    printed = cli("train", *given, "--out", whole).flat
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
    assert "Resuming after step 5" in cli("train --resume", out).out
    assert losses(out) == losses(whole) and tensors_of(out) == tensors_of(whole)


def test_a_run_does_not_resume_with_another_teacher(root, tmp_path, cli):
    whole, out = tmp_path / "whole", tmp_path / "run"
    file = tmp_path / "teacher.safetensors"
    shutil.copy(root / "teacher" / "model.safetensors", file)
    cli("train", root / "cats.txt", STUDENT, "--teacher", file, "--out", whole)
    without_the_end(whole, out)
    tensors, metadata = safetensors.read(file)
    tensors["final_norm.weight"][0] += 1
    safetensors.write(file, tensors, metadata)
    cli.refuses(f"{file} has changed since the run", "train --resume", out)
    file.unlink()
    cli.refuses(f"{file} does not exist", "train --resume", out)
    cli.refuses("takes all settings from the run", "train --resume", out, "--alpha 0.2")


def test_a_cache_is_made_once_and_never_by_a_check(root, tmp_path, learn):
    cache = tmp_path / "cache"
    flags = "--teacher-cache", cache
    given = [root / "cats.txt", *STUDENT.split(), "--teacher", root / "teacher", *flags]
    assert status("check", *given) in (0, 1)
    assert not cache.exists()
    for out, made in (("first", True), ("second", False)):
        printed = learn(tmp_path / out, *flags).out
        assert ("Running the teacher over the text once" in printed) == made
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    error = learn(tmp_path / "third", *flags, "--teacher-top-k 3", ends=2).err
    assert "was made for another top k" in error
    assert not (tmp_path / "third").exists()


def test_unsuitable_teachers_are_refused(root, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    TransformerModel(5, 16, 8, 1, 1).save("tokenless.safetensors")
    cats, teacher = f"{root}/cats.txt", f"--teacher {root}/teacher"
    for arguments, message in (
        (f"{root}/cows.txt {teacher}", "has different tokens than this text"),
        (f"{cats} --teacher none", "none does not exist; give a run"),
        (f"{cats} --teacher tokenless.safetensors", "has no tokenizer in its metadata"),
        (f"{cats} --teacher {cats}", "is not a valid safetensors file"),
        (f"{cats} --temperature 3", "temperature=3.0 needs a teacher"),
        (f"{cats} --learn-temperature", "learn_temperature=True needs a teacher"),
        (f"{cats} {teacher} --alpha 2", "alpha=2.0 must be at least 0 and at most 1"),
        (f"{cats} {teacher} --block-size 17", "the teacher sees 16 tokens"),
        (f"{cats} {teacher} --teacher-cache .", "not a valid safetensors file: not a regular file"),
        (f"{cats} {teacher} --teacher-cache a/b", "cannot write"),
    ):
        cli.refuses(message, "train", STUDENT, arguments, "--out run")
        assert not (tmp_path / "run").exists()


def test_teacher_settings_are_saved_and_reused(root, tmp_path, cli, learn):
    first, second = tmp_path / "first", tmp_path / "second"
    learn(first, LEARNT)
    config = json.loads((first / "config.json").read_text(encoding="utf-8"))
    assert config["distillation"]["teacher"] == str(root / "teacher")
    assert config["distillation"]["alpha"] == 0.7 and len(config["teacher_sha256"]) == 64
    cli("train --config", first / "config.json", "--out", second)
    assert losses(first) == losses(second)


def test_estimate_counts_the_teacher(root, cli):
    def rows(*flags):
        cells = cli("estimate", root / "cats.txt", STUDENT, "--memory 1TB", *flags).cells.items()
        sizes = {name: cell.removesuffix(" MB") for name, cell in cells if cell.endswith(" MB")}
        return {name: float(size.replace(",", "")) for name, size in sizes.items()}

    teacher = "--teacher", root / "teacher"
    alone, taught, cached = rows(), rows(*teacher), rows(*teacher, "--teacher-cache cache")
    assert "teacher" not in alone and "teacher" not in cached
    assert taught["teacher"] > 0 and taught["activations"] > alone["activations"]
    assert taught["activations"] > cached["activations"] >= alone["activations"]

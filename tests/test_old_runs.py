"""Runs and models of earlier versions keep working, without conversion."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind.cli import main
from smallmind.files import safetensors
from smallmind.text.stories import built_in_text

OLD_RUNS = Path(__file__).parent / "old_runs"
TEXT_LENGTH = 1575  # characters of the stories that these runs have read


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def run(request, tmp_path, monkeypatch):
    """A copy of a finished run of version 0.1.0, and its text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(built_in_text()[:TEXT_LENGTH].encode())
    return Path(shutil.copytree(OLD_RUNS / request.param, "run"))


def truncate(run, step):
    """Leaves the run on disk as if it had been killed after its checkpoint of that step."""
    (run / "model.safetensors").unlink()
    for path in (run / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}.safetensors":
            path.unlink()


def edit_config(run, edit):
    path = run / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def assert_resumes_to_the_same_weights(run, weights, loss):
    """Asserts that weights and loss are at most so far from those of the earlier version."""
    old, before = safetensors.read(run / "model.safetensors")[0], losses(run)
    truncate(run, step=8)
    assert main(["train", "--resume", str(run)]) == 0
    new = safetensors.read(run / "model.safetensors")[0]
    assert old.keys() == new.keys()
    for name, value in old.items():
        np.testing.assert_allclose(new[name], value, rtol=0, atol=weights, err_msg=name)
    assert losses(run) == pytest.approx(before, abs=loss)


def losses(run):
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_an_old_run_generates(run, capsys):
    assert main(["generate", str(run), "--prompt", "A", "--max-tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("A")


def test_an_old_run_evaluates_to_the_same_loss(run, capsys):
    assert main(["evaluate", str(run)]) == 0
    printed = capsys.readouterr().out
    assert " 156 " in printed and "3.6957 nats" in printed  # as 0.1.0 prints


@pytest.mark.parametrize("missing", [(), ("distillation", "teacher_sha256")])
def test_an_old_run_resumes_to_the_same_weights(run, missing, capsys):
    def remove(config):  # what even earlier versions did not write
        for name in missing:
            del config[name]

    edit_config(run, remove)
    # To rounding: another CPU may add in another order.
    assert_resumes_to_the_same_weights(run, weights=2e-4, loss=1e-2)
    assert "Dropout" not in capsys.readouterr().out


@pytest.mark.parametrize("run", ["muon"], indirect=True)
def test_an_old_run_with_muon_resumes_to_the_same_weights(run):
    assert_resumes_to_the_same_weights(run, weights=2e-4, loss=1e-2)


@pytest.mark.parametrize("run", ["dropout"], indirect=True)
def test_an_old_run_with_dropout_resumes_to_nearly_the_same_weights(run, capsys):
    """Other elements are dropped than in 0.1.0: the weights differ by what four updates change."""
    assert_resumes_to_the_same_weights(run, weights=4e-3, loss=5e-2)
    assert "Dropout now drops other elements than in smallmind 0.1.0" in capsys.readouterr().out


def test_the_stories_are_those_of_old_runs():
    """Which are refused if their text has changed."""
    digest = hashlib.sha256(built_in_text().encode()).hexdigest()
    assert digest == "b24e07e028e07995b73cb8b10b9cf26e04968aa80df0e933a6a7e1bd7536bd42"


def test_an_old_run_is_verified(run, capsys):
    assert main(["verify", str(run), "--digests-only"]) == 0
    assert "4 checks passed" in capsys.readouterr().out


def test_an_old_model_loads_from_python(run):
    model = smallmind.TransformerModel.load(run / "model.safetensors")
    assert model.config.n_layer == 2 and model.config.n_embd == 8
    assert np.isfinite(model.forward(np.array([[1, 2, 3]], np.int32))).all()


@pytest.mark.parametrize("run", ["float32"], indirect=True)
def test_an_old_name_of_a_setting_is_accepted(run):
    def rename(config):
        assert "windows_at_once" in config["training"]
        config["training"]["windows_at_once"] = 2

    edit_config(run, rename)
    flags = ["--config", str(run / "config.json"), "--steps", "2", "--out", "again"]
    assert main(["train", *flags]) == 0
    again = json.loads(Path("again/config.json").read_text())
    assert again["training"]["micro_batch_size"] == 2

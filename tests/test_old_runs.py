"""Runs and models of earlier versions keep working, without conversion."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import safetensors
from smallmind.cli import main

OLD_RUNS = Path(__file__).parent / "old_runs"
PRECISIONS = ["float32", "float16", "bfloat16"]


@pytest.fixture(params=PRECISIONS)
def run(request, tmp_path, monkeypatch):
    """A copy of a finished run of version 0.1.0."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(OLD_RUNS / request.param, tmp_path / "run"))


def truncate(run, step):
    """Leaves the run on disk as if it had been killed after its checkpoint of that step."""
    (run / "model.safetensors").unlink()
    for path in (run / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}.safetensors":
            path.unlink()


def losses(run):
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_an_old_run_generates(run, capsys):
    assert main(["generate", str(run), "--prompt", "A", "--max-tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("A")


def test_an_old_run_evaluates_to_the_same_loss(run, capsys):
    assert main(["evaluate", str(run)]) == 0
    assert "3.85" in capsys.readouterr().out


@pytest.mark.parametrize("missing", [(), ("distillation", "teacher_sha256")])
def test_an_old_run_resumes_to_nearly_the_same_weights(run, missing, capsys):
    old, before = safetensors.read(run / "model.safetensors")[0], losses(run)
    config = json.loads((run / "config.json").read_text())
    for name in missing:  # what even earlier versions did not write
        del config[name]
    (run / "config.json").write_text(json.dumps(config))
    truncate(run, step=8)
    assert main(["train", "--resume", str(run)]) == 0
    new = safetensors.read(run / "model.safetensors")[0]
    assert "Dropout now drops other elements than in smallmind 0.1.0" in capsys.readouterr().out
    assert old.keys() == new.keys()
    for name, value in old.items():
        # At most what four updates change: the dropout masks are different.
        np.testing.assert_allclose(new[name], value, rtol=0, atol=4e-3, err_msg=name)
    for step, loss in losses(run).items():
        assert loss == pytest.approx(before[step], abs=5e-2)


def test_an_old_run_is_verified(run, capsys):
    assert main(["verify", str(run), "--digests-only"]) == 0
    assert "4 checks passed" in capsys.readouterr().out


def test_an_old_model_loads_from_python(run):
    model = smallmind.TransformerModel.load(run / "model.safetensors")
    assert model.config.n_layer == 2 and model.config.n_embd == 8
    assert np.isfinite(model.forward(np.array([[1, 2, 3]], np.int32))).all()


def test_an_old_name_of_a_setting_is_accepted(run, capsys):
    config = json.loads((run / "config.json").read_text())
    assert "windows_at_once" in config["training"]
    config["training"]["windows_at_once"] = 2
    (run / "config.json").write_text(json.dumps(config))
    Path("text.txt").write_text("a short text, so that its evaluation is short too. " * 20)
    flags = ["--config", str(run / "config.json"), "--steps", "2", "--out", "again"]
    assert main(["train", "text.txt", *flags]) == 0
    again = json.loads(Path("again/config.json").read_text())
    assert again["training"]["micro_batch_size"] == 2

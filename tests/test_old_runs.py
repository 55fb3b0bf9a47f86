"""Runs and models of earlier versions keep working, without conversion."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind.files import safetensors
from smallmind.kernels.number_types import to_float32
from smallmind.text.stories import built_in_text
from tests.programs import edited

OLD_RUNS = Path(__file__).parent / "old_runs"
TEXT_LENGTH = 1575  # characters of the stories that these runs have read
PRECISIONS = ["float32", "float16", "bfloat16"]


@pytest.fixture(params=PRECISIONS)
def run(request, tmp_path, monkeypatch):
    """A copy of a finished run of version 0.1.0, and its text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(built_in_text(TEXT_LENGTH)[:TEXT_LENGTH].encode())
    return Path(shutil.copytree(OLD_RUNS / request.param, "run"))


def losses(run):
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_an_old_run_generates_evaluates_and_is_verified(run, cli):
    assert cli("generate", run, "--prompt A --max-tokens 20").out.startswith("A")
    printed = cli("evaluate", run).out
    assert " 156 " in printed and "3.6957 nats" in printed  # as 0.1.0 prints
    assert "4 checks passed" in cli("verify", run, "--digests-only").out


# To rounding: another CPU may add in another order.
EQUAL = (2e-4, 1e-2)
# Other elements are dropped than in 0.1.0: the weights differ by what four updates change.
DROPPED = (4e-3, 5e-2)


@pytest.mark.parametrize(
    ("run", "missing", "near"),
    [
        *((name, [], EQUAL) for name in (*PRECISIONS, "muon")),
        # Even earlier versions did not write these.
        *((name, ["distillation", "teacher_sha256"], EQUAL) for name in PRECISIONS),
        ("dropout", [], DROPPED),
    ],
    indirect=["run"],
)
def test_an_old_run_resumes_to_the_same_weights(run, missing, near, cli):
    with edited(run / "config.json") as config:
        for name in missing:
            del config[name]
    old, before = safetensors.read(run / "model.safetensors")[0], losses(run)
    # As if it had been killed after its checkpoint of step 8.
    for path in (run / "model.safetensors", *(run / "checkpoints").iterdir()):
        if path.name != "step-00000008.safetensors":
            path.unlink()
    printed = cli("train --resume", run).out
    new = safetensors.read(run / "model.safetensors")[0]
    assert old.keys() == new.keys()
    for name, value in old.items():
        np.testing.assert_allclose(new[name], value, rtol=0, atol=near[0], err_msg=name)
    assert losses(run) == pytest.approx(before, abs=near[1])
    said = "Dropout now drops different elements than in smallmind 0.1.0" in printed
    assert said == (near == DROPPED) == ("Dropout" in printed)


def test_the_stories_are_those_of_old_runs():
    """Which are refused if their text has changed."""
    digest = hashlib.sha256(built_in_text().encode()).hexdigest()
    assert digest == "b24e07e028e07995b73cb8b10b9cf26e04968aa80df0e933a6a7e1bd7536bd42"


def test_an_old_model_loads_from_python(run):
    model = smallmind.TransformerModel.load(run / "model.safetensors")
    assert model.config.n_layer == 2 and model.config.n_embd == 8
    assert np.isfinite(model.forward(np.array([[1, 2, 3]], np.int32))).all()


@pytest.mark.parametrize("run", ["float32"], indirect=True)
def test_an_old_name_of_a_setting_is_accepted(run, cli):
    with edited(run / "config.json") as config:
        assert "windows_at_once" in config["training"]
        config["training"]["windows_at_once"] = 2
    cli("train --config", run / "config.json", "--steps 2 --out again")
    again = json.loads(Path("again/config.json").read_text())
    assert again["training"]["micro_batch_size"] == 2


@pytest.mark.parametrize("which", [None, "newest"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_old_model_is_read_to_run_only(run, which, precision):
    expected, _ = smallmind.load(run, checkpoint=which)
    expected.use_precision(precision)
    found, _ = smallmind.load(run, checkpoint=which, precision=precision)
    for name, values in expected.flat.compute.items():
        np.testing.assert_array_equal(found.parameters[name], to_float32(values))

"""The losses of a run in several precisions: measured, printed, kept and reported."""

import json

import numpy as np
import pytest

import smallmind
from smallmind import Run
from smallmind.cli import main
from smallmind.runs.precisions import COMPARED, PrecisionTable
from smallmind.views.report import report
from tests.programs import CATS

FIELDS = {"block_size": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "batch_size": 4, "steps": 9}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = Run.create(text=CATS, out=tmp_path_factory.mktemp("precisions") / "run", **FIELDS)
    run.train()
    return run


def test_a_run_compares_its_precisions(trained):
    found = trained.compare_precisions()
    assert [each.precision for each in found.losses] == list(COMPARED)
    assert found.losses[0].loss == trained.evaluate().loss
    sizes = [each.nbytes for each in found.losses]
    assert sizes == sorted(sizes, reverse=True) and sizes[3] < sizes[0] / 4
    for each in found.losses[1:]:
        assert each.loss != found.losses[0].loss
        assert each.loss == pytest.approx(found.losses[0].loss, abs=0.05)
        assert each.tokens == found.losses[0].tokens
    assert PrecisionTable.read(trained.path) == found
    assert "Loss by precision" in report(trained.path) and ">q4_0<" in report(trained.path)


def test_the_command_line_prints_and_keeps_them(trained, capsys):
    assert main(["evaluate", "--precision", "bfloat16,q8_0", str(trained.path)]) == 0
    printed = capsys.readouterr().out
    assert "Loss by precision" in printed and "over float32" not in printed
    found = PrecisionTable.read(trained.path)
    assert [each.precision for each in found.losses] == ["bfloat16", "q8_0"]
    assert f"{found.losses[0].loss:.4f} nats per token" in printed
    before = (trained.path / "precisions.json").read_bytes()
    assert main(["evaluate", "--precision", "q8_0", str(trained.path)]) == 0  # nothing compared
    assert "q8_0" in capsys.readouterr().out
    assert (trained.path / "precisions.json").read_bytes() == before


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_an_unknown_precision_is_refused(trained, capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--precision", "q6_K", str(trained.path)])
    assert "q6_K" in capsys.readouterr().err


def test_a_run_generates_in_q8_0(trained, capsys):
    words = ["generate", str(trained.path), "--prompt", "the", "--max-tokens", "5"]
    assert main([*words, "--precision", "q8_0"]) == 0
    assert capsys.readouterr().out.startswith("the")
    model, _ = smallmind.load(trained.path, precision="q8_0")
    exact, _ = trained.load()
    ids = np.arange(8)[None]
    assert np.abs(model.forward(ids) - exact.forward(ids)).max() < 0.05 * exact.forward(ids).std()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[]",
        json.dumps({"format": "smallmind precisions 2", "model": "", "losses": []}).encode(),
        b'{"format": "smallmind precisions 1", "model": "m", "losses": [{"loss": NaN}]}',
        b'{"format": "smallmind precisions 1", "model": "m", "losses": []}',
    ],
)
def test_a_table_that_is_damaged_is_left_out(trained, damage):
    (trained.path / "precisions.json").write_bytes(damage)
    assert PrecisionTable.read(trained.path) is None
    assert "Loss by precision" not in report(trained.path)


def test_what_a_run_trained_is_not_in_blocks_by_default(tmp_path, capsys):
    """Weights that it froze were; `evaluate` takes all of them in float32."""
    fields = {**FIELDS, "freeze": "embedding", "precision": "q8_0", "steps": 2}
    run = Run.create(text=CATS, out=tmp_path / "run", **fields)
    run.train()
    assert main(["evaluate", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert f"{run.evaluate().loss:.4f} nats per token" in printed and "q8_0" not in printed

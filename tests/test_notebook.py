"""A notebook is executed: each object shows itself, as a table or a picture and as plain text."""

import base64
import re
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

from smallmind import Run
from tests.programs import PATIENCE

# The shortest run that logs, evaluates and measures. NumPy's kernels need no compiling.
SETUP = """
import numpy as np
import smallmind
from smallmind.forecast.memory import estimate
from smallmind.training.preflight import first_loss
from smallmind.training.evaluation import TEXT

run = smallmind.Run.create(
    text="the cat sat on the <mat>. " * 60, out="runs/cats & dogs", backend="numpy",
    precision="float32", steps=6, block_size=8, n_embd=8, n_layer=2, n_head=2, batch_size=2,
    val_every=3, val_batches=1, log_every=1, warmup_steps=1, enable_diagnostics=True,
)
"""
CELLS = {
    "setup": SETUP,
    "untrained run": "run",
    "training": "_ = run.train()\nmodel, tokenizer = run.load(backend='numpy')",
    "run": "run",
    "metrics": "run.metrics()",
    "losses": "run.metrics().losses_svg()",
    "model": "model",
    "profiler": "run.training.profiler",
    "estimate": "estimate(model.config, run.settings.training, 2, backend='numpy')",
    "inspection": "ids = np.zeros((1, 4), np.int32)\nfound = model.inspect(ids, ids)\nfound",
    "attention": "found.attention_svg(0, 1, tokens=list('<&>\"'))",
    "gradient check": "smallmind.gradient_check(lambda x: x * x, np.ones(3), "
    "backward=lambda dy, x: 2 * dy * x)",
    "check": "first_loss(model, TEXT, run.data)",
}
SMALL = {"backend": "numpy", "precision": "float32", "block_size": 8, "n_embd": 8, "n_layer": 1}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The output of each cell: mime type -> content."""
    place = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, CELLS.values())))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(place / name))
        client = NotebookClient(
            notebook,
            timeout=PATIENCE,
            kernel_name="python3",
            resources={"metadata": {"path": place}},
        )
        client.execute()
    found = {}
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        streams = [x for x in cell.outputs if x.output_type == "stream"]
        shown = "".join(x.text for x in streams if x.name == "stderr")
        # Training shows its progress, and nothing else writes anything.
        assert "6/6  loss" in shown if name == "training" else streams == [], name
        found[name] = next((x.data for x in cell.outputs if "data" in x), {})
    return found


def table(html):
    """HTML that is a table -> its caption, and its cells by row."""
    element = ElementTree.fromstring(re.sub(r"<img [^>]*/>$", "", html))
    rows = [["".join(cell.itertext()) for cell in row] for row in element.iter("tr")]
    return element.findtext("caption"), rows


@pytest.mark.parametrize(
    ("name", "caption", "cells"),
    [
        ("model", "TransformerModel: ", ["parameters", ""]),
        ("profiler", "Where the time went", ["\N{NO-BREAK SPACE}" * 2 + "Forward"]),
        ("estimate", "Memory", ["activations"]),
        ("inspection", "Inspection of 1 x 4 tokens: 2 x 2 heads, loss ", ["blocks.1.mlp"]),
        ("gradient check", "Gradient check of 1 gradient, tolerance 1e-06: ok", ["x"]),
        ("check", None, ["loss at the start"]),
    ],
)
def test_an_object_is_a_table_and_readable_text(shown, name, caption, cells):
    data = shown[name]
    assert set(data) == {"text/plain", "text/html"}
    found, rows = table(data["text/html"])
    assert found is None if caption is None else found.startswith(caption)
    assert any(row[: len(cells)] == cells for row in rows), rows
    assert " object at 0x" not in data["text/plain"] and cells[0].strip() in data["text/plain"]
    assert max(map(len, data["text/plain"].split("\n"))) < 120


def test_a_run_is_a_table_with_its_losses(shown):
    data = shown["run"]
    assert data["text/plain"].endswith("cats & dogs: finished, 6 steps>")
    caption, rows = table(data["text/html"])
    facts = dict(rows)
    assert caption.endswith("cats & dogs: finished, 6 steps")
    assert facts["model"].startswith("Qwen3, 2 layers of 8 channels, ") and facts["text"]
    assert facts["best held-out loss"].count(" nats per token, after step ") == 1
    assert float(facts["bits per byte"]) > 0 and facts["time of training"] == "0:00"
    (encoded,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', data["text/html"])
    assert base64.b64decode(encoded).decode() == data["image/svg+xml"]


def test_a_run_without_steps_is_a_table_alone(shown):
    assert set(shown["untrained run"]) == {"text/plain", "text/html"}
    caption, rows = table(shown["untrained run"]["text/html"])
    assert caption.endswith("no checkpoint yet, 6 steps to train")
    assert [row[0] for row in rows] == ["model", "text"]


@pytest.mark.parametrize("name", ["run", "metrics", "losses"])
def test_losses_are_a_picture_that_needs_nothing_else(shown, name):
    content = shown[name]["image/svg+xml"]
    picture = ElementTree.fromstring(content)
    curves = [x for x in picture.iter(f"{SVG}polyline") if x.get("class").startswith("curve")]
    assert len(curves) == 3 + 2 and "var(" not in content  # two of them in the legend
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"training loss, smoothed", "held-out loss", "steps"} <= set(texts)
    assert picture.find(f"{SVG}rect").get("fill") == "#ffffff"  # readable on a dark page
    assert shown["losses"]["image/svg+xml"] == content
    assert shown["metrics"]["text/plain"].startswith("<MetricsTable of 6 steps: step, ")


def test_a_run_with_damaged_metrics_is_shown_too(tmp_path):
    run = Run.create(text="a cat sat on a mat\n" * 60, out=tmp_path / "run", **SMALL)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": "x", "val_loss": []}\n{"')
    assert [row[0] for row in table(run._repr_html_())[1]] == ["model", "text"]
    assert run._repr_svg_() is None


def test_attention_is_a_picture(shown):
    assert set(shown["attention"]) == {"text/plain", "image/svg+xml"}
    assert shown["attention"]["text/plain"].startswith("<Svg of ")
    picture = ElementTree.fromstring(shown["attention"]["image/svg+xml"])
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert titles[0] == "Layer 0, head 1: where each query (row) looks"
    assert titles[-1].startswith("query 3 '\"', key 3 '\"': 0.")

"""The curve of the loss in the closing lines of `smallmind train`."""

import re
import signal

import pytest

from smallmind import Run
from smallmind.charts.text import ASCII_BLOCKS, BLOCKS
from smallmind.cli.console import Console
from smallmind.cli.display import show_losses
from smallmind.training.evaluation import Evaluations
from smallmind.views.report import report
from tests.cli.test_cli import SMALL
from tests.faults.test_consoles import Recorded
from tests.views.written import append, rollback, step, write

LINE = re.compile(r"^Training loss: (\d\.\d{4}) (\S+) (\d\.\d{4})$", re.MULTILINE)


@pytest.mark.parametrize(
    ("columns", "encoding"), [(40, "utf-8"), (40, "ascii"), (80, "utf-8"), (200, "cp437")]
)
def test_a_run_ends_with_its_losses_before_its_results(
    text, tmp_path, cli, monkeypatch, columns, encoding
):
    monkeypatch.setenv("COLUMNS", str(columns))
    flags = "--recipe gpt2 --log-every 2 --out", tmp_path / "run"
    shown = cli.on(Recorded(encoding), "train", text, SMALL, *flags)
    first, curve, last = LINE.search(shown).groups()
    assert float(first) > float(last)
    blocks = BLOCKS if encoding == "utf-8" else ASCII_BLOCKS
    assert curve[0] == blocks[7] and curve[-1] == blocks[0] and set(curve) <= set(blocks)
    line = LINE.search(shown)[0]
    assert len(line) <= columns and len(curve) == min(16, min(columns, 80) - 29)
    after = shown[shown.index(line) :]
    assert "step 30/30" not in after and "held-out text" in " ".join(after.split())


def shown_losses(run):
    stream = Recorded("utf-8")
    show_losses(Console(stream), run)
    return stream.shown()


def test_the_losses_are_those_of_the_whole_run(tmp_path):
    write(tmp_path / "run", *(step(n, loss=10.0 - n) for n in range(1, 7)))
    run = type("Run", (), {"path": tmp_path / "run"})
    assert shown_losses(run) == "Training loss: 9.0000 █▇▅▄▂▁ 4.0000\n"
    append(tmp_path / "run", rollback(5, 8), step(6, loss=3.0), end='{"step": 7, "lo')
    assert shown_losses(run) == "Training loss: 9.0000 █▇▆▅▃▁ 3.0000\n"


def test_a_run_of_few_records_or_without_metrics_has_no_curve(tmp_path):
    write(tmp_path / "run", *(step(n) for n in (1, 10, 20)))
    run = type("Run", (), {"path": tmp_path / "run"})
    assert shown_losses(run) == ""
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert shown_losses(run) == ""


def test_an_interrupted_run_shows_what_it_has(text, tmp_path, monkeypatch, cli):
    original = Evaluations.evaluate

    def evaluate(evaluations, step, batches):
        if step == 20:
            signal.raise_signal(signal.SIGINT)
        return original(evaluations, step, batches)

    monkeypatch.setattr(Evaluations, "evaluate", evaluate)
    printed = cli("train", text, SMALL, "--log-every 2 --out", tmp_path / "run", ends=130).out
    assert LINE.search(printed) and "step 30/30" not in printed


def test_a_loss_has_one_name_wherever_it_is_shown(text, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("COLUMNS", "160")
    run = tmp_path / "run"
    flags = "--recipe gpt2 --log-every 2 --val-every 15 --val-batches 1 --out"
    printed = cli("train", text, SMALL, flags, run)
    final = re.search(r"Final held-out loss: (\d\.\d{4}) nats per token", printed.flat)[1]
    evaluated = re.findall(r"held-out loss (\d\.\d{4})  on training text \d", printed.out)
    (best,) = {min(evaluated)} - {final}
    last = re.findall(r"training loss (\d\.\d{4})", printed.out)[-1]
    rows = [re.split(" {2,}", line.strip()) for line in cli("runs", run).out.splitlines()]
    row = dict(zip(rows[0], rows[2], strict=True))
    assert (row["best held-out"], row["final held-out"]) == (best, final)
    watched = cli("watch", run, "--once").flat
    for name in (f"training loss {last}", f"(best {best}", f"final held-out loss {final}"):
        assert name in watched
    page = re.sub(r"<[^>]*>", " ", report(run))
    assert re.search(rf"Final held-out loss\s+{final}", page)
    shown = re.sub(r"<[^>]*>", " ", Run.open(run)._repr_html_())
    assert re.search(rf"best held-out loss\s+{best}", shown)
    assert re.search(rf"final held-out loss\s+{final}", shown)
    assert re.search(rf"held-out loss[│ ]+{final} nats per token", cli("evaluate", run).out)
    cli("export", run, "--to hf", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert f"| final held-out loss | {final} nats per token" in card

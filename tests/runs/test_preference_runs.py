"""Runs that learn from better and worse answers: from files, resumed, verified, on ranks."""

import json
import random
from functools import partial

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Run
from smallmind.forecast.memory import TextSize, estimate
from smallmind.forecast.pace import rough_pace
from smallmind.losses.preferences import PairsDataset
from smallmind.runs.assembly import outline_of
from smallmind.training.records import LossRecord
from tests.corpus.reading import lines, written
from tests.faults.runs import outcome, status
from tests.parallel import in_process
from tests.programs import refusal
from tests.runs.small import resumed_after

METHODS = "dpo", "ipo", "orpo", "kto"
SHAPE = {"block_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "precision": "float32"}
TUNED = {"steps": 12, "batch_size": 4, "val_every": 6, "save_every": 4, "log_every": 1}
TUNED |= {"learning_rate": 3e-3, "keep": 9}


def sums(count=40):
    draw = random.Random(1)
    for _ in range(count):
        a, b = draw.randrange(10), draw.randrange(10)
        yield {"prompt": f"{a}+{b}", "chosen": str(a + b), "rejected": str(a + b + 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with pairs, answers with labels, and a run that answers either way."""
    path = tmp_path_factory.mktemp("pairs")
    rows = list(sums())
    written(path / "pairs.jsonl", lines(*rows))
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for number, row in enumerate(rows)
        for side in [("chosen", "rejected")[number % 2]]
    ]
    written(path / "labels.jsonl", lines(*labelled))
    said = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    written(path / "chat.jsonl", lines(*said))
    run = Run.create(
        text=path / "chat.jsonl", out=path / "base", recipe="chat", steps=20, val_every=0, **SHAPE
    )
    run.train()
    return path


def tuned(folder, out, method="dpo", **fields):
    text = folder / ("labels.jsonl" if method == "kto" else "pairs.jsonl")
    base = {"init_from": str(folder / "base"), "loss": method}
    return Run.create(text=text, out=folder / out, recipe="chat", **{**TUNED, **base, **fields})


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_runs_learn_resume_and_are_verified(folder, method, adapted):
    fields = {"lora_rank": 4} if adapted else {}
    run = tuned(folder, f"{method} {adapted}", method, **fields)
    records = run.train()
    first = next(record for record in records if hasattr(record, "lr"))
    expected = {"dpo": np.log(2), "ipo": 25.0, "kto": 0.5}
    assert method == "orpo" or first.loss == pytest.approx(expected[method], rel=1e-5)
    judged = [record for record in records if isinstance(record, LossRecord)]
    assert [record.step for record in judged] == [6, 12]
    assert 0 <= judged[-1].numbers["won"] <= 1
    assert all(verdict.fault is None for verdict in Run.open(run.path).verify())
    half = tuned(folder, f"{method} {adapted} half", method, **fields)
    assert outcome(resumed_after(half, 5).path) == outcome(run.path)


def test_pairs_are_recognised_where_there_is_a_model_to_start_from(folder):
    pairs, base = folder / "pairs.jsonl", str(folder / "base")
    run = Run.create(text=pairs, out=folder / "recognised", init_from=base)
    assert run.settings.loss[0] == "preferences" and run.settings.preferences.loss == "dpo"
    assert isinstance(run.data, PairsDataset) and run.settings.training.epochs == 3
    plain = Run.create(text=pairs, out=folder / "plain", init_from=base, loss="cross-entropy")
    assert plain.settings.loss[0] == "cross-entropy"
    assert not isinstance(plain.data, PairsDataset)
    new = Run.create(text=pairs, out=folder / "new", **SHAPE)
    assert new.settings.loss[0] == "cross-entropy"
    for each in (run, plain, new):
        assert Run.open(each.path).data.block_size == each.data.block_size


def test_the_better_answers_become_likelier(folder):
    run = tuned(folder, "long", steps=60, val_every=60)
    run.train()
    loss, model = run.training.loss, run.training.model
    margins = loss.margins(model, np.arange(run.data.count_of("train")))
    assert (margins > 0).mean() > 0.8 and margins.mean() > 0.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"init_from": None}, "needs a model to start from: give one with --init-from"),
        ({"loss": "dop"}, "must be one of dpo, ipo, orpo, kto, cross-entropy"),
        ({"dpo_beta": 0.0}, "dpo_beta"),
        ({"block_size": 8}, "raise --block-size"),
    ],
)
def test_what_cannot_be_learned_is_refused(folder, fields, words):
    assert words in refusal(lambda: tuned(folder, "refused", **fields))
    assert not (folder / "refused").exists()


def test_conversations_beside_pairs_are_counted_and_left_out(folder):
    chat = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    path = written(folder / "mixed.jsonl", lines(*sums(4), chat))
    base = {"init_from": str(folder / "base")}
    run = Run.create(text=path, out=folder / "mixed", **base)
    assert run.data.count_of("train") == 3
    assert "Left out: 1 text without a worse answer" in run.files.source.report.notes
    alone = written(folder / "alone.jsonl", lines(*sums(1)))
    with pytest.raises(InputError, match="alone has 1 pair; two are needed, one of them to hold"):
        Run.create(text=alone, out=folder / "alone", **base)


@pytest.mark.parametrize("loss", ["dpo", "kto", None])
@pytest.mark.parametrize("kind", ["conversations", "plain text"])
def test_files_of_other_kinds_beside_pairs_are_named(folder, kind, loss):
    """The advice works as it is given."""
    pairs = written(folder / "kinds" / "pairs.jsonl", lines(*sums(4)))
    other = folder / "kinds" / ("chat.jsonl" if kind == "conversations" else "plain.txt")
    chat = {"prompt": "1+1", "completion": "2"}
    written(other, lines(chat, chat) if kind == "conversations" else "1+1 2+2 " * 50)
    base = {"init_from": str(folder / "base"), "steps": 1}
    for paths in ([pairs, other], [other, pairs], [folder / "kinds"]):
        settings = {"text": [*map(str, paths)], "out": folder / "mixed kinds", "loss": loss}
        if loss == "kto" and kind == "conversations":
            words = "has no answer with a label; give each answer one" if paths[1:] else ""
        else:
            words = f"pairs.jsonl has better and worse answers, and {other} has {kind}: "
        if words:
            assert words in refusal(partial(Run.create, **base, **settings))
    settings |= {"loss": "cross-entropy", "out": folder / f"all {kind} {loss}"}
    Run.create(**base, **settings)
    for name, text in (("first", other), ("second", pairs)):
        out = folder / f"{name} {kind} {loss}"
        run = Run.create(text=str(text), out=out, **base)
        run.train()
        base["init_from"] = str(out)
    other.unlink()


def test_a_text_without_pairs_is_refused(folder):
    base = {"init_from": str(folder / "base"), "loss": "dpo"}
    for name in ("chat.jsonl", "labels.jsonl"):
        with pytest.raises(InputError, match="give records with prompt, chosen and rejected"):
            Run.create(text=folder / name, out=folder / "none", **base)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_runs_are_the_same_at_any_number_of_ranks(folder, method):
    text = folder / ("labels.jsonl" if method == "kto" else "pairs.jsonl")
    words = ["train", text, "--init-from", folder / "base", "--loss", method, "--steps", 5]
    words += ["--batch-size", 8, "--data-shards", 4, "--val-every", 3, "--threads", 1]
    outcomes = []
    for size in (0, 1, 3, 4):
        out = folder / f"{method} ranks {size}"
        run = [*map(str, words), "--out", str(out)]
        assert (in_process.status(size, *run) if size else status(*run)) == 0
        outcomes.append(outcome(out))
    assert outcomes[1:] == outcomes[:1] * 3


def test_the_line_the_metrics_and_the_report_judge_answers(folder, capsys):
    out = folder / "shown"
    words = [folder / "pairs.jsonl", "--init-from", folder / "base", "--out", out, "--steps", 4]
    assert status("train", *map(str, words), "--val-every", "4") == 0
    printed = capsys.readouterr().out
    assert "held-out margin" in printed and "of pairs won" in printed
    assert "nats per pair" in printed and "perplexity" not in printed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any({"margin", "won"} <= row.keys() for row in rows)
    assert status("report", str(out), "--out", str(folder / "shown.html")) == 0
    page = (folder / "shown.html").read_text()
    assert "pairs won" in page and "nats per pair" in page
    assert smallmind.load(out)[0].config.n_embd == SHAPE["n_embd"]


@pytest.mark.parametrize("adapted", [False, True])
def test_the_estimate_of_memory_is_what_the_pool_holds(folder, adapted):
    run = tuned(
        folder, f"held {adapted}", val_every=0, steps=2, **{"lora_rank": 4} if adapted else {}
    )
    data, settings = run.data, run.settings
    text = TextSize.of(run.files.source.nbytes, data)
    loss = outline_of(settings, None)
    held = estimate(settings.model, settings.training, 4, loss=loss, text=text).activations
    pool = run.training.model.workspace.pool
    pool.trim()
    before = pool.statistics().bytes_held
    for _ in run.training.steps(settings.training):
        pass
    assert 0 < pool.statistics().bytes_held - before <= held


def test_pairs_that_fill_the_context_are_timed(folder):
    rows = [{"prompt": f"{i}+1", "chosen": "1" * 40, "rejected": "2" * 40} for i in range(10)]
    long = written(folder / "long.jsonl", lines(*rows))
    base = {"init_from": str(folder / "base"), "steps": 2, "batch_size": 2}
    run = Run.create(text=long, out=folder / "timed", **base)
    assert run.data.block_size > SHAPE["block_size"] >= run.data.longest
    assert rough_pace(run.training, run.settings.training).step > 0


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_run_is_evaluated_on_the_better_answers(folder, capsys, method):
    run = tuned(folder, f"evaluated {method}", method, steps=2)
    run.train()
    result = run.evaluate()
    assert 0 < result.loss < 20 and result.tokens > 2
    assert status("evaluate", str(run.path)) == 0
    assert "nats per token" in capsys.readouterr().out

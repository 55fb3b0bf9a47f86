"""The page about several runs: groups by seed, their means, what differs, and hostile names."""

import re

import pytest

from smallmind.views.report_of_runs import report_of_runs
from tests.programs import refuses
from tests.views.test_report import Page
from tests.views.written import evaluation, final, finish, step, write


def losses_to(end):
    return [x for n in range(1, 9) for x in (step(n), evaluation(n, end + 1 / n))] + [final(8, end)]


@pytest.fixture
def runs(tmp_path):
    """Two learning rates with two seeds each; the second rate is better."""
    found = []
    for rate, ends in ((1e-3, (2.0, 2.2)), (3e-3, (1.0, 1.4))):
        for seed, end in enumerate(ends):
            path = tmp_path / f"rate {rate} seed {seed}"
            found.append(
                finish(
                    write(path, *losses_to(end), learning_rate=rate, min_lr=0, steps=8, seed=seed),
                    8,
                )
            )
    return found


def rows_of(content, title):
    part = content.partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", part)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


def test_runs_with_other_seeds_are_one_group_with_mean_and_spread(runs):
    content = report_of_runs(runs)
    assert Page(content).text.count("held-out loss (nats per token)") == 2  # wide and narrow
    heads, best, other = rows_of(content, "Mean and spread over seeds")
    assert heads[:4] == ["place", "learning_rate", "mean", "spread"]
    assert best == ["1", "0.003", "1.2000", f"{0.4 / 2**0.5:.4f}", "1.0000", "1.4000", "2 of 2"]
    assert other[1:3] == ["0.001", "2.1000"]
    losses = [row[3] for row in rows_of(content, "Runs")[1:]]
    assert losses == ["1.0000", "1.4000", "2.0000", "2.2000"]
    # A colour and a name for each group, a line for each run, in both drawings.
    assert content.count("learning_rate=0.003 (2 runs)") == 1
    assert len(re.findall('<polyline class="curve c1"', content)) == 2 * 2 + 2 * 2


def test_a_run_that_failed_is_on_the_page_with_its_reason_and_without_a_loss(runs, tmp_path):
    failed = tmp_path / "failed"
    write(failed, step(3), {"step": 3, "failure": "the loss <diverged>"}, learning_rate=9.0)
    content = report_of_runs([*runs, failed])
    page = Page(content)
    assert "failed: failed: the loss <diverged>" in page.text
    assert "compared in training" not in page.text
    heads, *rows = rows_of(content, "Runs")
    assert rows[-1][heads.index("final held-out loss")] == ""


def test_runs_with_many_other_settings_have_a_table_of_these(runs, tmp_path):
    other = {"n_layer": 2, "n_embd": 64, "batch_size": 3, "block_size": 8, "optimizer": "adamw"}
    write(tmp_path / "other", *losses_to(0.5), schedule="constant", bias=False, **other)
    content = report_of_runs([runs[0], tmp_path / "other"])
    differing = {row[0]: row[1:] for row in rows_of(content, "Settings that differ")}
    assert differing["n_embd"] == ["64", "128"] and differing["bias"] == ["no", "yes"]
    assert rows_of(content, "Runs")[0][:3] == ["run", "seed", "final held-out loss"]


def test_names_and_settings_stay_text(tmp_path):
    evil = "<script>alert(1)<"
    for number, name in enumerate((evil, "b")):
        write(tmp_path / name, *losses_to(1.0), tokenizer=f"{evil}{number}.json")
    page = Page(report_of_runs([tmp_path / evil, tmp_path / "b"]))
    assert "script" not in {tag for tag, _ in page.elements} and evil in page.text


def test_what_cannot_be_read_is_refused(runs, tmp_path):
    refuses("is not a run", report_of_runs, [runs[0], tmp_path])
    (runs[1] / "config.json").write_text("{")
    refuses("cannot be shown", report_of_runs, runs)


def test_the_command_takes_several_runs(runs, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    assert "to both.html" in cli("report --out both.html", runs[:2]).out
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert page == report_of_runs(runs[:2])
    cli("report --run", [runs[0]])
    assert (tmp_path / "rate 0.001 seed 0-report.html").exists()

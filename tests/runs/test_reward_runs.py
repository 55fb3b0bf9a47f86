"""Runs that learn by rewards: from files and flags, killed, resumed, verified, shown."""

import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from smallmind import InputError, Run
from smallmind.forecast.memory import TextSize, estimate
from smallmind.forecast.pace import rough_pace
from smallmind.losses.question_data import QuestionsDataset
from smallmind.runs.assembly import outline_of
from smallmind.training.preflight import preflight
from tests.corpus.reading import lines, written
from tests.faults.runs import outcome, status
from tests.parallel import in_process
from tests.programs import refusal
from tests.runs.small import resumed_after

SHAPE = {"block_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "precision": "float32"}
TUNED = {"steps": 7, "batch_size": 4, "val_every": 3, "save_every": 2, "log_every": 1, "keep": 9}
TUNED |= {"learning_rate": 3e-3, "reward_answers": 3}
REWARD = "def reward(question, answer, wanted):\n    return answer.count(str(wanted)[0])\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with questions, a reward, and a run that answers."""
    path = tmp_path_factory.mktemp("rewards")
    draw = random.Random(1)
    asked = [(draw.randrange(10), draw.randrange(10)) for _ in range(40)]
    said = [{"prompt": f"{a}+{b}", "completion": str(a + b)} for a, b in asked]
    written(path / "asked.jsonl", lines(*said))
    written(path / "bare.jsonl", lines(*[{"prompt": row["prompt"]} for row in said]))
    turns = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in said]
    written(path / "turns.jsonl", lines(*turns))
    (path / "mine.py").write_text(REWARD)
    run = Run.create(
        text=path / "asked.jsonl", out=path / "base", recipe="chat", steps=20, val_every=0, **SHAPE
    )
    run.train()
    return path


def tuned(folder, out, reward="mine.py", text="asked.jsonl", **fields):
    reward = str(folder / reward) if reward and reward.endswith(".py") else reward
    base = {"init_from": str(folder / "base"), "reward": reward}
    return Run.create(
        text=folder / text, out=folder / out, recipe="chat", **{**TUNED, **base, **fields}
    )


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    "more", [{"reward_beta": 0.0}, {"reward_updates": 3, "reward_beta": 0.1}], ids=str
)
def test_runs_resume_and_are_verified(folder, more, adapted):
    more = more | ({"lora_rank": 4} if adapted else {})
    run = tuned(folder, f"whole {more}", **more)
    run.train()
    assert all(verdict.fault is None for verdict in Run.open(run.path).verify())
    half = tuned(folder, f"half {more}", **more)
    assert outcome(resumed_after(half, 5).path) == outcome(run.path)


def test_a_run_stays_near_the_model_that_it_starts_from_unless_told_otherwise(folder):
    """Without that it may forget all it can, and then no answer earns more than another."""
    assert tuned(folder, "near").settings.rewards.reward_beta == 0.005
    assert tuned(folder, "free", reward_beta=0.0).settings.rewards.reward_beta == 0.0


def test_a_run_that_is_killed_while_it_samples_resumes_to_the_bit(folder):
    whole = tuned(folder, "not killed")
    whole.train()
    program = (
        "import os, signal, sys\nfrom smallmind import Run\n"
        "from smallmind.losses.judge import Judge\n"
        "scores, calls = Judge.scores, []\n"
        "def killed(judge, answers):\n    calls.append(1)\n"
        "    if len(calls) == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return scores(judge, answers)\n"
        "Judge.scores = killed\nRun.open(sys.argv[1]).train()\n"
    )
    run = tuned(folder, "killed")
    run.unlock()
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], check=False)
    assert done.returncode == -9
    Run.open(run.path).resume()
    assert outcome(run.path) == outcome(whole.path)


def test_questions_need_no_answers_unless_the_reward_compares(folder):
    (folder / "short.py").write_text("def reward(question, answer):\n    return -len(answer)\n")
    for text in ("bare.jsonl", "turns.jsonl"):
        run = tuned(folder, f"short {text}", "short.py", text, steps=2)
        assert isinstance(run.data, QuestionsDataset) and run.data.count_of("train") == 36
        run.train()
        assert Run.open(run.path).data.digest == run.data.digest
        with pytest.raises(InputError, match="have no expected answers"):
            run.evaluate()
        said = "compares with the expected answer, and the question '"
        assert said in refusal(lambda text=text: tuned(folder, f"no {text}", "exact", text).train())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"init_from": None}, "needs a model to start from: give one with --init-from"),
        ({"reward": "exakt"}, "neither one of exact, contains, json, length nor a Python file"),
        ({"reward": "missing.py"}, "No such file"),
        ({"reward_answers": 1}, "reward_answers=1 must be at least 2"),
        ({"reward": None}, "needs a reward: add --reward"),
        ({"reward_tokens": 60}, "raise --block-size, or lower --reward-tokens"),
        ({"loss": "dpo"}, "--loss and --reward both set the loss; give only one"),
    ],
)
def test_what_cannot_be_learned_is_refused(folder, fields, words):
    more = {"lora_rank": 2} if "reward_tokens" in fields else {}
    assert words in refusal(lambda: tuned(folder, "refused", **fields | more))
    assert not (folder / "refused").exists()


def test_a_text_without_questions_is_refused(folder):
    written(folder / "plain.txt", "the cat sat on the mat.\n" * 99)
    assert "asks questions, and plain has none" in refusal(
        lambda: tuned(folder, "refused", text="plain.txt")
    )


def test_a_reward_that_fails_is_a_line_and_what_was_trained_is_saved(folder, capsys):
    (folder / "fails.py").write_text(
        "calls = []\ndef reward(question, answer):\n    calls.append(1)\n"
        "    return 1 / (len(calls) < 50)\n"
    )
    out = folder / "fails"
    words = ["train", folder / "asked.jsonl", "--init-from", folder / "base", "--steps", 9]
    words += ["--reward", folder / "fails.py", "--batch-size", 4, "--val-every", 0, "--out", out]
    assert status(*map(str, words)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"fails.py line 4 raised ZeroDivisionError.* for the question '\d\+\d'", said)
    assert Run.open(out).newest().step == 1


def test_a_check_asks_what_answers_earn(folder):
    (folder / "nan.py").write_text("def reward(question, answer):\n    return float('nan')\n")
    with pytest.raises(InputError, match=r"nan\.py returned nan, not a finite number, for the"):
        next(preflight(tuned(folder, "nan", "nan.py").training, untrained=False))
    first = next(preflight(tuned(folder, "checked").training, untrained=False))
    assert first.passed and first.name == "loss of rewards at the start"


def test_the_line_the_metrics_and_the_report_show_rewards(folder, capsys):
    out = folder / "shown"
    words = [folder / "asked.jsonl", "--init-from", folder / "base", "--out", out, "--steps", 4]
    words += ["--reward", folder / "mine.py", "--val-every", 2, "--log-every", 1]
    assert status("train", *map(str, words)) == 0
    printed = capsys.readouterr().out
    assert "held-out reward" in printed and "Final held-out reward:" in printed
    assert "Reward of sampled answers" in printed
    assert "nats" not in printed and "perplexity" not in printed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum({"sampled_reward", "teaching"} <= row.keys() for row in rows) == 4
    assert sum("reward" in row for row in rows) == 2
    assert status("report", str(out), "--out", str(folder / "shown.html")) == 0
    page = (folder / "shown.html").read_text()
    assert "held-out reward" in page and "Reward by step" in page
    assert status("evaluate", str(out)) == 0
    assert "exact answers" in capsys.readouterr().out


def test_a_run_by_rewards_is_for_one_process(folder):
    words = ["train", folder / "asked.jsonl", "--init-from", folder / "base", "--reward", "exact"]
    words += ["--steps", 2, "--batch-size", 4, "--out", folder / "ranks"]
    assert in_process.status(2, *map(str, words)) != 0


@pytest.mark.parametrize("more", [{}, {"reward_updates": 2, "lora_rank": 4}], ids=str)
def test_the_estimate_of_memory_is_what_the_pool_holds(folder, more):
    run = tuned(folder, f"held {more}", val_every=0, steps=6, **more)
    data, settings = run.data, run.settings
    text = TextSize.of(run.files.source.nbytes, data)
    loss = outline_of(settings, None)
    outlined = estimate(settings.model, settings.training, 4, loss=loss, text=text)
    held = outlined.activations
    pool = run.training.model.workspace.pool
    pool.trim()
    before = pool.statistics().bytes_held
    for _ in run.training.steps(settings.training):
        pass
    assert 0 < pool.statistics().bytes_held - before <= held
    decoder = run.training.loss._decoder
    assert outlined.sample > decoder.cache.nbytes > 0
    assert rough_pace(run.training, run.settings.training).step > 0


def test_windows_are_read_as_tokens(folder):
    data = tuned(folder, "windows").data
    whole = data.train[: len(data.train)]
    assert len(whole) == len(data.train) and whole[-1] == 0
    for part in (slice(0, 7), slice(5, data.block_size + 9), slice(len(whole) - 3, len(whole))):
        assert np.array_equal(data.train[part], whole[part])
    starts = np.arange(3) * data.block_size
    assert np.array_equal(data.windows(starts).ids.reshape(-1), whole[: 3 * data.block_size])

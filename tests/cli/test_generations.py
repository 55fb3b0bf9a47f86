"""`smallmind train --generations`: runs one after another, each the teacher of the next."""

import shutil
import signal
from pathlib import Path

import pytest

from smallmind import Run
from smallmind.forecast import pace
from smallmind.training.training import Training
from tests.programs import CATS
from tests.training.test_resume import tensors_of

FLAGS = (
    "--backend numpy --n-layer 1 --n-embd 8 --n-head 2 --block-size 8 --batch-size 2 "
    "--val-batches 1 --warmup-steps 2 --steps 12 --save-every 5 --keep 9 --log-every 1 "
    "--generations 3"
)


@pytest.fixture
def train(tmp_path, monkeypatch, cli):
    """Trains three generations in runs/a."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats.txt").write_text(CATS, encoding="utf-8")

    def train(*more, flags=FLAGS, ends=0):
        return cli("train cats.txt", flags, "--out runs/a", *more, ends=ends)

    return train


def settings_of(name):
    return Run.open(f"runs/{name}").settings


def interrupt(monkeypatch, step):
    """Sends what Ctrl-C sends, after a step."""
    steps = Training.steps

    def interrupted(self, *arguments, **more):
        for record in steps(self, *arguments, **more):
            yield record
            if self.progress.step == step:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Training, "steps", interrupted)


def test_each_generation_learns_from_the_one_before(train, tmp_path):
    printed = train("--seed 7")
    names = "a-generation-1", "a-generation-2", "a"
    found = [settings_of(name) for name in names]
    assert [x.distillation.teacher for x in found] == [
        None,
        *[str(tmp_path / "runs" / name) for name in names[:2]],
    ]
    assert [x.run.seed for x in found] == [7, 8, 9]
    assert {(x.distillation.alpha, x.distillation.temperature) for x in found[1:]} == {(0.7, 1.0)}
    lines = printed.out.splitlines()
    rows = [line.split() for line in lines if line.split()[1:2] and "runs/a" in line.split()[1]]
    finals = [Run.open(f"runs/{x}").metrics().curve("final_loss").values[-1] for x in names]
    shown = [[str(i), f"runs/{x}", f"{finals[i - 1]:.4f}"] for i, x in enumerate(names, 1)]
    assert [row for row in rows if row[0].isdecimal()] == shown
    assert printed.out.count("Next: ") == 1 and "Next: smallmind generate runs/a " in printed.out
    assert ("The last generation is not the best" in printed.out) == (min(finals) < finals[-1])


def test_a_repeated_command_goes_on_where_it_was(train, monkeypatch):
    train()
    later = "a-generation-2", "a"
    whole = {name: tensors_of(Path("runs") / name) for name in later}
    for name in later:
        shutil.rmtree(f"runs/{name}")
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        printed = train(ends=128 + signal.SIGINT).out
    assert "Generation 1 of 3 is finished: runs/a-generation-1" in printed
    assert "Repeat the command to continue with generation 2 of 3." in printed
    assert "Next:" not in printed and not Path("runs/a").exists()
    assert "Resuming after step 7" in train().out
    assert {name: tensors_of(Path("runs") / name) for name in later} == whole
    assert "Generation 3 of 3 is finished: runs/a" in train().out


def test_a_repeated_command_with_other_choices_is_refused(train, cli, tmp_path):
    train()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    (tmp_path / "dogs.txt").write_text(CATS[::-1], encoding="utf-8")
    for words, flags, text in (
        ("created with --seed 1337, not 4", "--seed 4", "cats.txt"),
        ("created with --n-embd 8, not 16", "--n-embd 16", "cats.txt"),
        ("created with another text: choose another --out", "", "dogs.txt"),
    ):
        cli.refuses(words, "train", text, FLAGS, "--out runs/a", flags)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--generations 1 must be at least 2", "--generations 1"),
        ("leave out --teacher", "--teacher runs/b"),
        ("leave out --init-from", "--init-from runs/b"),
        ("leave out --loss", "--loss dpo"),
        ("alpha=1.5 must be", "--alpha 1.5"),
    ],
)
def test_choices_that_a_teacher_excludes_are_refused_before_anything_is_trained(
    train, cli, tmp_path, words, flags
):
    cli.refuses(words, "train cats.txt", FLAGS, "--out runs/a", flags)
    assert not (tmp_path / "runs").exists()


def test_the_share_of_the_teacher_may_be_chosen(train):
    train("--generations 2 --alpha 0.4 --temperature 3")
    found = settings_of("a").distillation
    assert (found.alpha, found.temperature) == (0.4, 3.0)
    assert settings_of("a-generation-1").loss[0] == "cross-entropy"


def test_each_gets_its_share_of_the_minutes_that_are_left(train, monkeypatch):
    monkeypatch.setattr(pace, "measure", lambda *_: pace.Pace(60.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(pace, "refitting", lambda *_: lambda: None)
    train(flags=FLAGS.replace("--steps 12", "--minutes 9"))
    minutes = [settings_of(x).run.minutes for x in ("a-generation-1", "a-generation-2", "a")]
    # None of them takes long here, so the next ones have more.
    assert minutes[0] == pytest.approx(3, abs=0.3)
    assert minutes[1] == pytest.approx(4.5, abs=0.3) and minutes[2] == pytest.approx(9, abs=0.6)


def test_a_learned_vocabulary_is_that_of_the_teacher(train):
    train("--generations 2 --tokenizer bpe --vocab-size 270")
    first, last = (Run.open(f"runs/{name}") for name in ("a-generation-1", "a"))
    assert first.data.tokenizer.digest == last.data.tokenizer.digest


def test_a_resumed_run_takes_no_generations(train, cli):
    cli.refuses("leave out the other flags", "train --resume runs/a --generations 2")

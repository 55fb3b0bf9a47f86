"""`smallmind sweep`: its runs, one that fails, what it refuses, and that it survives its end."""

import os
import signal
import sys
import time

import pytest

from smallmind import Run
from smallmind.cli.program import make_parser
from smallmind.cli.sweep import _flags, _plan
from smallmind.files.lock import is_held
from smallmind.settings.sources import FIELDS, WITHOUT_GAIN
from tests.programs import CATS, PATIENCE, refuses, started

SIZE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "batch_size": 2, "log_every": 1}
SIZE |= {"backend": "numpy", "val_batches": 1, "warmup_steps": 2, "steps": 150, "save_every": 10}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats.txt").write_text(CATS)
    return tmp_path / "runs" / "cats-sweep"


def options(*words):
    return make_parser(["sweep"]).parse_args(["sweep", *words])


def test_every_flag_of_a_setting_with_a_value_takes_several():
    for name, (_, field) in FIELDS.items():
        if name in (
            *WITHOUT_GAIN,
            "vocab_size",
            "document_token",
            "bigram_vocab",
            "lengths",
            "exclude",
            "include",
            "text",
            "out",
            "enable_diagnostics",
            "part_settings",
        ):
            continue
        flag = next(iter(_flags({name: "x"})), "").partition("=")[0]
        if field.type in (bool, bool | None):
            assert getattr(options(flag), name) is True
        elif choices := field.metadata["choices"]:
            two = [str(each) for each in choices][:2]
            assert getattr(options(flag, ",".join(two)), name) == two
        else:
            wanted = ["2", "3"] if "str" in str(field.type) else [2, 3]
            assert getattr(options(flag, "2,3"), name) == wanted
    assert options("--size", "nano,tiny").size == ["nano", "tiny"]
    assert options("--freeze", r"embedding\,blocks.0,head").freeze == ["embedding,blocks.0", "head"]
    assert options("--minutes-each", "1,2").minutes == [1, 2]


def test_seeds_count_from_the_first_and_paths_become_absolute(sweep):
    found = _plan(options("cats.txt", "--seeds", "3", "--seed", "5", "--steps", "3"))
    assert [run.settings["seed"] for run in found.runs] == [5, 6, 7]
    assert found.text == (str(sweep.parents[1] / "cats.txt"),)


def test_what_cannot_be_swept_is_refused_before_anything_is_written(sweep, cli):
    cli.refuses("needs two runs or more", "sweep cats.txt --steps 3")
    cli.refuses("n_embd=9: n_embd=9 must be a multiple", "sweep cats.txt --n-embd 8,9 --n-head 4")
    two = options("cats.txt", "--seeds", "2", "--exclude", "a", "--exclude", "b")
    refuses("takes one --exclude", _plan, two)
    cli.refuses("missing.txt does not exist", "sweep missing.txt --seeds 2")
    cli.refuses("leave out one of the two lists", "sweep cats.txt --seeds 2 --seed 1,2")
    cli.refuses("--jobs 999", "sweep cats.txt --seeds 2 --jobs 999")
    cli.refuses("cannot read nowhere", "sweep --resume nowhere")
    cli.refuses("--resume takes all settings", "sweep --resume nowhere --steps 3")
    assert "must be a number" in cli("sweep --learning-rate 1e-3,fast", ends=2).err
    assert "did you mean tiny" in cli("sweep --size nano,tin", ends=2).err
    assert not sweep.exists() and not (sweep.parents[1] / "nowhere").exists()


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_sweep_that_was_stopped_and_killed_ends_with_the_same_bits(sweep, cli):
    words = [sys.executable, "-m", "smallmind", "sweep", "cats.txt", *FLAGS]
    words += ["--learning-rate=3e-3,1e9", "--jobs=1"]
    first = sweep / "learning_rate=0.003"
    begun = first / "checkpoints" / "step-00000010.safetensors"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with started(words, env=environment) as process:
        wait_until(begun.exists)
        process.send_signal(signal.SIGINT)
        printed = process.communicate()[0]
    assert process.returncode == 130 and "Next: smallmind sweep --resume" in printed
    assert "interrupted after" in printed
    saved = Run.open(first).newest().step
    assert 10 <= saved < 150
    again = sorted(first.glob("checkpoints/*"))
    with started(words, env=environment) as process:
        wait_until(lambda: sorted(first.glob("checkpoints/*")) != again)
        process.kill()
    wait_until(lambda: not is_held(first))  # the run notices that it is alone, and saves
    printed = cli("sweep --resume", sweep)
    assert "1/2" in printed.out and "2/2" in printed.out
    assert "the loss" in printed.out and "learning_rate=1e+09: " in printed.flat
    whole = Run.create(text="cats.txt", out="whole", **SIZE, learning_rate=3e-3)
    whole.train()
    trained, alone = (path / "model.safetensors" for path in (first, whole.path))
    assert trained.read_bytes() == alone.read_bytes()
    # Nothing is trained again, neither what has ended nor what would fail again.
    before = {path: path.stat().st_mtime_ns for path in sweep.glob("*/*")}
    printed = cli("sweep cats.txt --learning-rate 3e-3,1e9", FLAGS)
    assert "2 already done" in printed.out
    assert before == {path: path.stat().st_mtime_ns for path in sweep.glob("*/*")}
    assert "learning_rate=0.003" in cli("compare", sweep).out
    assert f"{sweep.parent.name}/{sweep.name} is a sweep" in cli("runs").flat
    assert "learning_rate=0.003" in cli("runs", sweep).out
    cli.refuses("such as learning_rate=1e+09", "sweep cats.txt --learning-rate 3e-3,1", FLAGS)

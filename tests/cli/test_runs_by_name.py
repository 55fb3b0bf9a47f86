"""Commands accept names of runs and checkpoints, and answer a mistyped word."""

import os
import re
import shutil

import pytest

import smallmind
from smallmind import Run, TransformerModel
from smallmind.cli import main
from smallmind.cli.program import COMMANDS
from smallmind.files.lock import RunLock
from tests.programs import flat, refuses
from tests.runs.small import create


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("named") / "run"
    create(path, save_every=2).train()
    return path


@pytest.fixture
def runs(finished, tmp_path, monkeypatch):
    """The working directory, with two runs in runs/."""
    monkeypatch.chdir(tmp_path)
    for seconds, name in enumerate(("newer", "older")):
        shutil.copytree(finished, tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "config.json", (10**9 - seconds, 10**9 - seconds))
    return tmp_path / "runs"


@pytest.fixture
def shown(cli):
    """Both outputs of a command line, each in one line, without the speed."""

    def shown(*words, ends=0):
        out, err = cli(*words, ends=ends)
        return flat(out), flat(re.sub(r"[\d,]+ tokens, [\d,]+ tokens/s", "", err))

    return shown


SHORT = "--max-tokens 3 --seed 1"


@pytest.mark.parametrize(
    ("name", "flags"),
    [("generate", SHORT), ("evaluate", ""), ("verify", "--digests-only"), ("export-metrics", "")],
)
def test_every_command_names_a_run_in_the_same_way(name, flags, runs, shown):
    by_place = shown(name, "runs/newer", flags)
    assert shown(name, "--run runs/newer", flags) == by_place
    out, err = shown(name, flags)
    assert out == by_place[0] and "The newest run is runs/newer" in err
    if name != "evaluate":  # it takes a text
        _, err = shown(name, "runs/newer --run runs/older", flags, ends=2)
        assert "give one run, not both runs/newer and runs/older" in err
    shutil.rmtree(runs)
    _, err = shown(name, flags, ends=2)
    assert err == "smallmind: no runs in runs; give the directory of one as RUN"


@pytest.mark.parametrize("command", ["evaluate", "train --resume"])
def test_a_name_in_runs_is_enough(command, runs, shown):
    assert shown(command, "newer") == shown(command, "runs/newer")
    (runs.parent / "older").mkdir()  # a path comes first
    assert "older is not a run" in shown(command, "older", ends=2)[1]


def test_evaluate_takes_a_text_after_the_run_or_the_flag(runs, tmp_path, shown):
    (tmp_path / "other.txt").write_text("the cat. " * 20, encoding="utf-8")
    by_place = shown("evaluate runs/older other.txt")
    assert "other, all of it" in by_place[0]
    assert shown("evaluate --run runs/older other.txt") == by_place
    model = runs / "older" / "model.safetensors"
    assert "other, all of it" in shown("evaluate", model, "other.txt")[0]
    assert "name the text to evaluate" in shown("evaluate", model, ends=2)[1]


def test_a_checkpoint_is_chosen_and_named(runs, shown):
    path = runs / "older"
    run = Run.open(path)
    best = run.newest().state["progress"]["best_step"]
    for flags, which, name in (
        ("", None, "the final model, step 6"),
        ("--checkpoint newest", "newest", "the newest checkpoint, step 6"),
        ("--checkpoint 4", 4, "the checkpoint, step 4"),
        ("--checkpoint best", "best", f"the best checkpoint, step {best}"),
    ):
        assert name in shown("evaluate", path, flags)[0]
        out, err = shown("generate", path, flags, SHORT)
        assert err == f"Using {name}, of {path}"
        assert out == flat(smallmind.generate(*run.load(which), max_tokens=3, seed=1))
    for wrong in ("5", "oldest"):
        _, err = shown("generate", path, "--checkpoint", wrong, ends=2)
        assert "choose newest, best or one of the steps 2, 3, 4, 6" in err


def test_a_run_that_is_going_or_was_killed_is_used(runs, shown):
    path = runs / "older"
    (path / "checkpoints" / "step-00000006.safetensors").unlink()
    model = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").unlink()
    (path / "samples.txt").unlink()
    with RunLock(path):
        for command in ("generate", "evaluate"):
            assert "the newest checkpoint, step 4" in " ".join(shown(command, path))
    # Interrupted at step 4, and killed after the checkpoint of step 6.
    shutil.copytree(runs / "newer" / "checkpoints", path / "checkpoints", dirs_exist_ok=True)
    early = Run.open(path)
    model4, tokenizer = early.load(4)
    early.directory.save_model(model4, tokenizer, 4)
    assert "the newest checkpoint, step 6" in shown("evaluate", path)[0]
    shutil.rmtree(path / "checkpoints")
    (path / "model.safetensors").write_bytes(model)
    assert "the final model, step 6" in shown("evaluate", path)[0]


def test_a_run_without_a_checkpoint_is_refused_in_one_line(runs, cli):
    path = runs / "older"
    shutil.rmtree(path / "checkpoints")
    (path / "model.safetensors").unlink()
    for command in ("generate", "evaluate"):
        for flags in ("", "--checkpoint best", "--checkpoint 2"):
            cli.refuses("checkpoint", command, path, flags)


def test_every_loader_reads_checkpoints(finished):
    run = Run.open(finished)
    expected = run.load(4, backend="numpy")[0].flat.data
    file = finished / "checkpoints" / "step-00000004.safetensors"
    assert (TransformerModel.load(file, "numpy").flat.data == expected).all()
    assert (smallmind.load(file, "numpy")[0].flat.data == expected).all()
    assert (smallmind.load(finished, "numpy", checkpoint=4)[0].flat.data == expected).all()
    refuses("is one file; give the run's directory to choose 4", smallmind.load, file, checkpoint=4)
    message = r"checkpoint must be a whole number or str or None, not 4\.0"
    with pytest.raises(TypeError, match=message):
        smallmind.load(finished, checkpoint=4.0)


ONE_FIELD = "a run reads one field: give one, or merge them in a copy of the file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --learningrate 0.1", "unknown flag --learningrate; did you mean --learning-rate?"),
        ("train --learning_rate=0.1", "unknown flag --learning_rate; did you mean --learning-rate"),
        ("train --steps abc", "error: --steps abc must be a whole number"),
        ("train --steps 2.5", "error: --steps 2.5 must be a whole number"),
        ("train --lr fast", "error: --learning-rate fast must be a number"),
        ("estimate --target-batch x", "error: --target-batch x must be a whole number"),
        ("train --no-bais", "unknown flag --no-bais; did you mean --no-bias?"),
        ("generate --temprature 1", "unknown flag --temprature; did you mean --temperature?"),
        ("schedule --optimizer muon", "unknown flag --optimizer; see smallmind schedule --help"),
        ("train --bogus", "unknown flag --bogus; see smallmind train --help"),
        ("--verson", "unknown flag --verson; did you mean --version?"),
        (
            "trian",
            "unknown command 'trian'; did you mean train? Choose from "
            + ", ".join(list(COMMANDS)[:3]),
        ),
        ("", "give a command: train, prepare, check,"),
        ("verify a b", "unexpected argument 'b'"),
        (
            "train --precision float8",
            "--precision: unknown value 'float8'; did you mean float32? Choose from float32, "
            "float16, bfloat16, auto",
        ),
        ("train --size tny", "unknown value 'tny'; did you mean tiny? Choose from nano, tiny,"),
        ("schedule --schedule cosin", "unknown value 'cosin'; did you mean cosine?"),
        ("train --backend cuda", "unknown value 'cuda'. Choose from numba, numpy"),
        # A flag that keeps one value is refused if it is given twice.
        ("schedule --steps 5 --steps 6", "--steps is given twice, as '5' and '6'; leave one"),
        ("schedule --steps=5 --step 5", "--steps is given twice, as '5' and '5'; leave one"),
        ("schedule --lr 1 --learning-rate 2", "--learning-rate/--lr is given twice, as '1' and"),
        ("estimate --bias --no-bias", "--bias/--no-bias is given twice; leave one of them out"),
        ("estimate --micro-batch-size 1 --windows-at-once 2", "--micro-batch-size is given twice"),
        ("generate --json --json", "--json is given twice; leave one of them out"),
        ("evaluate --unknown skip --unknown skip", "--unknown is given twice, as 'skip' and 'skip"),
        (
            "estimate --field prompt --field response",
            f"--field is given twice, as 'prompt' and 'response'; {ONE_FIELD}",
        ),
    ],
)
def test_a_mistyped_word_gets_the_nearest_known_one_and_a_repeated_flag_advice(
    arguments, message, capsys
):
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    error = flat(capsys.readouterr().err)
    assert exit_.value.code == 2 and message in error
    assert "twice" not in message or f"error: {message}" in error


def test_the_learning_rate_has_its_usual_short_name(shown):
    wanted, _ = shown("schedule --learning-rate 0.25")
    assert "2.5e-01" in wanted
    assert shown("schedule --lr 0.25") == (wanted, "")


def test_the_schedule_of_a_run_that_ends_in_its_warmup_says_so(shown):
    warned = shown("schedule --steps 50 --warmup-steps 100")[0]
    assert "The run ends during its warmup of 100 steps" in warned
    assert "during its warmup" not in shown("schedule --steps 50 --schedule one-cycle")[0]

"""`smallmind prepare`, and the other commands on what it writes."""

import json
import os
import re
import shutil
import signal
import sys

import pytest

from smallmind import Tokenizer
from smallmind.corpus import preparation
from smallmind.corpus.shards import open_shards
from smallmind.runs import source
from tests.corpus.reading import written
from tests.corpus.test_shards import flipped
from tests.corpus.writing import contents
from tests.faults.runs import outcome
from tests.programs import CATS, finished, flat, status

pytestmark = pytest.mark.usefixtures("quick_disk")

BPE = ["--tokenizer", "bpe", "--vocab-size", "270"]


TEXT = CATS
SMALL = (
    "--block-size 8 --n-embd 8 --n-layer 1 --n-head 2 --steps 4 --batch-size 2 --val-every 2 "
    "--val-batches 1 --backend numpy"
)


@pytest.fixture
def text(tmp_path):
    return str(written(tmp_path / "texts" / "cats.txt", TEXT))


@pytest.fixture
def shards(text, tmp_path, cli):
    """A prepared directory."""
    cli("prepare", text, BPE, "--out", tmp_path / "shards")
    return str(tmp_path / "shards")


@pytest.fixture
def refused(cli):
    """The one line with which a command is refused."""

    def refused(*words):
        printed = cli(*words, ends=2).err
        assert printed.startswith("smallmind: ") and "\n  " not in printed.rstrip("\n")
        return flat(printed)

    return refused


def test_prepare_shows_what_it_wrote_and_what_comes_next(text, tmp_path, cli):
    out = str(tmp_path / "shards")
    words = "prepare", text, BPE, "--shard-tokens 300 --out", out
    printed = flat(re.sub(r"[│\\]", "", cli(*words).out))
    tokens = open_shards(out)
    files = len(tokens.train.files) + len(tokens.held_out.files)
    for shown in (
        "files 1 ",
        "documents 1 ",
        f"characters {len(TEXT):,} ",
        "vocabulary 270 tokens ",
        f"training {len(tokens.train):,} tokens ",
        f"held out {len(tokens.held_out):,} tokens, the end of the text ",
        f"in {files} files",
        f"Next: smallmind train {out}",
    ):
        assert shown in printed, shown
    assert "was complete already" not in printed
    before = contents(out)
    assert f"{out} was complete already" in cli(*words).flat
    assert contents(out) == before


def test_every_command_takes_a_prepared_directory(shards, text, tmp_path, cli, refused):
    run = tmp_path / "run"
    cli("estimate", shards, SMALL)
    for command in ("check", "train --dry-run"):  # a model this small may not learn enough
        assert status(*command.split(), shards, *SMALL.split()) in (0, 1)
    assert not run.exists()
    assert "documents" in cli("train", shards, SMALL, "--out", run).out
    cli("train --resume", run, "--steps 6")
    cli("generate", run, "--max-tokens 5")
    cli("verify", run)
    cli("export-metrics", run)
    losses = set()
    for words in ("", shards, text):
        printed = cli("evaluate", run, words).flat
        assert "the held-out part" in printed
        losses.add(printed[printed.index("tokens predicted") :])
    assert len(losses) == 1
    other = str(tmp_path / "other")
    cli("prepare", text, "--tokenizer byte --out", other)
    assert "has tokens of another tokenizer" in refused("evaluate", run, other)
    # As the message says:
    cli("prepare", text, "--tokenizer", run / "tokenizer.json", "--out", other + "2")
    cli("evaluate", run, other + "2")


def test_excluded_files_are_left_out_also_after_resuming(text, tmp_path, cli):
    folder = os.path.dirname(text)
    written(tmp_path / "texts" / "node_modules" / "a.js", TEXT)
    flags = "--exclude node_modules"
    printed = cli("prepare", folder, "--out", tmp_path / "shards", flags).out
    assert "Excluded by 'node_modules': 1 path" in printed and "The texts include" not in printed
    state = open_shards(tmp_path / "shards").index.state
    assert state["characters"] == len(TEXT)
    run = tmp_path / "run"
    cli("train", folder, SMALL, flags, "--out", run)
    config = json.loads((run / "config.json").read_text())
    assert config["run"]["exclude"] == "node_modules"
    cli("train --resume", run, "--steps 6")
    printed = cli("prepare", folder, "--out", tmp_path / "all").flat
    assert "The texts include 1 file from node_modules; to leave them out: --exclude" in printed


def test_what_git_ignores_is_left_out_also_after_resuming_but_not_by_runs_from_before(
    text, tmp_path, cli
):
    folder = os.path.dirname(text)
    written(tmp_path / "texts" / ".gitignore", "*.log\n")
    written(tmp_path / "texts" / "a.log", "log " * 30)
    written(tmp_path / "texts" / "b.md", TEXT)
    written(tmp_path / "texts" / "c.min.js", "x=1;" * 30)
    printed = cli("prepare", folder, "--out", tmp_path / "shards").flat
    assert "Left out: 1 path listed in .gitignore; --no-gitignore reads them" in printed
    assert "Not read: 1 file generated or minified" in printed
    assert "kind" in printed and ".md" in printed and ".log" not in printed.replace("*.log", "")
    cli("train", folder, SMALL, "--include *.md", "--out", tmp_path / "run")
    for name, flags, before in (("new", "", False), ("old", "--no-gitignore", True)):
        run = tmp_path / name
        cli("train", folder, SMALL, flags, "--out", run)
        config = json.loads((run / "config.json").read_text())
        assert config["run"]["gitignore"] is not before
        if before:  # as an earlier version wrote it
            del config["run"]["gitignore"], config["run"]["include"]
            (run / "config.json").write_text(json.dumps(config))
        cli("train --resume", run, "--steps 6")


def test_a_tokenizer_may_come_from_a_file(text, tmp_path, cli, refused):
    file = tmp_path / "tokenizer.json"
    Tokenizer(TEXT, "bpe", vocab_size=265).save(file)
    out = str(tmp_path / "shards")
    cli("prepare", text, "--tokenizer", file, "--out", out)
    assert Tokenizer.load(os.path.join(out, "tokenizer.json")).vocab_size == 265
    for name in (str(file), "bpe"):
        cli("train", out, SMALL, "--tokenizer", name, "--out", out + name[-3:])
    message = refused("train", out, SMALL, "--tokenizer byte")
    assert "tokenizer='byte' contradicts" in message and "leave it out" in message


def test_wrong_flags_are_refused_before_anything_is_read(text, tmp_path, cli, refused, monkeypatch):
    monkeypatch.setattr(preparation, "survey", None)
    out = tmp_path / "shards"
    for name in ("index.json", "tokenizer.json"):
        written(tmp_path / "tokens" / name, "{}")
    for words, message in (
        (f"{text} --vocab-size 300", "--vocab-size has no effect with --tokenizer char; it needs"),
        (f"{text} --tokenizer byte --split gpt4", "it needs --tokenizer bpe"),
        (f"{text} --tokenizer bep", "bep"),
        (f"{text} --tokenizer bpe --vocab-size 200", "must be at least 257"),
        (f"{text} --shard-tokens 0", "shard_tokens=0 must be at least 1"),
        (f"{text} --encoding utf-9", "did you mean"),
        (f"{text}x", "does not exist"),
        (f"{tmp_path}/tokens", "contains tokens"),
    ):
        assert message in refused("prepare", words, "--out", out), message
    assert not out.exists()
    assert "--out" in cli("prepare", text, ends=2).err


@pytest.fixture
def continued(cli, tmp_path):
    """Repeats a command that prepares tokens, and compares them with those of a new directory."""

    def continued(*command):
        cli(*command, "--out", tmp_path / "shards")
        cli(*command, "--out", tmp_path / "other")
        assert contents(tmp_path / "shards") == contents(tmp_path / "other")

    return continued


@pytest.mark.parametrize("moment", ["survey", "_fitted", "_train_tokens", "_append"])
def test_ctrl_c_leaves_what_the_same_command_continues(
    text, tmp_path, cli, continued, monkeypatch, moment
):
    original = getattr(preparation, moment)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, moment, interrupted)
        printed = cli("prepare", text, BPE, "--out", tmp_path / "shards", ends=130)
    assert "Interrupted; the same command resumes it" in printed.out
    assert printed.err.endswith("smallmind: interrupted\n")
    assert (tmp_path / "shards").exists() == (moment == "_append")
    continued("prepare", text, BPE)


KILLED = """
import os, sys
from smallmind.files import durable
from smallmind.corpus import preparation
number, place, *arguments = sys.argv[1:]
owner = preparation if place == "survey" else preparation.ShardWriter
original = getattr(owner, place)

def signalled(*some, **more):
    result = original(*some, **more)
    os.kill(os.getpid(), int(number))
    return result

setattr(owner, place, signalled)
from smallmind.cli import main
sys.exit(main(arguments))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals for one process")
@pytest.mark.parametrize(
    ("number", "place", "ends"),
    [
        (signal.SIGKILL, "append", -signal.SIGKILL),
        (signal.SIGTERM, "append", 128 + signal.SIGTERM),
    ],
)
def test_a_process_that_a_signal_ends_is_continued(text, tmp_path, continued, number, place, ends):
    command = ["prepare", text, *BPE, "--out", str(tmp_path / "shards")]
    ended = finished([sys.executable, "-c", KILLED, str(int(number)), place, *command])
    assert ended.returncode == ends, ended.stderr
    assert "Traceback" not in ended.stderr
    continued("prepare", text, BPE)
    assert not (tmp_path / "shards" / ".lock").exists()


def half_prepared(monkeypatch, cli, *command):
    with monkeypatch.context() as patch:
        patch.setattr(preparation.ShardWriter, "append", _interrupt)
        cli(*command, ends=130)


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_large_text_is_kept_beside_the_run_by_itself(text, tmp_path, cli, refused, monkeypatch):
    cli("train", text, SMALL, "--out", tmp_path / "memory" / "run")
    monkeypatch.setattr(source, "LARGE", 0)
    for name in ("check", "estimate"):
        assert status(name, text, *SMALL.split()) in (0, 1)
    assert not (tmp_path / "runs").exists()
    run = tmp_path / "runs" / "run"
    printed = cli("train", text, SMALL, "--out", run).flat
    assert "as it would take much of the memory" in printed and "read from" in printed
    assert outcome(run) == outcome(tmp_path / "memory" / "run")
    os.unlink(text)
    cli("train --resume", run, "--steps 6")
    shutil.rmtree(tmp_path / "runs" / "tokens")
    message = refused("train --resume", run, "--steps 8")
    assert "does not exist" in message and f"smallmind train --resume {run} PATH" in message
    cli("train --resume", run, written(tmp_path / "moved.txt", TEXT), "--steps 8")


def test_an_interrupted_start_on_a_large_text_is_continued(text, tmp_path, cli, monkeypatch):
    monkeypatch.setattr(source, "LARGE", 0)
    command = "train", text, SMALL, "--out", tmp_path / "runs" / "run"
    half_prepared(monkeypatch, cli, *command)
    assert not (tmp_path / "runs" / "run").exists()
    monkeypatch.setattr(preparation, "survey", None)  # it was done
    cli(*command)


def test_the_token_files_of_others_are_trained_on(tmp_path, cli, refused):
    tokenizer = Tokenizer(TEXT, "bpe", vocab_size=270)
    ids = tokenizer.encode(TEXT).astype("<u2")
    file, named = written(tmp_path / "data" / "train.bin", ids.tobytes()), tmp_path / "t.json"
    assert "name their tokenizer with --tokenizer FILE" in refused("train", file, SMALL)
    tokenizer.save(named)
    with_file = file, "--tokenizer", named, SMALL
    cli("estimate", *with_file)
    assert status("check", file, "--tokenizer", named, *SMALL.split()) in (0, 1)
    run = tmp_path / "run"
    cli("train", *with_file, "--out", run)
    cli("train --resume", run, "--steps 6")
    assert "the held-out part" in cli("evaluate", run, file).flat
    timed = SMALL.replace("--steps 4", "--minutes 1")
    assert "For 1 minute:" in cli("estimate", *with_file[:-1], timed).out


def test_prepared_files_are_verified(text, tmp_path, cli):
    shards = tmp_path / "shards"
    cli("prepare", text, "--out", shards)
    assert "All 2 files are intact" in cli("verify", shards).out
    flipped(shards / "train_000000.bin")
    assert "does not match its SHA-256" in cli("verify", shards, ends=2).err


@pytest.mark.parametrize("flags", ["--vocab-size 400", "--split gpt4"])
def test_another_vocabulary_than_that_of_the_tokens_is_refused(shards, cli, flags):
    cli.refuses(f"{flags} contradicts {shards}", "check", shards, "--tokenizer bpe", flags)


def test_token_files_may_be_named_by_a_pattern(text, tmp_path, cli):
    shards = tmp_path / "shards"
    cli("prepare", text, "--shard-tokens 1000 --out", shards)
    (shards / "index.json").unlink()
    cli("train", f"{shards}/train_*.bin", SMALL, "--out", tmp_path / "run")
    cli.refuses("no file matches", "train", f"{shards}/none_*.bin", SMALL)

"""`smallmind prepare`, and the other commands on what it writes."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from smallmind import Tokenizer
from smallmind.cli import main
from smallmind.corpus import preparation
from smallmind.corpus.shards import open_shards
from smallmind.files import durable
from smallmind.runs import source
from tests.cli.test_cli import TEXT, flat
from tests.corpus.files import header
from tests.corpus.reading import written
from tests.corpus.writing import contents
from tests.faults.disk import Quick
from tests.faults.runs import outcome

BPE = ["--tokenizer", "bpe", "--vocab-size", "270"]
SMALL = ["--block-size", "8", "--n-embd", "8", "--n-layer", "1", "--n-head", "2", "--steps", "4"]
SMALL += ["--batch-size", "2", "--val-every", "2", "--val-batches", "1", "--backend", "numpy"]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(durable, "files", Quick())


@pytest.fixture
def text(tmp_path):
    return str(written(tmp_path / "texts" / "cats.txt", TEXT))


@pytest.fixture
def shards(text, tmp_path):
    """A prepared directory."""
    assert main(["prepare", text, *BPE, "--out", str(tmp_path / "shards")]) == 0
    return str(tmp_path / "shards")


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    capsys.readouterr()
    assert main([str(word) for word in arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("smallmind: ") and "\n  " not in printed.rstrip("\n")
    return flat(printed)


def test_prepare_shows_what_it_wrote_and_what_comes_next(text, tmp_path, capsys):
    out = str(tmp_path / "shards")
    assert main(["prepare", text, *BPE, "--out", out, "--shard-tokens", "300"]) == 0
    printed = flat(re.sub(r"[│\\]", "", capsys.readouterr().out))
    tokens = open_shards(out)
    files = len(tokens.train.files) + len(tokens.held_out.files)
    for words in (
        "files 1 ",
        "documents 1 ",
        f"characters {len(TEXT):,} ",
        "vocabulary 270 tokens ",
        f"training {len(tokens.train):,} tokens ",
        f"held out {len(tokens.held_out):,} tokens, the end of the text ",
        f"in {files} files",
        f"Next: smallmind train {out}",
    ):
        assert words in printed, words
    assert "was complete already" not in printed
    before = contents(out)
    assert main(["prepare", text, *BPE, "--out", out, "--shard-tokens", "300"]) == 0
    assert f"{out} was complete already" in flat(capsys.readouterr().out)
    assert contents(out) == before


def test_every_command_takes_a_prepared_directory(shards, text, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["check", shards, *SMALL]) in (0, 1)  # a model this small may not learn enough
    assert main(["estimate", shards, *SMALL]) == 0
    assert main(["train", shards, *SMALL, "--dry-run"]) in (0, 1)
    assert not (tmp_path / "run").exists()
    assert main(["train", shards, *SMALL, "--out", run]) == 0
    assert "documents" in capsys.readouterr().out
    assert main(["train", "--resume", run, "--steps", "6"]) == 0
    assert main(["generate", run, "--max-tokens", "5"]) == 0
    assert main(["verify", run]) == 0
    assert main(["export-metrics", run]) == 0
    capsys.readouterr()
    losses = set()
    for words in ([], [shards], [text]):
        assert main(["evaluate", run, *words]) == 0
        printed = flat(capsys.readouterr().out)
        assert "the held-out part" in printed
        losses.add(printed[printed.index("tokens predicted") :])
    assert len(losses) == 1
    other = str(tmp_path / "other")
    assert main(["prepare", text, "--tokenizer", "byte", "--out", other]) == 0
    message = refused(capsys, "evaluate", run, other)
    assert "has tokens of another tokenizer" in message
    prepared_so = ["--tokenizer", os.path.join(run, "tokenizer.json"), "--out", other + "2"]
    assert main(["prepare", text, *prepared_so]) == 0  # as the message says
    assert main(["evaluate", run, other + "2"]) == 0


def test_a_tokenizer_may_come_from_a_file(text, tmp_path, capsys):
    file = tmp_path / "tokenizer.json"
    Tokenizer(TEXT, "bpe", vocab_size=265).save(file)
    out = str(tmp_path / "shards")
    assert main(["prepare", text, "--tokenizer", str(file), "--out", out]) == 0
    assert Tokenizer.load(os.path.join(out, "tokenizer.json")).vocab_size == 265
    for name in (str(file), "bpe"):
        assert main(["train", out, *SMALL, "--tokenizer", name, "--out", out + name[-3:]]) == 0
    message = refused(capsys, "train", out, *SMALL, "--tokenizer", "byte")
    assert "tokenizer='byte' contradicts" in message and "leave it out" in message


def test_wrong_flags_are_refused_before_anything_is_read(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preparation, "survey", None)
    out = tmp_path / "shards"
    for flags, words in (
        (["--vocab-size", "300"], "--vocab-size has no effect with --tokenizer char; it needs"),
        (["--tokenizer", "byte", "--split", "gpt4"], "it needs --tokenizer bpe"),
        (["--tokenizer", "bep"], "bep"),
        (["--tokenizer", "bpe", "--vocab-size", "200"], "must be at least 257"),
        (["--shard-tokens", "0"], "shard_tokens=0 must be at least 1"),
        (["--encoding", "utf-9"], "did you mean"),
    ):
        assert words in refused(capsys, "prepare", text, *flags, "--out", out), words
    assert "does not exist" in refused(capsys, "prepare", text + "x", "--out", out)
    assert "holds tokens" in refused(
        capsys, "prepare", _directory_of_tokens(tmp_path), "--out", out
    )
    assert not out.exists()
    with pytest.raises(SystemExit):
        main(["prepare", text])
    assert "--out" in capsys.readouterr().err


def _directory_of_tokens(tmp_path):
    for name in ("index.json", "tokenizer.json"):
        written(tmp_path / "tokens" / name, "{}")
    return tmp_path / "tokens"


def test_a_directory_that_cannot_be_written_to_is_refused(text, tmp_path, capsys, monkeypatch):
    assert "cannot make" in refused(capsys, "prepare", text, "--out", text)
    assert "cannot make" in refused(capsys, "prepare", text, "--out", text + "/below")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    message = refused(capsys, "prepare", text, "--out", tmp_path / "closed")
    assert "cannot write to" in message and "choose another directory" in message


def test_a_full_disk_is_said_and_the_same_command_goes_on(text, tmp_path, capsys, monkeypatch):
    class Full(Quick):
        def write(self, file, data):
            if bytes(data[:4]) == header(1)[:4]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(file, data)

    command = ["prepare", text, "--out", str(tmp_path / "shards")]
    with monkeypatch.context() as patch:
        patch.setattr(durable, "files", Full())
        assert main(command) == 1
    printed = capsys.readouterr().err
    assert "No space left on device; make room and start again" in flat(printed)
    assert main(command) == 0
    assert main([*command[:-1], str(tmp_path / "other")]) == 0
    assert contents(tmp_path / "shards") == contents(tmp_path / "other")


@pytest.mark.parametrize("moment", ["survey", "_fitted", "_train_tokens", "_append"])
def test_ctrl_c_leaves_what_the_same_command_continues(text, tmp_path, capsys, monkeypatch, moment):
    command = ["prepare", text, *BPE, "--out", str(tmp_path / "shards")]
    original = getattr(preparation, moment)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, moment, interrupted)
        assert main(command) == 130
    printed = capsys.readouterr()
    assert "Interrupted; the same command resumes it" in printed.out
    assert printed.err.endswith("smallmind: interrupted\n")
    assert (tmp_path / "shards").exists() == (moment == "_append")
    assert main(command) == 0
    assert main([*command[:-1], str(tmp_path / "other")]) == 0
    assert contents(tmp_path / "shards") == contents(tmp_path / "other")


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
    ("number", "place", "status"),
    [
        (signal.SIGKILL, "survey", -signal.SIGKILL),
        (signal.SIGKILL, "append", -signal.SIGKILL),
        (signal.SIGTERM, "append", 128 + signal.SIGTERM),
        (signal.SIGINT, "append", 130),
    ],
)
def test_a_process_that_a_signal_ends_is_continued(text, tmp_path, number, place, status):
    command = ["prepare", text, *BPE, "--out", str(tmp_path / "shards")]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(int(number)), place, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr
    assert main(command) == 0
    assert main([*command[:-1], str(tmp_path / "other")]) == 0
    assert contents(tmp_path / "shards") == contents(tmp_path / "other")
    assert not (tmp_path / "shards" / ".lock").exists()


def half_prepared(monkeypatch, command):
    with monkeypatch.context() as patch:
        patch.setattr(preparation.ShardWriter, "append", _interrupt)
        assert main(command) == 130


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_what_is_not_finished_is_finished_as_the_message_says(text, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "shards")
    command = ["prepare", text, *BPE, "--out", out]
    half_prepared(monkeypatch, command)
    for name in ("train", "check", "estimate"):
        message = refused(capsys, name, out, *SMALL)
        assert f"run `smallmind prepare ... --out {out}` again, as before" in message
    assert main(command) == 0
    assert main(["train", out, *SMALL, "--out", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("is_complete", [True, False])
def test_other_texts_or_settings_are_refused_with_advice_that_works(
    text, tmp_path, capsys, monkeypatch, is_complete
):
    out = str(tmp_path / "shards")
    command = ["prepare", text, *BPE, "--out", out]
    if is_complete:
        assert main(command) == 0
    else:
        half_prepared(monkeypatch, command)
    other = ["prepare", text, "--out", out]
    assert "(tokenizer); choose another directory, or remove it" in refused(capsys, *other)
    written(tmp_path / "texts" / "cats.txt", TEXT + "more")
    message = refused(capsys, *command)
    assert "(files); choose another directory, or remove it to begin again" in message
    assert main([*command[:-1], out + "2"]) == 0
    shutil.rmtree(out)
    assert main(command) == 0
    assert contents(out) == contents(out + "2")


def test_a_large_text_is_kept_beside_the_run_by_itself(text, tmp_path, capsys, monkeypatch):
    assert main(["train", text, *SMALL, "--out", str(tmp_path / "memory" / "run")]) == 0
    monkeypatch.setattr(source, "LARGE", 0)
    for name in ("check", "estimate"):
        assert main([name, text, *SMALL]) in (0, 1)
    assert not (tmp_path / "runs").exists()
    run = tmp_path / "runs" / "run"
    capsys.readouterr()
    assert main(["train", text, *SMALL, "--out", str(run)]) == 0
    printed = flat(capsys.readouterr().out)
    assert "as it is large for the memory" in printed and "read from" in printed
    assert outcome(run) == outcome(tmp_path / "memory" / "run")
    os.unlink(text)
    assert main(["train", "--resume", str(run), "--steps", "6"]) == 0
    shutil.rmtree(tmp_path / "runs" / "tokens")
    message = refused(capsys, "train", "--resume", run, "--steps", "8")
    assert "does not exist" in message and f"smallmind train --resume {run} PATH" in message
    moved = str(written(tmp_path / "moved.txt", TEXT))
    assert main(["train", "--resume", str(run), moved, "--steps", "8"]) == 0


def test_an_interrupted_start_on_a_large_text_is_continued(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(source, "LARGE", 0)
    command = ["train", text, *SMALL, "--out", str(tmp_path / "runs" / "run")]
    half_prepared(monkeypatch, command)
    assert not (tmp_path / "runs" / "run").exists()
    monkeypatch.setattr(preparation, "survey", None)  # it was done
    assert main(command) == 0


def test_the_token_files_of_others_are_trained_on(tmp_path, capsys):
    tokenizer = Tokenizer(TEXT, "bpe", vocab_size=270)
    ids = tokenizer.encode(TEXT)
    file, named = (
        written(tmp_path / "data" / "train.bin", ids.astype("<u2").tobytes()),
        tmp_path / "t.json",
    )
    assert "name their tokenizer with --tokenizer FILE" in refused(capsys, "train", file, *SMALL)
    tokenizer.save(named)
    with_file = [str(file), "--tokenizer", str(named), *SMALL]
    assert main(["estimate", *with_file]) == 0
    assert main(["check", *with_file]) in (0, 1)
    assert main(["train", *with_file, "--out", str(tmp_path / "run")]) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "6"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), str(file)]) == 0
    assert "the held-out part" in flat(capsys.readouterr().out)
    without_steps = [word for word in with_file if word not in ("--steps", "4")]
    assert main(["estimate", *without_steps, "--minutes", "1"]) == 0
    assert "For 1 minutes" in capsys.readouterr().out


def test_tokens_and_texts_are_not_mixed(shards, text, tmp_path, capsys):
    for paths in ([shards, text], [text, shards]):
        message = refused(capsys, "train", *paths, *SMALL)
        assert message == (f"smallmind: {shards} holds tokens: give it alone, without other texts")
    inside = str(shutil.move(shards, tmp_path / "texts" / "shards"))
    assert main(["train", str(tmp_path / "texts"), *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert f"Skipped: {inside} holds tokens" in flat(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["train_000000.bin", "tokenizer.json"])
def test_a_directory_that_lacks_a_file_says_what_to_do(shards, text, tmp_path, capsys, name):
    run = str(tmp_path / "run")
    assert main(["train", shards, *SMALL, "--out", run]) == 0
    os.unlink(os.path.join(shards, name))
    advice = "restore it, or remove the directory and prepare it again"
    for command in (["train", shards, *SMALL], ["train", "--resume", run, "--steps", "6"]):
        assert advice in refused(capsys, *command)
    shutil.rmtree(shards)
    assert main(["prepare", text, *BPE, "--out", shards]) == 0
    assert main(["train", "--resume", run, "--steps", "6"]) == 0


def test_prepared_files_are_verified(text, tmp_path, capsys):
    shards = tmp_path / "shards"
    assert main(["prepare", text, "--out", str(shards)]) == 0
    assert main(["verify", str(shards)]) == 0
    assert "All 2 files are sound" in capsys.readouterr().out
    damaged = bytearray((shards / "train_000000.bin").read_bytes())
    damaged[-1] ^= 1
    (shards / "train_000000.bin").write_bytes(damaged)
    assert main(["verify", str(shards)]) == 2
    assert "does not match its SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--vocab-size", "400"], ["--split", "gpt4"]])
def test_another_vocabulary_than_that_of_the_tokens_is_refused(text, tmp_path, capsys, flags):
    shards = str(tmp_path / "shards")
    assert main(["prepare", text, *BPE, "--out", shards]) == 0
    assert main(["check", shards, "--tokenizer", "bpe", *flags]) == 2
    assert f"{flags[0]} {flags[1]} contradicts {shards}" in capsys.readouterr().err


def test_token_files_may_be_named_by_a_pattern(text, tmp_path, capsys):
    shards = tmp_path / "shards"
    assert main(["prepare", text, "--out", str(shards), "--shard-tokens", "1000"]) == 0
    (shards / "index.json").unlink()
    pattern = str(shards / "train_*.bin")
    small = ["--block-size", "8", "--n-layer", "1", "--n-embd", "16", "--steps", "2"]
    assert main(["train", pattern, *small, "--out", str(tmp_path / "run")]) == 0
    assert main(["train", str(shards / "none_*.bin"), *small]) == 2
    assert "no file matches" in capsys.readouterr().err

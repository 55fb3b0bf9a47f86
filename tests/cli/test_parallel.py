"""A rank prints its last words before it ends all: mpiexec gets the time to read them."""

import io
import os
import sys
import threading
from contextlib import contextmanager

import pytest

from smallmind.cli import parallel

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes do not tell what they hold")
if_pipes_tell = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="pipes may not tell what they hold"
)
WORDS = b"ZeroDivisionError: a bug\n"


@contextmanager
def said(monkeypatch):
    """Words on a standard error that is a pipe -> the end that reads it."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading, "rb", 0) as reader, open(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        sys.stderr.write(WORDS.decode())
        yield reader


@if_pipes_tell
def test_waits_until_everything_is_read(monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE", 60.0)
    with said(monkeypatch) as reader:
        sys.stderr.flush()
        waiting = threading.Thread(target=parallel._wait_until_read)
        waiting.start()
        assert reader.read(5) == WORDS[:5]
        waiting.join(0.2)
        assert waiting.is_alive()
        assert reader.read(len(WORDS)) == WORDS[5:]
        waiting.join(30.0)
        assert not waiting.is_alive()


def test_gives_up_waiting_for_a_reader(monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE", 0.01)
    with said(monkeypatch) as reader:
        parallel._wait_until_read()
        assert reader.read(len(WORDS)) == WORDS


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, io.StringIO("words"), closed()])
def test_other_streams_are_not_waited_for(stream, monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE", float("inf"))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    parallel._wait_until_read()


def test_a_file_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE", float("inf"))
    with open(tmp_path / "errors", "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        sys.stderr.write(WORDS.decode())
        parallel._wait_until_read()
    assert (tmp_path / "errors").read_bytes() == WORDS

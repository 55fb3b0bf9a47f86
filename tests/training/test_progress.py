"""Progress in scripts and notebooks, and a clock that does not count compiling."""

import re
import time

from smallmind import Run, Tokenizer, Training, TransformerModel
from smallmind.console import activity
from tests.cli.test_live_line import Terminal

HOUR = 3600 * 10**9  # nanoseconds
TEXT = "the cat sat on the mat. " * 100


def new_training():
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 8, 8, 1, 1, backend="numpy")
    return Training(model, tokenizer, TEXT, block_size=8, batch_size=2)


def test_progress_is_a_line_on_standard_error(capsys):
    plain = new_training().train(steps=3, val_every=0, log_every=1)
    assert capsys.readouterr() == ("", "")
    shown = new_training().train(steps=3, val_every=0, log_every=1, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("step 1/3  training loss ")
    assert [r.loss for r in shown] == [r.loss for r in plain]


def test_a_terminal_shows_progress_and_compiling_unless_told_otherwise(tmp_path, monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(activity, "_state", activity._State())
    few = {"backend": "numpy", "n_layer": 1, "n_embd": 8, "n_head": 1, "block_size": 8}
    during = []

    def compile_one(_record):
        activity.begin_compiling()
        during.append(terminal.lines())
        activity.end_compiling()

    def run(name):
        return Run.create(text=TEXT, out=tmp_path / name, steps=3, log_every=1, **few)

    run("silent").train(compile_one, progress=False)
    new_training().train(steps=3, val_every=0, progress=False)
    assert terminal.lines() == [] and not any(during)
    during.clear()
    run("shown").train(compile_one)
    assert re.search("3/3  (training )?loss ", terminal.lines()[-1])
    assert all(lines[-1].startswith("Compiling kernels for this CPU") for lines in during)
    run("resumed").train(progress=False)
    Run.open(tmp_path / "resumed").resume(steps=5)
    assert re.search("5/5  (training )?loss ", terminal.lines()[-1])
    new_training().train(steps=4, val_every=0)
    assert re.search("4/4  (training )?loss ", terminal.lines()[-1])  # the longer one if it fits


def test_compiling_does_not_count_as_time_of_steps_or_evaluations(monkeypatch):
    """The clock jumps by an hour wherever a kernel compiles."""
    now = [0]  # nanoseconds

    def perf_counter_ns():
        now[0] += 1_000_000
        return now[0]

    def compiling(method):
        def slow(*arguments, **settings):
            activity.begin_compiling()
            now[0] += HOUR
            activity.end_compiling()
            return method(*arguments, **settings)

        return slow

    training = new_training()
    monkeypatch.setattr(activity, "_state", activity._State())
    monkeypatch.setattr(time, "perf_counter_ns", perf_counter_ns)
    for name in ("loss_and_gradients", "losses"):
        monkeypatch.setattr(TransformerModel, name, compiling(getattr(TransformerModel, name)))
    records = training.train(steps=4, val_every=2, val_batches=1, log_every=1)
    assert now[0] > 4 * HOUR
    assert training.progress.seconds["total"] < 1
    assert 0 < training.progress.seconds["evaluations"] < 1
    assert all(r.tokens_per_second > 1000 for r in records if hasattr(r, "tokens_per_second"))

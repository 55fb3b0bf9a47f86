"""Settings, metrics and states from anywhere: refused in one line, at once, or read."""

import contextlib
import copy
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smallmind import InputError, ModelConfig, RunConfig, TrainingConfig, TransformerModel
from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Line, Panel
from smallmind.charts.svg import picture
from smallmind.cli.console import SILENT_SECONDS, Console, error_line
from smallmind.console.table import Table
from smallmind.runs.directory import RunDirectory
from smallmind.runs.metrics import read_metrics
from smallmind.settings.settings import SECTIONS
from smallmind.settings.sources import FIELDS, read_settings
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import newest, save
from smallmind.training.state import RunState
from smallmind.views.report import report
from tests.faults.runs import status, train
from tests.faults.test_hostile_files import anything
from tests.views.written import evaluation, step, write

HUGE = [10**9, 10**18, 10**400]
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")


def assert_one_line(capsys, start="smallmind: "):
    error = capsys.readouterr().err
    assert error.startswith(start) and error.count("\n") == 1, error
    assert len(error) < 400
    return error


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", ["n_layer", "n_embd", "n_head", "block_size", "vocab_size"])
def test_a_model_too_large_for_any_machine_is_refused(name, value):
    with pytest.raises(InputError, match=f"{name}=.* must be at least 1 and at most") as caught:
        ModelConfig(**{name: value})
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("value", HUGE)
def test_a_batch_too_large_for_any_machine_is_refused(value):
    with pytest.raises(InputError, match=r"batch_size=.* must be at least 1 and at most 65536"):
        RunConfig(batch_size=value)


def test_any_whole_number_is_below_2_to_the_63():
    assert TrainingConfig(steps=2**63 - 1).steps == 2**63 - 1
    with pytest.raises(InputError, match="at least 0 and below 9223372036854775808"):
        TrainingConfig(steps=2**63)
    for value in (10**400, 16**5000):  # Python refuses to print the second
        with pytest.raises(InputError, match=r"steps=\(a number of about \d+ digits\)"):
            TrainingConfig(steps=value)
        with pytest.raises(InputError, match="must be finite and at least 0"):
            TrainingConfig(learning_rate=value)


SETTINGS = {
    "deep.toml": "[model]\nn_layer = " + "[" * 100_000,
    "deep.json": '{"model": ' + "[" * 100_000,
    "nested.toml": "[model]\nn_layer = " + "[" * 150 + "]" * 150,
    "digits.toml": "[model]\nn_layer = " + "9" * 5000,
    "hexadecimal.toml": "[model]\nn_layer = 0x" + "f" * 5000,
    "digits.json": '{"model": {"n_layer": ' + "9" * 5000 + "}}",
    "format.json": '{"format": Infinity, "model": {}}',
    "unknown.json": '{"model": {"layers": 3}}',
    "list.json": '{"model": {}, "training": []}',
    "infinity.json": '{"model": {"dropout": Infinity}}',
    "escape.toml": '[model]\n"\\u001b[2J\\n" = 3',
    "surrogate.json": '{"model": {}, "distillation": {"teacher": "\\ud800"}}',
    "large.toml": "#" * 2_000_000,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_hostile_settings_are_refused(tmp_path, cli, name):
    (tmp_path / name).write_text(SETTINGS[name], encoding="utf-8")
    cli.refuses(name, "estimate --config", tmp_path / name)


settings = st.fixed_dictionaries(
    {},
    optional={
        section: st.dictionaries(st.sampled_from([*FIELDS, "x"]), anything, max_size=3) | anything
        for section in (*SECTIONS, "format")
    },
)
lines = st.lists(
    st.builds(lambda value: json.dumps(value).encode(), anything)
    | st.builds(lambda value: json.dumps({"step": value, "loss": value}).encode(), anything)
    | st.binary(max_size=20),
    max_size=4,
)


def check_settings(directory, fields):
    """They are read or refused, as the config.json of a run."""
    file = directory / "config.json"
    file.write_text(json.dumps(fields), encoding="utf-8")
    try:
        read_settings(file)
    except InputError as error:
        assert "\n" not in str(error).replace(str(file), "")
    with contextlib.suppress(InputError):
        RunDirectory(directory).load_config()


def check_metrics(directory, content):
    """They are exported or refused, and cut where a run resumes."""
    (directory / "metrics.jsonl").write_bytes(b"\n".join(content))
    with contextlib.suppress(InputError):
        read_metrics(directory).to_csv()
    RunDirectory(directory).cut_metrics(3)


@hypothesis_settings(max_examples=100, deadline=None)
@given(fields=settings, content=lines)
def test_any_settings_and_metrics_are_read_or_refused(tmp_path_factory, fields, content):
    directory = tmp_path_factory.getbasetemp() / "any-settings"
    directory.mkdir(exist_ok=True)
    check_settings(directory, fields)
    check_metrics(directory, content)


def within_seconds(work, seconds=20):
    """True if work ends in time; it would wait for ever on a FIFO that no other end has opened."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@POSIX
def test_a_config_that_is_not_a_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    messages = []

    def read():
        for file in (tmp_path / "pipe", "/dev/zero", "/dev/tty"):
            with pytest.raises(InputError) as caught:
                read_settings(type(tmp_path)(file))
            messages.append(str(caught.value))

    assert within_seconds(read)
    assert len(messages) == 3 and all("not a regular file" in text for text in messages[:2])


@POSIX
@pytest.mark.parametrize("kind", ["pipe", "zero", "link"])
def test_metrics_and_samples_are_regular_files_or_refused_without_waiting(tmp_path, kind):
    directory, elsewhere = RunDirectory(tmp_path), tmp_path / "elsewhere"
    elsewhere.write_text("mine\n")
    for name in ("metrics.jsonl", "samples.txt"):
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("/dev/zero" if kind == "zero" else elsewhere)
    done = []

    def use():
        with pytest.raises(InputError, match=r"(not a regular file|a symbolic link).*; remove it"):
            directory.save_sample(1, "text")
        with pytest.raises(OSError, match="not a regular file; remove it"):
            directory.flush()
        with pytest.raises(InputError, match=r"not a regular file|a symbolic link"):
            directory.cut_metrics(3)
        if kind != "link":  # that may be read, and holds no records
            with pytest.raises(InputError, match="not a regular file"):
                read_metrics(tmp_path)
        done.append(True)

    assert within_seconds(use) and done
    assert elsewhere.read_text() == "mine\n"


METRICS = [
    b'{"step": Infinity, "loss": 1}',
    b'{"step": 1e999, "loss": 1}',
    b'{"step": NaN}',
    b'{"step": true, "loss": 1}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"step": 1, "loss": ' + b"[" * 100_000,
    b'{"step": 1, "findings": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"step": 2, "loss": 1' + b"0" * 399 + b"}",
    b'{"step": 3, "\\ud800": "\\udfff\\u001b[2J"}',
]


def test_hostile_metrics_are_exported_or_skipped(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(METRICS) + b"\n")
    assert status("export-metrics", tmp_path, "--out", tmp_path / "table.csv") == 0
    assert b"\\ud800" in (tmp_path / "table.csv").read_bytes()
    assert status("export-metrics", tmp_path) == 0
    error = capsys.readouterr().err
    assert "Skipped cut or damaged lines" in error and "Traceback" not in error


def test_a_run_with_hostile_metrics_resumes(tmp_path):
    assert train(tmp_path, "--steps", "2", "--backend", "numpy") == 0
    run = tmp_path / "run"
    (run / "model.safetensors").unlink()
    (run / "metrics.jsonl").write_bytes(b"\n".join(METRICS) + b"\n")
    assert status("train", "--resume", run) == 0


@POSIX
def test_names_that_are_not_utf_8_are_refused_before_anything_is_made(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert status("train", "--steps", "1", "--out", os.fsdecode(b"run\xff")) == 2
    assert "is not valid UTF-8; rename it" in assert_one_line(capsys)
    assert list(tmp_path.iterdir()) == []


MISSING = object()
WRONG = [MISSING, None, "x", [], {}, True, -1, 0.5, 10**400, 1e308, [[]], {"a": 1}]


def leaves(value, path=()):
    """The paths to all values inside dictionaries."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))


def changed(state, path, value):
    state = copy.deepcopy(state)
    if not path:
        return {}
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


def test_states_of_the_wrong_type_are_refused_although_their_digests_are_right(tmp_path, capsys):
    """Each resumes, or is refused in one line: never a traceback in the middle of a run."""
    assert train(tmp_path, "--steps", "3", "--backend", "numpy", "--save-every", "1") == 0
    run = tmp_path / "run"
    sound = newest(run)[0]
    (run / "model.safetensors").unlink()
    paths = [path for path in leaves(sound.state) if path[:1] not in (("model",), ("config",))]
    for number, path in enumerate(paths):
        state = changed(sound.state, path, WRONG[number % len(WRONG)])
        save(run, RunState(sound.step, sound.tensors, state), keep=1)
        capsys.readouterr()
        (run / "model.safetensors").unlink(missing_ok=True)
        (run / "samples.txt").unlink(missing_ok=True)
        found = status("train", "--resume", run)
        error = capsys.readouterr().err
        assert found in (0, 1, 2), path
        assert "Traceback" not in error and error.count("\n") <= 1, path


@pytest.mark.parametrize("wrong", ["x", [], None, 3, {"n_layer": "2"}, {"n_layer": 10**18}])
def test_a_checkpoint_whose_model_is_no_model_is_refused(tmp_path, capsys, wrong):
    save(tmp_path, RunState(1, {}, {"model": wrong, "tokenizer": {"kind": "byte"}}))
    assert status("generate", "--run", tmp_path) == 2
    assert_one_line(capsys)


def test_a_tokenizer_of_half_characters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        Tokenizer.from_state({"kind": "char", "characters": "a\ud800"})


@pytest.mark.parametrize(
    "config", ['{"n_layer": 1000000000000}', "[", "[]", "3", '{"n_layer": "x"}', '{"layers": 1}']
)
def test_a_teacher_that_describes_no_model_is_refused(tmp_path, capsys, config):
    from smallmind.files import safetensors

    path = tmp_path / "teacher.safetensors"
    safetensors.write(path, {}, {"format": "smallmind model 1", "config": config})
    for arguments in (["estimate", "--teacher", path], ["generate", "--run", path]):
        assert status(*arguments) == 2
        assert_one_line(capsys)


class Stream:
    """Collects text written to a terminal or a pipe."""

    encoding = "utf-8"

    def __init__(self, is_terminal=True):
        self.text = ""
        self.is_terminal = is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self.is_terminal


HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\rd\x08\x7f\u202ee\u2067\u200f\u061c\0"
NOT_SHOWN = "\x1b\x07\x9b\r\x08\x7f\u202e\u2067\u200f\u061c\0"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    "show",
    [
        lambda console: console.line(HOSTILE),
        lambda console: console.warning(HOSTILE),
        lambda console: console.piece(HOSTILE),
        lambda console: console.quote(HOSTILE),
        lambda console: console.drawing(HOSTILE),
        lambda console: console.command("Resume:", [HOSTILE]),
        lambda console: console.table("Model", [["name", HOSTILE]]),
        lambda console: console.drawing(Table("", [[HOSTILE]], ["name"]).columns()),
        lambda console: console.live(HOSTILE),
    ],
)
def test_control_characters_are_shown_nowhere(show, is_terminal):
    stream = Stream(is_terminal)
    console = Console(stream)
    console._printed -= SILENT_SECONDS  # so that a pipe gets the live line too
    show(console)
    text = stream.text.removeprefix("\r").removeprefix("\x1b[K")  # those of the live line
    assert "b" in text and not any(c in text for c in NOT_SHOWN)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_in_errors_are_not_shown(monkeypatch, is_terminal):
    stream = Stream(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    error_line(HOSTILE)
    assert "b" in stream.text and not any(c in stream.text for c in NOT_SHOWN)


def test_control_characters_get_into_no_page_and_no_picture(tmp_path):
    """Names, settings, samples and findings of a run, in its report and in a notebook."""
    record = {"findings": [{"name": HOSTILE, "message": HOSTILE}]}
    saved = {"smallmind": HOSTILE, "python": HOSTILE}
    run = write(tmp_path / "run", step(1), step(2) | record, evaluation(2, 1.0), saved=saved)
    name = HOSTILE.replace("\0", "").replace("/", "")
    run = run.rename(tmp_path / name) if os.name == "posix" else run
    (run / "samples.txt").write_text(f"--- step 2\n{HOSTILE}\n", encoding="utf-8")
    (run / "profile.json").write_text(json.dumps({"rows": [{"path": [HOSTILE], "own": 10**9}]}))
    lines = [Line(HOSTILE, Curve([1, 2], [1, 2], [1, 2]))] * 2
    chart = picture(Figure(HOSTILE, [Panel(HOSTILE, HOSTILE, lines)], HOSTILE))
    table = Table(HOSTILE, [[HOSTILE]], [HOSTILE])
    for page in (report(run), chart, table.html(), str(table)):
        assert "\ufffd" in page and not any(c in page for c in NOT_SHOWN)


def test_generated_control_characters_are_exact_in_json_and_reach_no_terminal(
    tmp_path, capsys, monkeypatch
):
    tokenizer = Tokenizer("\x1b\x9b\r\x07")
    model = TransformerModel(tokenizer.vocab_size, 8, 8, 1, 1, backend="numpy")
    model.save(tmp_path / "model.safetensors", {"tokenizer": json.dumps(tokenizer.state())})
    generate = "generate", "--run", tmp_path / "model.safetensors", "--max-tokens", "9"
    assert status(*generate) == 0
    assert set(capsys.readouterr().out) == {"\ufffd", "\n"}
    assert status(*generate, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["text"]) <= set("\x1b\x9b\r\x07")
    terminal = Stream()
    monkeypatch.setattr("sys.stdout", terminal)
    assert status(*generate) == 0
    assert set(terminal.text) == {"\ufffd", "\n"} and len(terminal.text) >= 9


def test_the_weights_of_a_state_are_not_needed_to_refuse_it(tmp_path, capsys):
    """A re-signed state without its parameters."""
    assert train(tmp_path, "--steps", "1", "--backend", "numpy") == 0
    run = tmp_path / "run"
    sound = newest(run)[0]
    (run / "model.safetensors").unlink()
    save(run, RunState(sound.step, {"x": np.zeros(1)}, sound.state), keep=1)
    capsys.readouterr()
    assert status("train", "--resume", run) == 2
    assert_one_line(capsys)

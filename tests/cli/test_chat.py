"""`smallmind chat`: answers on a pipe, commands, JSON, Ctrl-C; and prompts in a template."""

import io
import json

import pytest

import smallmind
from smallmind import Run
from smallmind.cli import chat as command
from smallmind.cli import main

FIELDS = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 128, "batch_size": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    said = [(f"{i}?", "abc"[i]) for i in (0, 1, 2)]
    orders = [(said[i], said[j], said[k]) for i in range(3) for j in range(3) for k in range(3)]
    file = folder / "chats.jsonl"
    with file.open("w") as lines:
        for order in orders * 3:
            turns = [
                {"role": role, "content": text}
                for pair in order
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            lines.write(json.dumps({"messages": turns}) + "\n")
    Run.create(text=file, out=folder / "run", steps=150, dropout=0.0, **FIELDS).train()
    return folder / "run"


@pytest.fixture
def typed(run, monkeypatch, capsys):
    """Types lines into `smallmind chat` -> what it printed."""

    def answer(*lines, flags=("--temperature", "0")):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", str(run), *flags]) == 0
        return capsys.readouterr()

    return answer


def test_each_line_is_a_question(typed):
    printed = typed("0?", "", "2?", "1?")
    assert printed.out == "a\nc\nb\n"
    assert "Talking to the final model" in printed.err


def test_json_has_a_line_per_answer(typed):
    printed = typed("0?", "1?", flags=("--temperature", "0", "--json"))
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["content"] for line in lines] == ["a", "b"]
    assert all(line["role"] == "assistant" and line["ended"] == "end" for line in lines)


def test_commands(typed, tmp_path):
    file = tmp_path / "saved.json"
    printed = typed("0?", f"/save {file}", "/undo", "/undo", "/system You are b.", "/temperature 2")
    assert json.loads(file.read_text()) == {
        "messages": [{"role": "user", "content": "0?"}, {"role": "assistant", "content": "a"}]
    }
    for words in (
        "Wrote 2 turns to",
        "Removed your last question and its answer",
        "Nothing to undo",
        "New conversation, system prompt: You are b.",
        "Temperature: 2",
    ):
        assert words in " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/foo", "unknown command /foo. Commands: /system, /reset"),
        ("/temperature x", "/temperature needs a number"),
        ("/temperature -1", "/temperature needs a number of at least 0"),
        ("/save", "/save needs a file"),
        ("/save /", "cannot write /"),
        ("\u6f22", "never seen the character"),
        ("a" * 99, "the question has"),
    ],
)
def test_what_cannot_be_done_is_said_and_loses_nothing(typed, line, words):
    printed = typed("0?", line, "2?")
    assert printed.out == "a\nc\n" and words in " ".join(printed.err.split())


def test_a_saved_conversation_can_be_trained_on(typed, tmp_path):
    file = tmp_path / "saved.jsonl"
    typed("0?", "1?", f"/save {file}")
    file.write_text(file.read_text() * 2)
    run = Run.create(text=file, out=tmp_path / "run", steps=1, **FIELDS)
    assert run.files.source.report.conversations == 2 and run.files.source.report.turns == 8


def test_ctrl_c_stops_the_answer_not_the_program(typed, monkeypatch):
    answer, calls = command._answer, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        answer(*arguments)

    monkeypatch.setattr(command, "_answer", interrupted)
    assert typed("0?", "2?").out == "\nc\n"


class Unreadable(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def readline(self, *_):
        raise self.error


@pytest.mark.parametrize("words", [["chat"], ["generate", "-i"]])
@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (None, "standard input is closed: type lines in a terminal, or pipe them in"),
        (Unreadable(IsADirectoryError(21, "Is a directory")), "standard input: Is a directory"),
        (Unreadable(io.UnsupportedOperation("not readable")), "it is not open for reading"),
    ],
)
def test_input_that_cannot_be_read_is_said_in_a_line(
    run, monkeypatch, capsys, words, stream, message
):
    monkeypatch.setattr("sys.stdin", stream)
    assert main([*words, str(run)]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith("smallmind: ") and printed[-1].endswith(message)


def test_a_text_is_generated_without_an_input(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", str(run), "--prompt", "0", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("0")


def test_what_is_not_utf8_is_a_question_too(run, monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"\xff?\n0?\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["chat", str(run), "--temperature", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("a\n") and "never seen the character '\ufffd'" in printed.err


def test_a_long_conversation_says_that_it_drops_turns(typed):
    printed = typed(*["0?"] * 6)
    assert "the model no longer sees the first" in " ".join(printed.err.split())


def test_a_model_of_texts_is_refused_in_a_line(tmp_path, capsys):
    run = Run.create(text="abc\n" * 200, out=tmp_path / "run", steps=1, **FIELDS)
    run.train(progress=False)
    assert main(["chat", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "was not trained on conversations" in message and "--init-from" in message


def test_a_template_is_for_prompts_that_are_typed(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    flags = ["--temperature", "0", "--max-tokens", "1"]
    assert main(["generate", str(run), "-i", "--template", "a{}b\\n", *flags]) == 0
    assert capsys.readouterr().out.startswith("aabb\n")
    assert main(["generate", str(run), "--template", "{}", *flags]) == 2
    assert main(["generate", str(run), "-i", "--template", "x", *flags]) == 2


def test_an_evaluation_counts_right_answers(run, capsys):
    assert main(["evaluate", str(run)]) == 0
    assert "exact answers" in capsys.readouterr().out
    model, tokenizer = smallmind.load(run)
    assert smallmind.Chat(model, tokenizer, temperature=0).say("1?") == "b"

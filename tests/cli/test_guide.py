"""The guide: its pages, how they look in a terminal, and messages that name a page."""

import ast
import functools
import pydoc
import re
import tomllib
from pathlib import Path

import pytest

import smallmind
from smallmind.cli import main
from smallmind.cli.guide import page, rendered
from smallmind.guide import FOLDER, NAMES, quoted, title, with_page

ROOT = Path(smallmind.__file__).parent


@functools.cache
def strings():
    """Every string in the source, with a line break where a value is filled in."""

    def text(node):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        return "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in parts)

    found = []
    for source in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text or isinstance(node, ast.JoinedStr):
                found.append(text(node))
    return found


def test_the_list_fits_one_screen_and_names_every_page(capsys):
    assert main(["guide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    for name in NAMES:
        assert f"{name} " in "\n".join(lines) and title(page(name)) in "\n".join(lines)


def test_every_page_is_listed_and_in_the_wheel():
    assert {path.stem for path in FOLDER.glob("*.md")} == {*NAMES} - {"settings"}
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["smallmind"]
    packed = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert {path for path in FOLDER.iterdir() if path.suffix not in (".py", "")} <= packed


def test_the_page_of_settings_is_made_of_the_flags_when_it_is_read():
    shown = set(re.findall(r"^\| `(--[\w-]+)", page("settings"), re.MULTILINE))
    assert {"--n-layer", "--learning-rate", "--seed", "--teacher"} <= shown


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_printed_for_the_terminal(name, capsys):
    assert main(["guide", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(title(page(name)))
    assert "```" not in shown and "](" not in shown and "|---" not in shown
    text = [line for line in shown.splitlines() if not line.startswith("    ")]
    assert all(len(line) <= 80 for line in text)
    assert main(["guide", name, "--markdown"]) == 0
    assert capsys.readouterr().out == page(name)


def test_code_is_indented_tables_are_aligned_and_headings_bold():
    text = "# A\n\nOne\ntwo.\n\n```sh\nls # x\n```\n\n| a | b |\n|---|--:|\n| `x` | 10 |\n"
    shown = rendered(text, pydoc.TextDoc().bold)
    assert pydoc.plain(shown) == "A\n\nOne two.\n\n    ls # x\n\na   b\n-  --\nx  10\n"
    assert "A\bA" in shown


def test_a_terminal_gets_the_pager(monkeypatch):
    shown = []
    monkeypatch.setattr(pydoc, "pager", shown.append)
    monkeypatch.setattr("smallmind.cli.console.Console.is_terminal", True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["guide", "start"]) == 0
    assert pydoc.plain(shown[0]).startswith(title(page("start")))


def test_a_mistyped_page_gets_the_nearest_one(capsys):
    assert main(["guide", "memroy"]) == 2
    assert "did you mean memory?" in capsys.readouterr().err


@pytest.mark.parametrize("message", quoted())
def test_the_program_prints_a_message_that_the_guide_explains(message):
    for part in message.split("..."):
        assert any(part in text for text in strings()), part


def test_an_error_and_a_warning_name_their_page(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("the cat sat. " * 4, encoding="utf-8")
    assert main(["train", str(tmp_path / "short.txt"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.endswith("(smallmind guide your-text)\n")
    assert with_page("This run needs 2 GB of memory and 1 GB is free; use --size nano").endswith(
        "use --size nano (smallmind guide memory)"
    )
    assert with_page("all is well") == "all is well"

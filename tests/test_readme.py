"""The README's examples run as they are written, in the order in which they appear.

Not run: what would install something, leave this machine, or take as long as a whole default run.
Of these the command lines are parsed, by the real parser.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from smallmind.cli.program import make_parser
from smallmind.text.stories import built_in_text

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
# Eight minutes are not for a test, and few seconds would depend on how busy the machine is.
SHORTER = {"--minutes 8": "--steps 20"}

# In a fresh interpreter: what a reader has who types one block after the other.
RUNNER = """
import importlib.util, json, sys
from smallmind.cli import main

names = {}
for kind, code in json.load(sys.stdin):
    if kind == "python":
        if "xllamacpp" not in code or importlib.util.find_spec("xllamacpp"):
            exec(compile(code, "README.md", "exec"), names)
    elif main(code):
        sys.exit(f"failed: {code}")
"""


def commands(kind, block):
    """The words of each command of a block of sh, joined lines apart."""
    if kind != "sh":
        return []
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    apart = [" ".join(map(shlex.quote, words)).split(" '&&' ") for words in lines]
    return [shlex.split(part) for line in apart for part in line]


def ours(words):
    """The arguments of smallmind, also if another program starts it; None if it is not there."""
    found = [i for i, word in enumerate(words) if Path(word).name == "smallmind"]
    return words[found[0] + 1 :] if found else None


ALL = [words for block in BLOCKS for words in commands(*block)]


def test_the_two_commands_at_the_top_stay_as_they_are():
    first = [block.strip() for kind, block in BLOCKS if kind == "sh"][:2]
    assert first == [
        "python -m pip install -e . && smallmind train",
        'python -m pip install -e ".[test]" && python -m pytest',
    ]


@pytest.mark.parametrize("words", [words for words in ALL if ours(words)], ids=shlex.join)
def test_a_command_line_is_one_that_the_program_takes(words):
    assert make_parser(ours(words)).parse_args(ours(words)).run


@pytest.mark.parametrize("words", [words for words in ALL if "pip" in words], ids=shlex.join)
def test_what_is_installed_exists(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = words[-1]
    extra = re.fullmatch(r"\.\[(\w+)\]", target)
    named = {name for extras in project["optional-dependencies"].values() for name in extras}
    assert (
        target == "."
        or (extra and extra[1] in project["optional-dependencies"])
        or any(name.startswith(target) for name in named)
    )


def test_every_block_runs_as_written_one_after_the_other(tmp_path):
    text = built_in_text()[:60_000]
    for name in ("book.txt", "data.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    jobs = []
    for kind, block in BLOCKS:
        if kind == "python":
            jobs.append((kind, block))
            continue
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        own = [words[1:] for words in commands(kind, block) if words[0] == "smallmind"]
        jobs += [(kind, words) for words in own if words != ["train"]]  # that is .ci/run's
    assert sum(kind == "python" for kind, _ in jobs) >= 4 and len(jobs) >= 10
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(jobs),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Evaluation" in done.stdout and "norm of the gradient" in done.stdout

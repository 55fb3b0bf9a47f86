"""The examples of the README and of the guide run as they are written, in their order.

Not run: what would install something, leave this machine, or take as long as a whole default run.
Of these the command lines are parsed, by the real parser. Runs of the guide are as small as can be.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from smallmind import Tokenizer, export, load
from smallmind.cli.guide import page
from smallmind.cli.program import COMMANDS, make_parser
from smallmind.guide import NAMES
from smallmind.parts import CHAT_TEMPLATES
from smallmind.text.chat import Turn
from smallmind.text.stories import built_in_text
from smallmind.text.templates import fit_template
from tests.exchange.chat import made

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = FENCE.findall(README)
OWN_KERNEL = FENCE.findall(page("own-kernel"))
GUIDE = [block for name in NAMES if name != "own-kernel" for block in FENCE.findall(page(name))]
# Eight minutes are not for a test, and few seconds would depend on how busy the machine is.
SHORTER = {
    "--minutes 8": "--steps 10 --size nano",
    "--chat --out": "--chat --steps 10 --size nano --out",
    "--steps 300": "--steps 10",
    "steps=200": "steps=10",
    "--lora-rank 16 --out runs/adapted": "--lora-rank 16 --steps 10 --out runs/adapted",
}
TASKS = {
    "pairs.jsonl": {"good": "The cat was here.", "bad": "The cat here was."},
    "questions.jsonl": {"context": "The", "choices": ["cat was.", "was cat."], "answer": "A"},
    "prompts.jsonl": {"prompt": "The", "answer": "cat"},
}
# These make runs of the guide long or their models large.
LENGTHS = ("--steps", "--epochs", "--minutes", "--batch-size")
SIZES = ("--size", "--n-layer", "--n-embd", "--n-head", "--block-size")
# Commands of the guide that are only parsed, and why.
PARSED = {
    "train --resume auto": "nothing was interrupted",
    "chat runs/built-in": "waits for questions",
    "chat runs/chats": "likewise",
    "serve": "serves until it is ended",
    "chat runs/mine": "likewise",
    "chat SmolLM2-135M-Instruct.Q4_1.gguf": "likewise",
    "serve runs/weather": "serves until it is ended",
    "bench kernels column_sum --shapes 8192x512": "tests/test_bench.py measures smaller ones",
    "generate runs/base -i --template 'Q: {}\\nA:' --stop '\\n'": "likewise",
}

# In a fresh interpreter: what a reader has who types one block after the other.
RUNNER = """
import importlib.util, json, sys
from smallmind.cli import main
from smallmind.forecast import pace
from smallmind.text import questions
from smallmind.forecast import compiling

# A fiftieth of the built-in conversations.
every = questions.built_in_conversations
questions.built_in_conversations = lambda seed: every(questions.CONVERSATIONS // 50, seed)
questions.HELD_OUT_CONVERSATIONS //= 50

# Nothing is trained to predict how long a run takes.
compiling.rehearse = lambda *_: None
pace.rough_pace = pace.kept_pace = lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01)
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
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
    apart = [" ".join(map(shlex.quote, words)).split(" '&&' ") for words in lines]
    return [shlex.split(part) for line in apart for part in line]


def ours(words):
    """The arguments of smallmind, also if another program starts it; None if it is not there."""
    found = [i for i, word in enumerate(words) if Path(word).name == "smallmind"]
    return words[found[0] + 1 :] if found else None


ALL = [words for block in (*BLOCKS, *GUIDE, *OWN_KERNEL) for words in commands(*block)]


def smallest(words):
    """The words of a command of the guide, with the shortest run of the smallest model."""
    if words[0] == "plan":
        return [*words, "--trials", "0"]
    if words[0] != "train" or "--resume" in words:
        return words
    pairs = zip(words, ["", *words[:-1]], strict=True)
    changed = {*LENGTHS, *SIZES}
    kept = [word for word, before in pairs if not changed & {word, before}]
    size = [] if "--init-from" in words else ["--size", "nano"]  # there is only one
    # A step by reward samples answers to eight questions.
    return [*kept, *size, "--steps", "2" if "--reward" in words else "10"]


def test_the_two_commands_of_the_readme_stay_as_they_are():
    blocks = [block.strip() for kind, block in BLOCKS if kind == "sh"]
    assert blocks[0] == "python -m pip install -e . && smallmind train"
    assert 'python -m pip install -e ".[test]" && python -m pytest' in blocks


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
    text = built_in_text(60_000)[:60_000]
    for name in ("book.txt", "data.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    pairs = [{"question": f"Who is {i}?", "answer": f"Number {i}."} for i in range(30)]
    lines = "".join(f"{json.dumps(pair)}\n" for pair in pairs)
    (tmp_path / "chats.jsonl").write_text(lines, encoding="utf-8")
    for name, item in TASKS.items():
        (tmp_path / name).write_text(f"{json.dumps(item)}\n" * 3, encoding="utf-8")
    model, tokenizer = load(made(tmp_path / "SmolLM2-135M-Instruct", "SmolLM"), "numpy")
    export(model, tokenizer, tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", "gguf", "q4_1")
    jobs = []
    for kind, block in BLOCKS:
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        if kind == "python":
            jobs.append((kind, block))
            continue
        own = [words[1:] for words in commands(kind, block) if words[0] == "smallmind"]
        jobs += [(kind, words) for words in own if words != ["train"]]  # that is .ci/run's
    for kind, block in GUIDE:
        if kind == "python":
            jobs.append((kind, block))
        own = [words[1:] for words in commands(kind, block) if words[0] == "smallmind"]
        new = [(kind, smallest(words)) for words in own if shlex.join(words) not in PARSED]
        jobs += [job for job in new if job not in jobs]
    assert sum(kind == "python" for kind, _ in jobs) >= 6 and len(jobs) >= 30
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(jobs),
        cwd=tmp_path,
        env=os.environ | {"NUMBA_NUM_THREADS": "1"},  # as all tests here, see tests/conftest.py
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Evaluation" in done.stdout and "norm of the gradient" in done.stdout


def test_what_is_not_run_is_in_the_guide():
    assert set(PARSED) <= {shlex.join(ours(words)) for words in ALL if ours(words)}


@pytest.mark.parametrize("text", [README, *map(page, NAMES)], ids=["README", *NAMES])
def test_a_page_is_short_and_names_commands_and_files_that_exist(text):
    assert len(text.splitlines()) <= 120
    prose = FENCE.sub("", text)
    named = re.findall(r"`smallmind ([a-z-]+)( [a-z-]+)?", prose)
    assert {command for command, _ in named} <= set(COMMANDS)
    assert {what.strip() for command, what in named if command == "guide" and what} <= set(NAMES)
    base = ROOT if text is README else ROOT / "smallmind/guide"
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        assert link.startswith("https://") or (base / link).exists(), link


def test_the_page_on_a_kernel_of_your_own_runs_as_written(tmp_path):
    """Each file of the page by itself, then the command that measures; a mistake is named."""
    codes = [code for kind, code in OWN_KERNEL if kind == "python"]
    names = re.findall(r"^`(\w+\.py)`", page("own-kernel"), re.MULTILINE)
    for name, code in zip(names, codes, strict=True):
        (tmp_path / name).write_text(code, encoding="utf-8")

    def shown_by(*words):
        words = [sys.executable, *words]
        done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    status, assembly = shown_by("assembly.py")
    assert status == 0 and "call" not in assembly
    assert "Gradient check of 1 gradient, tolerance 1e-06: ok" in shown_by("layer.py")[1]
    (measure,) = (words for block in OWN_KERNEL for words in commands(*block) if "axpy.py" in words)
    measure = ["-m", "smallmind", *ours(measure), "--rounds", "1", "--threads", "1"]
    status, table = shown_by(*measure)
    assert status == 0 and re.search(r"^1000000 .* memory ", table, re.MULTILINE), table
    wrong = codes[0].replace("fma(load(x, i), factor", "fma(load(y, i), factor")
    (tmp_path / "axpy.py").write_text(wrong, encoding="utf-8")
    status, message = shown_by(*measure)
    assert status == 2 and re.search(r"axpy 17 is wrong: y\[\d+\] is \S+, not", message)


def test_the_modelfile_of_the_guide_writes_a_conversation_as_smollm2_does():
    """Its template and ends, as ChatML is known here; without what Ollama fills in for itself."""
    (modelfile,) = re.findall(r"^```text\n(FROM .*?)\n```", page("adapting"), re.DOTALL | re.M)
    template = re.search(r'^TEMPLATE """(.*?)"""', modelfile, re.DOTALL | re.M)[1]
    before, turn, after = re.fullmatch(
        r"(.*)\{\{- range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL
    ).groups()
    said = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Me."), ("user", "Why?")]
    turns = (turn.replace("{{ .Role }}", r).replace("{{ .Content }}", x) for r, x in said)
    tokenizer, chatml = fit_template(Tokenizer("", "byte"), "chatml")
    ids = chatml.prompt(tokenizer, [Turn(role, text) for role, text in said])
    assert before + "".join(turns) + after == tokenizer.decode(ids)
    ends = re.findall('^PARAMETER stop "(.*)"$', modelfile, re.M)
    assert ends == [CHAT_TEMPLATES["chatml"]["special"][-1]]

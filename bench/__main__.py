"""Measures speed, memory and what runs survive: python -m bench COMMAND.

NumPy, Numba and PyTorch read which machine code to use from the environment when they are imported,
so the arguments are read first.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path

from smallmind.bench.machine import describe, variables_of
from smallmind.checks import InputError
from smallmind.cli.bench import (
    ALL,
    ARCHS,
    COMPARE,
    STEP_SHAPES,
    Flag,
    count,
    counted,
    flag,
    measure,
    one_of,
    peers,
    several,
    shape,
)
from smallmind.cli.bench import COMMANDS as OWN

MEMORY = ("example", "layers", "limit", "long", "accumulation", "runs")
TYPES = ("float32", "bfloat16", "q8_0", "q4_0")
AGAINST = ("start", "products", "attention", "steps", "generation")
RECIPE_PEERS = {"nanogpt": ("PyTorch", "torch"), "ppmd": ("pyppmd", "pyppmd")}
FAULTS = ("operations", "saves", "runs", "writers", "starts", "pairs", "terminals")
FAULTS += ("power", "cuts", "flips", "kernels", "fuzzing")


def _size(text: str) -> str:
    from smallmind.settings.presets import SIZES

    return one_of("size", SIZES)(text)


def _text_or_stories() -> Flag:
    return flag("text", "TEXT", "a UTF-8 text file; default: built-in stories", nargs="?")


def _only(parts: Collection[str]) -> Flag:
    check = one_of("part", parts)
    return several("--only", "P,P", check, f"some of {', '.join(parts)}; default: all")


# Each names a module of this package: its help and its flags.
COMMANDS: dict[str, tuple[str, list[Flag]]] = {
    "kernels": (OWN["kernels"][0], [*OWN["kernels"][1], COMPARE]),
    "step": (OWN["step"][0], [*OWN["step"][1], COMPARE]),
    "threads": (
        "count and measure how a training step divides among threads",
        [
            several("--shapes", "S,S", shape, STEP_SHAPES),
            ("--arch", {"choices": ARCHS, "default": "gpt2", "help": "(gpt2)"}),
            flag(
                "--bandwidth",
                "GB/s",
                "memory bandwidth of the machine to predict for; default: what its cores can use",
                type=count,
            ),
            counted("--rounds", 5, "turns per number of threads"),
        ],
    ),
    "busy": (
        "measure training steps beside programs that keep the cores busy",
        [
            several("--sizes", "S,S", _size, "such as nano,tiny; default: nano,tiny,small"),
            counted("--rounds", 6, "turns each"),
        ],
    ),
    "start": (
        OWN["start"][0],
        [
            *OWN["start"][1],
            several(
                "--sizes",
                "S,S",
                _size,
                "such as nano,tiny: also compare the time that a run's start predicts with the "
                "time that it takes",
            ),
            counted("--steps", None, "of the runs of --sizes; default: as many as usual"),
            COMPARE,
        ],
    ),
    "tokenizer": (
        "time learning tokens and encoding with them",
        [
            _text_or_stories(),
            several("--megabytes", "N,N", count, "sizes to repeat the text to (1,100)", [1, 100]),
            counted("--vocab-size", 4096, "tokens to learn"),
            counted("--rounds", 3, "turns each"),
        ],
    ),
    "memory": (
        "compare the memory of training with its estimate",
        [
            _only(MEMORY),
            counted("--steps", 5, "steps to time"),
        ],
    ),
    "against": (
        "compare with another commit: status 1 if this tree is more than 3 %% slower",
        [
            flag("commit", "COMMIT", "as git names it"),
            _only(AGAINST),
            (
                "--save",
                {
                    "action": "store_true",
                    "help": "keep the shares of the machine's limit for later machines of its kind",
                },
            ),
        ],
    ),
    "inferena": (
        "measure SmolLM2-135M as the table kvark/inferena does",
        [
            flag("--weights", "PATH", "weights of SmolLM2-135M; default: random ones", type=Path),
            peers("torch"),
            counted("--rounds", 7, "turns each"),
            flag("--out", "FILE", "also write the line of JSON to FILE", type=Path),
        ],
    ),
    "generate": (
        "measure tokens per second",
        [
            counted("--rounds", 3, "turns each"),
            several(
                "--types",
                "T,T",
                one_of("type", TYPES),
                f"also measure larger models, read from GGUF in some of {', '.join(TYPES)}",
            ),
        ],
    ),
    "serve": (
        "measure the server under load",
        [counted("--rounds", 5, "turns of each case")],
    ),
    "soak": (
        "keep the server busy with requests of all kinds, a third of which are abandoned",
        [
            flag(
                "model",
                "MODEL",
                "a run or a model; default: a small run that is trained first",
                type=Path,
                nargs="?",
            ),
            flag("--minutes", "X", "minutes of requests (10)", type=float, default=10),
        ],
    ),
    "faults": (
        "count the faults that runs survive",
        [
            counted(
                "--kills",
                1000,
                "kills during saves; a fifth as many during runs, a twentieth of starts",
            ),
            counted(
                "--sessions",
                60,
                "runs ended by pairs of signals, and as many by closing the terminal",
            ),
            counted("--flips", 10_000, "bits to flip"),
            counted("--damages", 100, "damaged files of the kernel cache"),
            flag("--minutes", "X", "minutes of fuzzing (10)", type=float, default=10),
            counted("--seed", 1, "random seed of fuzzing"),
            _only(FAULTS),
        ],
    ),
    "recipe": (
        "measure how fast recipes learn",
        [
            _text_or_stories(),
            flag(
                "--compare",
                "NAME=FLAGS",
                "a recipe: flags of smallmind train under a name; may be given several times; "
                "default: the default recipe",
                action="append",
            ),
            flag("--flags", "FLAGS", "flags of all recipes", default=""),
            flag("--target", "X", "stop each run once the held-out loss reaches X", type=float),
            counted("--seeds", 3, "runs of each"),
            several(
                "--peers",
                "P,P",
                one_of("peer", RECIPE_PEERS),
                "nanoGPT's recipe in PyTorch (nanogpt), the compressor PPMd (ppmd); both need TEXT",
                [],
            ),
        ],
    ),
    "picture": (
        "draw a run's loss over time and what it wrote at three moments",
        [
            flag("run", "RUN", "a run with --val-every and --sample-every", type=Path),
            several("--at", "N,N,N", count, "steps of samples (50,300,1500)", [50, 300, 1500]),
            flag("--out", "FILE.svg", "(loss.svg)", type=Path, default=Path("loss.svg")),
        ],
    ),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line -> options, without importing numerical packages."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (help, flags) in COMMANDS.items():
        command = commands.add_parser(name, help=help)
        for word, settings in [*flags, *ALL]:
            command.add_argument(word, **settings)
    return parser.parse_args(arguments)


def main() -> None:
    try:
        _run(parse())
    except (InputError, ChildProcessError) as error:
        sys.exit(str(error))


def _run(options: argparse.Namespace) -> None:
    for file in (options.json, getattr(options, "out", None)):
        if file and not os.access(file.resolve().parent, os.W_OK):
            sys.exit(f"cannot write {file}: {file.resolve().parent} is not a writable directory")
    if options.command in OWN and not getattr(options, "sizes", None):
        measure(options, options.command)
        return
    os.environ.update(variables_of(options.threads, options.isa))
    if options.command in ("threads", "busy"):
        from smallmind.kernels.codegen.cpus import bind_to_cores

        bind_to_cores()
        for sizes in getattr(options, "shapes", None) or []:
            if len(sizes) != 5 or sizes[2] % sizes[4]:
                sys.exit("--shapes needs B, T, C, layers and heads, C a multiple of the heads")
    if options.command == "faults" and not importlib.util.find_spec("hypothesis"):
        sys.exit('faults needs the test packages: python -m pip install -e ".[test]"')
    for peer in options.peers if options.command == "recipe" else ():
        package, name = RECIPE_PEERS[peer]
        if not options.text:
            sys.exit(f"--peers {peer} needs a TEXT")
        if not importlib.util.find_spec(name):
            sys.exit(f"--peers {peer} needs {package}: python -m pip install {name}")
    module = importlib.import_module(f"bench.{options.command}")
    described = describe()
    print("  ".join(f"{name} {value}" for name, value in described.items()), flush=True)
    results = module.run(options, described)
    if options.json:
        record = {"machine": described, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    # Only now, so that what was measured is kept.
    if hasattr(module, "failures") and (failed := module.failures(results)):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()

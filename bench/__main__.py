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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from bench.thread_pools import ThreadPools

# Environment that makes each package use an instruction set. Without NUMBA_CPU_FEATURES, Numba
# would add the host's features to those of the named CPU.
ISAS = {
    "haswell": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "x86-64": {
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": "Prescott",
    },
    "skylake-avx512": {
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
}

# Shapes of `step` that have a name.
NAMED = {"tiny": [(16, 16, C, 1, 4) for C in (16, 64, 128)]}
ARCHS = ("gpt2", "llama", "modern")
MEMORY = ("example", "layers", "limit", "long", "runs")
AGAINST = ("start", "products", "attention", "steps", "generation")
FAULTS = ("operations", "saves", "runs", "writers", "starts", "pairs", "terminals")
FAULTS += ("power", "cuts", "flips", "kernels", "fuzzing")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write 768x128x384")
    return shape


def _step_shapes(text: str) -> list[tuple[int, ...]]:
    return [shape for word in text.split(",") for shape in NAMED.get(word) or [_shape(word)]]


def _size(text: str) -> str:
    from smallmind.settings.presets import SIZES

    return _one_of("size", SIZES)(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _number(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"no {kind} named {text!r}; there are {', '.join(names)}"
            )
        return text

    return check


Flag = tuple[str, dict[str, Any]]  # the arguments of `add_argument`


def _flag(name: str, metavar: str, help: str, **rest: Any) -> Flag:
    return name, {"metavar": metavar, "help": help, **rest}


def _counted(name: str, default: int | None, help: str = "") -> Flag:
    """A whole number above 0."""
    help = help if default is None else f"{help} ({default})".strip()
    return _flag(name, "N", help, type=_count, default=default)


def _several(
    name: str, metavar: str, type: Callable[[str], Any], help: str, default: Any = None
) -> Flag:
    """Values with commas between them."""
    return _flag(
        name,
        metavar,
        help,
        type=lambda text: [type(word) for word in text.split(",")],
        default=default,
    )


def _peers(default: str) -> Flag:
    help = f"such as torch,torch compile; default: {default}"
    return _flag(
        "--peers", "P,P", help, type=lambda text: [name for name in text.split(",") if name]
    )


def _text_or_stories() -> Flag:
    return _flag("text", "TEXT", "a UTF-8 text file; default: built-in stories", nargs="?")


def _only(parts: Collection[str]) -> Flag:
    check = _one_of("part", parts)
    return _several("--only", "P,P", check, f"some of {', '.join(parts)}; default: all")


def _folder(help: str) -> Flag:
    help += "; default: that of temporary files"
    return _flag("folder", "FOLDER", help, nargs="?", type=Path)


STEP_SHAPES = "such as 12x64x128x4x4: B, T, C, layers, heads"
# Each names a module of this package: its help and its flags.
COMMANDS: dict[str, tuple[str, list[Flag]]] = {
    "kernels": (
        "compare each kernel with the machine's limit",
        [
            _flag("names", "KERNEL", "default: all of them", nargs="*"),
            _several("--shapes", "S,S", _shape, "such as 768x128x384,1x512x128"),
            _counted("--rounds", 7, "turns per contestant"),
            _flag("--plot", "FILE.png", "plot GFLOP/s by shape", type=Path),
        ],
    ),
    "step": (
        "compare a training step with other libraries",
        [
            _flag(
                "--shapes",
                "S,S",
                f"{STEP_SHAPES}; or tiny: 1 layer of 16, 64, 128",
                type=_step_shapes,
            ),
            _peers("torch, torch compile and jax, if installed"),
            _several(
                "--arch",
                "A,A",
                _one_of("architecture", ARCHS),
                f"some of {', '.join(ARCHS)}; default: gpt2",
                ["gpt2"],
            ),
            _counted("--steps", 60, "steps to time"),
        ],
    ),
    "threads": (
        "count and measure how a training step divides among threads",
        [
            _several("--shapes", "S,S", _shape, STEP_SHAPES),
            ("--arch", {"choices": ARCHS, "default": "gpt2", "help": "(gpt2)"}),
            _flag(
                "--bandwidth",
                "GB/s",
                "of the memory of the machine that is predicted; default: as much as cores can use",
                type=_count,
            ),
            _counted("--rounds", 5, "turns per number of threads"),
        ],
    ),
    "busy": (
        "measure training steps beside programs that keep the cores busy",
        [
            _several("--sizes", "S,S", _size, "such as nano,tiny; default: nano,tiny,small"),
            _counted("--rounds", 6, "turns each"),
        ],
    ),
    "start": (
        "time compiling kernels and loading them from cache",
        [
            _counted("--rounds", 3, "later starts"),
            _several(
                "--sizes",
                "S,S",
                _size,
                "such as nano,tiny: also compare the time that a run's start predicts with the "
                "time that it takes",
            ),
            _counted("--steps", None, "of the runs of --sizes; default: as many as usual"),
        ],
    ),
    "tokenizer": (
        "time learning tokens and encoding with them",
        [
            _text_or_stories(),
            _several(
                "--megabytes", "N,N", _count, "the text is repeated to so many (1,100)", [1, 100]
            ),
            _counted("--vocab-size", 4096),
            _counted("--rounds", 3),
        ],
    ),
    "memory": (
        "compare the memory of training with its estimate",
        [
            _only(MEMORY),
            _counted("--steps", 5, "steps to time"),
        ],
    ),
    "prefetch": (
        "measure how long steps wait for batches",
        [
            _folder("on the disk to read from"),
            _several("--ahead", "N,N", _number, "batches drawn ahead (0,1,2,4)", [0, 1, 2, 4]),
            _counted("--megabytes", 256, "size of the file"),
            _counted("--steps", 30, "in a turn"),
            _counted("--rounds", 7, "turns each"),
        ],
    ),
    "corpus": (
        "measure preparing a large corpus, and training",
        [
            _folder("with room for seven times the corpus"),
            _counted("--megabytes", 1000, "size of the corpus"),
            _counted("--steps", 50, "in a turn"),
            _counted("--rounds", 15, "turns each"),
        ],
    ),
    "against": (
        "compare with another commit: status 1 if this tree is more than 3 % slower",
        [
            _flag("commit", "COMMIT", "as git names it"),
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
            _flag("--weights", "PATH", "of SmolLM2-135M; default: random ones", type=Path),
            _peers("torch"),
            _counted("--rounds", 7, "turns each"),
            _flag("--out", "FILE", "also write the line of JSON to FILE", type=Path),
        ],
    ),
    "generate": ("measure tokens per second", [_counted("--rounds", 3, "turns each")]),
    "ranks": (
        "measure training on several ranks of MPI",
        [_counted("--rounds", 5, "turns each")],
    ),
    "faults": (
        "count the faults that runs survive",
        [
            _counted(
                "--kills",
                1000,
                "kills during saves; a fifth as many during runs, a twentieth of starts",
            ),
            _counted(
                "--sessions", 60, "runs ended by signals in pairs, and as many by closed terminals"
            ),
            _counted("--flips", 10_000, "bits to flip"),
            _counted("--damages", 100, "damaged files of the kernel cache"),
            _flag("--minutes", "X", "minutes of fuzzing (10)", type=float, default=10),
            _counted("--seed", 1, "random seed of fuzzing"),
            _only(FAULTS),
        ],
    ),
    "recipe": (
        "measure how fast recipes learn",
        [
            _text_or_stories(),
            _flag(
                "--compare",
                "NAME=FLAGS",
                "a recipe: flags of smallmind train under a name; may be given several times; "
                "default: the default recipe",
                action="append",
            ),
            _flag("--flags", "FLAGS", "flags of all recipes", default=""),
            _flag("--target", "X", "stop each run once the held-out loss reaches X", type=float),
            _counted("--seeds", 3, "runs of each"),
            (
                "--peers",
                {
                    "action": "store_true",
                    "help": "nanoGPT's recipe in PyTorch beside them; needs TEXT",
                },
            ),
        ],
    ),
    "picture": (
        "draw a run's loss over time and what it wrote at three moments",
        [
            _flag("run", "RUN", "a run with --val-every and --sample-every", type=Path),
            _several("--at", "N,N,N", _count, "steps of samples (50,300,1500)", [50, 300, 1500]),
            _flag("--out", "FILE.svg", "(loss.svg)", type=Path, default=Path("loss.svg")),
        ],
    ),
}
ALL: list[Flag] = [
    _counted("--threads", None, "default: one per core"),
    ("--isa", {"choices": ISAS, "help": "compile for this instruction set"}),
    _flag("--json", "FILE", "write the results to FILE", type=Path),
]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line -> options, without importing numerical packages."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (help, flags) in COMMANDS.items():
        command = commands.add_parser(name, help=help)
        for flag, settings in [*flags, *ALL]:
            command.add_argument(flag, **settings)
    return parser.parse_args(arguments)


def _import_and_bind(threads: int) -> None:
    """Imports the peers of the kernels and binds the threads that each of them starts.

    NumPy and PyTorch come first, so that they keep their own OpenMP settings.
    """
    pools = ThreadPools()
    import numpy as np

    matrix = np.ones((512, 512), np.float32)
    np.matmul(matrix, matrix)
    pools.note()
    try:
        import torch
    except ImportError:
        pass
    else:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.mm(torch.from_numpy(matrix), torch.from_numpy(matrix))
        pools.note()
    from bench.ceilings import multiply_add

    multiply_add()
    pools.note()
    pools.bind()


def main() -> None:
    options = parse()
    if getattr(options, "plot", None) and not importlib.util.find_spec("matplotlib"):
        sys.exit('--plot needs matplotlib: python -m pip install -e ".[bench]"')
    os.environ.update(ISAS.get(options.isa, {}))
    for file in (options.json, getattr(options, "plot", None), getattr(options, "out", None)):
        if file and not os.access(file.resolve().parent, os.W_OK):
            sys.exit(f"cannot write {file}: {file.resolve().parent} is not a writable directory")
    if getattr(options, "plot", None) and options.plot.suffix not in (".png", ".pdf", ".svg"):
        sys.exit(f"--plot {options.plot}: the name must end in .png, .pdf or .svg")
    # Two threads of one core share its multipliers: the default is one per core.
    count = options.threads or min(psutil.cpu_count(logical=False) or 1, os.cpu_count() or 1)
    os.environ["NUMBA_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(count)
    if options.command == "kernels":
        _import_and_bind(count)
    if options.command in ("threads", "busy"):
        from smallmind.kernels.codegen.threads import bind_to_cores

        bind_to_cores()
    if options.command == "faults" and not importlib.util.find_spec("hypothesis"):
        sys.exit('faults needs the test packages: python -m pip install -e ".[test]"')
    if options.command == "recipe" and options.peers:
        if not options.text:
            sys.exit("--peers needs a TEXT")
        if not importlib.util.find_spec("torch"):
            sys.exit("--peers needs PyTorch: python -m pip install torch")
    from bench import machine

    module = importlib.import_module(f"bench.{options.command}")
    if options.command == "kernels":
        unknown = [name for name in options.names if name not in module.KERNELS]
        if unknown:
            sys.exit(f"no kernel named {unknown[0]}; there are {', '.join(module.KERNELS)}")
        axes = {len(module.KERNELS[name].axes.split()) for name in options.names}
        for shape in options.shapes or []:
            if axes != {len(shape)}:
                sys.exit("--shapes needs the names of kernels, and one size for each of their axes")
    if options.command in ("step", "threads"):
        for shape in options.shapes or []:
            if len(shape) != 5 or shape[2] % shape[4]:
                sys.exit("--shapes needs B, T, C, layers and heads, C a multiple of the heads")
    described = machine.describe()
    print("  ".join(f"{name} {value}" for name, value in described.items()), flush=True)
    results = module.run(options, described)
    if options.json:
        record = {"machine": described, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if getattr(options, "plot", None):
        from bench import plot

        plot.draw(results, options.plot)
    # Only now, so that what was measured is kept.
    if hasattr(module, "failures") and (failed := module.failures(results)):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()

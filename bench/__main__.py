"""Measures speed, memory and what runs survive: python -m bench COMMAND.

NumPy, Numba and PyTorch read which machine code to use from the environment when they are imported,
so the arguments are read first.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
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
FAULTS = (
    "operations",
    "saves",
    "runs",
    "writers",
    "starts",
    "pairs",
    "terminals",
    "power",
    "cuts",
    "flips",
    "kernels",
    "fuzzing",
)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write 768x128x384")
    return shape


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [_shape(word) for word in text.split(",")]


def _step_shapes(text: str) -> list[tuple[int, ...]]:
    return [shape for word in text.split(",") for shape in NAMED.get(word) or [_shape(word)]]


def _sizes(text: str) -> list[str]:
    from smallmind.settings.presets import SIZES

    sizes = text.split(",")
    for size in sizes:
        if size not in SIZES:
            raise argparse.ArgumentTypeError(
                f"no size named {size!r}; there are {', '.join(SIZES)}"
            )
    return sizes


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _number(text: str) -> int:
    return 0 if text == "0" else _count(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line -> options, without importing numerical packages."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    kernels = commands.add_parser("kernels", help="compare each kernel with the machine's limit")
    kernels.add_argument("names", nargs="*", metavar="KERNEL", help="default: all of them")
    kernels.add_argument(
        "--shapes", type=_shapes, metavar="S,S", help="such as 768x128x384,1x512x128"
    )
    kernels.add_argument(
        "--rounds", type=_count, default=7, metavar="N", help="turns per contestant (7)"
    )
    kernels.add_argument("--plot", type=Path, metavar="FILE.png", help="plot GFLOP/s by shape")

    step = commands.add_parser("step", help="compare a training step with other libraries")
    step.add_argument(
        "--shapes",
        type=_step_shapes,
        metavar="S,S",
        help="such as 12x64x128x4x4: B, T, C, layers, heads; or tiny: 1 layer of 16, 64, 128",
    )
    step.add_argument(
        "--peers",
        type=lambda text: [word for word in text.split(",") if word],
        metavar="P,P",
        help="such as torch,jax; default: torch, torch compile and jax, if installed",
    )
    step.add_argument(
        "--arch",
        type=lambda text: text.split(","),
        default=["gpt2"],
        metavar="A,A",
        help=f"some of {', '.join(ARCHS)}; default: gpt2",
    )
    step.add_argument("--steps", type=_count, default=60, metavar="N", help="steps to time (60)")

    threads = commands.add_parser(
        "threads", help="count and measure how a training step divides among threads"
    )
    threads.add_argument(
        "--shapes",
        type=_shapes,
        metavar="S,S",
        help="such as 12x64x128x4x4: B, T, C, layers, heads",
    )
    threads.add_argument("--arch", choices=ARCHS, default="gpt2", help="(gpt2)")
    threads.add_argument(
        "--bandwidth",
        type=_count,
        metavar="GB/s",
        help="of the memory of the machine that is predicted; default: as much as cores can use",
    )
    threads.add_argument(
        "--rounds", type=_count, default=5, metavar="N", help="turns per number of threads (5)"
    )

    start = commands.add_parser("start", help="time compiling kernels and loading them from cache")
    start.add_argument("--rounds", type=_count, default=3, metavar="N", help="later starts (3)")
    start.add_argument(
        "--sizes",
        type=_sizes,
        metavar="S,S",
        help="such as nano,tiny: also compare the time that a run's start predicts with the time "
        "that it takes",
    )
    start.add_argument(
        "--steps",
        type=_count,
        metavar="N",
        help="of the runs of --sizes; default: as many as usual",
    )

    tokenizer = commands.add_parser("tokenizer", help="time learning tokens and encoding with them")
    tokenizer.add_argument(
        "text", nargs="?", metavar="TEXT", help="a UTF-8 text file; default: built-in stories"
    )
    tokenizer.add_argument(
        "--megabytes",
        type=lambda text: [_count(word) for word in text.split(",")],
        default=[1, 100],
        metavar="N,N",
        help="the text is repeated to so many (1,100)",
    )
    tokenizer.add_argument("--vocab-size", type=_count, default=4096, metavar="N", help="(4096)")
    tokenizer.add_argument("--rounds", type=_count, default=3, metavar="N", help="(3)")

    memory = commands.add_parser("memory", help="compare the memory of training with its estimate")
    memory.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="P,P",
        help="some of example, layers, limit, long, runs; default: all",
    )
    memory.add_argument("--steps", type=_count, default=5, metavar="N", help="steps to time (5)")

    prefetch = commands.add_parser("prefetch", help="measure how long steps wait for batches")
    prefetch.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="on the disk to read from; default: that of temporary files",
    )
    prefetch.add_argument(
        "--ahead",
        type=lambda text: [_number(word) for word in text.split(",")],
        default=[0, 1, 2, 4],
        metavar="N,N",
        help="batches drawn ahead (0,1,2,4)",
    )
    prefetch.add_argument(
        "--megabytes", type=_count, default=256, metavar="N", help="size of the file (256)"
    )
    prefetch.add_argument("--steps", type=_count, default=30, metavar="N", help="in a turn (30)")
    prefetch.add_argument("--rounds", type=_count, default=7, metavar="N", help="turns each (7)")

    corpus = commands.add_parser("corpus", help="measure preparing a large corpus, and training")
    corpus.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="with room for seven times the corpus; default: that of temporary files",
    )
    corpus.add_argument(
        "--megabytes", type=_count, default=1000, metavar="N", help="size of the corpus (1000)"
    )
    corpus.add_argument("--steps", type=_count, default=50, metavar="N", help="in a turn (50)")
    corpus.add_argument("--rounds", type=_count, default=15, metavar="N", help="turns each (15)")

    generate = commands.add_parser("generate", help="measure tokens per second")
    generate.add_argument("--rounds", type=_count, default=3, metavar="N", help="turns each (3)")

    ranks = commands.add_parser("ranks", help="measure training on several ranks of MPI")
    ranks.add_argument("--rounds", type=_count, default=5, metavar="N", help="turns each (5)")

    faults = commands.add_parser("faults", help="count the faults that runs survive")
    faults.add_argument(
        "--kills",
        type=_count,
        default=1000,
        metavar="N",
        help="kills during saves; a fifth as many during runs, a twentieth of starts (1000)",
    )
    faults.add_argument(
        "--sessions",
        type=_count,
        default=60,
        metavar="N",
        help="runs ended by signals in pairs, and as many by closed terminals (60)",
    )
    faults.add_argument(
        "--flips", type=_count, default=10_000, metavar="N", help="bits to flip (10000)"
    )
    faults.add_argument(
        "--damages",
        type=_count,
        default=100,
        metavar="N",
        help="damaged files of the kernel cache (100)",
    )
    faults.add_argument(
        "--minutes", type=float, default=10, metavar="X", help="minutes of fuzzing (10)"
    )
    faults.add_argument(
        "--seed", type=_count, default=1, metavar="N", help="random seed of fuzzing (1)"
    )
    faults.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="P,P",
        help=f"some of {', '.join(FAULTS)}; default: all",
    )

    recipe = commands.add_parser("recipe", help="measure how fast recipes learn")
    recipe.add_argument(
        "text", nargs="?", metavar="TEXT", help="a UTF-8 text file; default: built-in stories"
    )
    recipe.add_argument(
        "--compare",
        action="append",
        metavar="NAME=FLAGS",
        help="a recipe: flags of smallmind train under a name; may be given several times; "
        "default: the default recipe",
    )
    recipe.add_argument("--flags", default="", metavar="FLAGS", help="flags of all recipes")
    recipe.add_argument(
        "--target",
        type=float,
        metavar="X",
        help="stop each run once the held-out loss reaches X",
    )
    recipe.add_argument("--seeds", type=_count, default=3, metavar="N", help="runs of each (3)")
    recipe.add_argument(
        "--peers", action="store_true", help="nanoGPT's recipe in PyTorch beside them; needs TEXT"
    )

    for command in (
        kernels,
        step,
        threads,
        start,
        tokenizer,
        memory,
        prefetch,
        corpus,
        generate,
        ranks,
        faults,
        recipe,
    ):
        command.add_argument("--threads", type=_count, metavar="N", help="default: one per core")
        command.add_argument("--isa", choices=ISAS, help="compile for this instruction set")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
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
    for file in (options.json, getattr(options, "plot", None)):
        if file and not os.access(file.resolve().parent, os.W_OK):
            sys.exit(f"cannot write {file}: {file.resolve().parent} is not a writable directory")
    if getattr(options, "plot", None) and options.plot.suffix not in (".png", ".pdf", ".svg"):
        sys.exit(f"--plot {options.plot}: the name must end in .png, .pdf or .svg")
    # Two threads of one core share its multipliers: the default is one per core.
    count = options.threads or min(psutil.cpu_count(logical=False) or 1, os.cpu_count() or 1)
    os.environ["NUMBA_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(count)
    if options.command == "kernels":
        _import_and_bind(count)
    if options.command == "threads":
        from smallmind.kernels.codegen.threads import bind_to_cores

        bind_to_cores()
    if options.command == "faults" and not importlib.util.find_spec("hypothesis"):
        sys.exit('faults needs the test packages: python -m pip install -e ".[test]"')
    if options.command == "recipe" and options.peers:
        if not options.text:
            sys.exit("--peers needs a TEXT")
        if not importlib.util.find_spec("torch"):
            sys.exit("--peers needs PyTorch: python -m pip install torch")
    from bench import (
        corpus,
        generate,
        kernels,
        machine,
        memory,
        plot,
        prefetch,
        ranks,
        recipe,
        start,
        step,
        threads,
        tokenizer,
    )

    if options.command == "kernels":
        unknown = [name for name in options.names if name not in kernels.KERNELS]
        if unknown:
            sys.exit(f"no kernel named {unknown[0]}; there are {', '.join(kernels.KERNELS)}")
        axes = {len(kernels.KERNELS[name].axes.split()) for name in options.names}
        for shape in options.shapes or []:
            if axes != {len(shape)}:
                sys.exit("--shapes needs the names of kernels, and one size for each of their axes")
    if options.command in ("step", "threads"):
        for shape in options.shapes or []:
            if len(shape) != 5 or shape[2] % shape[4]:
                sys.exit("--shapes needs B, T, C, layers and heads, C a multiple of the heads")
    if options.command == "step" and (unknown := [x for x in options.arch if x not in ARCHS]):
        sys.exit(f"--arch: no architecture named {unknown[0]!r}; there are {', '.join(ARCHS)}")
    parts = {"memory": list(memory.PARTS), "faults": list(FAULTS)}.get(options.command, [])
    unknown = [name for name in getattr(options, "only", None) or [] if name not in parts]
    if unknown:
        sys.exit(f"--only: no part named {unknown[0]!r}; there are {', '.join(parts)}")
    described = machine.describe()
    commands: dict[str, Callable[..., Any]] = {
        "kernels": kernels.run,
        "step": step.run,
        "threads": threads.run,
        "start": start.run,
        "tokenizer": tokenizer.run,
        "memory": memory.run,
        "prefetch": prefetch.run,
        "corpus": corpus.run,
        "generate": generate.run,
        "ranks": ranks.run,
        "recipe": recipe.run,
    }
    if options.command == "faults":
        from bench import faults

        commands["faults"] = faults.run
    results = commands[options.command](options, described)
    if options.json:
        record = {"machine": described, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if getattr(options, "plot", None):
        plot.draw(results, options.plot)
    # Only now, so that what was measured is kept.
    if options.command == "step" and (wrong := step.disagreements(results)):
        sys.exit("\n".join(wrong))
    if options.command == "faults" and any(row["lost"] for row in results):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Compares this tree with another commit, and with the last machine of its kind.

python -m bench against COMMIT: both trees are copied to a temporary folder, and processes of both
take turns. The fastest calls of two turns are a pair. The exit status is 1 if this tree is slower
by more than 3 %, and the spread of the pairs says that this is not noise.
"""

import argparse
import contextlib
import dataclasses
import datetime
import io
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from smallmind.bench import start, step
from smallmind.bench.machine import ROOT, Worker, answer_of
from smallmind.bench.peers.job import Sizes
from smallmind.cli.bench import saying
from smallmind.kernels.timing import TURN, duration

RESULTS = Path(__file__).parent / "results"
SLOWER = 1.03  # from this ratio on a row is doubtful
NOISY = 0.1  # between quartiles: other programs disturb
PAIRS = 8
# In which a doubtful row is timed at most: where a process happens to have its memory, steps on two
# threads differ by 4 %. A cold start takes a minute, so that it is repeated once.
PROCESSES, COLD_STARTS = 5, 2
BEFORE, NOW = "before", "now"  # the trees

PARTS = ("start", "products", "attention", "steps", "generation")
# M, K, N of a step's products in models of 128 to 576 channels.
HIDDEN = [
    (768, 128, 384),
    (768, 512, 128),
    (2048, 128, 512),
    (768, 192, 768),
    (2048, 256, 1024),
    (2048, 1024, 256),
    (2048, 384, 1152),
    (1024, 1536, 384),
    (4096, 384, 1536),
    (128, 576, 1536),
    (1024, 576, 1728),
]
# The shapes of the operands of each product (M, K) x (K, N), and the order of a step's sizes in it:
# a layer's output, the gradient of its weights, that of its input.
PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "matmul": (lambda M, K, N: ((M, K), (K, N)), lambda M, K, N: (M, K, N)),
    "matmul_transpose_a": (lambda M, K, N: ((K, M), (K, N)), lambda M, K, N: (K, M, N)),
    "matmul_transpose_b": (lambda M, K, N: ((M, K), (N, K)), lambda M, K, N: (M, N, K)),
}
SYMBOLS = {"matmul": "A B", "matmul_transpose_a": "A^T B", "matmul_transpose_b": "A B^T"}
OFFSETS = {"aligned": 0, "NumPy's": 16}  # bytes after a cache line
HEADS = [(12, 4, 64, 32), (16, 4, 128, 32), (16, 4, 512, 32), (8, 6, 256, 64)]  # B, H, T, D
DIRECTIONS = {"forward": 2, "backward": 5}  # products over the causal half
STEPS = [Sizes(16, 16, 64, 1, 4), *step.SIZES]
PRECISIONS = {"float32": 4, "bfloat16": 2}  # bytes
GENERATION = [(256, 128, 4, 4), (256, 384, 6, 6)]  # T, C, layers, heads
PROMPT, TOKENS = 100, 50


class Row(NamedTuple):
    """Something to time: how `bench.peers.tree` builds it, and the least that it takes."""

    name: str
    build: list[Any]
    operations: float = 0.0
    nbytes: int = 0
    group: str = ""  # of rows whose shares are kept as one
    turn: float = TURN
    pairs: int = PAIRS


def rows(part: str) -> Iterator[Row]:
    """The rows of a part."""
    if part == "start":
        yield Row("start, cold", ["start", True], pairs=1)
        yield Row("start, warm", ["start", False], pairs=PAIRS // 2)
    if part == "products":
        for name, symbol in SYMBOLS.items():
            for placed, offset in OFFSETS.items():
                for M, K, N in (PRODUCTS[name][1](*shape) for shape in HIDDEN):
                    group, shapes = f"{symbol}, {placed}", PRODUCTS[name][0](M, K, N)
                    built = ["product", name, *shapes, (M, N), offset]
                    yield Row(f"{group}, {M} x {K} x {N}", built, 2.0 * M * K * N, group=group)
    if part == "attention":
        for direction, products in DIRECTIONS.items():
            for B, H, T, D in HEADS:
                name, work = f"attention, {direction}, B{B} T{T} {H} heads of {D}", B * H * T * D
                yield Row(name, ["attention", direction, B, H, T, D], products * work * (T + 1.0))
    for sizes in STEPS if part == "steps" else []:
        work = step.operations(sizes, "gpt2")
        for precision in PRECISIONS:
            built = ["step", *dataclasses.astuple(sizes)[:-1], precision]
            yield Row(f"step, {sizes.name}, {precision}", built, work, turn=10 * TURN)
    for T, C, layers, heads in GENERATION if part == "generation" else []:
        for precision, width in PRECISIONS.items():
            built = ["generation", PROMPT, TOKENS, T, C, layers, heads, precision]
            nbytes = TOKENS * width * layers * 12 * C * C  # the blocks' weights, for each token
            name = f"generation, {layers} x {C}, {precision}"
            yield Row(name, built, nbytes=nbytes, turn=10 * TURN)


def _git(*arguments: str) -> bytes:
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        sys.exit(f"git {' '.join(arguments)}: {found.stderr.decode().strip()}")
    return found.stdout


class Trees:
    """Both trees in a folder, and where they keep their kernels: by default in the user's cache."""

    def __init__(self, commit: str, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.names = {BEFORE: commit, NOW: "this tree"}
        self.caches: dict[str, dict[str, str]] = {BEFORE: {}, NOW: {}}
        archive = _git("archive", commit, "smallmind")
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            # Python 3.11 has filters from 3.11.4 on.
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            files.extractall(folder / BEFORE, **safely)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "smallmind", folder / NOW / "smallmind", ignore=ignored)

    def _place(self, tree: str) -> dict[str, Any]:
        """The arguments with which a process finds a tree, and this one's bench."""
        variables = {"PYTHONPATH": f"{self.folder / tree}{os.pathsep}{ROOT}", **self.caches[tree]}
        return {"variables": variables, "cwd": self.folder / tree, "stderr": subprocess.DEVNULL}

    def worker(self, tree: str) -> Worker:
        """A new process that times a tree."""
        place = self._place(tree)
        return Worker(self.names[tree], "bench.peers.tree", threads=self.threads, **place)

    def start(self, tree: str, is_cold: bool) -> float:
        """The seconds of a start, to the end of its first step; a cold one leaves its kernels."""
        if is_cold:
            cache = tempfile.mkdtemp(prefix=f"kernels-{tree}-", dir=self.folder)
            self.caches[tree] = {"SMALLMIND_CACHE_DIR": cache}
        return float(sum(answer_of("-c", start.PROGRAM, **self._place(tree))))


Record = dict[str, Any]


def _is_slower(record: Record) -> bool:
    """True if three of four pairs agree that this tree is slower, and by more than 3 %."""
    return record.get("ratio", 0) > SLOWER and record["low"] > 1


def record_of(row: Row, seconds: dict[str, list[float]]) -> Record:
    """The seconds of pairs -> a record; the ratio is their median, low and high their quartiles."""
    ratios = np.divide(seconds[NOW], seconds[BEFORE])
    low, ratio, high = (float(x) for x in np.quantile(ratios, (0.25, 0.5, 0.75)))
    record: Record = {"row": row.name, "group": row.group or row.name}
    record |= {"ratio": ratio, "low": low, "high": high}
    record |= {tree: statistics.median(times) for tree, times in seconds.items()}
    return record


def measure(
    row: Row, trees: Trees, workers: dict[str, Worker], pairs: int, seconds: dict[str, list[float]]
) -> Record:
    """Adds so many pairs of turns to the seconds -> the row's record."""
    if row.build[0] != "start":
        for worker in workers.values():  # both at once: they may have to compile
            worker.tell(build=row.build)
        for tree, reason in [(tree, worker.answer()) for tree, worker in workers.items()]:
            if reason:
                left_out = f"{trees.names[tree]} cannot: {reason}"
                return {"row": row.name, "left_out": left_out, "by": tree}
    for number in range(pairs):
        for tree in (BEFORE, NOW) if number % 2 else (NOW, BEFORE):
            if row.build[0] == "start":
                seconds[tree].append(trees.start(tree, row.build[1]))
            else:
                seconds[tree].append(workers[tree].ask(turn=row.turn))
    record = record_of(row, seconds)
    if least := row.operations or row.nbytes:
        limit = workers[NOW].ask(limit=None if row.operations else row.nbytes)
        record["share"] = least / limit / record[NOW]
    return record


def _show(record: Record) -> None:
    text = f"{record['row']:<46} "
    if "left_out" in record:
        text += f"left out: {record['left_out']}"
    else:
        text += f"{duration(record[BEFORE]):>9} {duration(record[NOW]):>9} {record['ratio']:6.3f}"
        text += f" ({record['low']:.3f}-{record['high']:.3f})"
        text += f" {record['share']:5.0%}" if "share" in record else ""
        is_noisy = record["high"] - record["low"] > NOISY
        text += "  slower" if _is_slower(record) else "  noisy" if is_noisy else ""
    print(text, flush=True)


def time_part(part: str, trees: Trees) -> list[Record]:
    """Times the rows of a part; doubtful ones again and again, in new processes."""
    known = {row.name: row for row in rows(part)}
    seconds: dict[str, dict[str, list[float]]] = {name: {BEFORE: [], NOW: []} for name in known}
    records: dict[str, Record] = {}
    for number in range(PROCESSES):
        again = [
            name
            for name, row in known.items()
            if name not in records
            or (_is_slower(records[name]) and (row.pairs > 1 or number < COLD_STARTS))
        ]
        if not again:
            break
        with contextlib.ExitStack() as running:
            workers = {tree: running.enter_context(trees.worker(tree)) for tree in (BEFORE, NOW)}
            for name in again:
                row = known[name]
                with saying(name):
                    record = measure(row, trees, workers, row.pairs, seconds[name])
                _show(record)
                records[name] = record
    return list(records.values())


def shares(records: list[Record]) -> dict[str, str]:
    """The rows of the table of results: shares of the limit, of products the least too; seconds."""
    groups: dict[str, list[float]] = {}
    for record in records:
        if "share" in record:
            groups.setdefault(record["group"], []).append(record["share"])
    table = {r["row"]: f"{r[NOW]:.2f} s" for r in records if NOW in r and "share" not in r}
    for group, each in groups.items():
        least = f", least {min(each):.0%}" if len(each) > 1 else ""
        table[group] = f"{statistics.median(each):.0%}{least}"
    return table


HEAD = """
Shares of multiply-adds from registers, in generation of a copy of the weights; seconds of a start.

| row | share | date | commit |
|---|--:|---|---|
"""


def compare_with_kind(found: dict[str, str], machine: Record, commit: str, is_saved: bool) -> None:
    """Prints the shares beside those of the last machine of this kind, and may replace them."""
    kind = str(machine["llvm_cpu"]).replace("znver", "zen")
    kind += f"-{machine['compiled_for']}" * (machine["compiled_for"] != "host")
    file = RESULTS / f"{kind}.md"
    title = f"\n## `python -m bench against`, {machine['threads']} threads\n"
    text = file.read_text(encoding="utf-8") if file.exists() else f"# {machine['cpu']}, {kind}\n"
    before, _, section = text.partition(title)
    section, rest = re.split(r"(?=\n## )|\Z", section, maxsplit=1)
    lines = [line for line in section.removeprefix(HEAD).splitlines() if line.startswith("| ")]
    known = {row: values for row, *values in (line[2:-2].split(" | ") for line in lines)}
    if known:
        print(f"\nShares of the machine's limit beside those in {file.name}")
        compared = [[row, *known.get(row, [""])[:1], share] for row, share in found.items()]
        print(tabulate(compared, ["", "then", "now"], disable_numparse=True), flush=True)
    if is_saved:
        known |= {row: [share, str(datetime.date.today()), commit] for row, share in found.items()}
        table = "".join(f"| {' | '.join([row, *values])} |\n" for row, values in known.items())
        file.write_text(f"{before}{title}{HEAD}{table}{rest}", encoding="utf-8")
    elif not known:
        print(f"\n{file.name} has no shares of {machine['threads']} threads: --save writes them")


def run(options: argparse.Namespace, machine: Record) -> list[Record]:
    """Measures and prints each row; returns the records. Units: seconds."""
    commit = _git("describe", "--always", "--dirty").decode().strip()
    records = []
    heads = f"\n{'':<46} {options.commit[:9]:>9}      this  ratio (quartiles)  of limit"
    try:
        with tempfile.TemporaryDirectory(prefix="smallmind-against-") as folder:
            trees = Trees(options.commit, Path(folder), machine["threads"])
            print(heads, flush=True)
            for part in PARTS:
                if part in (options.only or PARTS):
                    records += time_part(part, trees)
    except KeyboardInterrupt:
        print("Interrupted")
        raise SystemExit(130) from None
    compare_with_kind(shares(records), machine, commit, options.save)
    return records


def failures(records: list[Record]) -> list[str]:
    """A line for every row in which this tree is slower, or which it cannot run."""
    slower = [f"{r['row']}: {r['ratio']:.3f} times as long" for r in records if _is_slower(r)]
    return slower + [f"{r['row']}: {r['left_out']}" for r in records if r.get("by") == NOW]

"""The bench measures what it claims, and refuses what it cannot; no times are asserted."""

import io
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import Phase

from bench import __main__ as program
from bench import (
    against,
    busy,
    faults,
    inferena,
    memory,
    recipe,
    start,
    threads,
    trial,
)
from bench.__main__ import parse
from smallmind import Tokenizer, TransformerModel, export
from smallmind.bench import cases, kernels, machine, overview, step
from smallmind.bench.ceilings import Streams
from smallmind.bench.machine import ROOT
from smallmind.bench.peers import job, ours
from smallmind.bench.peers.job import Job, Sizes
from smallmind.cli import bench as command
from smallmind.cli import main
from smallmind.kernels.cases import Case, WrongError, awkward
from smallmind.kernels.codegen import threads as thread_counts
from smallmind.kernels.description import KERNELS, described
from smallmind.settings.presets import ARCHITECTURES
from tests.programs import printed_by


def bench(place, *arguments):
    """Runs a command -> its output, and the record that it writes."""
    file = place / "record.json"
    words = [sys.executable, "-m", "bench", *arguments, "--json", str(file)]
    return printed_by(words), json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture
def with_torch(monkeypatch):
    """PyTorch as the worker has it that measures."""
    monkeypatch.setattr(cases, "torch", pytest.importorskip("torch", exc_type=ImportError))


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_a_row_and_the_shapes_to_measure(name):
    found = [row for row in kernels.rows() if kernels.named(row)[0] == name]
    assert found
    for row in found:
        axes, shapes = kernels.known()[row]
        assert all(len(shape) == len(axes.split()) for shape in shapes) and len(shapes) >= 2


@pytest.mark.parametrize("name", [*cases.NUMPY, *cases.TORCH])
def test_peers_run_at_any_sizes(name, with_torch):
    case = Case(name, list(awkward(name))[3])
    for run in (cases.numpy_peer(case), cases.torch_peer(case)):
        for _ in range(2):
            if run:
                run()


@pytest.mark.parametrize("name", ["attention", "layernorm", "rmsnorm", "swiglu", "gelu_erf"])
def test_peers_compute_what_the_kernel_does(name, with_torch):
    case = Case(name, (3, 4, 5, 8)[: len(described(name).arguments.axes)])
    out = cases.torch_peer(case)()
    out = (out[0] if isinstance(out, tuple) else out).numpy()
    case.run()
    ours = next(iter(case.outputs().values()))
    theirs = out.transpose(0, 2, 1, 3).reshape(ours.shape) if out.ndim == 4 else out
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)


def test_a_limit_of_memory_has_no_part_of_a_call(monkeypatch):
    """Reading few bytes on several threads takes as long as starting them."""
    made = []

    class Noted(kernels.Streams):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            made.append(self.nbytes)

    monkeypatch.setattr(kernels, "Streams", Noted)
    record = kernels.measure("document_positions", (2, 8), rounds=1)
    assert made[0] > 1000 * record["bytes"] > 0


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(case):
        raise WrongError(f"{case.label} is wrong")

    monkeypatch.setattr(Case, "check", wrong)
    assert kernels.measured("matmul", (4, 4, 4), 1) == {"wrong": "matmul 4x4x4 is wrong"}


def test_kernels_prints_a_table_and_writes_a_record(tmp_path):
    flags = ["--shapes", "64x64x64,1x64x64", "--rounds", "1"]
    shown, record = bench(tmp_path, "kernels", "matmul", *flags)
    assert "64x64x64" in shown and "x NumPy" in shown
    assert record["machine"]["threads"] >= 1
    assert [result["shape"] for result in record["results"]] == [[64, 64, 64], [1, 64, 64]]
    for result in record["results"]:
        assert result["worst_error"] < 1e-5
        assert {"ours", "NumPy", "read", "copy"} <= set(result["times"])
        assert "update" not in result["times"]  # it only writes what it does not read
        assert result["bound"] in ("memory", "arithmetic") and result["share_of_bound"] > 0


@pytest.mark.parametrize(("width", "hidden"), [(200, 0), (80, 2), (40, 5)])
def test_a_narrow_terminal_hides_spare_columns(monkeypatch, width, hidden):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    printed = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    rows = command._Rows(command.Console(printed), "A table", command.SPARE)
    rows.add(dict.fromkeys(("shape", *command.SPARE, "best", "bound"), "1"))
    assert rows.hidden == [*command.SPARE[:hidden]]
    lines = printed.getvalue().splitlines()[2:]
    assert [len(line.split()) for line in lines[1:]] == [9 - hidden] * 2
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "mattmul"], "no kernel named mattmul; there are"),
        (["kernels", "matmul", "--shapes", "3x4"], "name kernels with the same axes"),
        (["kernels", "--shapes", "3x4"], "column_sum takes RxC, matmul MxKxN"),
        (["kernels", "matmul", "--shapes", "3x0x4"], "'3x0x4' is not a shape"),
        (["kernels", "matmul", "--json", "nowhere/r.json"], "nowhere is not a writable directory"),
        (["kernels", "matmul", "--isa", "z80"], "invalid choice: 'z80'"),
        (["step", "--shapes", "2x8x16"], "--shapes needs B, T, C, layers and heads"),
        (["step", "--peers", "keras"], "--peers: keras is not installed"),
        (["step", "--arch", "gpt2,bert"], "no architecture named 'bert'; there are gpt2, llama"),
        (["start", "--sizes", "nano,huge"], "no size named 'huge'; there are nano, tiny,"),
        (["memory", "--only", "long,short"], "no part named 'short'; there are example, layers,"),
        (["against", "HEAD", "--only", "step"], "no part named 'step'; there are start, products,"),
        (["inferena", "--peers", "jax"], "--peers: jax is not installed, or has no Llama"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    monkeypatch.setattr(machine, "Worker", partial(Answering, answers={"known": kernels.known}))
    for name in ("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # restored: main() sets them
    with pytest.raises(SystemExit) as refused:
        program.main()
    if refused.value.code == 2:  # by argparse, below its usage
        assert message in capsys.readouterr().err
    else:
        assert message in refused.value.code and "\n" not in refused.value.code


def test_a_step_is_compared_with_each_peer(tmp_path):
    peers = step.installed()
    flags = ["--shapes", "2x8x16x2x2", "--peers", ",".join(peers), "--steps", "5"]
    shown, whole = bench(tmp_path, "step", *flags)
    assert "loss after 20" in shown and "Python takes" in shown
    [record] = whole["results"]
    assert list(record["contestants"]) == ["ours", *peers] and "ours bfloat16" in peers
    for name, contestant in record["contestants"].items():
        assert contestant["seconds"] > 0 and contestant["peak_bytes"] > 1e7
        limit = step.AGREEMENT_16_BITS if name.endswith("float16") else step.AGREEMENT
        assert contestant["worst_difference"] < limit
        assert len(contestant["losses"]) == step.COMPARED
    losses = record["contestants"]["ours"]["losses"]
    assert losses[-1] < losses[0]


class Answering:
    """In place of a process that measures: answers from a table, or by functions."""

    def __init__(self, *_, answers, **__):
        self.answers = answers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, **command):
        ((what, asked),) = command.items()
        answer = self.answers[what]
        return answer(asked) if callable(answer) else answer


def test_an_interrupted_step_shows_what_it_has(monkeypatch, capsys):
    turns = itertools.count()

    def run(asked):
        if next(turns) == 5:  # after the losses of both, and a turn of each
            signal.raise_signal(signal.SIGINT)
        return {name: [0.25] * asked[1] for name in ("seconds", "processor_seconds", "losses")}

    answers = {"run": run, "memory": 10**8, "python": 0.1, "ceiling": 1e9}
    monkeypatch.setattr(step, "Worker", partial(Answering, answers=answers))
    quiet = {"others": 0, "multiply_add_per_second_on_one": 1, "multiply_add_per_second": 1}
    monkeypatch.setattr(machine, "answer_of", lambda *_, **__: [{"threads": 1}, quiet])
    flags = ["--shapes", "2x8x16x2x2,2x9x16x2x2", "--peers", "ours bfloat16", "--threads", "1"]
    (record,) = command.measure(parse(["step", *flags]), "step")
    assert record["is_interrupted"] and list(record["contestants"]) == ["ours", "ours bfloat16"]
    printed = capsys.readouterr().out
    assert "best ms" in printed and "ours bfloat16" in printed and "Interrupted" in printed


def test_a_busy_machine_is_named():
    quiet = {"others": 0.1, "multiply_add_per_second_on_one": 10, "multiply_add_per_second": 19}
    assert machine.disturbances(quiet, 2) == []
    busy = quiet | {"others": 1.26, "multiply_add_per_second": 11}
    load, gain = machine.disturbances(busy, 2)
    assert load.startswith("other programs keep 1.3 of ")
    assert gain == "2 threads together compute 1.1 times as much as one"


def test_only_other_programs_count_while_this_one_computes(monkeypatch):
    """Three of four CPUs are busy for two seconds, in which this process computes for three."""
    waits: list[float] = []
    clocks = {"perf_counter": [10.0, 12.0, 12.0], "process_time": [5.0, 8.0]}
    played = {name: iter(times).__next__ for name, times in clocks.items()}
    monkeypatch.setattr(machine, "time", SimpleNamespace(sleep=waits.append, **played))
    shares = iter([0.0, 75.0])
    played = {"cpu_percent": lambda: next(shares), "cpu_count": lambda: 4}
    monkeypatch.setattr(machine, "psutil", SimpleNamespace(**played))
    assert machine.listen()() == 1.5 and waits == [0.0]


def test_bytes_cost_what_the_same_kind_of_access_does():
    """Only what a call needs is timed."""
    streams = Streams(1024)
    assert streams.contestants(0, 0, 8).keys() == {"update"}
    assert streams.contestants(8, 0, 8).keys() == {"read", "update"}
    assert streams.contestants(0, 8, 0).keys() == {"read", "copy"}
    n = streams.nbytes
    assert streams.floor({"update": 5.0 * n}, 0, 0, 8) == 40
    assert streams.floor({"read": 2.0 * n, "update": 5.0 * n, "ours": 1.0}, 3, 0, 1) == 11
    # A copy writes one half, which is read first, and reads the other.
    assert streams.floor({"read": 2.0 * n, "copy": 3.0 * n}, 1, 10, 0) == 42


def test_the_bench_uses_the_threads_that_a_run_would(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 3)
    assert machine.variables_of(None, None)["NUMBA_NUM_THREADS"] == "3"
    assert machine.variables_of(2, None)["NUMBA_NUM_THREADS"] == "2"


def test_a_page_shows_what_a_machine_is_good_for(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    rate = [2e11, 1e11]
    answers = {
        "machine": {"cpu": "Ours", "threads": 2},
        "load": {"others": 0, "multiply_add_per_second_on_one": 1, "multiply_add_per_second": 2},
        "peaks": {"float32 multiply-adds": rate},
        "bandwidths": {"1000000": {"read": rate, "copy": rate}},
        "step": lambda _: {"seconds": 0.5, "tokens": 768, "rate": 1e11, "is_measured": True},
        "generation": {"parameters": 134e6, "tokens_per_second": 92.0},
    }
    monkeypatch.setattr(machine, "Worker", partial(Answering, answers=answers))
    for flags in (["--json", "a.json"], ["--compare", "a.json"]):
        assert main(["bench", "machine", "--threads", "2", *flags]) == 0
    printed = capsys.readouterr().out
    for words in (
        r"float32 multiply-adds +200 GFLOP/s +100 GFLOP/s",
        r"copy 1 MB +200 GB/s +100 GB/s",
        r"tiny +500\.00 ms +1,536 +100",
        r"134 M in q8_0 +92",
        r"generation, 135 M in q8_0 +92 tokens/s +92 tokens/s +1\.000",
    ):
        assert re.search(words, printed), words
    figures = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["results"]
    assert {"name": "step of nano", "value": 0.5, "unit": "s"} in figures


def test_the_figures_of_the_page_are_measured(monkeypatch):
    monkeypatch.setitem(overview.SIZES, "nano", overview.SIZES["nano"] | {"block_size": 8})
    for name, few in {"LEVELS": (250_000,), "ROUNDS": 2, "STEPS": 2, "READ": 2}.items():
        monkeypatch.setattr(overview, name, few)
    small = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "mlp_width": 64, "n_head": 2}
    monkeypatch.setattr(overview, "KNOWN", {**small, "n_kv_head": 1, "block_size": 64})
    both = [*overview.peaks().values(), *overview.bandwidths()["250000"].values()]
    assert all(len(figures) == 2 and min(figures) > 0 for figures in both)
    measured, computed = overview.step("nano"), overview.step("large", 1e12)
    assert measured["is_measured"] and measured["tokens"] == 12 * 8 and measured["seconds"] > 0
    assert not computed["is_measured"] and computed["seconds"] > 1
    assert overview.generation()["tokens_per_second"] > 0


def test_threads_counts_measures_and_predicts(tmp_path):
    flags = ["--shapes", "2x8x16x2x2", "--rounds", "1", "--threads", "1", "--bandwidth", "50"]
    shown, whole = bench(tmp_path, "threads", *flags)
    assert "busiest of 16" in shown and "parallel regions per step" in shown
    [record] = whole["results"]
    assert list(record["predicted_seconds"]["1"]) == ["1", "2", "4", "8", "16"]
    assert list(record["seconds"]) == ["1"] and record["memory_bytes_per_second"] == 50e9
    for calls in record["kernels"]:
        assert calls["calls"] > 0 and calls["seconds"]["1"] > 0 and calls["read"] > 0
        assert calls["imbalance"]["1"] == pytest.approx(1, abs=0.5)


def test_steps_beside_busy_loops_are_compared_with_the_better_number_of_threads(monkeypatch):
    monkeypatch.setattr(busy, "TURN", 0.01)
    monkeypatch.setitem(busy.SIZES, "nano", {**busy.SIZES["nano"], "n_layer": 1})
    before, are_fixed = thread_counts.threads(), thread_counts.are_fixed()
    try:
        quiet, crowded = busy.measure("nano", rounds=1)
    finally:
        thread_counts.set_threads(before, are_fixed)
    assert (quiet["loops"], crowded["loops"]) == (0, busy.cores())
    for record in (quiet, crowded):
        better = min(record["one"], record["all"])
        assert record["ratio"] == record["chosen"] / better > 0
    slow = {**crowded, "size": "tiny", "loops": 2, "ratio": 1.5}
    assert busy.failures([{**quiet, "ratio": 1.2}, slow]) == [
        "tiny beside 2 loops: 1.50 times the better"
    ]


def test_the_busy_command_fails_above_its_limit(monkeypatch, capsys):
    record = {"loops": 2, "one": 1.0, "all": 2.0, "chosen": 1.5, "ratio": 1.5}
    monkeypatch.setattr(busy, "measure", lambda size, _: [{"size": size, **record}])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["bench", "busy", "--sizes", "nano"])
    with pytest.raises(SystemExit, match="nano beside 2 loops: 1"):
        program.main()
    assert "x the better" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["gpt2", "llama", "modern"])
def test_the_division_of_every_kernel_of_a_step_is_known(arch):
    counted = threads.Step(Sizes(2, 8, 16, 2, 2), arch).count([1, 3])
    assert {name for name, _ in counted} <= KERNELS.keys()
    for calls in counted.values():
        assert calls.calls > 0 and 1 <= calls.imbalance[3] <= 3.5


def test_a_prediction_divides_what_is_divided():
    def calls(seconds, nbytes, regions):
        times = {1: seconds, 2: seconds}  # two threads gain nothing
        return threads.Calls("x", "", 1, regions, 0, nbytes, 0, {1: 1, 2: 1, 4: 1.5}, times)

    machine = threads.Machine({1: 1e-6, 2: 3e-6}, core_rate=1e9, memory_rate=2e9)
    assert machine.region_of(4) == pytest.approx(7e-6)
    step = {("x", "computes"): calls(0.8, 0, 1), ("x", "moves"): calls(1.0, int(1e9), 0)}
    assert threads.predicted(step, 0.1, machine, 1) == pytest.approx(1.9, abs=2e-6)
    # 0.8 of the busiest of four, a gigabyte at the rate of memory, a region, what is not divided
    expected = 0.8 * 1.5 / 4 + 0.5 + 0.1
    assert threads.predicted(step, 0.1, machine, 4) == pytest.approx(expected, abs=1e-5)
    expected = 1.6 * 1.5 / 4 + 2 * 1.5 / 4 + 0.1
    assert threads.predicted(step, 0.1, machine, 4, 2) == pytest.approx(expected, abs=1e-5)


def test_architectures_are_measured_one_after_another(monkeypatch, capsys):
    measured = []

    def measure(sizes, arch, peers, steps, threads, variables):
        measured.append((sizes.T, arch, peers, steps, threads))
        return {"contestants": {}, "is_interrupted": False}

    monkeypatch.setattr(step, "measure", measure)
    monkeypatch.setattr(command, "_show_step", lambda *_: None)
    monkeypatch.setattr(step, "installed", lambda: ["torch", "jax"])
    quiet = {"others": 0, "multiply_add_per_second_on_one": 1, "multiply_add_per_second": 3}
    monkeypatch.setattr(machine, "answer_of", lambda *_, **__: [{"threads": 3}, quiet])
    monkeypatch.setattr(machine, "cores", lambda: 3)
    flags = ["--shapes", "2x8x16x2x2,2x9x16x2x2", "--arch", "gpt2,modern"]
    command.measure(parse(["step", *flags]), "step")
    assert measured == [
        (8, "gpt2", ["torch", "jax"], 60, 3),
        (8, "modern", ["torch"], 60, 3),  # JAX's page is GPT-2 alone
        (9, "gpt2", ["torch", "jax"], 60, 3),
        (9, "modern", ["torch"], 60, 3),
    ]


@pytest.mark.parametrize("arch", program.ARCHS)
def test_pytorch_has_the_same_model(arch, tmp_path):
    torch_step = pytest.importorskip("smallmind.bench.peers.torch_step", exc_type=ImportError)
    sizes = Sizes(B=2, T=8, n_embd=16, n_layer=2, n_head=2)
    model = TransformerModel(job.model_config(sizes, arch))
    job.write(tmp_path / "job.npz", sizes, arch, dict(model.parameters), b"to be or not " * 9)
    work = Job(tmp_path / "job.npz")
    step_of_ours, theirs = ours.build(work), torch_step.build(work, compiled=False, bfloat16=False)
    losses = [step_of_ours(i) for i in range(3)]
    assert losses == pytest.approx([theirs(i) for i in range(3)], abs=1e-4)
    del work.weights["final_norm.weight"]
    with pytest.raises(ValueError, match=r"final_norm\.weight"):
        torch_step.build(work, compiled=False, bfloat16=False)


def test_peers_whose_losses_differ_are_named():
    record = {
        "arch": "llama",
        "sizes": {"B": 3, "T": 5, "n_embd": 8, "n_layer": 2, "n_head": 1},
        "contestants": {
            name: {"worst_difference": difference}
            for name, difference in {
                "ours": 0.0,
                "torch": 1.1e-3,
                "jax": 0.9e-3,
                "ours float16": 0.019,
                "torch compile bfloat16": 0.021,
                "ours bfloat16": float("nan"),
            }.items()
        },
    }
    assert step.failures([record]) == [
        f"llama, B3 T5 2x8 1 heads: {name}'s losses differ by {difference} from ours"
        for name, difference in (
            ("torch", "1.1e-03"),
            ("torch compile bfloat16", "2.1e-02"),
            ("ours bfloat16", "nan"),
        )
    ]


def test_the_operations_of_a_step_are_counted():
    sizes = Sizes(B=3, T=5, n_embd=7, n_layer=2, n_head=1)
    # By hand: q, k, v, projection, expansion to 28 and back in two layers; the head.
    multiplied = 2 * (4 * 7 * 7 + 2 * 7 * 28) + 65 * 7
    # 6 per parameter and token; QK^T and PV forward, twice that backward, half of T x (T + 1).
    attention = 3 * 2 * (2 * 3 * 5 * 6 * 7 * 2) // 2
    assert step.operations(sizes, "gpt2") == 6 * multiplied * 15 + attention


def test_turns_of_short_steps_are_longer():
    turns = [step.steps_per_turn(operations) for operations in (10**6, 10**9, 10**11)]
    assert turns == [100, 10, 5]


def test_shapes_are_parsed():
    options = parse(["kernels", "matmul", "--shapes", "1x2x3,40x50x60", "--threads", "2"])
    assert options.shapes == [(1, 2, 3), (40, 50, 60)]
    assert options.threads == 2
    named = parse(["step", "--shapes", "tiny,2x8x16x2x2"])
    assert named.shapes[0] == (16, 16, 16, 1, 4) and named.shapes[-1] == (2, 8, 16, 2, 2)
    assert parse(["step", "--peers", ""]).peers == []  # none rather than the default


TINY = {"block_size": 16, "n_layer": 4, "n_head": 2, "n_embd": 16}


def test_a_trial_is_a_process_that_may_run_out_of_memory():
    settings = [memory.training_settings("float32", "none", 3)]
    whole = memory.run_trial(1, model=TINY, batch_size=3, settings=settings, steps=2)
    assert len(whole["seconds"]) == 1 and len(whole["seconds"][0]) == 2
    assert whole["peak"] > 5e7 and whole["scratch"] > 0
    assert whole["weights"] == whole["gradients"] == whole["moments"] / 2
    capacity = whole["pool"]["high_water_mark"] - 1
    refused = memory.run_trial(
        1, model=TINY, batch_size=3, settings=settings, steps=1, capacity=capacity
    )
    assert "out_of_memory" in refused


def test_memory_is_measured_by_precision_and_strategy(monkeypatch, capsys):
    def in_this_process(_threads, **arguments):
        try:
            return trial.run(**arguments)
        except MemoryError as error:
            return {"out_of_memory": str(error)}

    monkeypatch.setattr(memory, "run_trial", in_this_process)
    monkeypatch.setattr(memory, "EXAMPLE", TINY)
    monkeypatch.setattr(memory, "PRECISIONS", ("float32", "float16"))
    monkeypatch.setattr(memory, "LONG", 64)
    monkeypatch.setattr(memory, "LIMIT", 180 * 10**6)
    options = parse(["memory", "--steps", "1", "--only", "example,layers,limit,long,accumulation"])
    records = memory.run(options, {"threads": 1})
    assert list(records) == ["example", "layers", "limit", "long", "accumulation"]
    held_at_once = [r["pool"]["high_water_mark"] for r in records["accumulation"]]
    assert sorted(held_at_once, reverse=True) == held_at_once
    assert held_at_once[2] < held_at_once[0] / 8
    held = {
        (r["precision"], r["checkpoint_strategy"], r["micro_batch_size"]): r
        for r in records["example"]
    }
    assert len(held) == 12
    whole, half = held["float32", "none", 16], held["float16", "none", 16]
    assert half["working_weights"] == whole["weights"] / 2 and not whole["working_weights"]
    assert half["activations"] < 0.75 * whole["activations"]
    for r in records["example"]:
        assert abs(r["error_of_held"]) < 0.05
        assert r["seconds"] > 0 and r["estimate"]["total"] > r["activations"]
    for r in records["layers"]:
        limit = {"none": 1, "every_layer": 0.3, "sqrt_layers": 0.5}[r["checkpoint_strategy"]]
        assert 0 < r["share_of_none"] <= limit
    first, second = records["limit"]
    assert all(r["fits"] and r["larger_refused"] for r in (first, second))
    assert second["windows"] > 2 * first["windows"]
    printed = capsys.readouterr().out
    for words in ("working weights", "x none", "of none", "is refused", "B1 T64 4x128", "16 x 4"):
        assert words in printed, words


def test_the_predicted_time_of_runs_is_compared_with_the_real_one(monkeypatch, capsys):
    """By a run that says 3 s and takes 2, where it is the first with its cache 1."""
    caches = []

    def run_trial(threads, variables, flags):
        caches.append(variables["SMALLMIND_CACHE_DIR"])
        took = {"seconds": 2.0 if caches.count(caches[-1]) > 1 else 1.0}
        return {"predicted": 3.0, **took, "spread": 1.0, "timing": 0.25}

    monkeypatch.setattr(start, "run_trial", run_trial)
    records = start.predictions(["nano", "tiny"], 20, threads=1)
    assert [r["ratio"] for r in records] == [3.0, 1.5] * 2
    rows = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["--size nano --steps 20", "cold", "3.0 s", "1.0 s", "3.00", "1.0", "0.25 s"] in rows
    assert ["--size tiny --steps 20", "warm", "3.0 s", "2.0 s", "1.50", "1.0", "0.25 s"] in rows


@pytest.mark.slow
def test_a_run_says_what_it_will_take_and_takes(tmp_path):
    flags = ["--size", "nano", "--steps", "2", "--out", str(tmp_path / "run")]
    found = memory.run_trial(1, flags=flags)
    assert found["status"] == 0 and min(found["predicted"], found["seconds"]) > 0
    assert found["spread"] >= 1 and found["estimate"] > 0


def test_faults_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(faults, "EXAMPLES", 100)
    options = parse(["faults", "--only", "cuts,flips,fuzzing", "--flips", "20", "--minutes", "0"])
    rows = faults.run(options, {})
    assert [row["lost"] for row in rows] == [0, 0, 0]
    assert rows[0]["tried"] > 1000 and rows[1]["tried"] == 20 and rows[2]["tried"] >= 4 * 100
    assert "files made up or changed at random" in capsys.readouterr().out


def test_a_lost_checkpoint_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(faults, "load", lambda _: None)
    # The example that fails is not made shorter, which takes long.
    monkeypatch.setattr(faults, "settings", partial(faults.settings, phases=[Phase.generate]))
    monkeypatch.setattr(faults.test_hostile_files, "check_headers", lambda *_: 1 / 0)
    options = parse(["faults", "--only", "flips,fuzzing", "--flips", "20", "--minutes", "0"])
    assert [row["lost"] for row in faults.run(options, {})] == [20, 1]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_recipes_are_compared_under_their_names():
    options = parse(
        ["recipe", "--flags", "--n-layer 2", "--compare", "a=--steps 3", "--compare", "b="]
    )
    options.compare.append("c=--tokenizer bpe")
    characters = ["--tokenizer", "char"]
    assert recipe.variants(options) == {
        "a": ["--n-layer", "2", "--steps", "3", *characters],
        "b": ["--n-layer", "2", *characters],
        "c": ["--n-layer", "2", "--tokenizer", "bpe"],
    }
    for wrong in (["--steps 3"], ["a=", "a="]):
        options.compare = wrong
        with pytest.raises(SystemExit, match="--compare"):
            recipe.variants(options)
    flags = ["--minutes", "1", "--n-layer", "2", "--target-loss", "1.5", "--bias"]
    assert recipe.without_length(flags) == ["--n-layer", "2", "--bias"]


def test_a_compressor_predicts_the_last_tenth_of_a_text():
    pytest.importorskip("pyppmd")
    random_bits = "".join(random.Random(1).choices("ab", k=50_000))
    found = recipe.ppmd(random_bits)
    assert found["tokens"] == 50_000 and abs(found["loss"] - math.log(2)) < 0.03
    assert recipe.ppmd("the cat sat on the mat. " * 2000)["loss"] < 0.01


def test_a_recipe_is_measured_over_seeds(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200, encoding="utf-8")
    flags = "--n-layer 1 --n-embd 8 --n-head 1 --block-size 8 --batch-size 2 --backend numpy"
    flags += " --steps 6 --val-every 2 --val-batches 1 --warmup-steps 1"
    arguments = ["recipe", str(text), "--flags", flags, "--seeds", "2", "--target", "9"]
    (result,) = recipe.run(parse(arguments), {"threads": 1})
    assert [run["seed"] for run in result["runs"]] == [1337, 1338]
    for run in result["runs"]:
        assert run["steps"] == 2  # the first evaluation reached the target
        assert run["tokens"] == 2 * 2 * 8 and 0 < run["loss"] < 9
    assert "default" in capsys.readouterr().out


MACHINE = {"cpu": "Ours", "llvm_cpu": "znver9", "compiled_for": "host", "threads": 1}
in_a_clone = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares commits")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """`bench against` of one small row per part, with its results and temporary files here."""
    for name, rows in {"HIDDEN": 1, "HEADS": 1, "STEPS": 1, "GENERATION": 1}.items():
        monkeypatch.setattr(against, name, getattr(against, name)[:rows])
    for name, few in {"PAIRS": 2, "TOKENS": 2, "PRECISIONS": {"float32": 4}}.items():
        monkeypatch.setattr(against, name, few)
    monkeypatch.setattr(against, "RESULTS", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


@in_a_clone
@pytest.mark.slow
def test_this_tree_takes_turns_with_a_commit(small, capsys):
    only = ["--only", "products,attention,steps,generation", "--save"]
    records = against.run(parse(["against", "HEAD", *only]), MACHINE)
    printed = capsys.readouterr().out
    assert len(records) == 6 + 2 + 1 + 1
    for record in records:
        assert record["low"] <= record["ratio"] <= record["high"] and record["share"] > 0
        assert record["row"] in printed
    assert {"A B, aligned", "A^T B, NumPy's", "step, B16 T16 1x64 4 heads, float32"} <= {
        record["group"] for record in records
    }
    assert not list((small / "temporary").iterdir())
    saved = (small / "zen9.md").read_text(encoding="utf-8")
    assert saved.startswith("# Ours, zen9\n") and "against`, 1 threads" in saved
    against.compare_with_kind({"A B, aligned": "50%"}, MACHINE, "abc", is_saved=False)
    assert re.search(r"A B, aligned +\d+% +50%", capsys.readouterr().out)


def test_a_doubtful_row_is_timed_again_and_fails_if_most_pairs_agree(monkeypatch, capsys):
    times = {"slow": [2.0] * 15, "lucky": [2.0] * 3 + [0.5] * 6, "even": [1.0] * 9}
    known = [against.Row(name, [name], pairs=3) for name in times]
    monkeypatch.setattr(against, "rows", lambda _: iter(known))
    asked = []

    def measure(row, trees, workers, pairs, seconds):
        asked.append((row.name, pairs))
        now = seconds[against.NOW] + times[row.name][len(seconds[against.NOW]) :][:pairs]
        seconds.update({against.NOW: now, against.BEFORE: [1.0] * len(now)})
        return against.record_of(row, seconds)

    monkeypatch.setattr(against, "measure", measure)
    trees = SimpleNamespace(worker=nullcontext)
    records = against.time_part("steps", trees)
    assert asked == [("slow", 3), ("lucky", 3), ("even", 3), ("slow", 3), ("lucky", 3)] + 3 * [
        ("slow", 3)
    ]
    assert against.failures(records) == ["slow: 2.000 times as long"]
    assert "slower" in capsys.readouterr().out


@in_a_clone
def test_a_row_that_a_tree_cannot_run_is_left_out(small, monkeypatch, capsys):
    missing = against.Row("attention of nothing", ["attention", "forward", 1, 2, 3])
    monkeypatch.setattr(against, "rows", lambda _: iter([missing]))
    (record,) = against.run(parse(["against", "HEAD", "--only", "attention"]), MACHINE)
    assert "HEAD cannot: TypeError: _attention() missing 1 required" in record["left_out"]
    assert "attention of nothing" in capsys.readouterr().out
    assert against.failures([record]) == []
    (failed,) = against.failures([record | {"by": against.NOW}])
    assert failed.startswith("attention of nothing: HEAD cannot")
    with pytest.raises(SystemExit, match=r"git archive nowhere smallmind: .*nowhere"):
        against.run(parse(["against", "nowhere"]), MACHINE)


@in_a_clone
def test_the_trees_are_removed_after_an_interrupt(tmp_path):
    command = [sys.executable, "-m", "bench", "against", "HEAD", "--only", "products"]
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        while "of limit" not in process.stdout.readline():
            assert list(tmp_path.iterdir()) or process.poll() is None
        process.send_signal(signal.SIGINT)
        assert "Interrupted" in process.stdout.read()
    assert process.returncode == 130
    assert not list(tmp_path.glob("smallmind-against-*"))


def test_an_interrupt_while_a_worker_starts_ends_it(monkeypatch):
    processes = []

    def interrupted(*arguments, **settings):
        processes.append(start_it(*arguments, **settings))
        signal.raise_signal(signal.SIGINT)
        return processes[0]

    start_it = machine.started
    monkeypatch.setattr(machine, "started", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.Worker("ours", "smallmind.bench.peers.ours", threads=1)
    assert processes[0].poll() is not None


def test_results_of_a_kind_of_cpu_keep_what_else_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(against, "RESULTS", tmp_path)
    file = tmp_path / "zen9.md"
    file.write_text("# Zen 9\n\nfirst\n\n## Last\n\nlast\n", encoding="utf-8")
    both = {"A B": "50%", "start, warm": "0.80 s"}
    for found, count, commit in ((both, 1, "one"), ({"A B": "60%"}, 1, "two"), (both, 2, "three")):
        machine = MACHINE | {"threads": count}
        against.compare_with_kind(found, machine, commit, is_saved=True)
    text = file.read_text(encoding="utf-8")
    rows = re.findall(r"\| (.*) \| (.*) \| \d{4}-\d\d-\d\d \| (.*) \|", text)
    assert rows[:2] == [("A B", "60%", "two"), ("start, warm", "0.80 s", "one")]
    assert rows[2:] == [("A B", "50%", "three"), ("start, warm", "0.80 s", "three")]
    assert text.startswith("# Zen 9\n\nfirst\n\n## Last\n\nlast\n") and "2 threads" in text


@pytest.mark.parametrize("weights", ["random", "exported"])
def test_a_case_of_the_neutral_table_is_measured(weights, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", exc_type=ImportError)
    small = {"vocab_size": 200, "n_embd": 36, "n_layer": 1, "mlp_width": 24}
    monkeypatch.setattr(inferena, "SHAPE", inferena.SHAPE | small)
    flags = ["--rounds", "1", "--out", str(tmp_path / "line.json")]
    if weights == "exported":
        model = TransformerModel(256, 128, 12, 1, 2, **ARCHITECTURES["llama"])
        export(model, Tokenizer(kind="byte"), tmp_path / "model", "hf")
        flags += ["--weights", str(tmp_path / "model")]
    records = inferena.run(parse(["inferena", *flags]), MACHINE)
    assert [record["name"] for record in records] == ["ours", "torch"]
    assert inferena.failures(records) == []
    V = 256 if weights == "exported" else 200
    assert records[0]["loss"] == pytest.approx(np.log(V), abs=0.1)
    assert all(record["peak_bytes"] > 1e7 for record in records)
    line = json.loads((tmp_path / "line.json").read_text(encoding="utf-8"))
    assert json.dumps(line) in capsys.readouterr().out
    assert line["framework"] == "smallmind" and line["model"] == "SmolLM2-135M"
    assert set(line["timings"]) == {"compile_s", "inference_ms", "latency_ms", "training_ms"}
    assert len(line["outputs"]["logits_sample"]) == 16
    wrong = [records[0], records[1] | {"loss": records[0]["loss"] + 0.01}]
    assert "torch's loss is" in inferena.failures(wrong)[0]


def test_the_command_measures_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["bench", "kernels", "sum_of_squares", "--shapes", "9", "--rounds", "1"]
    assert main([*flags, "--json", "a.json", "--threads", "1"]) == 0
    whole = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert whole["machine"]["threads"] == 1 and whole["limits"]["multiply_add_per_second"] > 0
    assert list(whole["limits"]["copy_bytes_per_second"]) == ["1000000"]  # 36 bytes need no more
    capsys.readouterr()
    flags += ["--plot", "roofline.svg"]
    assert main([*flags, "--compare", "a.json", "--isa", "haswell", "--threads", "1"]) == 0
    drawn = (tmp_path / "roofline.svg").read_text(encoding="utf-8")
    assert ">sum_of_squares<" in drawn and ">1 MB, " in drawn
    shown = capsys.readouterr().out
    assert "compiled_for haswell" in shown and "instruction_set AVX2" in shown
    assert "Median of 1 ratios" in shown and "Not the same compiled_for" in shown
    assert re.search(r"sum_of_squares 9 +[\d.]+ us +[\d.]+ us +\d", shown)


DISTURBED = {  # length: spread, share of the bound, what is shown of it
    9: (0.2, 0.5, "20 %"),
    10: (0.21, 0.5, "21 % !"),
    11: (1.0, 0.5, "100 % !"),
    12: (32.16, 0.5, "> 100 % !"),
    13: (0.05, 1.0, "100 %"),
    14: (0.05, 4.32, "!"),
}


def test_what_other_programs_disturbed_is_marked(monkeypatch, cli):
    """No share and no spread above 100 % is printed."""
    record, lengths = kernels.measure("sum_of_squares", [9], rounds=1), list(DISTURBED)

    def disturbed(asked):
        _, shape, _ = asked
        spread, share, _ = DISTURBED[shape[0]]
        times = {name: {**each, "spread": spread} for name, each in record["times"].items()}
        return {**record, "shape": shape, "share_of_bound": share, "times": times}

    limits = {"others": 0, "multiply_add_per_second_on_one": 1, "multiply_add_per_second": 1}
    copies = {"copy_bytes_per_second": {"1000000": 1}, "copy_bytes_per_second_on_one": 1}
    answers = {"known": kernels.known, "machine": {"cpu": "Ours"}, "measure": disturbed}
    answers["limits"] = {**limits, **copies}
    monkeypatch.setattr(machine, "Worker", partial(Answering, answers=answers))
    for chosen, is_marked in ((lengths, True), ([9, 13], False)):
        shapes = ",".join(map(str, chosen))
        printed = cli(f"bench kernels sum_of_squares --shapes {shapes} --rounds 1 --threads 1")
        for length in chosen:
            (row,) = re.findall(rf"^ *{length} .*$", printed.out, re.MULTILINE)
            shown = DISTURBED[length][2]
            assert re.search(rf"(^|\s){re.escape(shown)}(\s|$)", row)
            assert ("!" in row) == ("!" in shown)
            assert not [x for x in re.findall(r"(?<!> )(\d+) %", row) if int(x) > 100]
        assert ("! marks what other programs disturbed" in printed.flat) == is_marked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read a.json: No such file"),
        ("[1]", "a.json was not written by `smallmind bench start --json`"),
        ('{"command": "step", "results": []}', "a.json is of `smallmind bench step`"),
    ],
)
def test_a_file_that_cannot_be_compared_is_refused_before_measuring(
    content, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert main(["bench", "start", "--compare", "a.json"]) == 2
    assert f"--compare: {message}" in " ".join(capsys.readouterr().err.split())

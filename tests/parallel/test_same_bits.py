"""Weights, losses and evaluations have equal bits at any number of ranks, and alone.

Ranks that are threads of this process are fast; those of MPI show that its messages are the same.
"""

import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

import smallmind
from smallmind import Run
from smallmind.runs.parallel import Leader
from tests.exchange.models import model_of, tokenizer_of
from tests.faults.runs import TEXT, outcome, status, write_text
from tests.parallel import in_process
from tests.parallel.commands import disturbing
from tests.parallel.launching import LAUNCHERS, needs_mpi, on_every_mpi, run

BASE = shlex.split(
    "--block-size 16 --n-embd 16 --n-layer 2 --n-head 2 --batch-size 8 --val-every 4 "
    "--val-batches 3 --warmup-steps 3 --log-every 1 --save-every 5 --threads 1"
)
PACKAGE = Path(smallmind.__file__).parent
ALONE = 0  # without mpiexec
AT_ONCE = 12  # configurations per program
SIZES = 1, 2, 3, 5, 6, 7, 8  # numbers of ranks
SOME_SIZES = 3, 8  # with unequal shares, and with one shard each


class Configuration(NamedTuple):
    """Flags of `train` and the number of shards that ranks divide among them.

    With `spikes` the loss spikes once; with `early` gradients are sent during the backward pass
    from the third step on, however little time that takes.
    """

    flags: list[str]
    shards: int
    spikes: bool
    early: bool

    def sizes(self, chosen=SIZES):
        return [size for size in chosen if size <= self.shards]


def configuration(flags, shards=8, spikes=False, early=False):
    return Configuration(shlex.split(flags), shards, spikes, early)


# Together they cover what changes the arithmetic of a step.
FEW = {
    "gpt2": configuration("--recipe gpt2 --precision float32 --dropout 0.1 --max-grad-norm 0.1"),
    "llama": configuration(
        "--recipe gpt2 --arch llama --precision float16 --grad-accum-steps 3 --batch-size 5"
    ),
    "modern": configuration(
        "--arch modern --optimizer muon --precision bfloat16 --epochs 1 --batch-size 30 "
        "--reduce-precision bfloat16 --dropout 0.1"
    ),
    "spike": configuration("--init-from INITIAL --val-batches 0", spikes=True),
    "six": configuration(
        "--recipe gpt2 --teacher INITIAL --learn-temperature --batch-size 7 "
        "--use-gradient-checkpointing",
        shards=6,
    ),
    "early": configuration(
        "--recipe gpt2 --grad-accum-steps 2 --batch-size 5 --shard-optimizer --dropout 0.1",
        early=True,
    ),
    "early, rounded": configuration(
        "--arch modern --optimizer muon --shard-optimizer --reduce-precision bfloat16 "
        "--use-gradient-checkpointing --micro-batch-size 1",
        spikes=True,
        early=True,
        shards=6,
    ),
    "frozen": configuration(
        "--n-layer 4 --freeze embedding,blocks.0,blocks.2 --optimizer muon --shard-optimizer "
        "--precision bfloat16",
        spikes=True,
        early=True,
        shards=6,
    ),
    "on disk": configuration("--precision float32 --grad-accum-steps 2"),
    "target": configuration(
        "--precision float32 --epochs 8 --batch-size 30 --val-every 20 --target-loss 1.0"
    ),
}
LENGTHS = (
    "--dropout 0.1 --grad-accum-steps 2",
    "--epochs 1 --batch-size 30 --max-grad-norm 0.1",
    "--init-from INITIAL --batch-size 5",
    "--teacher INITIAL --dropout 0.2",
)
ALL = {
    " ".join(words): configuration(" ".join(words), shards, early=number % 2 == 1)
    for number, words in enumerate(
        itertools.product(
            ("--arch gpt2", "--arch llama --n-kv-head 1", "--arch modern"),
            (f"--precision {name}" for name in ("float32", "float16", "bfloat16")),
            ("--optimizer adamw", "--optimizer muon"),
            ("--shard-optimizer", "--reduce-precision bfloat16"),
            LENGTHS,
        )
    )
    for shards in [(6, 8, 9)[number % 3]]
}


def _initial(root, text, flags, known):
    """A run of the same shape and architecture as one with these flags."""
    shape = BASE[: BASE.index("--batch-size")]
    for flag in ("--arch", "--n-kv-head"):
        if flag in flags:
            shape += flags[flags.index(flag) :][:2]
    if tuple(shape) not in known:
        out = known[tuple(shape)] = root / f"initial {len(known)}"
        assert status("train", text, *shape, "--steps", "3", "--out", out) == 0
    return known[tuple(shape)]


def commands(root, configurations):
    """The words that train each configuration -> name, size, out -> words, with their shards."""
    text = write_text(root)
    prepared, initials = root / "prepared", {}
    assert status("prepare", text, "--out", prepared) == 0

    def words(name, size):
        flags, out = configurations[name].flags, root / f"{name.replace('/', '')} {size}"
        chosen = ["train", prepared if name == "on disk" else text, *BASE, *flags]
        if "INITIAL" in chosen:
            chosen[chosen.index("INITIAL")] = _initial(root, text, flags, initials)
        chosen += [] if "--epochs" in chosen else ["--steps", 9]
        chosen += ["--data-shards", configurations[name].shards, "--out", out]
        return [str(word) for word in chosen], out

    return words


def train_in_process(words, configurations, name, size):
    """Trains a configuration on ranks that are threads, or alone -> the run."""
    chosen = configurations[name]
    arguments, out = words(name, size)
    with disturbing(chosen.spikes, chosen.early):
        ended = in_process.status(size, *arguments) if size else status(*arguments)
    assert ended == 0
    return out


def train_over_mpi(root, words, configurations, size, launcher):
    """Trains all configurations with mpiexec -> name -> the run."""
    runs, lines = {}, []
    for name, chosen in configurations.items():
        arguments, runs[name] = words(name, f"{size} of MPI")
        lines.append((chosen.spikes, chosen.early, arguments))
    file = root / f"commands {size}.json"
    file.write_text(json.dumps(lines), encoding="utf-8")
    code, _, errors = run(launcher.command((size, ("-m", "tests.parallel.commands", file))))
    assert code == 0, errors
    return runs


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The directory of the runs of FEW, the words that train them, and those trained alone."""
    root = tmp_path_factory.mktemp("few")
    words = commands(root, FEW)
    return root, words, {name: train_in_process(words, FEW, name, ALONE) for name in FEW}


@pytest.mark.parametrize(
    "sizes", [SOME_SIZES, pytest.param(SIZES, marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("name", FEW)
def test_runs_are_the_same_at_any_number_of_ranks(few, name, sizes):
    _, words, alone = few
    expected = outcome(alone[name])
    assert expected[1]
    for size in FEW[name].sizes(sizes):
        trained = train_in_process(words, FEW, name, size)
        assert outcome(trained) == expected, f"{size} ranks"
        lines = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
        spikes = [line["spike_step"] for line in lines if "spike_step" in line]
        assert spikes == [7] * FEW[name].spikes


# Ranks exchange in these all that they exchange in FEW.
OVER_MPI = {name: FEW[name] for name in ("modern", "six", "early", "early, rounded", "on disk")}


@needs_mpi
@pytest.mark.parametrize(
    ("size", "chosen"),
    [(3, OVER_MPI), *(pytest.param(size, FEW, marks=pytest.mark.slow) for size in (1, 3))],
    ids=lambda value: len(value) if isinstance(value, dict) else value,
)
def test_runs_over_mpi_are_the_same(few, size, chosen):
    root, words, alone = few
    for name, trained in train_over_mpi(root, words, chosen, size, LAUNCHERS[0]).items():
        assert outcome(trained) == outcome(alone[name]), name


@needs_mpi
def test_by_default_there_are_eight_shards_at_any_number_of_ranks(few, tmp_path):
    """A single one is a run without mpiexec, or the arithmetic of shards would be everybody's."""
    text, flags = write_text(tmp_path), [*FEW["gpt2"].flags, "--steps", "9"]
    whole, one, eight = (tmp_path / name for name in ("whole", "one", "eight"))
    words = "train", text, *BASE, *flags
    assert status(*words, "--out", whole) == 0
    assert in_process.status(1, *words, "--data-shards", 1, "--out", one) == 0
    assert outcome(one) == outcome(whole)
    program = "-m", "tests.parallel.disturbed", "--", *words, "--out", eight
    code, printed, errors = run(LAUNCHERS[0].command((3, program)))
    assert code == 0, errors
    assert "3, each with 2 or 3 of 8 data shards" in printed
    assert outcome(eight) == outcome(few[2]["gpt2"]) != outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_runs_of_every_kind_are_the_same_at_any_number_of_ranks(tmp_path, name):
    words = commands(tmp_path, ALL)
    alone = outcome(train_in_process(words, ALL, name, ALONE))
    assert alone[1]
    for size in ALL[name].sizes():
        assert outcome(train_in_process(words, ALL, name, size)) == alone, f"{size} ranks"


@needs_mpi
@pytest.mark.slow
@on_every_mpi
def test_runs_of_every_kind_are_the_same_over_mpi(tmp_path, launcher):
    names = list(ALL)
    for first in range(0, len(names), AT_ONCE):
        chosen = {name: ALL[name] for name in names[first : first + AT_ONCE]}
        root = tmp_path / str(first)
        root.mkdir()
        words = commands(root, chosen)
        alone = {name: outcome(train_in_process(words, chosen, name, ALONE)) for name in chosen}
        for size in (2, 3, 5):
            trained = train_over_mpi(root, words, chosen, size, launcher)
            assert {name: outcome(run) for name, run in trained.items()} == alone, f"{size} ranks"


@pytest.mark.parametrize("length", ["--steps 6", "--epochs 2 --batch-size 28"])
def test_dead_units_are_those_of_the_whole_batch(tmp_path, length):
    """Also where ranks have no windows."""
    flags = "--recipe gpt2 --mlp relu2 --learning-rate 0.05 --warmup-steps 0 --batch-size 4 "
    flags += "--grad-accum-steps 3 --check-gradient-health --diagnostic-interval 2 " + length
    words = "train", write_text(tmp_path), *BASE, *shlex.split(flags), "--data-shards", 8
    found = []
    for size in (1, 3, 8):
        assert in_process.status(size, *words, "--out", tmp_path / str(size)) == 0
        lines = (tmp_path / str(size) / "metrics.jsonl").read_text().splitlines()
        found.append([row["findings"] for row in map(json.loads, lines) if "findings" in row])
    assert "hidden units are dead" in json.dumps(found[0])
    assert found == found[:1] * 3


def resume(path, size, until):
    """Continues a run on ranks, to a step."""

    def lead(ranks):
        run = Run.open(path)
        run.session.join(Leader(ranks))
        run.resume(lambda record: run.stop() if record.step >= until else None)
        ranks.end(0)

    in_process.on_ranks(size, lead)


class Watched(in_process.ThreadRanks):
    """Notes which files of the package look at anything of the group."""

    files: ClassVar = set()

    def __getattribute__(self, name):
        place = Path(sys._getframe(1).f_code.co_filename)
        if "smallmind" in place.parts and "tests" not in place.parts:
            self.files.add(place.relative_to(PACKAGE).as_posix())
        return super().__getattribute__(name)


def test_nothing_looks_at_the_group_but_its_few_places(tmp_path, monkeypatch):
    monkeypatch.setattr(in_process, "ThreadRanks", Watched)
    flags = "--recipe gpt2 --steps 6 --shard-optimizer --optimizer muon --check-gradient-health"
    words = "train", write_text(tmp_path), *BASE, *shlex.split(flags), "--data-shards", 3
    assert in_process.status(2, *words, "--sample-every", 3, "--out", tmp_path / "run") == 0
    others = {file for file in Watched.files if not file.startswith(("parallel/", "optim/"))}
    assert others == {"cli/parallel.py", "runs/parallel.py", "training/training.py"}
    assert {"parallel/gradient_sum.py", "optim/muon.py"} <= Watched.files


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("shards", [6, pytest.param(8, marks=pytest.mark.slow), 9])
def test_runs_resume_on_any_number_of_ranks(tmp_path, optimizer, shards):
    """Also runs of nine shards. The state of the optimizer is divided anew."""
    settings = {"recipe": "gpt2", "optimizer": optimizer, "steps": 12, "n_layer": 1, "n_embd": 16}
    settings |= {"n_head": 2, "block_size": 16, "batch_size": 7, "dropout": 0.1, "log_every": 1}
    settings |= {"data_shards": shards, "shard_optimizer": True, "val_every": 4, "threads": 1}
    settings |= {"warmup_steps": 2, "grad_accum_steps": 2, "val_batches": 2}
    whole, parts = (
        Run.create(text=TEXT, out=tmp_path / name, **settings).path for name in ("whole", "parts")
    )
    Run.open(whole).train()
    for size, until in ((3, 3), (5, 7), (1, 9), (6, 12)):
        resume(parts, size, until)
    assert outcome(parts) == outcome(whole)


@pytest.mark.parametrize("name", ["Gemma 3", "GPT-NeoX", "GPT-Neo"])
def test_models_of_other_architectures_learn_the_same_on_two_ranks(tmp_path, name):
    tokenizer = tokenizer_of("char")
    smallmind.export(model_of(name, tokenizer), tokenizer, tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    flags = "--steps 3 --batch-size 6 --val-every 0 --data-shards 2 --warmup-steps 0 --threads 1"
    found = []
    for size in (1, 2):
        out = tmp_path / f"run {size}"
        words = "train", tmp_path / "text.txt", "--init-from", tmp_path / "model", "--out", out
        assert in_process.status(size, *words, *flags.split()) == 0
        found.append(smallmind.load(out)[0].flat.data.tobytes())
    assert found[0] == found[1]

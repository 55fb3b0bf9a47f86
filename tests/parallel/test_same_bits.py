"""The same bits of weights, losses and evaluations at any number of ranks, and alone."""

import itertools
import json
import shlex
import sys
from typing import NamedTuple

import pytest

from tests.faults.runs import outcome, status, write_text
from tests.parallel.launching import LAUNCHERS, needs_mpi, on_every_mpi, run

pytestmark = needs_mpi

BASE = shlex.split(
    "--block-size 16 --n-embd 16 --n-layer 2 --n-head 2 --batch-size 8 --val-every 4 "
    "--val-batches 3 --warmup-steps 3 --log-every 1 --save-every 5 --threads 1"
)
ALONE = 0  # without mpiexec
AT_ONCE = 12  # configurations per program


class Configuration(NamedTuple):
    """Flags of `train`, the number of shards, and the numbers of ranks that train with them.

    With `spikes` the loss spikes once; with `early` gradients are sent during the backward pass
    from the third step on, however little time that takes.
    """

    flags: list[str]
    shards: int
    ranks: tuple[int, ...]
    spikes: bool
    early: bool


def configuration(flags, shards=8, ranks=(ALONE, 1, 2, 4), spikes=False, early=False):
    return Configuration(shlex.split(flags), shards, ranks, spikes, early)


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
        ranks=(ALONE, 1, 2, 3),
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
        ranks=(ALONE, 1, 2, 3),
    ),
    "on disk": configuration("--precision float32 --grad-accum-steps 2"),
}
LENGTHS = (
    "--dropout 0.1 --grad-accum-steps 2",
    "--epochs 1 --batch-size 30 --max-grad-norm 0.1",
    "--init-from INITIAL --batch-size 5",
    "--teacher INITIAL --dropout 0.2",
)
ALL = {
    " ".join(words): configuration(" ".join(words), shards, (ALONE, 1, 2, shards // 2))
    for number, words in enumerate(
        itertools.product(
            ("--arch gpt2", "--arch llama --n-kv-head 1", "--arch modern"),
            (f"--precision {name}" for name in ("float32", "float16", "bfloat16")),
            ("--optimizer adamw", "--optimizer muon"),
            ("", "--reduce-precision bfloat16"),
            LENGTHS,
        )
    )
    for shards in [6 if number % 3 == 0 else 8]
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


def train_everywhere(root, configurations, launcher):
    """Trains each configuration with every number of its ranks -> name, ranks -> the run."""
    text = write_text(root)
    prepared, initials = root / "prepared", {}
    assert status("prepare", text, "--out", prepared) == 0
    runs = {}
    for ranks in sorted({n for chosen in configurations.values() for n in chosen.ranks}):
        commands = []
        for name, (flags, shards, numbers, spikes, early) in configurations.items():
            if ranks not in numbers:
                continue
            out = runs[name, ranks] = root / f"{name.replace('/', '')} {ranks}"
            words = ["train", prepared if name == "on disk" else text, *BASE, *flags]
            if "INITIAL" in words:
                words[words.index("INITIAL")] = _initial(root, text, flags, initials)
            words += [] if "--epochs" in words else ["--steps", 9]
            if ranks == ALONE or shards != 8:  # else it is the default
                words += ["--data-shards", shards]
            commands.append((spikes, early, [str(word) for word in (*words, "--out", out)]))
        file = root / f"commands {ranks}.json"
        file.write_text(json.dumps(commands), encoding="utf-8")
        program = "-m", "tests.parallel.commands", file
        words = [sys.executable, *map(str, program)]
        if ranks != ALONE:
            words = launcher.command((ranks, program))
        code, _, errors = run(words)
        assert code == 0, errors
    return runs


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return train_everywhere(tmp_path_factory.mktemp("few"), FEW, LAUNCHERS[0])


def assert_same(runs, configurations, name):
    alone = outcome(runs[name, ALONE])
    assert alone[1]
    for ranks in configurations[name].ranks:
        assert outcome(runs[name, ranks]) == alone, f"{ranks} ranks"


@pytest.mark.parametrize("name", FEW)
def test_runs_are_the_same_at_any_number_of_ranks(few, name):
    assert_same(few, FEW, name)


def test_a_spike_on_one_rank_rolls_all_back(few):
    for ranks in FEW["spike"].ranks:
        lines = (few["spike", ranks] / "metrics.jsonl").read_text().splitlines()
        spikes = [line["spike_step"] for line in map(json.loads, lines) if "spike_step" in line]
        assert spikes == [7]


def test_one_shard_on_one_rank_is_a_run_without_mpiexec(few, tmp_path):
    """Or the arithmetic of shards would be that of every run."""
    text, flags = write_text(tmp_path), [*FEW["gpt2"].flags, "--steps", "9"]
    assert status("train", text, *BASE, *flags, "--out", tmp_path / "whole") == 0
    words = ["train", text, *BASE, *flags, "--data-shards", 1, "--out", tmp_path / "one"]
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([(False, False, list(map(str, words)))]), encoding="utf-8")
    code, _, errors = run(LAUNCHERS[0].command((1, ("-m", "tests.parallel.commands", file))))
    assert code == 0, errors
    assert outcome(tmp_path / "one") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "one") != outcome(few["gpt2", ALONE])


@pytest.mark.slow
@on_every_mpi
def test_runs_of_every_kind_are_the_same_at_any_number_of_ranks(tmp_path, launcher):
    names = list(ALL)
    for first in range(0, len(names), AT_ONCE):
        chosen = {name: ALL[name] for name in names[first : first + AT_ONCE]}
        root = tmp_path / str(first)
        root.mkdir()
        runs = train_everywhere(root, chosen, launcher)
        for name in chosen:
            assert_same(runs, chosen, name)

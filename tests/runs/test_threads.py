"""Choosing the number of threads from Python, each on a core of its own."""

import os
import sys

import pytest

import smallmind
from smallmind.forecast.threads import choose_threads, useful_threads
from smallmind.settings.config import ModelConfig, RunConfig, TrainingConfig
from smallmind.settings.settings import Settings
from tests.programs import printed_by

PIN = """
import os
import smallmind
smallmind.set_threads(2, pin=True)
from smallmind.kernels.codegen.threads import threads
print(threads(), os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"])
smallmind.set_threads(1)
print(threads())
try:
    smallmind.set_threads(2, pin=True)
except smallmind.InputError as error:
    print(error)
"""


def test_threads_are_pinned_before_the_first_kernel_runs_only(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OMP_")]:
        monkeypatch.delenv(name)
    printed = printed_by([sys.executable, "-c", PIN], NUMBA_NUM_THREADS="2")
    first, second, refusal = printed.splitlines()
    assert first == "2 spread cores" and second == "1"
    assert refusal.startswith("the threads are running already: call set_threads(..., pin=True)")


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_number_of_threads_that_cannot_run_is_refused(count):
    with pytest.raises(smallmind.InputError, match=f"threads={count} must be at "):
        smallmind.set_threads(count)


@pytest.mark.parametrize(
    ("sizes", "cores", "chosen"),
    [
        ({"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 64}, 16, 4),
        ({"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 8}, 16, 2),
        ({"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 8}, 1, 1),
        ({"n_layer": 4, "n_embd": 128, "n_head": 4, "block_size": 128}, 16, 16),
        ({"n_layer": 6, "n_embd": 384, "n_head": 6, "block_size": 256}, 64, 64),
    ],
)
def test_small_models_run_on_fewer_threads(monkeypatch, sizes, cores, chosen):
    monkeypatch.setattr("smallmind.kernels.codegen.cpus.cores", lambda: cores)
    monkeypatch.setattr("smallmind.kernels.codegen.cpus.bind_to_cores", lambda: None)
    settings = Settings(model=ModelConfig(vocab_size=65, **sizes))
    assert choose_threads(settings.run, settings) == chosen
    assert choose_threads(RunConfig(threads=1), settings) == 1


def test_passes_of_few_windows_run_on_fewer_threads_too():
    model, run = ModelConfig(vocab_size=65, n_layer=1, n_embd=32, n_head=2), RunConfig()
    whole = useful_threads(model, TrainingConfig(), run)
    assert useful_threads(model, TrainingConfig(micro_batch_size=1), run) < whole

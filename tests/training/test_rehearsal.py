"""A tiny run before the real one: it loads all kernels, and leaves no trace."""

import json
import subprocess
import sys

import pytest

from smallmind import ModelConfig, TrainingConfig
from smallmind.kernels.codegen import cache_directory
from smallmind.settings.presets import ARCHITECTURES
from smallmind.training import rehearsal
from smallmind.training.rehearsal import rehearse  # conftest.py replaces it

# Rehearses, then trains, evaluates and writes with other sizes -> the kernels that this loads.
PROGRAM = """
import json, sys
from smallmind import ModelConfig, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.kernels.codegen.cache import KernelCache
from smallmind.training.rehearsal import STEPS, rehearse

model, training = json.loads(sys.argv[1])
config = ModelConfig(65, 96, 3, 6, **model)
settings = TrainingConfig(steps=STEPS, val_every=0, **training)
rehearse(config, settings, None, "numba")
loaded, load = [], KernelCache.load_overload
def counted(cache, *arguments):
    loaded.append(cache._py_func.__name__)
    return load(cache, *arguments)
KernelCache.load_overload = counted
text = "the cat sat on the mat. " * 200
run = Training(TransformerModel(**vars(config)), Tokenizer(text), text, batch_size=5)
list(run.steps(settings))
run.evaluate_held_out(), run.sample()
print(json.dumps(loaded))
"""
KINDS = [
    ({"n_embd": 192}, {}),
    ({"n_embd": 192, **ARCHITECTURES["llama"], "n_kv_head": 2}, {"precision": "bfloat16"}),
    ({"n_embd": 100, **ARCHITECTURES["modern"], "head_size": 20}, {"optimizer": "muon"}),
]


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_rehearsal_a_run_loads_no_kernel(kind):
    command = [sys.executable, "-c", PROGRAM, json.dumps(kind)]
    result = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    assert json.loads(result.stdout) == []


def test_the_rehearsal_of_any_model_is_tiny(monkeypatch):
    calls = []
    monkeypatch.setattr(rehearsal, "_rehearse", lambda *arguments: calls.append(arguments))
    for model in (
        ModelConfig(50_000, 1, 90, 64, 65_536, document_token=40_000, bigram_rows=10**6),
        ModelConfig(7, 8192, 1, 12, 17, head_size=301, n_kv_head=3, position="rope"),
    ):
        rehearse(model, TrainingConfig(epochs=3, steps=10**6), None, "numpy")
        (tiny, settings, *_) = calls[-1]
        assert tiny.n_layer * tiny.n_embd * tiny.block_size <= 2 * 2 * 65 * 64
        assert tiny.head_channels % 2 == model.head_channels % 2
        assert settings.steps < 100 and settings.epochs == 0


def test_a_first_start_expects_the_kernels_of_its_configuration(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_directory, "cache_directory", lambda: tmp_path)
    adamw, muon = TrainingConfig(), TrainingConfig(optimizer="muon", precision="bfloat16")
    plain = rehearsal._expected(ModelConfig(65, 64), adamw)
    modern = rehearsal._expected(ModelConfig(65, 64, **ARCHITECTURES["modern"]), muon)
    assert 150 < plain < 200 < modern < 320
    (tmp_path / "kernel.nbi").touch()  # later ones lack fewer, nobody knows how many
    assert rehearsal._expected(ModelConfig(65, 64), adamw) == 0

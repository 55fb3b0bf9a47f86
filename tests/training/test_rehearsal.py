"""A tiny run before the real one: it loads all kernels, and leaves no trace."""

import json
import os
import subprocess
import sys

import pytest

from smallmind import ModelConfig, TrainingConfig
from smallmind.forecast import compiling
from smallmind.forecast.compiling import STEPS, rehearse  # conftest.py replaces it
from smallmind.kernels.codegen import cache_directory, cpus
from smallmind.kernels.description import KERNELS, kernel
from smallmind.settings.presets import ARCHITECTURES
from tests.programs import started

# Rehearses, then trains, evaluates and writes with other sizes -> the kernels that this loads.
PROGRAM = """
import json, sys
from smallmind import ModelConfig, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.kernels.codegen.cache import KernelCache
from smallmind.forecast.compiling import STEPS, rehearse

model, training = json.loads(sys.argv[1])
config = ModelConfig(65, 96, 3, 6, **model)
settings = TrainingConfig(steps=STEPS, val_every=0, **training)
rehearse(config, settings, "numba")
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
    monkeypatch.setattr(compiling, "_rehearse", lambda *arguments: calls.append(arguments))
    for model in (
        ModelConfig(50_000, 1, 90, 64, 65_536, document_token=40_000, bigram_rows=10**6),
        ModelConfig(7, 8192, 1, 12, 17, head_size=301, n_kv_head=3, position="rope"),
    ):
        rehearse(model, TrainingConfig(epochs=3, steps=10**6), "numpy")
        (tiny, settings, *_) = calls[-1]
        assert tiny.n_layer * tiny.n_embd * tiny.block_size <= 2 * 2 * 65 * 64
        assert tiny.head_channels % 2 == model.head_channels % 2
        assert settings.steps < 100 and settings.epochs == 0


def test_a_first_start_expects_the_kernels_of_its_configuration(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_directory, "cache_directory", lambda _module: tmp_path)
    adamw, muon = TrainingConfig(), TrainingConfig(optimizer="muon", precision="bfloat16")
    plain = compiling._expected(ModelConfig(65, 64), adamw)
    modern = compiling._expected(ModelConfig(65, 64, **ARCHITECTURES["modern"]), muon)
    assert 150 < plain < 200 < modern < 320
    (tmp_path / "kernel.nbc").touch()  # later ones lack fewer, nobody knows how many
    assert compiling._expected(ModelConfig(65, 64), adamw) == 0


def test_every_kernel_says_what_compiling_it_costs():
    with pytest.raises(TypeError, match="functions"):
        kernel("elementwise")
    costs = {name: about.functions for name, about in KERNELS.items()}
    shared = {name for name, count in costs.items() if not count}
    assert shared == {"matmul_gelu", "matmul_transpose_b"}  # with other products
    slowest = sorted(costs, key=lambda name: -costs[name])
    assert slowest[:2] == ["attention_backward", "matmul_transpose_a"]


# Rehearses with an empty cache -> the functions that this process has compiled.
FIRST = """
import json, sys
from numba.core import event
from smallmind import ModelConfig, TrainingConfig
from smallmind.kernels.codegen import cpus
from smallmind.memory import available
from smallmind.forecast import compiling
from smallmind.forecast.compiling import STEPS, rehearse

class Compiled(event.Listener):
    names = []
    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

event.register("numba:compile", Compiled())
helpers, exec_instead = json.loads(sys.argv[1])
cpus.USABLE = set(range(1 + helpers))
compiling.PROGRAM = exec_instead or compiling.PROGRAM
config = ModelConfig(65, 16, 1, 1, 16)
settings = TrainingConfig(steps=STEPS, val_every=0)
rehearse(config, settings, "numba")
print(json.dumps(Compiled.names))
"""


def compiled_at_a_first_start(cache, helpers, instead=""):
    words = [sys.executable, "-c", FIRST, json.dumps([helpers, instead])]
    environment = {**os.environ, "SMALLMIND_CACHE_DIR": str(cache)}
    result = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(result.stdout)


def test_a_helper_ends_with_the_process_that_it_helps(tmp_path):
    environment = {**os.environ, "SMALLMIND_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-I", "-c", compiling.PROGRAM]
    with started(words, stdin=subprocess.PIPE, env=environment) as helper:
        fields = vars(ModelConfig(65, 16, 1, 1, 16)), vars(TrainingConfig(steps=STEPS))
        job = json.dumps([sys.path, *fields, sorted(cpus.USABLE)])
        helper.stdin.write(f"{job}\n")
        helper.stdin.close()  # as when the process dies
        assert helper.wait() == 0
    assert not any(tmp_path.rglob("*.nbc"))


@pytest.mark.slow
def test_helpers_compile_a_part_of_the_kernels(tmp_path):
    alone = compiled_at_a_first_start(tmp_path / "alone", 0)
    helped = compiled_at_a_first_start(tmp_path / "helped", 1)
    assert len(helped) < 0.8 * len(alone)
    for cache in ("alone", "helped"):
        assert compiled_at_a_first_start(tmp_path / cache, 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("instead", ["import os; os._exit(3)", "import time; time.sleep(600)"])
def test_helpers_that_fail_or_hang_cost_nothing(tmp_path, instead):
    assert len(compiled_at_a_first_start(tmp_path, 2, instead)) > 30

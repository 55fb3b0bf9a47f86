"""A transformer training engine in NumPy and Numba that runs on the CPU.

A run on disk, which can be interrupted, resumed and loaded:

    import smallmind

    run = smallmind.Run.create(text="book.txt", steps=500)
    run.train()
    model, tokenizer = run.load()  # later: smallmind.load(run.path)
    print(smallmind.generate(model, tokenizer, "The "))

The same in memory only:

    text = open("book.txt", encoding="utf-8").read()
    tokenizer = smallmind.Tokenizer(text)
    model = smallmind.TransformerModel(tokenizer.vocab_size, 64, 128, 4, 4)
    training = smallmind.Training(model, tokenizer, text)
    training.train(steps=500)
"""

TYPE_CHECKING = False  # that of typing, which the command line would have to wait for
if TYPE_CHECKING:
    from typing import Any

    from smallmind.checks import InputError
    from smallmind.exchange.format import export
    from smallmind.exchange.stored import load
    from smallmind.kernels.linalg import matmul, matmul_transpose_a, matmul_transpose_b
    from smallmind.losses.distillation import Distillation
    from smallmind.losses.preferences import Preferences
    from smallmind.memory.tensor_pool import TensorPool
    from smallmind.memory.tracker import MemoryTracker
    from smallmind.nn.cache import KeyValueCache
    from smallmind.nn.gradient_check import GradientCheck, gradient_check
    from smallmind.nn.inspection import Inspection
    from smallmind.nn.pictures import show
    from smallmind.nn.recompute import CheckpointManager
    from smallmind.nn.transformer import TransformerModel
    from smallmind.optim.adamw import AdamW
    from smallmind.optim.loss_scaler import LossScaler
    from smallmind.optim.muon import Muon
    from smallmind.runs.run import Run
    from smallmind.settings.config import (
        CheckpointStrategy,
        GenerationConfig,
        ModelConfig,
        Precision,
        RunConfig,
        TrainingConfig,
        __version__,
    )
    from smallmind.settings.settings import Settings
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.health import GradientDiagnostics
    from smallmind.training.profiler import TrainingProfiler
    from smallmind.training.training import Training
    from smallmind.writing.chat import Chat
    from smallmind.writing.form import Form
    from smallmind.writing.generation import generate, generate_samples

# Public name -> its module, which is imported when the name is first used.
_EXPORTS = {
    "AdamW": "smallmind.optim.adamw",
    "Chat": "smallmind.writing.chat",
    "CheckpointManager": "smallmind.nn.recompute",
    "CheckpointStrategy": "smallmind.settings.config",
    "Distillation": "smallmind.losses.distillation",
    "Form": "smallmind.writing.form",
    "GenerationConfig": "smallmind.settings.config",
    "GradientCheck": "smallmind.nn.gradient_check",
    "GradientDiagnostics": "smallmind.training.health",
    "InputError": "smallmind.checks",
    "Inspection": "smallmind.nn.inspection",
    "MemoryTracker": "smallmind.memory.tracker",
    "KeyValueCache": "smallmind.nn.cache",
    "LossScaler": "smallmind.optim.loss_scaler",
    "ModelConfig": "smallmind.settings.config",
    "Muon": "smallmind.optim.muon",
    "Precision": "smallmind.settings.config",
    "Preferences": "smallmind.losses.preferences",
    "Run": "smallmind.runs.run",
    "RunConfig": "smallmind.settings.config",
    "Settings": "smallmind.settings.settings",
    "TensorPool": "smallmind.memory.tensor_pool",
    "Tokenizer": "smallmind.text.tokenizer",
    "Training": "smallmind.training.training",
    "TrainingConfig": "smallmind.settings.config",
    "TrainingProfiler": "smallmind.training.profiler",
    "TransformerModel": "smallmind.nn.transformer",
    "__version__": "smallmind.settings.config",
    "export": "smallmind.exchange.format",
    "generate": "smallmind.writing.generation",
    "generate_samples": "smallmind.writing.generation",
    "gradient_check": "smallmind.nn.gradient_check",
    "load": "smallmind.exchange.stored",
    "matmul": "smallmind.kernels.linalg",
    "matmul_transpose_a": "smallmind.kernels.linalg",
    "matmul_transpose_b": "smallmind.kernels.linalg",
    "set_threads": "smallmind.forecast.threads",
    "show": "smallmind.nn.pictures",
}

__all__ = [
    "AdamW",
    "Chat",
    "CheckpointManager",
    "CheckpointStrategy",
    "Distillation",
    "Form",
    "GenerationConfig",
    "GradientCheck",
    "GradientDiagnostics",
    "InputError",
    "Inspection",
    "KeyValueCache",
    "LossScaler",
    "MemoryTracker",
    "ModelConfig",
    "Muon",
    "Precision",
    "Preferences",
    "Run",
    "RunConfig",
    "Settings",
    "TensorPool",
    "Tokenizer",
    "Training",
    "TrainingConfig",
    "TrainingProfiler",
    "TransformerModel",
    "__version__",
    "export",
    "generate",
    "generate_samples",
    "gradient_check",
    "load",
    "matmul",
    "matmul_transpose_a",
    "matmul_transpose_b",
    "set_threads",
    "show",
]


def __getattr__(name: str) -> "Any":
    import importlib

    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'smallmind' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

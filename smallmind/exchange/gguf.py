"""Models in GGUF, as llama.cpp runs them: its metadata, its names, its types of weights."""

import functools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.exchange import gguf_file, published
from smallmind.exchange.adapters import pairs_of
from smallmind.exchange.architectures import (
    architecture_of,
    config_of,
    known_architecture,
    settings_of,
)
from smallmind.exchange.format import (
    AdapterFormat,
    Exported,
    ExternalModel,
    ModelFormat,
    check_file,
    padded,
)
from smallmind.exchange.gguf_tokenizer import PREFIX, metadata_of, tokenizer_of
from smallmind.exchange.tensors import type_of, written_tensors
from smallmind.files import durable
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import Stored
from smallmind.parts import NUMBER_TYPES, types_for
from smallmind.settings.architectures import Layout
from smallmind.settings.config import ModelConfig
from smallmind.text.tokenizer import Tokenizer

SUFFIX = ".gguf"
FLOAT32 = "position_embd"  # llama.cpp wants it in float32
QUANTISATION = 2  # the version of the blocks


class GGUF(ModelFormat):
    """A file of llama.cpp and what is built on it."""

    types = tuple(kind.name for kind in types_for("store"))

    def check_path(self, path: Path) -> None:
        check_file(path, [SUFFIX], _begins_as_gguf, "a GGUF file")

    def write(self, path: Path, exported: Exported, type: str) -> None:
        config, parameters = exported.model.config, exported.model.parameters
        architecture = architecture_of(config)
        self.check_path(path)
        general: dict[str, Any] = {
            "general.architecture": architecture.gguf,
            "general.type": "model",
            "general.name": exported.name,
            "general.file_type": np.uint32(NUMBER_TYPES[type].file_type),
        }
        if NUMBER_TYPES[type].block > 1:
            general["general.quantization_version"] = np.uint32(QUANTISATION)
        settings = settings_of(config, architecture.metadata)
        tokenizer = exported.tokenizer
        metadata = {
            **general,
            **{f"{architecture.gguf}.{key}": _typed(value) for key, value in settings.items()},
            **metadata_of(tokenizer),
            **published.metadata_of(tokenizer),
        }
        tensors = written_tensors(config, architecture, architecture.gguf_tensors)
        path.parent.mkdir(parents=True, exist_ok=True)
        gguf_file.write(
            path,
            metadata,
            [
                gguf_file.TensorToWrite(
                    tensor.name,
                    tensor.shape,
                    type_of(tensor.shape, "f32" if tensor.name.startswith(FLOAT32) else type),
                    functools.partial(tensor.of_model, parameters),
                )
                for tensor in tensors
            ],
        )

    def find(self, path: Path) -> "GGUFFile | None":
        # One that is damaged is recognised by its name: to open it says what is wrong.
        is_named = path.suffix == SUFFIX and path.is_file()
        return GGUFFile(path) if is_named or _begins_as_gguf(path) else None


class GGUFAdapter(AdapterFormat):
    """A file that llama.cpp loads beside that of the model which it adapts (`--lora`)."""

    def check_path(self, path: Path) -> None:
        GGUF().check_path(path)

    def write(self, path: Path, adapter: SavedAdapter) -> None:
        architecture = architecture_of(adapter.config)
        self.check_path(path)
        metadata = {
            "general.architecture": architecture.gguf,
            "general.type": "adapter",
            "adapter.type": "lora",
            "adapter.lora.alpha": np.float32(adapter.adapter.alpha),
        }
        tensors = [
            gguf_file.TensorToWrite(
                f"{name}.weight.lora_{letter}", x.shape, NUMBER_TYPES["f32"], copy
            )
            for name, pair in pairs_of(adapter, architecture.gguf_tensors)
            for letter, x in (("a", pair.a), ("b", pair.b))
            for copy in [functools.partial(np.ascontiguousarray, x)]
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        gguf_file.write(path, metadata, tensors)


class GGUFFile(ExternalModel):
    """A GGUF file."""

    is_one_file = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata, self._tensors = gguf_file.read(path)
        try:
            if self._metadata.get("general.type") == "adapter":
                raise InputError(
                    "it is an adapter, which is written here but not read; import PEFT's instead"
                )
            if str(self._metadata.get("split.count", 1)) not in ("0", "1"):
                raise InputError(
                    "it is one of several files of a model; join them with llama.cpp's program, "
                    "llama-gguf-split --merge FIRST JOINED"
                )
            self._described = known_architecture(self._metadata, "general.architecture", "gguf")
            self.config = self._config()
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        self.name = f"the {self._described.name} in {path}"

    def _config(self) -> ModelConfig:
        settings, prefix = self._described.metadata, f"{self._described.gguf}."
        saved = {
            key.removeprefix(prefix): value
            for key, value in self._metadata.items()
            if key.startswith(prefix)
        }
        _check_rotation(saved, "rope_freqs.weight" in self._tensors)
        embedding = self._tensors.get("token_embd.weight")
        if not self._tensors:
            raise InputError("it has a tokenizer, but no model; give the file with the weights")
        if embedding is None:
            raise InputError("it lacks the tensor token_embd.weight")
        known: dict[str, Any] = {
            "vocab_size": embedding.shape[0],
            "tie_weights": "output.weight" not in self._tensors,
        }
        if "bias" not in self._described.parts:
            has_biases = "blk.0.attn_q.bias" in self._tensors
            known["bias"] = self._described.filled.get("bias", has_biases)
        return config_of(self._described, settings, saved, **known)

    def tokenizer(self) -> Tokenizer:
        try:
            if not any(key.startswith(PREFIX) for key in self._metadata):
                raise InputError("it has no tokenizer; convert the model with its tokenizer")
            tokenizer = padded(tokenizer_of(self._metadata), self.config.vocab_size)
            return tokenizer.with_published(published.of_metadata(self._metadata, tokenizer))
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None

    def tensors(self) -> tuple[Layout, Mapping[str, Stored]]:
        return self._described.gguf_tensors, self._tensors


def _begins_as_gguf(path: Path) -> bool:
    with suppress(OSError, ValueError), durable.open_regular(path) as file:
        return file.read(4) == gguf_file.MAGIC
    return False


def _check_rotation(saved: Mapping[str, Any], has_factors: bool) -> None:
    """Raises InputError if the rotations are scaled, by a tensor of factors (Llama 3.1) or by
    settings.
    """
    scaling, factors = "rope.scaling.type", ("rope.scaling.factor", "rope.scale_linear")
    kind = str(saved.get(scaling, "linear"))
    by = [] if kind in ("none", "linear") else [scaling]
    if kind == "linear":
        by += [key for key in factors if str(saved.get(key, 1.0)) not in ("0.0", "1.0")]
    if has_factors:
        by.append("rope_freqs.weight")
    if by:
        raise InputError(f"its rotations (rope) are scaled, by {by[0]}; only the default is known")


def _typed(value: Any) -> Any:
    """Returns whole numbers and fractions as GGUF counts and measures."""
    if isinstance(value, int) and not isinstance(value, bool):
        return np.uint32(value)
    return np.float32(value) if isinstance(value, float) else value

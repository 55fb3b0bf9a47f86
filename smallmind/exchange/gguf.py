"""Models in GGUF, as llama.cpp runs them: its metadata, its names, its types of weights."""

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError, shown_value
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
from smallmind.kernels.reference import rotary_frequencies
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import Stored
from smallmind.nn.rope import scaled
from smallmind.parts import NUMBER_TYPES, types_for
from smallmind.settings.architectures import Architecture, Layout
from smallmind.settings.config import ModelConfig
from smallmind.text.tokenizer import Tokenizer

SUFFIX = ".gguf"
FLOAT32 = "position_embd"  # llama.cpp wants it in float32
QUANTISATION = 2  # the version of the blocks
NOT_LLAMA3 = "its tensor rope_freqs does not scale rotations as Llama 3, and is not supported"
BLENDED = 1e-4  # from the ends, where float32 has rounded the shares that are kept


class GGUF(ModelFormat):
    """A file of llama.cpp and what is built on it."""

    types = tuple(kind.name for kind in types_for("store"))

    def check_path(self, path: Path) -> None:
        check_file(path, [SUFFIX], _begins_as_gguf, "is not a GGUF file")

    def write(self, path: Path, exported: Exported, type: str) -> None:
        config, parameters = exported.model.config, exported.model.parameters
        architecture = _architecture(config, "hf")
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
        scaling, divisors = _scaling_of(config, architecture.gguf_tensors)
        settings |= scaling
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
            ]
            + divisors,
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
        architecture = _architecture(adapter.config, "peft")
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
        self._metadata, tensors = gguf_file.read(path)
        self._tensors = {**tensors}
        try:
            if self._metadata.get("general.type") == "adapter":
                raise InputError(
                    "it is an adapter, which can be written but not read; import the PEFT "
                    "adapter instead"
                )
            if str(self._metadata.get("split.count", 1)) not in ("0", "1"):
                raise InputError(
                    "it is one of several files of a model; merge them with llama.cpp: "
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
        name = self._described.gguf_tensors.divisors
        divisors = self._tensors.pop(f"{name}.weight", None) if name else None
        embedding = self._tensors.get("token_embd.weight")
        if not self._tensors:
            raise InputError("it has a tokenizer, but no model; give the file with the weights")
        if embedding is None:
            raise InputError("it lacks the tensor token_embd.weight")
        known: dict[str, Any] = {
            "vocab_size": embedding.shape[0],
            "tie_weights": "output.weight" not in self._tensors,
            "rope_scaling": _linear_scaling(saved),
        }
        if "bias" not in self._described.parts:
            has_biases = "blk.0.attn_q.bias" in self._tensors
            known["bias"] = self._described.filled.get("bias", has_biases)
        config = config_of(self._described, settings, saved, **known)
        if divisors is None:
            return config
        if known["rope_scaling"] or divisors.shape != (config.rotary_channels // 2,):
            raise InputError(NOT_LLAMA3)
        values = np.empty(divisors.shape, np.float32)
        divisors.read(0, values)
        return config.having_parts(rope_scaling=_llama3_scaling(values, config))

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


def _architecture(config: ModelConfig, other: str) -> Architecture:
    """Returns the architecture of a model. InputError if llama.cpp does not have it."""
    architecture = architecture_of(config)
    if not architecture.gguf:
        raise InputError(f"llama.cpp does not run {architecture.name}; export it to {other}")
    return architecture


def _begins_as_gguf(path: Path) -> bool:
    with suppress(OSError, ValueError), durable.open_regular(path) as file:
        return file.read(4) == gguf_file.MAGIC
    return False


def _linear_scaling(saved: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """-> how metadata scales rotations, as in `part_settings`. InputError if not linearly."""
    kind = str(saved.get("rope.scaling.type", "linear"))
    if kind not in ("none", "linear"):
        raise InputError(f"rope.scaling.type: {shown_value(kind)} is not supported, only linear")
    found = [saved[key] for key in ("rope.scaling.factor", "rope.scale_linear") if key in saved]
    factor = found[0] if found and kind == "linear" else 1.0
    if not isinstance(factor, float | int) or any(other != factor for other in found[1:]):
        raise InputError(f"rope.scaling.factor is {shown_value(factor)}, not a single number")
    return ("linear", float(factor)) if factor not in (0, 1) else None


def _scaling_of(
    config: ModelConfig, layout: Layout
) -> tuple[dict[str, Any], list[gguf_file.TensorToWrite]]:
    """-> the metadata and the tensors that scale the rotations of a model, if they are scaled."""
    match config.part_setting("rope_scaling"):
        case None:
            return {}, []
        case ("linear", factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}, []
    if not layout.divisors:
        raise InputError(
            "llama.cpp does not scale rotations of this architecture as Llama 3; export it to hf"
        )
    values = np.array(_divisors(config), np.float32)
    tensor = gguf_file.TensorToWrite(
        f"{layout.divisors}.weight", values.shape, NUMBER_TYPES["f32"], lambda: values
    )
    return {}, [tensor]


def _divisors(config: ModelConfig) -> list[float]:
    """Returns what the frequencies of a model's rotations have been divided by."""
    plain = rotary_frequencies(config.rope_theta, config.rotary_channels)
    return [f / s for f, s in zip(plain, scaled(plain, config), strict=True)]


def _llama3_scaling(values: np.ndarray, config: ModelConfig) -> tuple[Any, ...] | None:
    """The divisors of a file -> the settings of Llama 3 that they follow from; None if all are 1.

    They tell the context only in proportion to its low factor, which is taken as 1. InputError if
    they do not follow from any.
    """
    if np.array_equal(values, np.ones_like(values)):
        return None
    frequencies = rotary_frequencies(config.rope_theta, config.rotary_channels)
    turns = np.array(frequencies) / (2 * math.pi)  # per token
    factor = float(values.max())
    with np.errstate(all="ignore"):
        kept = (1 / values - 1 / factor) / (1 - 1 / factor)
    blended = (kept > BLENDED) & (kept < 1 - BLENDED)
    # Between the two ends kept = (context turns - 1) / (high - 1).
    high, context = 4.0, 1 / turns[kept <= BLENDED].max(initial=turns[-1])
    if blended.sum() > 1:
        slope, start = np.polyfit(turns[blended], kept[blended], 1)
        high, context = 1 - 1 / start, -slope / start
    elif blended.any():
        context = ((high - 1) * kept[blended][0] + 1) / turns[blended][0]
    for number in (round, float):  # whole ones, if they do
        scaling = "llama3", factor, 1.0, float(number(high)), number(context)
        with suppress(InputError):  # which no model can have
            if np.allclose(_divisors(config.having_parts(rope_scaling=scaling)), values, 1e-5, 0):
                return scaling
    raise InputError(NOT_LLAMA3)


def _typed(value: Any) -> Any:
    """Returns whole numbers and fractions as GGUF counts and measures."""
    if isinstance(value, int) and not isinstance(value, bool):
        return np.uint32(value)
    return np.float32(value) if isinstance(value, float) else value

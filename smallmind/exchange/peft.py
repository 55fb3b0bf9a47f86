"""Adapters of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

Format: https://github.com/huggingface/peft, "src/peft/utils/save_and_load.py".
"""

import dataclasses
import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError, from_json, number, shown_value, whole
from smallmind.exchange.adapters import Pair, matrices_of, pairs_of, read_pairs
from smallmind.exchange.architectures import architecture_of
from smallmind.exchange.format import AdapterFormat
from smallmind.exchange.stored import StoredAdapter, StoredModel, check_no_run, digest_of
from smallmind.files import durable, safetensors
from smallmind.kernels.number_types import BFLOAT16, to_float32
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import Base
from smallmind.settings.architectures import Layout
from smallmind.settings.config import ModelConfig
from smallmind.text.tokenizer import Tokenizer

CONFIG = "adapter_config.json"
MODEL = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1_000_000
PREFIX = "base_model.model."
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
NAME = re.compile(r"[\w.]+")  # of modules, in patterns
# These change nothing that is computed with the tensors, or are read.
HARMLESS = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
    *("lora_dropout", "fan_in_fan_out", "use_rslora", "init_lora_weights", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core", "eva_config"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying", "lora_ga_config"),
}
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that change the base
Saved = dict[str, Any]


class Peft(AdapterFormat):
    """A directory that `PeftModel.from_pretrained` reads."""

    def check_path(self, path: Path) -> None:
        durable.check_new_directory(path)

    def write(self, path: Path, adapter: SavedAdapter) -> None:
        layout = _layout(adapter.config)
        pairs = dict(pairs_of(adapter, layout))
        tensors = {}
        for name, pair in pairs.items():
            for letter, values in ("A", pair.a), ("B", pair.b):
                tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = np.ascontiguousarray(values)
        base = adapter.base and Path(adapter.base.path)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base) if base and base.is_dir() else None,
            "inference_mode": True,
            "r": adapter.adapter.rank,
            "lora_alpha": adapter.adapter.alpha,
            "lora_dropout": adapter.adapter.dropout,
            "target_modules": _endings(set(pairs), set(matrices_of(adapter.config, layout))),
            "bias": "none",
            "fan_in_fan_out": not layout.outputs_first,
        }
        with durable.new_directory(path, (MODEL, CONFIG)):
            safetensors.write(path / MODEL, tensors, {"format": "pt"})
            durable.write(path / CONFIG, [json.dumps(config, indent=2).encode() + b"\n"])


def _layout(config: ModelConfig) -> Layout:
    """Returns the names of modules of transformers: all call the head so, whatever files do."""
    layout = architecture_of(config).tensors
    return dataclasses.replace(layout, names={**layout.names, "head": "lm_head"})


def _endings(wanted: set[str], names: set[str]) -> list[str]:
    """-> the shortest ends of names by which PEFT finds those that are wanted, and no others."""
    others = [f".{name}" for name in names - wanted]

    def shortest(name: str) -> str:
        words = name.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words)))
        return next((end for end in ends if not any(x.endswith(f".{end}") for x in others)), name)

    return sorted({shortest(name) for name in wanted})


class PeftDirectory(StoredAdapter):
    """An adapter of PEFT. Nothing that it names is executed or fetched."""

    is_external = True

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, f"the PEFT adapter in {path}"
        with durable.explained(path / CONFIG, "JSON file"):
            self._saved: Saved = from_json(durable.read(path / CONFIG, MAX_CONFIG_BYTES))
        try:
            if not isinstance(self._saved, dict):
                raise ValueError("it is not a JSON object")
            _check(self._saved)
        except KeyError as error:
            raise InputError(f"{path / CONFIG} has no {error}") from None
        except ValueError as error:  # InputError is one
            raise InputError(f"{path / CONFIG}: {error}") from None

    def tokenizer(self) -> Tokenizer:
        return self._found_base().tokenizer()

    def adapter(self) -> SavedAdapter:
        found = self._found_base()
        path = self.base or Path(self._saved["base_model_name_or_path"])
        return self.read(found.config, Base(str(path.resolve()), digest_of(found.parameters())))

    def _found_base(self) -> StoredModel:
        """Finds the model that it says it belongs to, if that is a path: no name is fetched."""
        path = self._saved.get("base_model_name_or_path")
        return self.stored_base(
            Base(path, "") if isinstance(path, str) and path else None, self.name
        )

    def read(self, config: ModelConfig, base: Base | None = None) -> SavedAdapter:
        """Reads the adapter for a model with this config. InputError if it has another one."""
        pairs = {}
        for name, found in self._tensors().items():
            a, b = (found.get(letter) for letter in "AB")
            if a is None or b is None or a.ndim != 2 or b.ndim != 2 or not len(a):
                raise InputError(f"{self.path}: the adapter of {shown_value(name)} is incomplete")
            pairs[name] = Pair(a, b, self._scale(name, len(a)))
        layout = _layout(config)
        dropout = self._saved.get("lora_dropout", 0.0)
        return read_pairs(str(self.path), config, layout, pairs, dropout, base)

    def _tensors(self) -> dict[str, dict[str, np.ndarray]]:
        """The name of a module -> its "A" and "B", float32."""
        if not (self.path / MODEL).exists():
            pickle = f"only {PICKLE}, a pickle, which could run arbitrary code when loaded"
            held = pickle if (self.path / PICKLE).exists() else f"no {MODEL}"
            raise InputError(f"{self.path} has {held}; save the adapter as safetensors")
        found: dict[str, dict[str, np.ndarray]] = {}
        tensors, _ = safetensors.read(self.path / MODEL, strict=False)
        for name, values in tensors.items():
            match = TENSOR.fullmatch(name)
            if match is None:
                raise InputError(
                    f"{self.path} has a tensor that is not supported: {shown_value(name)}; only "
                    "A and B of linear layers are"
                )
            if values.dtype == safetensors.BFLOAT16:
                values = to_float32(values.view(BFLOAT16))
            if values.dtype.kind != "f":
                raise InputError(f"{self.path}: {name} is of type {values.dtype}")
            with np.errstate(over="ignore"):  # what is infinite then is refused
                found.setdefault(match[1], {})[match[2]] = values.astype(np.float32, copy=False)
        return found

    def _scale(self, name: str, rank: int) -> float:
        """-> the factor of B A of a module. InputError if its rank is not the one in the config."""
        expected, alpha = (
            self._setting("r", "rank", name),
            self._setting("lora_alpha", "alpha", name),
        )
        if expected != rank:
            raise InputError(
                f"{self.path}: the adapter of {shown_value(name)} has rank {rank}; {CONFIG} says "
                f"{expected}"
            )
        return float(alpha / (math.sqrt(rank) if self._saved.get("use_rslora") else rank))

    def _setting(self, key: str, pattern: str, name: str) -> Any:
        """Returns a setting of a module: of the pattern that its name ends with, as PEFT does."""
        patterns = self._saved.get(f"{pattern}_pattern") or {}
        found = (value for end, value in patterns.items() if f".{name}".endswith(f".{end}"))
        return next(found, self._saved[key])


def _check(saved: Saved) -> None:
    """Raises InputError or ValueError for what is not LoRA as it is computed here."""
    kind, bias = saved.get("peft_type"), saved.get("bias", "none")
    if kind != "LORA":
        raise InputError(f"peft_type={shown_value(kind)} is not supported; it must be LORA")
    if bias != "none":
        raise InputError(f"bias={shown_value(bias)} is not supported; it must be none")
    initial = saved.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(CHANGING):
        raise InputError(
            f"init_lora_weights={shown_value(initial)} has changed its base model; convert it "
            f"with PEFT, save_pretrained(..., path_initial_model_for_weight_conversion)"
        )
    for key, value in saved.items():
        if value and key not in HARMLESS and key != "bias":
            raise InputError(
                f"{shown_value(key)} is {shown_value(value)}, which may change what the adapter "
                "computes and is not supported"
            )
    if whole(saved["r"]) < 1:
        raise ValueError("r must be at least 1")
    tables = [saved.get(f"{name}_pattern") or {} for name in ("rank", "alpha")]
    for table in tables:
        if not isinstance(table, dict):
            raise ValueError("a pattern is not a JSON object")
        if odd := [pattern for pattern in table if not NAME.fullmatch(pattern)]:
            raise InputError(
                f"the pattern {shown_value(odd[0])} is not supported: it is not a name"
            )
    for value in (saved["lora_alpha"], *tables[1].values(), saved.get("lora_dropout", 0.0)):
        if not math.isfinite(number(value)):
            raise ValueError(f"{shown_value(value)} is not a finite number")
    if not 0 <= saved.get("lora_dropout", 0.0) < 1:
        raise ValueError("lora_dropout must be at least 0 and below 1")


def find_peft(path: Path, which: int | str | None = None) -> PeftDirectory | None:
    """Finds the adapter of PEFT at a path; None if there is something else."""
    if path.name in (MODEL, CONFIG, PICKLE) and (path.parent / CONFIG).is_file():
        raise InputError(f"{path} is one file of an adapter; give its directory, {path.parent}")
    with suppress(OSError):
        if (path / CONFIG).is_file():
            found = PeftDirectory(path)
            check_no_run(path, which)
            return found
    return None

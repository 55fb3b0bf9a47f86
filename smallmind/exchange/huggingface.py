"""Directories of Hugging Face's transformers: safetensors, config.json, tokenizer.json.

ModelFormat: https://github.com/huggingface/transformers, "src/transformers/models".
"""

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError, from_json, shown_value, whole
from smallmind.exchange import published
from smallmind.exchange.architectures import (
    architecture_of,
    config_of,
    known_architecture,
    settings_of,
)
from smallmind.exchange.card import model_card
from smallmind.exchange.format import (
    PICKLES,
    Exported,
    ExternalModel,
    ModelFormat,
    explain_pickle,
    padded,
)
from smallmind.exchange.published import CONFIG, TOKENIZER
from smallmind.exchange.tensors import encode, tensors_of, written_tensors
from smallmind.files import durable, safetensors
from smallmind.kernels.number_types import DTYPES
from smallmind.nn.loading import Stored
from smallmind.nn.transformer import TransformerModel
from smallmind.parts import NUMBER_TYPES, types_for
from smallmind.settings.architectures import Architecture, Layout
from smallmind.settings.config import MAX_LAYERS, ModelConfig
from smallmind.text import tokenizer_json
from smallmind.text.sentencepiece import read_model
from smallmind.text.tokenizer import Tokenizer

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARD = "README.md"
TIED = "tie_word_embeddings"
TOKENIZER_MODEL = "tokenizer.model"  # SentencePiece's, where there is no tokenizer.json
COMPARED_TOGETHER = 2**20  # numbers
MAX_CONFIG_BYTES = 1_000_000
MAX_INDEX_BYTES = 20_000_000
BUFFERS = (  # of earlier versions
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    ".rotary_emb.inv_freq",
)
REFUSED = {
    "auto_map": "custom code, which is never executed",
    "quantization_config": "quantised weights; save it in 16 or 32 bits",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # tables of Gemma's rope_parameters
MOVED = {"rope_theta": "rope_theta", "rotary_share": "partial_rotary_factor"}
ROPE_TYPES = ("rope_type", "type")  # version 4 of transformers prefers the second
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
SCALINGS: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": LLAMA3}
SHARD = re.compile(r"\w[\w.-]*\.safetensors")


class HuggingFace(ModelFormat):
    """A directory that `from_pretrained` of transformers reads."""

    types = tuple(kind.name for kind in types_for("store") if kind.block == 1)

    def check_path(self, path: Path) -> None:
        durable.check_new_directory(path)

    def write(self, path: Path, exported: Exported, type: str) -> None:
        architecture = architecture_of(exported.model.config)
        files: dict[str, Any] = published.files_of(
            exported.tokenizer, exported.model.config.block_size
        )
        config = {
            "architectures": [architecture.model_class],
            "model_type": architecture.model_type,
            **settings_of(exported.model.config, architecture.config),
            **files[CONFIG],
            "dtype": NUMBER_TYPES[type].precision,
        }
        if architecture.rotates:
            # Since version 5; earlier ones read rope_theta and rope_scaling.
            kind, *numbers = config.pop("rope_scaling") or ("default",)
            scaling = {"rope_type": kind, **dict(zip(SCALINGS[kind], numbers, strict=True))}
            theta = exported.model.config.rope_theta
            table = {**scaling, "rope_theta": theta}
            if "rotary_share" in architecture.config.keys:
                table["partial_rotary_factor"] = exported.model.config.values()["rotary_share"]
            if key := architecture.config.keys.get("window_theta"):
                of_windows = {"rope_type": "default", "rope_theta": config[key]}
                table = {FULL: table, SLIDING: of_windows}
            config["rope_parameters"] = table
            if numbers:
                config["rope_scaling"] = scaling
        if "attention_types" in config:  # of GPT-Neo: lists, and how often each is repeated
            config["attention_types"] = [[config["attention_types"], 1]]
            config["window_size"] = config["window_size"] or exported.model.config.block_size
        card = model_card(exported, architecture.name, architecture.model_class)
        files |= {CARD: card, CONFIG: config}
        tokenizer = files.pop(TOKENIZER)
        with durable.new_directory(path, (MODEL, TOKENIZER, *files)):
            tensors = _written(exported.model, architecture, type)
            safetensors.write(path / MODEL, tensors, {"format": "pt"})
            tokenizer_json.write(path / TOKENIZER, tokenizer)
            for name, content in files.items():
                if not isinstance(content, str):
                    content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                durable.write(path / name, [content.encode()])

    def find(self, path: Path) -> "HuggingFaceDirectory | None":
        is_file = path.suffix in (".safetensors", ".json")
        saved = None
        with suppress(OSError, ValueError):
            directory = path.parent if is_file else path
            saved = from_json(durable.read(directory / CONFIG, MAX_CONFIG_BYTES))
        if not isinstance(saved, dict) or "model_type" not in saved:
            return None
        if not path.is_dir():
            raise InputError(f"{path} is one file of a model; give its directory, {path.parent}")
        return HuggingFaceDirectory(path)


class HuggingFaceDirectory(ExternalModel):
    """A directory of transformers. Nothing that it names is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with durable.explained(path / CONFIG, "JSON file"):
            self._saved = from_json(durable.read(path / CONFIG, MAX_CONFIG_BYTES))
        try:
            self._described, self.config = _described(self._saved)
        except ValueError as error:  # InputError is one
            raise InputError(f"{path / CONFIG}: {error}") from None
        self.name = f"the {self._described.name} in {path}"
        self._settle_head()

    @property
    def _head(self) -> str:
        """The name of the tensor of an untied head."""
        return f"{self._described.tensors.names['head']}.weight"

    @property
    def _embedding(self) -> str:
        """The name of the matrix that a tied head is."""
        return f"{self._described.tensors.names['token_embedding']}.weight"

    def _settle_head(self) -> None:
        """Ties or unties the config, with a warning, if the file has another head than it says.

        transformers unties it too. Where a head is missing it would draw one at random: that is
        refused if the config says that there is one.
        """
        # One block is enough, and a config may say that there are millions.
        config, is_tied = dataclasses.replace(self.config, n_layer=1), self.config.tie_weights
        _, stored = self._tensors(dataclasses.replace(config, tie_weights=False))
        head, embedding = stored.get(self._head), stored.get(self._embedding)
        if is_tied and head and embedding and not _are_equal(head, embedding):
            reason = f"is not the embedding, as {TIED} says: it is read by itself"
        elif embedding and not (is_tied or head) and self._saved.get(TIED) is None:
            reason = f"is missing, and {TIED} is not set: the embedding replaces it"
        else:
            return
        self.config = dataclasses.replace(self.config, tie_weights=not is_tied)
        warnings.warn(f"{self.path}: {self._head} {reason}", stacklevel=2)

    def tokenizer(self) -> Tokenizer:
        file, model = self.path / TOKENIZER, self.path / TOKENIZER_MODEL
        if not (file.exists() or model.exists()):
            raise InputError(
                f"{self.path} has no {TOKENIZER}; save the tokenizer there with transformers, "
                "AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
            )
        try:
            if file.exists():
                contents = tokenizer_json.read(file)
            else:
                is_gemma = str(self._saved.get("model_type")).startswith("gemma")
                usual = {"tokenizer_class": "GemmaTokenizer"} if is_gemma else {}
                said = usual | published.settings_of(self.path)
                file, contents = model, read_model(model, said)
            published.add_tokens(contents, self.path)
            processor = contents.get("post_processor")
            tokenizer = padded(Tokenizer.load(file, contents), self.config.vocab_size)
        except InputError as error:
            shown = str(error)
            raise InputError(shown if str(file) in shown else f"{file}: {shown}") from None
        try:
            found = published.of_directory(self.path, self._saved, processor, tokenizer.special)
            return tokenizer.with_published(found)
        except ValueError as error:
            raise InputError(
                f"{self.path}: a file about its tokenizer is damaged: {error}"
            ) from None

    def tensors(self) -> tuple[Layout, Mapping[str, Stored]]:
        return self._tensors(self.config)

    def _tensors(self, config: ModelConfig) -> tuple[Layout, dict[str, Stored]]:
        """Returns its names for the parameters of such a model, and its tensors by these names."""
        layout = self._described.tensors
        expected = {tensor.name for tensor in tensors_of(config, layout)}
        return layout, _as_expected(self._stored(), expected, self._head, self._embedding)

    def _stored(self) -> dict[str, Stored]:
        stored: dict[str, Stored] = {}
        for file, names in self._files().items():
            tensors = safetensors.open_tensors(file, strict=False)[0]
            if names is not None and (different := tensors.keys() ^ names):
                odd = min(different)
                lack = f"{file.name} has no" if odd in names else "no file is listed for"
                raise InputError(
                    f"{self.path / INDEX} is the index of another model: {lack} {odd!a}"
                )
            stored |= {name: _stored(name, file, tensor) for name, tensor in tensors.items()}
        return stored

    def _files(self) -> dict[Path, set[str] | None]:
        """-> the files of weights: one, or the shards of an index with the names of their
        tensors.
        """
        if (self.path / MODEL).exists():
            return {self.path / MODEL: None}
        index = self.path / INDEX
        if not index.exists():
            names = sorted(file.name for file in self.path.iterdir())
            others = [name for name in names if SHARD.fullmatch(name)]
            pickles = [name for name in names if Path(name).suffix in PICKLES]
            if others:
                reason = f"{others[0]}, but neither {MODEL} nor {INDEX}; fetch what is missing"
            elif pickles:
                reason = f"only {pickles[0]}, {explain_pickle(pickles[0])}"
            else:
                reason = f"no {MODEL}; fetch it"
            raise InputError(f"{self.path} has {reason}")
        with durable.explained(index, "JSON file"):
            content = from_json(durable.read(index, MAX_INDEX_BYTES))
        table = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(table, dict) or not table:
            raise InputError(f"{index} has no weight_map")
        shards: dict[str, set[str]] = {}
        for name, shard in table.items():
            if not isinstance(shard, str) or not SHARD.fullmatch(shard):
                raise InputError(
                    f"{index} names {shown_value(shard)}, which is not a file in this folder"
                )
            shards.setdefault(shard, set()).add(name)
        for shard in shards:
            if not (self.path / shard).exists():
                raise InputError(f"{self.path} lacks {shard}, one of {len(shards)} weight files")
        return {self.path / shard: shards[shard] for shard in sorted(shards)}


def _written(
    model: TransformerModel, architecture: Architecture, type: str
) -> safetensors.LazyTensors:
    """Returns the tensors of a model, each of which is converted when it is asked for."""
    tensors = written_tensors(model.config, architecture, architecture.tensors)
    by_name = {tensor.name: tensor for tensor in tensors}

    def converted(name: str) -> np.ndarray:
        values = by_name[name].of_model(model.parameters)
        if type == "f32":
            return values  # a view
        return encode(values, NUMBER_TYPES[type]).view(safetensors.DTYPES[type.upper()])

    return safetensors.LazyTensors(by_name, converted)


def _stored(name: str, file: Path, tensor: safetensors.StoredTensor) -> Stored:
    """Returns a tensor in a file of safetensors. InputError if it is not floating point."""
    if tensor.dtype.kind != "f" and tensor.dtype != safetensors.BFLOAT16:
        raise InputError(f"{file}: {name!a} is of type {tensor.dtype}, not floating point")

    def read_wide(first: int, out: np.ndarray) -> None:
        values = np.empty(out.shape, tensor.dtype)
        tensor.read_rows(first, values)
        with np.errstate(over="ignore"):  # infinite weights are refused
            out[...] = values

    if tensor.dtype.itemsize == 8:
        return Stored(tensor.shape, np.float32, read_wide)
    dtype = DTYPES[safetensors.NAMES[tensor.dtype].lower()]
    return Stored(tensor.shape, dtype, tensor.read_rows)


def _are_equal(one: Stored, other: Stored) -> bool:
    """Returns True if two matrices in files are of the same type and have the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    step = max(1, COMPARED_TOGETHER // max(1, one.shape[-1]))
    for first in range(0, one.shape[0], step):
        shape = min(step, one.shape[0] - first), *one.shape[1:]
        pieces = [np.empty(shape, one.dtype) for _ in range(2)]
        for piece, stored in zip(pieces, (one, other), strict=True):
            stored.read(first, piece)
        if not np.array_equal(pieces[0].view(np.uint8), pieces[1].view(np.uint8)):
            return False
    return True


def _described(saved: dict[str, Any]) -> tuple[Architecture, ModelConfig]:
    """config.json -> the architecture, the settings of the model."""
    for key, what in REFUSED.items():
        if saved.get(key):
            raise InputError(f"it has {key}: {what}")
    architecture = known_architecture(saved, "model_type", "model_type")
    flat = {**saved, **_rotation(saved, architecture), **_layers(saved, architecture)}
    return architecture, config_of(architecture, architecture.config, flat)


def _rotation(saved: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """-> the rope settings of config.json as they were before version 5 of transformers moved them.

    The scaling is that of `part_settings`, or None. InputError for one that is not supported.
    """
    keys = architecture.config.keys
    found: dict[str, Any] = {}
    tables = {key: saved.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"{key} is not a JSON object")
    # Where a file has both, transformers reads the first alone.
    key = next((key for key, table in tables.items() if table), "rope_parameters")
    table = tables[key]
    if "window_theta" in keys and table.keys() & {FULL, SLIDING}:
        of_windows = _rotation_in(key, table.get(SLIDING) or {}, saved)
        if of_windows["rope_scaling"]:
            raise InputError(f"{key}: scaled rotations in windows are not supported")
        table = table.get(FULL) or {}
        if "rope_theta" in of_windows:
            found["window_theta"] = of_windows["rope_theta"]
    found |= _rotation_in(key, table, saved)
    return {str(keys.get(name, name)): value for name, value in found.items()}


def _rotation_in(key: str, table: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """-> the rope settings in a table of config.json."""
    if not isinstance(table, dict):
        raise InputError(f"{key} is not a JSON object")
    table = {name: value for name, value in table.items() if value is not None}
    kinds = [table[name] for name in ROPE_TYPES if name in table] or ["default"]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in SCALINGS:
            known = " and ".join(SCALINGS)
            raise InputError(f"{key}: {shown_value(kind)} is not supported, only {known}")
    moved = {ours: table[name] for ours, name in MOVED.items() if name in table}
    if kinds[0] != kinds[-1] or table.keys() - {
        *(*ROPE_TYPES, *MOVED.values()),
        *SCALINGS[kinds[0]],
    }:
        raise InputError(f"{key} is {shown_value(table)}; as {kinds[0]} it is not supported")
    if kinds[0] == "default":
        return {"rope_scaling": None, **moved}
    # The table may lack the context, and a key beside it comes first.
    context = table.get(LLAMA3[-1], saved.get("max_position_embeddings"))
    numbers = {**table, LLAMA3[-1]: saved.get(LLAMA3[-1], context)}
    return {"rope_scaling": (kinds[0], *map(numbers.get, SCALINGS[kinds[0]])), **moved}


def _layers(saved: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """-> the lists of layers that config.json may leave out, as transformers makes them."""
    keys, words = architecture.config.keys, architecture.config.words
    if "attention_types" in keys.values():
        return {"attention_types": _repeated(saved.get("attention_types"))}
    count = saved.get("num_hidden_layers")
    is_count = isinstance(count, int) and 0 < count <= MAX_LAYERS  # else it is refused elsewhere
    if not isinstance(count, int) or not is_count:
        return {}
    found: dict[str, Any] = {}
    if "window_theta" in keys and saved.get("layer_types") is None:
        interval = saved.get("sliding_window_pattern", saved.get("_sliding_window_pattern", 6))
        interval = whole(interval, 1)
        has_window = [(i + 1) % interval > 0 for i in range(count)]
        found["layer_types"] = [words["window_layers"][has] for has in has_window]
    if "has_window" not in keys:
        return found
    rotates = saved.get("no_rope_layers")
    if "rotary_layers" in words and rotates is None:
        interval = whole(saved.get("no_rope_layer_interval", 4), 1)
        rotates = found["no_rope_layers"] = [int((i + 1) % interval > 0) for i in range(count)]
    if saved.get("use_sliding_window") and saved.get("layer_types") is None:
        first = whole(saved.get("max_window_layers", 28))
        has_window = [not x for x in rotates] if rotates else [i >= first for i in range(count)]
        found["layer_types"] = [words["window_layers"][has] for has in has_window]
    return found


def _repeated(types: Any) -> list[Any]:
    """Lists of kinds of layers, and how often each is repeated -> a kind for each layer."""
    types = [[["global", "local"], 12]] if types is None else types
    try:
        return [
            kind
            for kinds, count in types
            for _ in range(min(whole(count), MAX_LAYERS))
            for kind in kinds
        ]
    except (TypeError, ValueError):
        raise InputError(f"attention_types is {shown_value(types)}") from None


def _as_expected(
    stored: dict[str, Stored], names: set[str], head: str, embedding: str
) -> dict[str, Stored]:
    """Tensors under the names that a model with a head has, without what it computes itself.

    Files of the model without its head leave out the first word of each name; those that keep one
    of two equal tensors may have the head in place of the embedding.
    """
    prefix = next(name.partition(".")[0] for name in names if name != head)
    named = {
        name if name in names or f"{prefix}.{name}" not in names else f"{prefix}.{name}": tensor
        for name, tensor in stored.items()
    }
    computed = {name for name in named if name.endswith(BUFFERS) and name not in names}
    if head not in names:  # the embedding again
        computed.add(head)
        if head in named:
            named.setdefault(embedding, named[head])
    return {name: tensor for name, tensor in named.items() if name not in computed}

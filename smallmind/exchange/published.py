"""The chat form of a published model: its template, the tokens that end a turn, what is added.

A tokenizer carries it as `published`: the JSON of files of transformers by their names. Templates
are in tokenizer_config.json, config.json has only the tokens that begin and end texts, and
tokenizer.json only its post_processor. Both formats read it into this form, and write it from it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError, from_json, shown_value
from smallmind.files import durable
from smallmind.text.chat import USER, Turn
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer
from smallmind.text.tokenizer_json import added_around

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MAX_BYTES = 20_000_000
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in config.json
# A token's name in transformers -> its key in GGUF.
KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}
# Tokens added to each text, if a setting says so -> its key in GGUF.
ADDED = {"bos": "tokenizer.ggml.add_bos_token", "eos": "tokenizer.ggml.add_eos_token"}
CHAT_TEMPLATE, CHAT_TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes without tokens of their own


# Directories of transformers


def of_directory(
    path: Path, config: Mapping[str, Any], processor: Any, special: Mapping[str, int]
) -> dict[str, Any]:
    """-> the published facts in the files of a directory: its config.json has been read already.

    processor: the post_processor of its tokenizer.json, None without one; special: the tokens that
    it may add.
    """
    found: dict[str, Any] = {CONFIG: {name: config[name] for name in IDS if name in config}}
    _check_ids(path / CONFIG, found[CONFIG])
    for name in (TOKENIZER_CONFIG, GENERATION_CONFIG, SPECIAL_TOKENS_MAP):
        if (path / name).exists():
            found[name] = _object(path / name)
            _check_ids(path / name, found[name])
    settings = found.get(TOKENIZER_CONFIG, {})
    if not (path / TOKENIZER).exists():  # which would have the last word
        roles = {**found.get(SPECIAL_TOKENS_MAP, {}), **settings}
        names = {x: _content(roles.get(f"{x}_token")) for x in ADDED}
        added = {x for x in ADDED if settings.get(f"add_{x}_token") is True and names[x] in special}
        first, last = (names[x] if x in added else None for x in ADDED)
        processor = _template_processing(first, last, special)
    if processor:
        found[TOKENIZER] = {"post_processor": processor}
    settings.pop("auto_map", None)  # code, which is never executed here and does not travel
    if templates := dict(_template_files(path)):
        settings["chat_template"] = _as_one(templates)
        found[TOKENIZER_CONFIG] = settings
    return {name: part for name, part in found.items() if part}


def settings_of(path: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a directory, empty without one."""
    return _object(path / TOKENIZER_CONFIG) if (path / TOKENIZER_CONFIG).exists() else {}


def add_tokens(contents: dict[str, Any], path: Path) -> None:
    """Adds to a tokenizer.json the tokens that only other files in its directory have.

    As transformers does: those that tokenizer_config.json describes, else those of
    added_tokens.json, which are special if they have a role.
    """
    settings, roles, numbers = (
        _object(path / name) if (path / name).exists() else {}
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
    )
    described = settings.get("added_tokens_decoder")
    if isinstance(described, dict):
        tokens = [
            {**token, "id": int(number)}
            for number, token in described.items()
            if isinstance(token, dict) and number.isdecimal()
        ]
    else:
        special = set(_names([*{**roles, **settings}.values()]))
        tokens = [
            {"content": x, "id": n, "special": x in special, "normalized": x not in special}
            for x, n in numbers.items()
        ]
    known, model = contents.get("added_tokens") or [], contents.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not (isinstance(known, list) and isinstance(vocabulary, dict)):
        return  # whoever reads it refuses it
    names = set(_names(known))
    missing = [x for x in tokens if isinstance(x.get("content"), str) and x["content"] not in names]
    for token in missing:
        token["id"] = vocabulary.get(token["content"], token["id"])
    contents["added_tokens"] = [*known, *missing]


def _names(tokens: Sequence[Any]) -> Iterator[str]:
    """Yields the names of tokens, which stand for themselves or are described, alone or in
    lists.
    """
    for token in tokens:
        if isinstance(token, list):
            yield from _names([each for each in token if not isinstance(each, list)])
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str):
            yield name


def _check_ids(file: Path, said: Mapping[str, Any]) -> None:
    """Raises InputError unless tokens are numbers; -1 is one that some write for none."""
    for name in IDS:
        value = said.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and -1 <= i < 2**31 for i in values):
            raise InputError(f"{file}: {name} is {shown_value(value)}, not the number of a token")


def _object(file: Path) -> dict[str, Any]:
    with durable.explained(file, "JSON file"):
        content = from_json(durable.read(file, MAX_BYTES))
    if not isinstance(content, dict):
        raise InputError(f"{file} is not a JSON object")
    return content


def _template_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of templates in files of their own, if there is a default one."""
    if not (path / TEMPLATE).exists():
        return
    for file in [path / TEMPLATE, *sorted((path / TEMPLATES).glob("*.jinja"))]:
        with durable.explained(file, "template"):
            text = durable.read(file, MAX_BYTES).decode("utf-8")
        yield "default" if file.parent == path else file.stem, text


def files_of(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """Returns the contents of the files of a directory, by name; see `of_directory`."""
    published = tokenizer.published
    ids = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    settings: dict[str, Any] = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    said, roles = (published.get(name, {}) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP))
    if said.get("tokenizer_class") not in GENERIC and tokenizer.end_of_text is not None:
        # Another class has these without saying so.
        ends = {"bos_token", "eos_token"} - set(roles)
        settings |= dict.fromkeys(sorted(ends), tokenizer.separator)
    for first in tokenizer.beginning[:1]:
        ids["bos_token_id"] = first
        names = {token: content for content, token in tokenizer.special.items()}
        if first in names:
            settings["bos_token"] = names[first]  # unless it is said
    if tokenizer.beginning or "add_bos_token" in said:
        # Programs that do not read the post_processor ask for it.
        said = {**said, "add_bos_token": bool(tokenizer.beginning)}
    # tokenizer.json says everything. Without a class, transformers builds a tokenizer of the
    # architecture's own kind.
    files: dict[str, Any] = {
        CONFIG: {**ids, **published.get(CONFIG, {})},
        TOKENIZER: {**tokenizer.as_json(), **published.get(TOKENIZER, {})},
        TOKENIZER_CONFIG: {**settings, **said, "tokenizer_class": GENERIC[0]},
    }
    if not published.keys() - {TOKENIZER}:
        files[GENERATION_CONFIG] = {**ids, "pad_token_id": tokenizer.end_of_text}
    templates = _templates(said.get("chat_template"))
    if "default" in templates:  # where transformers looks first since version 4.50
        files[TEMPLATE] = templates["default"]
    others = published.keys() & {GENERATION_CONFIG, SPECIAL_TOKENS_MAP}
    return files | {name: published[name] for name in sorted(others)}


# GGUF


def of_metadata(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the published facts in the keys of a GGUF file whose tokenizer has been read."""
    contents = {token: content for content, token in tokenizer.special.items()}
    named = {name: metadata.get(key) for name, key in KEYS.items()}
    ids = {name: i for name, i in named.items() if type(i) is int and i in contents}
    settings: dict[str, Any] = {f"{name}_token": contents[token] for name, token in ids.items()}
    # Byte-level BPE of any other pattern adds a token only where a key says so.
    model = metadata.get("tokenizer.ggml.model")
    begins = model in ("llama", "bert") or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    adds = {"bos": begins and "bos" in ids, "eos": model in ("t5", "bert") and "eos" in ids}
    for name, key in ADDED.items():
        value = metadata.get(key)
        settings[f"add_{name}_token"] = adds[name] = value if type(value) is bool else adds[name]
    templates = {
        key.removeprefix(CHAT_TEMPLATE).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key.split(".")[:2] == CHAT_TEMPLATE.split(".") and isinstance(value, str)
    }
    if templates:
        settings["chat_template"] = _as_one(templates)
    if not (ids or templates):
        return {}
    said: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    if tokenizer.end_of_text is not None:
        ends.append(tokenizer.end_of_text)  # llama.cpp ends there too, by its name
    if ends := list(dict.fromkeys(ends)):
        said["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    first, last = (adds[name] and settings.get(f"{name}_token") for name in ADDED)
    post_processor = _template_processing(first or None, last or None, tokenizer.special)
    files = {CONFIG: said, GENERATION_CONFIG: said, TOKENIZER: {"post_processor": post_processor}}
    return {TOKENIZER_CONFIG: settings, **{name: part for name, part in files.items() if part}}


def metadata_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the keys of GGUF for what is `published`; see `of_metadata`."""
    settings = tokenizer.published.get(TOKENIZER_CONFIG, {})
    templates = _templates(settings.get("chat_template"))
    keys: dict[str, Any] = {KEYS[name]: np.uint32(i) for name, i in _ids(tokenizer).items()}
    if tokenizer.published:
        around = added_around(tokenizer.published.get(TOKENIZER, {}).get("post_processor"))
        keys |= dict(zip(ADDED.values(), map(bool, around), strict=True))
    for name, template in templates.items():
        plain = re.sub(r"[^A-Za-z0-9]", "_", name)
        keys[CHAT_TEMPLATE if name == "default" else f"{CHAT_TEMPLATE}.{plain}"] = template
    if others := [name for name in templates if name != "default"]:
        keys[CHAT_TEMPLATES] = others
    return keys


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the tokens that have a role in GGUF, as far as anything says so."""
    files, special = tokenizer.published, tokenizer.special
    by_name = {**files.get(SPECIAL_TOKENS_MAP, {}), **files.get(TOKENIZER_CONFIG, {})}
    by_id = {**files.get(GENERATION_CONFIG, {}), **files.get(CONFIG, {})}
    found: dict[str, int] = {}
    for name in KEYS:
        content = _content(by_name.get(f"{name}_token"))
        if name == "bos" and tokenizer.beginning:
            found[name] = tokenizer.beginning[0]
            continue
        ids = [special[content]] if content in special else _tokens(by_id, name, tokenizer)
        if ids:
            found[name] = ids[0]
    ends = [*_tokens(files.get(GENERATION_CONFIG, {}), "eos", tokenizer)]
    ends = [i for i in (found.get("eos"), *ends) if i not in (None, tokenizer.end_of_text)]
    if ends:  # not only the end of a text: the first ends a turn
        found.setdefault("eot", ends[0])
        if others := [i for i in ends if i not in found.values()]:
            found.setdefault("eom", others[0])
    return found


def _tokens(said: Mapping[str, Any], name: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that a file names by number, without those that do not exist."""
    value = said.get(f"{name}_token_id")
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and 0 <= i < tokenizer.vocab_size]


def _content(token: Any) -> Any:
    """A token in the words of transformers, a text or a description -> its text."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def beginning_of(tokenizer: Tokenizer) -> int | None:
    """-> the token before a text without context, in transformers: that of beginnings, else of
    ends.

    None if the tokenizer has neither.
    """
    if tokenizer.beginning:
        return tokenizer.beginning[0]
    files = [tokenizer.published.get(name, {}) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)]
    said = [_content(file.get(f"{name}_token")) for name in ADDED for file in files]
    known = [tokenizer.special[content] for content in said if content in tokenizer.special]
    return known[0] if known else tokenizer.end_of_text


def as_learned(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer of a model that has learned conversations, as its exports describe it.

    If its template does not write the tokens that begin texts, its conversations had none: other
    programs must not add them to what the template writes.
    """
    template = format_of(tokenizer)
    if not (template and tokenizer.beginning):
        return tokenizer
    asked = template.prompt(tokenizer, [Turn(USER, "?")])
    if len(tokenizer.begun(asked)) == len(asked):
        return tokenizer
    files = {name: dict(part) for name, part in tokenizer.published.items() if name != TOKENIZER}
    files.setdefault(TOKENIZER_CONFIG, {})["add_bos_token"] = False
    return tokenizer.with_published(files)


def _templates(said: Any) -> dict[str, str]:
    """The chat_template of transformers, one or several -> templates by name."""
    named = said if isinstance(said, list) else [{"name": "default", "template": said}]
    return {
        one["name"]: one["template"]
        for one in named
        if isinstance(one, Mapping)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("template"), str)
    }


def _as_one(templates: Mapping[str, str]) -> Any:
    """Returns the reverse of `_templates`."""
    if list(templates) == ["default"]:
        return templates["default"]
    return [{"name": name, "template": template} for name, template in templates.items()]


def _template_processing(
    first: str | None, last: str | None, special: Mapping[str, int]
) -> dict[str, Any] | None:
    """-> the post_processor of tokenizer.json that adds these tokens; None if there are none."""
    if not (first or last):
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        pieces = [first and {"SpecialToken": {"id": first, "type_id": type_id}}]
        pieces.append({"Sequence": {"id": sequence, "type_id": type_id}})
        pieces.append(last and {"SpecialToken": {"id": last, "type_id": type_id}})
        return [piece for piece in pieces if isinstance(piece, dict)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [special[token]], "tokens": [token]}
            for token in (first, last)
            if token
        },
    }

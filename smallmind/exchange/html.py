"""A model in an HTML page that runs it by itself: one file, which needs no network and no server.

The page is that of `smallmind serve`; `model.js` beside this file computes in the browser. What the
file holds of the model can come from anywhere, so none of it is ever read as HTML or as a program.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smallmind import page, parts
from smallmind.checks import InputError
from smallmind.exchange.format import Exported, ModelFormat, check_file
from smallmind.exchange.tensors import encode, type_of
from smallmind.files import durable
from smallmind.nn.parameters import Role
from smallmind.parts import types_for
from smallmind.settings.config import ModelConfig, __version__
from smallmind.text.templates import KnownTemplate, format_of
from smallmind.text.tokenizer import Tokenizer

SUFFIXES = (".html", ".htm")
PACKAGE = Path(__file__).parents[1]
PROGRAMS = (PACKAGE / "exchange" / "model.js", PACKAGE / "exchange" / "client.js")
MARK = b'<meta name="generator" content="smallmind '  # in the first bytes of the file
HEAD_BYTES = 1024
TOKENIZERS = ("char", "byte", "bpe")
MAX_BYTES = 2**28  # of weights: browsers limit the length of a text
BASE64_BYTES = 3 * 2**18  # that are encoded at a time, a multiple of 3


class HTML(ModelFormat):
    """A page with the model inside. Matrices are (out, in), as products with one row read them."""

    types = tuple(kind.name for kind in types_for("page"))

    def check_path(self, path: Path) -> None:
        check_file(path, SUFFIXES, is_page, "was not made by `export --to html`")

    def write(self, path: Path, exported: Exported, type: str) -> None:
        tokenizer = exported.tokenizer
        if tokenizer.kind not in TOKENIZERS:
            raise InputError(
                f"a page cannot run the tokenizer {tokenizer.kind!r}, only "
                f"{' or '.join(TOKENIZERS)}"
            )
        tensors = [
            (spec.name, values, type_of(values.shape, type))
            for spec in exported.model.flat.specs
            for values in [exported.model.parameters[spec.name]]
            for values in [values.T if spec.role in (Role.MATRIX, Role.HEAD) else values]
        ]
        sizes = [kind.size(values.shape) for _, values, kind in tensors]
        if sum(sizes) > MAX_BYTES:
            raise InputError(
                f"a page holds at most {MAX_BYTES:,} bytes of weights, and this model has "
                f"{sum(sizes):,} in {type}; export it to gguf"
            )
        about = {
            **describe(exported),
            "tensors": [
                {"name": name, "type": kind.name, "size": size}
                for (name, _, kind), size in zip(tensors, sizes, strict=True)
            ],
        }
        self.check_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        encoded = (encode(values, kind) for _, values, kind in tensors)
        durable.write(path, _page(about, encoded))


def describe(exported: Exported) -> dict[str, Any]:
    """Returns a model and its tokenizer as model.js reads them, without the weights. JSON-able.

    InputError if it does not know a part of them.
    """
    model, tokenizer = exported.model, exported.tokenizer
    state, config, position = tokenizer.state(), model.config, model.network.embedding.position
    blocks = [
        {"window": config.window_of(i), "frequencies": position.in_block(i).frequencies}
        for i in range(config.n_layer)
    ]
    about = {
        "format": 1,
        "version": __version__,
        "name": exported.name,
        "parameters": model.flat.count,
        "config": {**config.values(), **_pages_parts(config), "blocks": blocks},
        # In pairs: JavaScript would bring names that are numbers to the front.
        "tokenizer": {**state, "special": list(state.get("special", {}).items())},
        "vocab_size": tokenizer.vocab_size,
        "unit": tokenizer.unit,
        "opening": tokenizer.opening,
        "beginning": tokenizer.beginning,
        "ends": sorted(tokenizer.ends),
        "template": _template(tokenizer),
    }
    if tokenizer.kind == "bpe":
        from smallmind.kernels.bpe import characters

        about["classes"] = {
            "letters": characters.LETTERS,
            "numbers": characters.NUMBERS,
            "spaces": characters.WHITE_SPACE,
            "newlines": characters.NEWLINES,
        }
    return about


def _pages_parts(config: ModelConfig) -> dict[str, str]:
    """-> slot -> the name in model.js of the part of this model. InputError if it has none."""
    found = {}
    for slot, table in parts.LAYERS.items():
        names = {name: getattr(parts.load(table, name), "page", "") for name in table}
        found[slot] = names[config.part(slot)]
        if not found[slot]:
            known = " or ".join(name for name, page in names.items() if page)
            raise InputError(f"a page cannot run {slot}={config.part(slot)!r}, only {known}")
    return found


def _template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the chat template that a tokenizer carries, as fields; None if it has none."""
    template = format_of(tokenizer)
    if template is None:
        return None
    if not isinstance(template, KnownTemplate):
        raise InputError(
            "its chat template is in Jinja, which a page cannot run; fine-tune it with "
            "--chat-template chatml first"
        )
    names = "name", "before", "after", "special", "begin", "system", "strips", "lead", "joins"
    return {name: getattr(template, name) for name in names}


def _page(about: dict[str, Any], tensors: Iterator[np.ndarray]) -> Iterator[bytes]:
    """Yields the bytes of a file, part by part."""
    document = page.document()
    programs = "".join(
        f"<script>\n{program.read_text(encoding='utf-8')}</script>\n" for program in PROGRAMS
    )
    opening, head, rest = document.partition("<head>\n")
    begin, script, end = rest.partition("<script>")
    policy = page.policy(document + programs)
    yield f"{opening}{head}".encode()
    yield MARK + f'{__version__}">\n<meta charset="utf-8">\n'.encode()
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{begin}'.encode()
    yield b'<script type="application/json" id="smallmind-about">'
    yield json.dumps(about).replace("<", "\\u003c").encode()
    yield b'</script>\n<script type="text/plain" id="smallmind-weights">'
    yield from _base64(tensors)
    yield f"</script>\n{programs}{script}{end}".encode()


def _base64(tensors: Iterator[np.ndarray]) -> Iterator[bytes]:
    """Yields all bytes of tensors, one after another, in base64."""
    waiting = bytearray()
    for tensor in tensors:
        waiting += tensor.tobytes()
        while len(waiting) > BASE64_BYTES:
            yield base64.b64encode(waiting[:BASE64_BYTES])
            del waiting[:BASE64_BYTES]
    yield base64.b64encode(waiting)


def is_page(path: Path) -> bool:
    """Returns True if a file is a page with a model inside."""
    try:
        with durable.open_regular(path) as file:
            return MARK in file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return False

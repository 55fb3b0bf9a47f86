"""Tokens that only other files than tokenizer.json have are read, as transformers reads them."""

import json

import pytest

from smallmind.exchange.huggingface import HuggingFaceDirectory
from tests.exchange import chat
from tests.programs import refuses

NEW = "<new>"


def divided(path, where):
    """Writes a model whose last added token, and a new one, stand only in another file."""
    chat.made(path, "Qwen")
    data = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    last = data["added_tokens"].pop()
    name, number = last["content"], last["id"]
    if where == "added_tokens.json":
        content = {name: number, NEW: number + 1}
    else:
        settings = json.loads((path / "tokenizer_config.json").read_text())
        described = {**last, "content": NEW, "special": True}
        tokens = {str(number): last, str(number + 1): described}
        for token in tokens.values():
            token.pop("id", None)
        content = {**settings, "added_tokens_decoder": tokens}
    (path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (path / where).write_text(json.dumps(content), encoding="utf-8")
    return path, name, number


@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_of_other_files_are_tokens(tmp_path, where):
    path, name, number = divided(tmp_path, where)
    tokenizer = HuggingFaceDirectory(path).tokenizer()
    assert tokenizer.special[name] == number and tokenizer.special[NEW] == number + 1
    text = f"a{NEW}b {name}c{NEW}\n"
    ids = tokenizer.encode(text).tolist()
    assert ids.count(number) == 1 and ids.count(number + 1) == 2
    assert tokenizer.decode(ids) == text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    assert ids == theirs.encode(text, add_special_tokens=False)


def test_a_number_that_another_token_has_is_refused(tmp_path):
    path, name, number = divided(tmp_path, "added_tokens.json")
    (path / "added_tokens.json").write_text(json.dumps({name: number, NEW: number}))
    refuses("have the ids of other tokens", HuggingFaceDirectory(path).tokenizer)
    (path / "added_tokens.json").write_text(json.dumps({name: "7"}))
    refuses(f"its added token {name!r} is damaged", HuggingFaceDirectory(path).tokenizer)

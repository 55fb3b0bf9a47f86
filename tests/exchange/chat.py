"""Chat models as they are published: a directory of transformers around a published tokenizer."""

import json

import smallmind
from smallmind import Tokenizer
from smallmind.exchange.format import padded
from tests.exchange.models import model_of
from tests.text import published

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TOOLS = "{{ messages | length }} tools"
ENDS = {  # what begins a text, what ends a turn
    "Llama 3": ("<|begin_of_text|>", "<|reserved_special_token_1|>"),
    "Qwen": (None, published.TURN_END),
    "SmolLM": (published.TURN, published.TURN_END),
}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


def made(path, name, has_own_file=True):
    """Writes a chat model -> the directory."""
    data = published.file_of(name)
    tokenizer = padded(Tokenizer.from_json(data), 640)
    smallmind.export(model_of("Llama", tokenizer, n_embd=64, block_size=64), tokenizer, path)
    begin, turn_end = ENDS[name]
    special = {token["content"]: token["id"] for token in data["added_tokens"]}
    ids = {"eos_token_id": [special[turn_end], tokenizer.end_of_text]}
    ids |= {"bos_token_id": special.get(begin), "pad_token_id": tokenizer.end_of_text}
    roles = {"bos_token": begin, "eos_token": turn_end, "pad_token": tokenizer.separator}
    settings = {**roles, "model_max_length": 8192, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}
    if has_own_file:
        (path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = TEMPLATE
    config = json.loads((path / "config.json").read_text()) | ids
    contents = {
        "tokenizer.json": data,
        "tokenizer_config.json": settings,
        "special_tokens_map.json": roles,
        "generation_config.json": {**ids, **SAMPLING},
        "config.json": {**config, "eos_token_id": special[turn_end]},
    }
    for file, content in contents.items():
        (path / file).write_text(json.dumps(content), encoding="utf-8")
    return path

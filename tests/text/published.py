"""Tokenizers built by the `tokenizers` library as those of published models are, but small."""

import functools
import json
import random

import pytest

from smallmind.text.stories import built_in_text

SIMILAR = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LINES = """\
Straße, naïve café!\r
  日本語テキスト。 def f(x):
\treturn 'don\u2019t' + "DON'T"    # 3
In 2024, 1 000 000.50 x 17 = 17000000, 1    2   33      444
\U0001f600\U0001f469\u200d\U0001f469 e\u0301 \u0338 A\u030a \u0661\u0662
"""
TEXT = built_in_text(30_000)[:30_000] + LINES * 30 + "".join(map(chr, range(32, 127)))
# Whose characters have bytes that occur in no text that a tokenizer without an alphabet has seen.
UNSEEN = "\x00\x7f\u0530\u07c0\u2d30\uffff\U000f0000"
END, BEGIN, LLAMA_END = "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>"
TURN, TURN_END, CALL = "<|im_start|>", "<|im_end|>", "<tool_call>"


def byte_level(**settings):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **settings}


def split(regex):
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            byte_level(use_regex=False),
        ],
    }


def added(number, content, special=True, normalized=False):
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def learned(size, pre_tokenizer, special=(), alphabet=True):
    """-> the file of a tokenizer that `tokenizers` has learned, special tokens first."""
    tokenizers = pytest.importorskip("tokenizers")
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer, "model": empty}
    made = tokenizers.Tokenizer.from_str(json.dumps(shell))
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(letters),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return {
        **json.loads(made.to_str()),
        "decoder": byte_level(add_prefix_space=True, use_regex=True),
    }


def gpt2():
    """With a model of no type, merges in one string each, and an end that is `normalized`."""
    data = learned(500, byte_level())
    model = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "vocab": {**data["model"]["vocab"], END: 500},
        "merges": [" ".join(pair) for pair in data["model"]["merges"]],
    }
    post = byte_level(add_prefix_space=True, trim_offsets=False)
    tokens = [added(500, END, normalized=True)]
    return {**data, "added_tokens": tokens, "post_processor": post, "model": model}


def llama3():
    """Each token is made by all pairs that make it, or by none: whole words need no merges.

    A person has added a token, which is looked for between the others.
    """
    data = learned(600, split(SIMILAR % "{1,3}"))
    vocabulary = data["model"]["vocab"]
    pairs = [
        (token[:i], token[i:])
        for token in sorted(vocabulary, key=lambda token: vocabulary[token])
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    random.Random(1).shuffle(pairs)
    pairs = sorted(pairs[: len(pairs) * 2 // 3], key=lambda pair: vocabulary["".join(pair)])
    special = [BEGIN, LLAMA_END, *(f"<|reserved_special_token_{i}|>" for i in range(3))]
    template = [
        {"SpecialToken": {"id": BEGIN, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    begin = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BEGIN: {"id": BEGIN, "ids": [600], "tokens": [BEGIN]}},
    }
    return {
        **data,
        "added_tokens": [
            *(added(600 + i, content) for i, content in enumerate(special)),
            added(605, "x<|", special=False, normalized=True),
        ],
        "post_processor": {
            "type": "Sequence",
            "processors": [byte_level(add_prefix_space=True, trim_offsets=False), begin],
        },
        "model": {**data["model"], "ignore_merges": True, "merges": list(map(" ".join, pairs))},
    }


def qwen():
    """With accents joined, tokens that belong to the text, and one that a person has added."""
    data = learned(550, split(SIMILAR % ""))
    tokens = [
        added(550, END),
        added(551, TURN),
        added(552, TURN_END),
        added(553, CALL, special=False),
        added(554, "caf\xe9 \xc5", special=False, normalized=True),
        added(555, "<tool", special=False, normalized=True),
    ]
    return {
        **data,
        "normalizer": {"type": "NFC"},
        "added_tokens": tokens,
        "post_processor": byte_level(trim_offsets=False, use_regex=False),
        "decoder": byte_level(trim_offsets=False, use_regex=False),
        "model": {
            **data["model"],
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "merges": list(map(" ".join, data["model"]["merges"])),
        },
    }


def smollm():
    """Without tokens for bytes that the text lacks; special ones come first."""
    digits = {"type": "Digits", "individual_digits": True}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [digits, byte_level(use_regex=True)]}
    special = [END, TURN, TURN_END, "<repo_name>"]
    return learned(520, pre_tokenizer, special, alphabet=False)


PUBLISHED = {"GPT-2": gpt2, "Llama 3": llama3, "Qwen": qwen, "SmolLM": smollm}


@functools.cache
def file_of(name):
    """The file of the tokenizer with this name."""
    return PUBLISHED[name]()


@functools.cache
def theirs_of(name):
    """The tokenizer as `tokenizers` has it."""
    return pytest.importorskip("tokenizers").Tokenizer.from_str(json.dumps(file_of(name)))

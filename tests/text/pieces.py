"""Tokenizers that are not byte-level BPE, small: trained by SentencePiece and by `tokenizers`."""

import functools
import io
import json
import random

import pytest

from tests.text.published import TEXT

BASE = {"vocab_size": 700, "minloglevel": 2, "character_coverage": 0.9995}
# As Llama 2 and TinyLlama, Gemma, T5 and XLM-R have trained theirs.
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
BPE = {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **PLAIN}
TRAINED = {
    "llama": {**BPE, "allow_whitespace_only_pieces": True},
    "gemma": {
        **BPE,
        **{"add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>"},
        "control_symbols": "<start_of_turn>,<end_of_turn>",
        "user_defined_symbols": ["\n\n", "▁▁", "▁▁▁"],
    },
    "t5": {
        "vocab_size": 400,
        "model_type": "unigram",
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 2,
        "bos_id": -1,
    },
    "unigram": {"vocab_size": 650, "model_type": "unigram", "byte_fallback": True},
}
WORDS = [
    "hello",
    "Hello",
    "the",
    "  ",
    " ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "a",
    "1",
    "4567",
    ".",
]
WORDS += [
    "'s",
    "don't",
    "👩\u200d👩\u200d👧",
    "🎉",
    "👍🏽",
    "é",
    "e\u0301",
    "ﬁ",
    "½",
    "日本語",
    "中",
    "한국어",
]
WORDS += [
    "привет",
    "\u200d",
    "\u00a0",
    "\u3000",
    "\ufeff",
    "\x00",
    "\x01",
    "<0x41>",
    "▁",
    "▁▁",
    "a▁b",
]
WORDS += ["<", ">", "</", "__", "##", "ẞ", "İ", "—", "<s>", "</s>", "<unk>", "<bos>", "<eos>"]
WORDS += ["<end_of_turn>", "[CLS]", "[SEP]", "<mask>", "<Fn>", "<tool>", "<strip>"]


def hard(count, seed=0):
    """Strings that tokenizers of this kind divide in ways of their own."""
    choose = random.Random(seed)
    found = ["", " ", "  ", "\n", " a", "  a", "a ", "a  ", "</s> a", " <s> a", "a <strip> b"]
    while len(found) < count:
        words = choose.choices(WORDS, k=choose.randint(1, 14))
        found.append("".join(word + " " * (choose.random() < 0.3) for word in words))
    return found


@functools.cache
def trained(name):
    """The bytes of a tokenizer.model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    lines = [line for line in TEXT.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, **{**BASE, **TRAINED[name]}
    )
    return written.getvalue()


def added(content, **how):
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, "special": True, **usual, **how}


@functools.cache
def _made(name):
    tokenizers = pytest.importorskip("tokenizers")
    models, trainers = tokenizers.models, tokenizers.trainers
    normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers
    decoders = tokenizers.decoders
    if name == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special)
    elif name == "metaspace":  # XLM-R
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        made = tokenizers.Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=700, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    elif name == "bytes":  # DeepSeek Coder
        made = tokenizers.Tokenizer(models.BPE())
        words = [tokenizers.Regex(x) for x in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(x, "isolated") for x in words),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:  # Llama 2's normalizer
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        made = tokenizers.Tokenizer(
            models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special)
        lines = [line.replace(" ", "\0 ").split("\0") for line in TEXT.splitlines()]
        made.train_from_iterator([piece for line in lines for piece in line], trainer)
        data = json.loads(made.to_str())
        data["added_tokens"] = data["added_tokens"][:3]  # bytes are not found in texts
        return json.dumps(data)
    made.train_from_iterator(TEXT.splitlines(), trainer)
    return made.to_str()


def file_of(name):
    """The contents of a tokenizer.json, with added tokens of every kind after its own."""
    data = json.loads(_made(name))
    vocabulary = data["model"]["vocab"]
    first = len(vocabulary)
    more = [added("<mask>", lstrip=True), added("<strip>", rstrip=True)]
    more += [added("<tool>", special=False), added("<Fn>", special=False, normalized=True)]
    more += [added("word", special=False, single_word=True)]
    data["added_tokens"] += [{**token, "id": first + i} for i, token in enumerate(more)]
    return data


MADE = ("wordpiece", "metaspace", "prepend", "bytes")


def written(tokenizer):
    """The contents of its tokenizer.json, in which pairs of tokens are lists."""
    return json.loads(json.dumps(tokenizer.contents))

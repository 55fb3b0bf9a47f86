"""The pluggable parts, by the names that settings use for them.

A new part is one new file and one line here. Parts are named rather than imported, so that `--help`
can list them without loading any. A program adds a part of its own with a line too, before it
builds a model: `parts.NORMS["mine"] = "my_module:MyNorm"`.
"""

import importlib
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

NORMS = {
    "layernorm": "smallmind.nn.layernorm:LayerNorm",
    "rmsnorm": "smallmind.nn.rmsnorm:RMSNorm",
}

MLPS = {
    "gelu": "smallmind.nn.mlp:MLP",
    "gelu-erf": "smallmind.nn.mlp:ExactGELU",
    "relu2": "smallmind.nn.mlp:SquaredReLU",
    "swiglu": "smallmind.nn.mlp:SwiGLU",
    "geglu": "smallmind.nn.mlp:GeGLU",
}

POSITIONS = {
    "learned": "smallmind.nn.learned_position:LearnedPosition",
    "rope": "smallmind.nn.rope:RotaryPosition",
    "none": "smallmind.nn.position:Position",
}

# Which of these a model has follows from its architecture; the first is the usual one.
ATTENTIONS = {"causal": "smallmind.nn.attention:Attention"}
BLOCKS = {
    "prenorm": "smallmind.nn.block:Block",
    "sandwich": "smallmind.nn.block:SandwichBlock",
    "parallel": "smallmind.nn.block:ParallelBlock",
}
EMBEDDINGS = {
    "tokens": "smallmind.nn.embedding:Embedding",
    "scaled": "smallmind.nn.embedding:ScaledEmbedding",
}

LAYERS = {  # the tables by the names of settings
    "norm": NORMS,
    "mlp": MLPS,
    "position": POSITIONS,
    "attention": ATTENTIONS,
    "block": BLOCKS,
    "embedding": EMBEDDINGS,
}

OPTIMIZERS = {
    "adamw": "smallmind.optim.adamw:AdamW",
    "muon": "smallmind.optim.muon:Muon",
}

SCHEDULES = {
    "constant": "smallmind.optim.schedule:ConstantRate",
    "cosine": "smallmind.optim.schedule:Cosine",
    "one-cycle": "smallmind.optim.schedule:OneCycle",
    "linear": "smallmind.optim.schedule:LinearDecay",
    "step": "smallmind.optim.schedule:Step",
    "exponential": "smallmind.optim.schedule:Exponential",
    "wsd": "smallmind.optim.schedule:WarmupStableDecay",
    "plateau": "smallmind.optim.schedule:ReduceOnPlateau",
}

LOSSES = {
    "cross-entropy": "smallmind.losses.cross_entropy:CrossEntropy",
    "distillation": "smallmind.losses.distillation:Distillation",
    "preferences": "smallmind.losses.preferences:Preferences",
    "rewards": "smallmind.losses.rewards:Rewards",
}

LOSS_SETTINGS = {  # of losses with flags; also the names of their sections in files of settings
    "distillation": "smallmind.losses.teacher_settings:DistillationConfig",
    "preferences": "smallmind.losses.preference_settings:PreferencesConfig",
    "rewards": "smallmind.losses.reward_settings:RewardsConfig",
}

REWARDS = {  # of answers; any other name is that of a file of Python
    "exact": "smallmind.losses.judge:exact",
    "contains": "smallmind.losses.judge:contains",
    "json": "smallmind.losses.judge:json",
    "length": "smallmind.losses.judge:length",
}

TOKENIZERS = {
    "char": "smallmind.text.char_tokenizer:CharTokenizer",
    "byte": "smallmind.text.byte_tokenizer:ByteTokenizer",
    "bpe": "smallmind.text.bpe_tokenizer:BPETokenizer",
    "hf": "smallmind.text.hf_tokenizer:HFTokenizer",
}
LEARNED_TOKENIZERS = tuple(name for name in TOKENIZERS if name != "hf")  # that is read from files

READERS = {  # by the suffix of a file or by what it is; any other file is read like .txt
    ".txt": "smallmind.corpus.decoding:decoded",
    ".jsonl": "smallmind.corpus.json_records:read_json_lines",
    ".ndjson": "smallmind.corpus.json_records:read_json_lines",
    ".json": "smallmind.corpus.json_records:read_json",
    ".csv": "smallmind.corpus.tables:read_table",
    ".tsv": "smallmind.corpus.tables:read_table",
    ".html": "smallmind.corpus.html_text:texts_of_page",
    ".htm": "smallmind.corpus.html_text:texts_of_page",
    ".xhtml": "smallmind.corpus.html_text:texts_of_page",
    ".xht": "smallmind.corpus.html_text:texts_of_page",
    ".md": "smallmind.corpus.plain_text:markdown",
    ".markdown": "smallmind.corpus.plain_text:markdown",
    ".srt": "smallmind.corpus.plain_text:subtitles",
    ".vtt": "smallmind.corpus.plain_text:subtitles",
    ".ipynb": "smallmind.corpus.notebooks:read_notebook",
    ".epub": "smallmind.corpus.documents:epub",
    ".docx": "smallmind.corpus.documents:docx",
    ".odt": "smallmind.corpus.documents:odt",
    ".pdf": "smallmind.corpus.pdf:read_pdf",
    ".mhtml": "smallmind.corpus.html_text:read_web_archive",
    ".mht": "smallmind.corpus.html_text:read_web_archive",
    ".xml": "smallmind.corpus.xml_text:texts_of",
    ".gz": "smallmind.corpus.compressed:read_packed",
    ".bz2": "smallmind.corpus.compressed:read_packed",
    ".xz": "smallmind.corpus.compressed:read_packed",
    ".zst": "smallmind.corpus.compressed:read_packed",
    ".zip": "smallmind.corpus.compressed:read_zip",
    ".parquet": "smallmind.corpus.parquet:read_parquet",
    "a WhatsApp chat": "smallmind.corpus.chats:read_whatsapp",
}

# How conversations are written, for tokenizers that do not say so. The last of the `special` tokens
# ends an answer. A template may also `begin` with a text, add a `system` turn where there is none,
# strip what is said, and `lead` answers with a text that the model writes. Roles may have other
# `names`. One that `joins` has no system turn: that text and this are put before the first turn,
# and users and assistants take turns. `digests` are those of Jinja that does the same.
CHAT_TEMPLATES: dict[str, dict[str, Any]] = {
    "chatml": {
        "turns": "<|im_start|>{role}\n{text}<|im_end|>\n",
        "special": ("<|im_start|>", "<|im_end|>"),
    },
    "llama3": {
        "turns": "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "special": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "begin": "<|begin_of_text|>",
        "strips": True,
    },
    "gemma": {
        "turns": "<start_of_turn>{role}\n{text}<end_of_turn>\n",
        "special": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "begin": "<bos>",
        "strips": True,
        "names": {"assistant": "model"},
        "joins": "\n\n",
        # The template that Google publishes with Gemma 3.
        "digests": ("c4e177c7845f808e375c987b9264431b2c92ec45c0ade99a7e4c55a9e251f7a0",),
    },
    # As Hermes and Qwen write calls of tools. In Jinja, as tools are not data that is filled in.
    "hermes": {
        "jinja": (
            "{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
            "{% if tools or first %}{{ '<|im_start|>system\n' + first }}{% if tools %}"
            "{{ ('\n\n' if first else '') + 'These are the tools:\n' }}"
            "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
            "{{ 'A call is written as <tool_call>' }}"
            '{{ \'{"name": ..., "arguments": {...}}</tool_call>\' }}{% endif %}'
            "{{ '<|im_end|>\n' }}{% endif %}"
            "{% for message in messages %}"
            "{% if not (loop.first and message['role'] == 'system') %}"
            "{{ '<|im_start|>' + message['role'] + '\n' }}"
            "{% if message['role'] == 'tool' %}"
            "{{ '<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
            "{% else %}{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
            "{{ '\n' if message['content'] or not loop.first else '' }}"
            "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] }}"
            "{{ '\", \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}"
            "{{ '}\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
            "{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
        "special": ("<|im_start|>", "<|im_end|>"),
    },
    "qa": {
        "turns": {
            "system": "{text}\n",
            "user": "Q: {text}\n",
            "assistant": "A:{text}<|endoftext|>",
        },
        "special": ("<|endoftext|>",),
        "lead": " ",
    },
}

TASKS = {  # on which a model is evaluated
    "pairs": "smallmind.tasks.pairs:SentencePairs",
    "choices": "smallmind.tasks.choices:MultipleChoice",
    "exact": "smallmind.tasks.exact:Exact",
}

FORMATS = {  # of models of other programs
    "hf": "smallmind.exchange.huggingface:HuggingFace",
    "gguf": "smallmind.exchange.gguf:GGUF",
    "html": "smallmind.exchange.html:HTML",
}

STORED = {  # kinds of models on disk, in the order in which they are looked for at a path
    "external": "smallmind.exchange.format:find_external",
    "peft": "smallmind.exchange.peft:find_peft",
    "run": "smallmind.runs.loading:find_in_run",
    "file": "smallmind.runs.loading:find_file",
}

ADAPTER_FORMATS = {
    "peft": "smallmind.exchange.peft:Peft",
    "gguf-adapter": "smallmind.exchange.gguf:GGUFAdapter",
}


class NumberType(NamedTuple):
    """A way to store numbers as items: one number each, or a block of them with its scale.

    `kernels.codecs` reads it by `unpack_` and its name, and writes it by `pack_` if files are
    stored in it. Numbers are computed with if they have a `precision`.
    """

    name: str  # in files
    gguf: int  # its number there
    item: str  # a code of `struct`, or the names and codes of a block's fields
    block: int = 1  # numbers per item
    precision: str = ""  # its name in settings
    file_type: int = -1  # `general.file_type` of a GGUF file of it
    limit: float = math.inf  # the largest magnitude that can be written
    # To "store" in files, run in a "page", "compare" with others by default, "sum" over processes.
    uses: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of an item."""
        return struct.calcsize("<" + "".join(code for _, code in self.fields))

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The names of an item's fields and their codes, which are those of NumPy too."""
        pairs = (field.rpartition(":") for field in self.item.split())
        return [(name, code) for name, _, code in pairs]

    @property
    def bits(self) -> str:
        """The bits of a number, such as "8.5"."""
        return f"{8 * self.nbytes / self.block:g}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns True if the rows of a tensor are whole items."""
        return bool(shape) and shape[-1] % self.block == 0

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a tensor."""
        return math.prod(shape) // self.block * self.nbytes


_FLOAT16 = 65504.0  # the largest number, and the largest scale of a block
NUMBER_TYPES = {
    kind.name: kind
    for kind in (
        NumberType("f32", 0, "f", 1, "float32", 0, uses="store page compare sum"),
        NumberType("f16", 1, "H", 1, "float16", 1, _FLOAT16, "store page"),
        NumberType("bf16", 30, "h", 1, "bfloat16", 32, uses="store compare sum"),
        NumberType("q8_0", 8, "scale:e q:32b", 32, "q8_0", 7, 127 * _FLOAT16, "store page compare"),
        NumberType("q5_1", 7, "scale:e min:e high:4B q:16B", 32, "", 9, _FLOAT16, "store"),
        NumberType("q5_0", 6, "scale:e high:4B q:16B", 32, "", 8, 16 * _FLOAT16, "store"),
        NumberType("q4_1", 3, "scale:e min:e q:16B", 32, "", 3, _FLOAT16, "store"),
        NumberType("q4_0", 2, "scale:e q:16B", 32, "q4_0", 2, 8 * _FLOAT16, "store compare"),
        NumberType("q6_K", 14, "q:128B high:64B scales:16b scale:e", 256),  # read only from here on
        NumberType("q5_K", 13, "scale:e min:e scales:12B high:32B q:128B", 256),
        NumberType("q4_K", 12, "scale:e min:e scales:12B q:128B", 256),
        NumberType("q3_K", 11, "high:32B q:64B scales:12B scale:e", 256),
        NumberType("q2_K", 10, "scales:16B q:64B scale:e min:e", 256),
        NumberType("iq4_nl", 20, "scale:e index:16B", 32),
        NumberType("iq4_xs", 23, "scale:e high:2B scales:4B index:128B", 256),
    )
}
PRECISIONS = {kind.precision: kind for kind in NUMBER_TYPES.values() if kind.precision}
QUANTISED = {name: kind for name, kind in PRECISIONS.items() if kind.block > 1}


def types_for(use: str) -> list[NumberType]:
    """Returns the number types for a use, such as "store", in the order of the table."""
    return [kind for kind in NUMBER_TYPES.values() if use in kind.uses.split()]


def load(table: Mapping[str, str], name: str) -> Any:
    """One of the tables above, a name in it -> the class or function that the name refers to."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

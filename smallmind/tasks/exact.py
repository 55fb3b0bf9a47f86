"""Prompts with answers that the model must write word for word."""

from collections.abc import Sequence

from smallmind.nn.transformer import TransformerModel
from smallmind.tasks.likelihood import Scorer
from smallmind.tasks.task import Item, ItemRecord, Judged, Task, as_text
from smallmind.text.chat import USER, Turn
from smallmind.text.templates import format_of, stopping
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.answers import SPARE_TOKENS, answers, likeliest
from smallmind.writing.form import Form

PROMPTS = ("prompt", "question", "query", "instruction", "context", "input", "text")
ANSWERS = ("answer", "answers", "completion", "response", "output", "target", "label")


class Exact(Task):
    """Right if the likeliest continuation is an answer, but for spaces around it.

    It ends where the model ends it or, unless an answer has several lines, with the line, or some
    tokens after the longest answer. Models of conversations are asked in a turn.
    """

    noun = "prompt"
    measures = ("right",)

    @staticmethod
    def item(record: ItemRecord, group: str) -> Item:
        value = record.value(ANSWERS)
        texts = [as_text(one) for one in (value if isinstance(value, list) else [value])]
        accepted = [text.strip() for text in texts if text and text.strip()]
        if not accepted or len(accepted) < len(texts):
            raise record.wrong("has an answer that is empty or not text")
        return Item(group, (record.text(PROMPTS), *accepted))

    @staticmethod
    def judge(
        model: TransformerModel,
        tokenizer: Tokenizer,
        items: Sequence[Item],
        form: Form | None = None,
    ) -> Judged:
        tokenizer = stopping(tokenizer)
        scorer, template = Scorer(model, tokenizer), format_of(tokenizer)
        prompts = [item.texts[0] for item in items]
        if template:
            ids = [template.prompt(tokenizer, (Turn(USER, prompt),)) for prompt in prompts]
        else:
            ids = scorer.encode_each(prompts, begins=True)
        texts = []
        for item, prompt in zip(items, ids, strict=True):
            accepted = item.texts[1:]
            most = max(map(len, scorer.encode_each(accepted))) + SPARE_TOKENS
            stop = () if template or any("\n" in text for text in accepted) else ("\n",)
            begun = prompt if len(prompt) else scorer.alone(prompt).ids
            texts.append(likeliest(tokenizer, begun, most, scorer.context, stop, form))
        written = answers(model, tokenizer, texts)
        right = [text.strip() in item.texts[1:] for text, item in zip(written, items, strict=True)]
        cut = sum(len(one.ids) < len(prompt) for one, prompt in zip(texts, ids, strict=True))
        return Judged((right,), cut)

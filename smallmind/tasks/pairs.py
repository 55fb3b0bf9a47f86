"""Pairs of sentences, of which the good one should be likelier: Warstadt et al. 2020, BLiMP."""

from collections.abc import Sequence

from smallmind.nn.transformer import TransformerModel
from smallmind.tasks.likelihood import Scorer, distinct
from smallmind.tasks.task import Item, ItemRecord, Judged, Task
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.form import Form

GOOD = (
    *("good", "sentence_good", "good_sentence", "grammatical", "acceptable", "correct"),
    *("chosen", "positive"),
)
BAD = (
    *("bad", "sentence_bad", "bad_sentence", "ungrammatical", "unacceptable", "incorrect"),
    *("wrong", "rejected", "negative"),
)


class SentencePairs(Task):
    """Right if the whole of the first sentence is likelier than the whole of the second."""

    noun = "pair"
    measures = ("right",)

    @staticmethod
    def item(record: ItemRecord, group: str) -> Item:
        texts = record.text(GOOD), record.text(BAD)
        if not all(texts):
            raise record.wrong("has an empty sentence")
        return Item(group, texts)

    @staticmethod
    def judge(
        model: TransformerModel,
        tokenizer: Tokenizer,
        items: Sequence[Item],
        _form: Form | None = None,
    ) -> Judged:
        texts, numbers = distinct(text for item in items for text in item.texts)
        found = Scorer(model, tokenizer).texts(texts)
        pairs = [
            (found[good], found[bad]) for good, bad in zip(numbers[::2], numbers[1::2], strict=True)
        ]
        right = [good.value > bad.value for good, bad in pairs]
        return Judged((right,), sum(good.is_cut or bad.is_cut for good, bad in pairs))

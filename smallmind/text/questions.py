"""The built-in conversations: questions about short stories, whose answers follow from these.

The stories are about who had, found or took what, where and how many, in words of the grammar of
the built-in text (`text.stories`). Everything in a story occurs in it once, so each question has
one answer, and only the story tells it.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from smallmind.text.chat import ASSISTANT, USER, Conversation, Turn
from smallmind.text.grammar import Grammar
from smallmind.text.stories import RULES

COUNT = 40_000  # conversations
HELD_OUT = 1_000  # of them, about stories that none of the others is about
FACTS = 3  # in a story
QUESTIONS = 3  # in a conversation, at most
# The settings of a run on them, unless others are chosen: measured, see bench/LOG.md.
BUILT_IN_FIELDS: dict[str, Any] = {
    "tokenizer": "bpe",
    "bpe_vocab_size": 1000,
    "bigram_rows": 2**14,
    "value_residual": True,
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "block_size": 256,
    "batch_size": 8,
    "steps": 5000,
    "matrix_learning_rate": 0.01,
    "val_every": 500,
}


class Fact(NamedTuple):
    """A sentence of a story, and the questions that it answers."""

    sentence: str
    answers: tuple[tuple[str, str], ...]  # questions and answers


def built_in_conversations(count: int = COUNT, seed: int = 1) -> list[Conversation]:
    """Conversations about stories that are all different, the same for the same seed."""
    words, random, known = Words(), Random(seed), set()
    conversations: list[Conversation] = []
    while len(conversations) < count:
        story, questions = words.story(random)
        if story not in known:
            known.add(story)
            conversations.append(tuple(_turns(story, questions)))
    return conversations


def _turns(story: str, questions: list[tuple[str, str]]) -> Iterator[Turn]:
    said = f"{story}\n"
    for question, answer in questions:
        yield Turn(USER, said + question)
        yield Turn(ASSISTANT, answer)
        said = ""


class Words:
    """The words of the grammar, by its rules, and the stories that they make."""

    def __init__(self) -> None:
        grammar = Grammar(RULES)
        self._all = {
            rule: grammar.words(rule)
            for rule in ("boy", "girl", "place", "look", "colour", "thing", "creature", "two")
        }
        self._all["hero"] = self._all["boy"] + self._all["girl"]

    def story(self, random: Random) -> tuple[str, list[tuple[str, str]]]:
        """Draws a story -> it, and some questions about it with their answers."""
        facts_told = 1 + int(FACTS * random.random())
        heroes = _some(random, self._all["hero"], facts_told)
        places = _some(random, self._all["place"], facts_told)
        things = _some(random, self._all["thing"], facts_told)
        creatures = _some(random, self._all["creature"], facts_told)
        facts = [
            self._fact(random, *names)
            for names in zip(heroes, places, things, creatures, strict=True)
        ]
        asked = [answer for fact in facts for answer in fact.answers]
        questions = _some(random, asked, QUESTIONS)
        story = "One day " + " ".join(fact.sentence for fact in facts)
        return story, questions

    def _fact(self, random: Random, hero: str, place: str, thing: str, creature: str) -> Fact:
        """Draws what happens to a hero, with some of the other words."""
        kind = int(3 * random.random())
        look, colour, number = (_one(random, self._all[name]) for name in ("look", "colour", "two"))
        if kind == 0:
            sentence = f"{hero} had {number} {colour} {thing}s."
            answers = (
                (f"Who had the {thing}s?", f"{hero}."),
                (f"What did {hero} have?", f"{number.capitalize()} {colour} {thing}s."),
                (f"What colour were the {thing}s?", f"{colour.capitalize()}."),
                (f"How many {thing}s did {hero} have?", f"{number.capitalize()}."),
            )
        elif kind == 1:
            sentence = f"{hero} found a {look} {creature} at the {place}."
            answers = (
                (f"Who found the {creature}?", f"{hero}."),
                (f"What did {hero} find?", f"A {look} {creature}."),
                (f"Where did {hero} find the {creature}?", f"At the {place}."),
                (f"Who was at the {place}?", f"{hero}."),
            )
        else:
            sentence = f"{hero} took a {colour} {thing} to the {place}."
            answers = (
                (f"Who took the {thing}?", f"{hero}."),
                (f"What did {hero} take to the {place}?", f"A {colour} {thing}."),
                (f"What colour was the {thing}?", f"{colour.capitalize()}."),
                (f"Where did {hero} take the {thing}?", f"To the {place}."),
            )
        return Fact(sentence, answers)


def _one(random: Random, words: Any) -> Any:
    """Draws one of them; only with `random.random()`, whose stream is the same everywhere."""
    return words[int(len(words) * random.random())]


def _some(random: Random, words: Any, count: int) -> list[Any]:
    """Draws this many different ones, in any order."""
    left = list(words)
    return [left.pop(int(len(left) * random.random())) for _ in range(min(count, len(left)))]

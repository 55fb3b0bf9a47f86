"""The built-in conversations: questions about short stories, whose answers follow from these.

The stories are about who had or found what, how many, of which colour and where, in words of the
grammar of the built-in text (`text.stories`). No two things in a story have the same name, colour,
number or place, so each question has one answer, and only the story tells it. Answers are sentences
that begin with words of the question: then the last two tokens written mostly occur in the story
too, before what is asked for, and a small model learns soonest to continue from there.
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
QUESTIONS = 6  # in a conversation, at most
ABSENT = 0.1  # share of questions about what is not in the story
UNKNOWN = "I do not know."
# The settings of a run on them, unless others are chosen: measured, see bench/LOG.md.
BUILT_IN_FIELDS: dict[str, Any] = {
    "tokenizer": "bpe",
    "bpe_vocab_size": 641,  # a token for every word
    "bigram_rows": 2**14,
    "value_residual": True,
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "rope_theta": 1e6,
    "block_size": 256,
    "batch_size": 8,
    "steps": 4000,
    "matrix_learning_rate": 0.01,
    "val_every": 500,
    "early_stopping_patience": 0,
}


class Fact(NamedTuple):
    """A part of a story, and the questions that it answers."""

    told: str
    answers: list[tuple[str, str]]  # questions and answers


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
            for rule in (
                *("boy", "girl", "place", "look", "mood", "colour", "thing", "creature", "two"),
            )
        }
        self._all["hero"] = self._all["boy"] + self._all["girl"]

    def story(self, random: Random) -> tuple[str, list[tuple[str, str]]]:
        """Draws a story -> it, and some questions about it with their answers."""
        count = 1 + int(FACTS * random.random())
        rules = "hero", "place", "look", "mood", "colour", "thing", "creature", "two"
        drawn = zip(*(_some(random, self._all[rule], count + 1) for rule in rules), strict=True)
        *facts, absent = (_fact(random, *words) for words in drawn)
        questions = _some(random, [one for fact in facts for one in fact.answers], QUESTIONS)
        unknown = [(question, UNKNOWN) for question, _ in absent.answers]
        for i in range(len(questions)):
            if unknown and random.random() < ABSENT:
                questions[i] = unknown.pop(int(len(unknown) * random.random()))
        return " ".join(fact.told for fact in facts), questions


def _fact(
    random: Random,
    hero: str,
    place: str,
    look: str,
    mood: str,
    colour: str,
    thing: str,
    creature: str,
    number: str,
) -> Fact:
    """Draws what is told, with some of these words."""
    kind = int(4 * random.random())
    if kind == 0:
        had = f"{hero} had {number} {thing}s."
        were = f"The {thing}s were {colour}."
        answers = [
            (f"What did {hero} have?", had),
            (f"How many {thing}s did {hero} have?", had),
            (f"What colour were the {thing}s?", were),
            (f"Who had the {thing}s?", f"The {thing}s were {hero}'s."),
        ]
        return Fact(f"{had} {were}", answers)
    if kind == 1:
        found = f"{hero} found {number} {mood} {creature}s."
        were = f"The {creature}s were at the {place}."
        answers = [
            (f"What did {hero} find?", found),
            (f"How many {creature}s did {hero} find?", found),
            (f"Where were the {creature}s?", were),
        ]
        return Fact(f"{found} {were}", answers)
    if kind == 2:
        was = f"The {thing} was {hero}'s."
        answers = [(f"Whose was the {thing}?", was), (f"Who had the {thing}?", was)]
        return Fact(f"The {look} {thing} was {hero}'s.", answers)
    followed = f"The {creature} followed {hero}."
    answers = [(f"Who did the {creature} follow?", followed)]
    return Fact(f"The {mood} {creature} followed {hero}.", answers)


def _some(random: Random, words: Any, count: int) -> list[Any]:
    """Draws this many different ones, in any order.

    Only with `random.random()`, whose stream is the same everywhere.
    """
    left = list(words)
    return [left.pop(int(len(left) * random.random())) for _ in range(min(count, len(left)))]

"""The built-in conversations: questions about short stories, whose answers follow from these.

The stories are about who had or found what, how many, of which colour and where, in words of the
grammar of the built-in text (`text.stories`). No two things in a story have the same name, colour,
number or place, so each question has one answer, and only the story tells it. Answers are sentences
that begin with words of the question: then the last two tokens written mostly occur in the story
too, before what is asked for, and a small model learns soonest to continue from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from smallmind.text.chat import ASSISTANT, USER, Conversation, Turn
from smallmind.text.grammar import Grammar
from smallmind.text.stories import RULES

CONVERSATIONS = 40_000  # conversations
HELD_OUT_CONVERSATIONS = 1_000  # of them, about stories that none of the others is about
MAX_FACTS = 3  # in a story
MAX_QUESTIONS = 6  # in a conversation
ABSENT_SHARE = 0.1  # of questions about what is not in the story
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


# Each thing that a story may tell, and the questions that it answers, with their answers.
FACTS = (
    (
        "{hero} had {two} {thing}s. The {thing}s were {colour}.",
        ("What did {hero} have?", "{hero} had {two} {thing}s."),
        ("How many {thing}s did {hero} have?", "{hero} had {two} {thing}s."),
        ("What colour were the {thing}s?", "The {thing}s were {colour}."),
        ("Who had the {thing}s?", "The {thing}s were {hero}'s."),
    ),
    (
        "{hero} found {two} {mood} {creature}s. The {creature}s were at the {place}.",
        ("What did {hero} find?", "{hero} found {two} {mood} {creature}s."),
        ("How many {creature}s did {hero} find?", "{hero} found {two} {mood} {creature}s."),
        ("Where were the {creature}s?", "The {creature}s were at the {place}."),
    ),
    (
        "The {look} {thing} was {hero}'s.",
        ("Whose was the {thing}?", "The {thing} was {hero}'s."),
        ("Who had the {thing}?", "The {thing} was {hero}'s."),
    ),
    (
        "The {mood} {creature} followed {hero}.",
        ("Who did the {creature} follow?", "The {creature} followed {hero}."),
    ),
)


def built_in_conversations(count: int = CONVERSATIONS, seed: int = 1) -> list[Conversation]:
    """-> conversations about stories that are all different, the same for the same seed."""
    grammar, random, known = Grammar(RULES), Random(seed), set()
    words = {rule: grammar.words(rule) for rule in ("place", "look", "mood", "colour")}
    words = {"hero": grammar.words("boy") + grammar.words("girl"), **words}
    words |= {rule: grammar.words(rule) for rule in ("thing", "creature", "two")}
    conversations: list[Conversation] = []
    while len(conversations) < count:
        story, questions = _story(words, random)
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


def _story(words: Mapping[str, Sequence[str]], random: Random) -> tuple[str, list[tuple[str, str]]]:
    """Draws a story -> it, and some questions about it with their answers."""
    count = 1 + int(MAX_FACTS * random.random())
    drawn = zip(*(_some(random, rule, count + 1) for rule in words.values()), strict=True)
    *facts, absent = (_fact(random, dict(zip(words, each, strict=True))) for each in drawn)
    answers = [one for _, *answers in facts for one in answers]
    questions = _some(random, answers, MAX_QUESTIONS)
    unknown = [(question, UNKNOWN) for question, _ in absent[1:]]
    for i in range(len(questions)):
        if unknown and random.random() < ABSENT_SHARE:
            questions[i] = unknown.pop(int(len(unknown) * random.random()))
    return " ".join(told for told, *_ in facts), questions


def _fact(random: Random, words: dict[str, str]) -> list[Any]:
    """Draws what is told with some of these words -> it, then each question and its answer."""
    told, *answers = FACTS[int(len(FACTS) * random.random())]
    return [told.format_map(words), *(tuple(x.format_map(words) for x in one) for one in answers)]


def _some(random: Random, words: Any, count: int) -> list[Any]:
    """Draws some different ones by `random.random()`, whose stream is the same everywhere."""
    left = list(words)
    return [left.pop(int(len(left) * random.random())) for _ in range(min(count, len(left)))]

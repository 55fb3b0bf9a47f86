"""The built-in questions against a plain reader of the stories, which answers them itself."""

import re
from collections import Counter, defaultdict

import pytest

from smallmind.text.questions import ABSENT_SHARE, MAX_QUESTIONS, UNKNOWN, built_in_conversations

COUNT = 2000
# The parts of stories, and each question with the part that answers it, and the answer.
HAD = r"(?P<hero>\w+) had (?P<number>\w+) (?P<thing>\w+)s\. The (?P=thing)s were (?P<colour>\w+)\."
FOUND = (
    r"(?P<hero>\w+) found (?P<number>\w+) (?P<mood>\w+) (?P<creature>\w+)s\. "
    r"The (?P=creature)s were at the (?P<place>\w+)\."
)
WAS = r"The (?P<look>\w+) (?P<thing>\w+) was (?P<hero>\w+)'s\."
FOLLOWED = r"The (?P<mood>\w+) (?P<creature>\w+) followed (?P<hero>\w+)\."
HAD_THEM, FOUND_THEM = "{hero} had {number} {thing}s.", "{hero} found {number} {mood} {creature}s."
READ = (
    (r"Who had the (?P<thing>\w+)s\?", HAD, "The {thing}s were {hero}'s."),
    (r"What did (?P<hero>\w+) have\?", HAD, HAD_THEM),
    (r"How many (?P<thing>\w+)s did (?P<hero>\w+) have\?", HAD, HAD_THEM),
    (r"What colour were the (?P<thing>\w+)s\?", HAD, "The {thing}s were {colour}."),
    (r"What did (?P<hero>\w+) find\?", FOUND, FOUND_THEM),
    (r"How many (?P<creature>\w+)s did (?P<hero>\w+) find\?", FOUND, FOUND_THEM),
    (r"Where were the (?P<creature>\w+)s\?", FOUND, "The {creature}s were at the {place}."),
    (r"Whose was the (?P<thing>\w+)\?", WAS, "The {thing} was {hero}'s."),
    (r"Who had the (?P<thing>\w+)\?", WAS, "The {thing} was {hero}'s."),
    (r"Who did the (?P<creature>\w+) follow\?", FOLLOWED, "The {creature} followed {hero}."),
)


def read_answers(story, question):
    """Every answer to a question that a part of the story gives."""
    return [
        answer.format(**told.groupdict())
        for asked, fact, answer in READ
        if (known := re.fullmatch(asked, question))
        for told in re.finditer(fact, story)
        if known.groupdict().items() <= told.groupdict().items()
    ]


@pytest.fixture(scope="module")
def conversations():
    return built_in_conversations(COUNT)


def asked(conversations):
    """Yields the story, the question and the answer of every turn of the assistant."""
    for turns in conversations:
        story, newline, _ = turns[0].text.partition("\n")
        assert newline and all("\n" not in turn.text for turn in turns[1:])
        for user, assistant in zip(turns[::2], turns[1::2], strict=True):
            assert (user.role, assistant.role) == ("user", "assistant")
            yield story, user.text.rpartition("\n")[2], assistant.text


def form(question):
    """The names in a question, and the question without them."""
    for pattern, *_ in READ:
        if known := re.fullmatch(pattern, question):
            return known.groupdict(), pattern
    raise AssertionError(question)


def test_answers_follow_from_the_story(conversations):
    for story, question, answer in asked(conversations):
        assert (read_answers(story, question) or [UNKNOWN]) == [answer], (story, question)


def test_a_reader_of_another_story_is_wrong(conversations):
    every = list(asked(conversations))
    others = every[100:] + every[:100]
    right = sum(
        read_answers(other, question) == [answer]
        for (_, question, answer), (other, _, _) in zip(every, others, strict=True)
    )
    assert right < 0.02 * len(every)


def test_some_questions_have_no_answer_in_the_story(conversations):
    answers = [answer for *_, answer in asked(conversations)]
    assert answers.count(UNKNOWN) / len(answers) == pytest.approx(ABSENT_SHARE, abs=0.02)


def without(names, answer):
    """An answer without the names that its question has."""
    for name, word in names.items():
        answer = answer.replace(word, f"{{{name}}}")
    return answer


def test_guessing_the_likeliest_answer_is_seldom_right(conversations):
    seen, right = defaultdict(Counter), 0
    for _, question, answer in asked(built_in_conversations(2 * COUNT, 2)):
        names, asks = form(question)
        seen[asks][without(names, answer)] += 1
    every = list(asked(conversations))
    for _, question, answer in every:
        names, asks = form(question)
        right += seen[asks].most_common(1)[0][0] == without(names, answer)
    assert right / len(every) < 0.25


def test_stories_are_all_different_and_follow_from_the_seed(conversations):
    stories = [turns[0].text.partition("\n")[0] for turns in conversations]
    assert len(set(stories)) == COUNT
    assert built_in_conversations(50) == conversations[:50]
    others = built_in_conversations(50, 2)
    assert not {turns[0].text for turns in others} & {turns[0].text for turns in conversations}


def test_a_conversation_has_one_story_and_several_questions(conversations):
    lengths = Counter(len(turns) // 2 for turns in conversations)
    assert set(lengths) == set(range(1, MAX_QUESTIONS + 1))
    for turns in conversations:
        questions = [turn.text.rpartition("\n")[2] for turn in turns[::2]]
        assert len(set(questions)) == len(questions)

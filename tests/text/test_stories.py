"""The grammar's exact entropy against enumeration and sampling, and the built-in stories."""

import math
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from smallmind.text.grammar import Grammar
from smallmind.text.stories import ENTROPY_PER_CHARACTER, RULES, built_in_text
from tests.text.measured import Measured

DATA = Path(__file__).parents[2] / "data"
STORIES = Measured(RULES)

# Each grammar is followed by its texts and their probabilities, written out with plain loops.

PETS = """
story: <hero><pet>{hero} had a {pet}. It <sound {pet}>, and {he} ran.\\n
hero: {hero=Tom}{he=he} | {hero=Ann}{he=she}
pet: {pet=<kind>}
kind: 3 * cat | dog
sound cat: purred | hissed
sound dog: barked
"""


def pets():
    for hero, he in ("Tom", "he"), ("Ann", "she"):
        for pet, share, sounds in ("cat", 3 / 4, ["purred", "hissed"]), ("dog", 1 / 4, ["barked"]):
            for sound in sounds:
                text = f"{hero} had a {pet}. It {sound}, and {he} ran.\n"
                yield text, share / 2 / len(sounds)


TREASURES = """
story: <start>{owner=<owner>} <end {what}>
start: {place=sea}<find {place}>{what}: | 2 * {place=hill}<find {place}>{what} ({place}):
find sea: {what=shell} | {what=pearl}
find hill: {what=pearl} | 4 * {what=stone}
owner: mum | 3 * me
end shell: <plain>
end stone: <plain>
end pearl: {what}, {owner}!
plain: {owner} {owner}. | {Owner}, {place}.
"""


def treasures():
    for place, what, share in (
        ("sea", "shell", 1 / 6),
        ("sea", "pearl", 1 / 6),
        ("hill", "pearl", 2 / 15),
        ("hill", "stone", 8 / 15),
    ):
        start = f"{what}:" if place == "sea" else f"{what} ({place}):"
        for owner, chance in ("mum", share / 4), ("me", share * 3 / 4):
            if what == "pearl":
                yield f"{start} {what}, {owner}!", chance
            else:
                yield f"{start} {owner} {owner}.", chance / 2
                yield f"{start} {owner.capitalize()}, {place}.", chance / 2


TOOLS = """
story: {size=<size>}{job=<job>}{size} {job}: {tool=<size> <tool {job}>}{tool}, <again {size}>
again big: {tool} and {job}
again small: <size>
size: big | 2 * small
job: dig | cut
tool dig: spade | fork | 2 * hoe
tool cut: saw
"""


def tools():
    sizes = [("big", 1 / 3), ("small", 2 / 3)]
    for size, p in sizes:
        for job, tools_of_job in (
            ("dig", [("spade", 1 / 4), ("fork", 1 / 4), ("hoe", 1 / 2)]),
            ("cut", [("saw", 1.0)]),
        ):
            for tool_size, q in sizes:
                for tool, r in tools_of_job:
                    start = f"{size} {job}: {tool_size} {tool}, "
                    if size == "big":
                        yield f"{start}{tool_size} {tool} and {job}", p / 2 * q * r
                    else:
                        for last, s in sizes:
                            yield start + last, p / 2 * q * r * s


SMALL = pytest.mark.parametrize(
    ("rules", "texts"), [(PETS, pets), (TREASURES, treasures), (TOOLS, tools)]
)


@SMALL
def test_entropy_and_length_match_an_enumeration_of_all_texts(rules, texts):
    probabilities = Counter()
    for text, probability in texts():
        probabilities[text] += probability
    assert math.isclose(sum(probabilities.values()), 1.0)
    entropy = -sum(p * math.log(p) for p in probabilities.values())
    length = sum(p * len(text) for text, p in probabilities.items())
    grammar = Measured(rules)
    assert grammar.entropy() == pytest.approx(entropy, rel=1e-12)
    assert grammar.expected_length() == pytest.approx(length, rel=1e-12)


@SMALL
def test_each_text_has_one_derivation_and_the_expected_probability(rules, texts):
    grammar = Measured(rules)
    for text, probability in texts():
        assert grammar.derivations(text) == 1
        assert grammar.log_probability(text) == pytest.approx(math.log(probability), rel=1e-12)
        assert grammar.derivations(text + "x") == grammar.derivations(text[:-1]) == 0
    assert grammar.log_probability("no such text") == -math.inf


@SMALL
def test_sample_frequencies_match_their_probabilities(rules, texts):
    grammar, random, draws = Grammar(rules), Random(5), 20_000
    seen = Counter(grammar.sample(random) for _ in range(draws))
    expected = dict(texts())
    assert seen.keys() <= expected.keys()
    for text, p in expected.items():
        assert abs(seen[text] - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


def test_two_derivations_of_one_text_are_counted():
    grammar = Measured("story: <size>bird | black<size>\nsize: black | bird")
    assert grammar.derivations("blackbird") == 2
    assert grammar.derivations("birdbird") == 1
    assert grammar.log_probability("blackbird") == pytest.approx(math.log(1 / 2))
    # Why the grammar must be unambiguous: else the choices have more entropy than the text.
    assert grammar.entropy() == pytest.approx(math.log(4))


def test_a_choice_that_is_never_written_counts_as_two_derivations():
    assert Measured("story: {mood=<mood>}The end.\nmood: sad | glad").derivations("The end.") == 2


@pytest.mark.parametrize(
    "rules",
    [
        "story: <hero>",
        "story: <end {hero}>",
        "story: {hero} left.",
        "story: <hero>{hero}\nhero: {hero=Tom} | Ann",
        "story: {hero=<hero>}{hero}\nhero: {he=he}Tom",
        "story: once <story>",
        "story: <a>\na: <b>\nb: x | <a>",
        "story: a | | b",
        "story: {hero",
        "story: a > b",
        "story: a\nstory: b",
        "a story",
    ],
)
def test_invalid_rules_are_refused(rules):
    with pytest.raises(ValueError):
        Measured(rules)


@pytest.fixture(scope="module")
def text():
    return built_in_text()


def split(text):
    assert text.endswith("\n\n")
    return [story + "\n\n" for story in text.removesuffix("\n\n").split("\n\n")]


def test_every_story_has_exactly_one_derivation(text):
    start = split(text[: text.index("\n\n", 100_000) + 2])
    assert len(start) > 100
    assert all(STORIES.derivations(story) == 1 for story in start)


def test_mean_surprisal_and_length_of_stories_agree_with_theory(text):
    start = split(text)[:400]
    for measured, expected in (
        ([-STORIES.log_probability(story) for story in start], STORIES.entropy()),
        ([len(story) for story in start], STORIES.expected_length()),
    ):
        mean = sum(measured) / len(measured)
        variance = sum((value - mean) ** 2 for value in measured) / (len(measured) - 1)
        assert variance > 0
        assert abs(mean - expected) < 4 * math.sqrt(variance / len(measured))


def test_entropy_per_character_is_that_of_a_story_over_its_length():
    expected = STORIES.entropy() / STORIES.expected_length()
    assert pytest.approx(expected, rel=1e-15) == ENTROPY_PER_CHARACTER


def test_the_seed_determines_the_text():
    assert built_in_text(20_000, seed=3) == built_in_text(20_000, seed=3)
    assert built_in_text(20_000, seed=3) != built_in_text(20_000, seed=4)


@pytest.mark.parametrize("characters", [50_000, 1_000_000])
def test_the_size_is_accurate_to_two_percent(characters):
    assert characters <= len(built_in_text(characters)) <= 1.02 * characters


def test_a_longer_text_begins_with_the_shorter(text):
    assert text.startswith(built_in_text(50_000))


def test_the_data_file_holds_the_built_in_text(text):
    with open(DATA / "stories.txt", encoding="ascii", newline="") as file:
        assert file.read() == text


def test_the_readme_states_the_entropy():
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    assert f"{ENTROPY_PER_CHARACTER:.4f} nats" in readme


def test_stories_use_few_characters_and_end_in_an_empty_line(text):
    assert re.fullmatch(r"[a-zA-Z.,!?'\" \n]+", text)
    assert "\n\n\n" not in text
    assert "  " not in text and " \n" not in text and "\n " not in text
    assert all(len(story.splitlines()) == 5 for story in split(text))


def test_no_two_stories_are_alike(text):
    assert len(set(split(text))) == len(split(text))


BOYS = {"Finn", "Gus", "Jack", "Leo", "Max", "Paul"}
GIRLS = {"Dora", "Ella", "Ivy", "Kate", "Nora", "Zoe"}


def test_pronouns_fit_the_hero(text):
    heroes = Counter()
    for story in split(text):
        words = set(re.findall("[A-Za-z]+", story))
        (hero,) = words & (BOYS | GIRLS)
        heroes[hero] += 1
        ours, theirs = {"boy", "he", "his"}, {"girl", "she", "her"}
        if hero in GIRLS:
            ours, theirs = theirs, ours
        words = {word.lower() for word in words}
        assert ours <= words
        assert not words & theirs
    assert heroes.keys() == BOYS | GIRLS


@pytest.mark.parametrize(
    ("problem", "solution"),
    [
        (r"was up on a \w+ (?:tree|roof)!", r"a \w+ (?:ladder|rope)\. .* climbed up it"),
        (r"was deep in a \w+ (?:well|pond)!", r"a \w+ (?:bucket|net)\. .* let it down"),
        (r"was across a \w+ (?:lake|bog)!", r"a \w+ (?:raft|plank)\. .* crossed on it"),
        (r"was shut in a \w+ (?:shed|chest)!", r"a \w+ (?:key|hammer)\. .* broke in with it"),
        (r"was held by a \w+ (?:fox|bear)!", r"a \w+ (?:pie|fish)\. .* gave it away"),
    ],
)
def test_the_solution_fits_the_problem(text, problem, solution):
    matching = [story for story in split(text) if re.search(problem, story)]
    assert matching == [story for story in split(text) if re.search(solution, story)]
    assert matching


@pytest.mark.parametrize(
    ("want", "deed"),
    [("kite", "flew it"), ("cake", "ate it"), ("poem", "read it"), ("sled", "rode it")],
)
def test_the_ending_fits_the_wish(text, want, deed):
    matching = [story for story in split(text) if f" got the {want}." in story]
    assert matching == [story for story in split(text) if deed in story]
    assert all(len(re.findall(rf"\b{want}\b", story)) == 3 for story in matching)


@pytest.mark.parametrize("trait", ["brave", "kind", "clever", "patient"])
def test_the_moral_fits_the_trait(text, trait):
    for story in split(text):
        if f" {trait} " in story.splitlines()[0]:
            assert re.search(rf"(Be {trait},|A {trait} (boy|girl)) [^.]*\.\n\n$", story)

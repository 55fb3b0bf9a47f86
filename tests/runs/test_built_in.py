"""The settings of runs on the built-in stories, which nobody has chosen."""

import pytest

from smallmind.runs.creating import prepare
from smallmind.settings.rules import Choices, Facts, resolve
from smallmind.text.stories import BUILT_IN_FIELDS
from tests.programs import CATS

STORIES = Facts(built_in=BUILT_IN_FIELDS, is_chat=False)


def chosen(recipe="modern", facts=STORIES, **given):
    """The fields of BUILT_IN_FIELDS that a run gets."""
    fields = resolve(Choices(given, recipe), facts).chosen
    return {name: fields[name] for name in BUILT_IN_FIELDS if name in fields}


def test_the_size_is_that_for_the_stories():
    assert chosen() == BUILT_IN_FIELDS
    assert Choices({}).settings(STORIES).model.n_embd == BUILT_IN_FIELDS["n_embd"]
    assert chosen(steps=5, batch_size=3) == BUILT_IN_FIELDS | {"steps": 5, "batch_size": 3}
    assert "steps" not in chosen(epochs=2)


@pytest.mark.parametrize(
    "given", [{"n_layer": 1}, {"n_embd": 64}, {"n_head": 2}, {"n_kv_head": 2}, {"minutes": 3.0}]
)
def test_another_size_leaves_the_recipe_alone(given):
    assert chosen(**given) == chosen(**given, facts=Facts())


def test_another_text_leaves_the_recipe_alone():
    prepared = prepare(Choices({}), CATS)
    assert prepared.facts.built_in is None
    assert prepared.settings.model.n_embd == Choices({}).settings().model.n_embd


def test_other_recipes_and_saved_settings_stay():
    for recipe in ("gpt2", None):
        assert chosen(recipe) == chosen(recipe, facts=Facts())

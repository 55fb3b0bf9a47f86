"""The settings of runs on the built-in stories, which nobody has chosen."""

import pytest

from smallmind.runs.chat_recipe import for_built_in
from smallmind.settings.sources import Choices
from smallmind.text.stories import BUILT_IN_FIELDS


def chosen(recipe="modern", **given):
    """The fields of BUILT_IN_FIELDS that a run gets."""
    fields = for_built_in(Choices(given, recipe)).fields
    return {name: fields[name] for name in BUILT_IN_FIELDS if name in fields}


def test_the_size_is_that_for_the_stories():
    assert chosen() == BUILT_IN_FIELDS
    for_built_in(Choices({})).settings()
    assert chosen(steps=5, batch_size=3) == BUILT_IN_FIELDS | {"steps": 5, "batch_size": 3}
    assert "steps" not in chosen(epochs=2)


@pytest.mark.parametrize(
    "given",
    [
        {"n_layer": 1},
        {"n_embd": 64},
        {"n_head": 2},
        {"n_kv_head": 2},
        {"minutes": 3.0},
        {"text": "book.txt"},
        {"init_from": "runs/first"},
    ],
)
def test_another_size_or_text_leaves_the_recipe_alone(given):
    choices = Choices(given)
    assert for_built_in(choices) is choices


def test_other_recipes_and_saved_settings_stay():
    for recipe in ("gpt2", None):
        choices = Choices({}, recipe)
        assert for_built_in(choices) is choices

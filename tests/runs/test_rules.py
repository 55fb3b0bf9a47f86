"""Settings are resolved by rules, in order, and say what has set each of them."""

import sys

import pytest

from smallmind import Run
from smallmind.cli import main
from smallmind.settings import rules
from smallmind.settings.config import ModelConfig
from smallmind.settings.presets import RECIPES
from smallmind.settings.rules import RULES, Choices, Facts, Rule, resolve
from smallmind.settings.settings import CHOSEN, Settings
from smallmind.settings.sources import FIELDS
from tests.programs import CATS, refuses

FEW = {"steps": 2, "n_layer": 1, "n_embd": 16, "n_head": 1, "block_size": 16, "batch_size": 2}


@pytest.fixture
def text(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(CATS)
    monkeypatch.chdir(tmp_path)
    return "book.txt"


def test_each_rule_has_a_name_a_sentence_and_a_fact():
    facts = set(Facts.__dataclass_fields__)
    for rule in RULES:
        assert rule.needs in facts | {""}
        assert rule.origin.why.endswith(".") and len(rule.origin.why) <= 100
    assert len({rule.origin.by for rule in RULES}) == len(RULES)


def test_a_rule_waits_for_its_fact():
    assert "tokenizer" not in resolve(Choices({})).chosen
    found = resolve(Choices({}), Facts(characters=10**6)).chosen
    assert found["tokenizer"] == "bpe"
    assert resolve(Choices({"tokenizer": "byte"}), Facts(characters=10**6)).chosen["tokenizer"] == (
        "byte"
    )


def test_a_new_rule_is_a_function_and_a_line(monkeypatch):
    def quiet(choices, facts):
        """A text of few characters is logged at each step."""
        return {"log_every": 1} if facts.characters < 100 else {}

    monkeypatch.setattr(rules, "RULES", (*RULES, Rule(quiet, "characters")))
    settings = Choices({}).settings(Facts(characters=99))
    assert settings.training.log_every == 1
    assert settings.explain()["log_every"] == (
        "rule quiet",
        "A text of few characters is logged at each step.",
    )
    assert Choices({}).settings(Facts(characters=100)).training.log_every == 10


def test_resolving_changes_no_choices():
    given = {"n_layer": 2}
    choices = Choices(given)
    assert resolve(choices).chosen["n_layer"] == 2 and len(resolve(choices).chosen) > 10
    assert choices.chosen == given == {"n_layer": 2}


def test_settings_say_what_has_set_them(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[training]\nmax_grad_norm = 0.5\nkeep = 3")
    choices = Choices.of("nano", "test", file, {"n_head": 1}, "llama")
    settings = choices.settings(Facts(vocab_size=7, separator=None))
    by = {name: origin.by for name, origin in settings.explain().items()}
    expected = {
        "n_layer": "--size nano",
        "norm": "--arch llama",
        "steps": "--preset test",
        "max_grad_norm": str(file),
        "n_head": "chosen",
        "optimizer": "recipe modern",
        "beta2": "rule rates",
        "vocab_size": "rule vocabulary",
    }
    assert {name: by[name] for name in expected} == expected
    assert settings.explain()["optimizer"].why == RECIPES["modern"].about
    assert "keep" not in by  # it has its default, whoever said so
    changed = {
        name for name, (_, field) in FIELDS.items() if settings.fields[name] != field.default
    }
    assert by.keys() == changed


def test_what_a_program_replaces_is_chosen():
    settings = Choices({}).settings()
    assert (
        settings.explain()["n_layer"].by == "recipe modern"
        if "n_layer" in settings.explain()
        else True
    )
    replaced = settings.replace(optimizer="adamw", steps=7)
    assert replaced.explain()["steps"] == CHOSEN and "optimizer" not in replaced.explain()
    assert settings.explain()["steps"].by == "recipe modern"
    assert settings == Settings.from_fields(settings.fields)  # origins do not count
    assert "origins" not in settings.to_dict()


def test_a_starting_model_decides_for_its_weights():
    config = ModelConfig(vocab_size=9, n_layer=2, n_embd=32, n_head=2, position="rope")
    facts = Facts(start=config, start_tokenizer="char", limits_context=False)
    choices = Choices({"init_from": "first"})
    settings = choices.settings(facts)
    assert settings.model == config
    assert settings.explain()["n_layer"].by == "rule starting model"
    wrong = Choices({"init_from": "first", "n_layer": 3})
    refuses("n_layer=3 contradicts first, whose weights have n_layer=2", wrong.settings, facts)


def test_a_window_of_the_default_length_is_a_choice_too():
    shape = {"vocab_size": 9, "block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 2}
    known = {"start_tokenizer": "char", "limits_context": False, "is_chat": True}
    known |= {"conversations": 9, "window": lambda: ModelConfig.block_size}
    facts = Facts(start=ModelConfig(position="rope", **shape), **known)
    choices = Choices({"init_from": "first"}, is_default=True)
    assert choices.settings(facts).model.block_size == ModelConfig.block_size


def test_a_run_says_what_has_set_its_settings(text, tmp_path):
    run = Run.create(text=text, out=tmp_path / "run", **FEW)
    origins = run.settings.explain()
    assert origins["steps"] == CHOSEN and origins["text"] == CHOSEN
    assert origins["vocab_size"].by == "rule vocabulary"
    assert origins["threads"].by == "this machine"
    opened = Run.open(tmp_path / "run").settings
    assert opened == run.settings and set(opened.explain().values()) == {CHOSEN}


def test_train_explains_and_writes_nothing(text, tmp_path, capsys):
    (tmp_path / "my.toml").write_text("[model]\nn_embd = 64\n")
    words = [text, "--explain", "--preset", "test", "--config", "my.toml", "--n-layer", "2"]
    assert main(["train", *words]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in printed.splitlines() if line}
    assert lines["n_layer"] == ["2", "--n-layer"]
    assert lines["n_embd"] == ["64", "my.toml"]
    assert lines["steps"] == ["100", "--preset test"]
    assert lines["qk_norm"] == ["True", "recipe modern"]
    assert lines["learning_rate"] == ["0.01", "rule rates"]
    assert lines["text"] == ["book.txt", "TEXT"]
    assert "rule rates: Sets rates by optimizer" in printed and "seed" not in lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "my.toml"]
    assert main(["train", "--explain", "--resume", "auto"]) == 2


def calls_with_choices(function):
    """Counts the calls with a person's choices among their arguments until a function returns."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        if event == "call":
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            count += any(type(frame.f_locals.get(name)) is Choices for name in names)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def train_until_built(monkeypatch):
    """-> a function that runs `smallmind train WORDS` until settings are settled."""

    class Settled(Exception):
        pass

    def build(*_):
        raise Settled

    monkeypatch.setattr("smallmind.cli.train._build", build)

    def run(*words):
        with pytest.raises(Settled):
            main(["train", *words])

    return run


def test_choices_are_settled_in_few_calls(text, train_until_built):
    size = ["--n-layer", "1", "--n-embd", "16", "--n-head", "1", "--block-size", "16"]
    assert 20 <= calls_with_choices(lambda: train_until_built(text, *size, "--out", "run")) <= 40


def test_a_new_run_builds_few_configs_of_its_model(text, train_until_built, monkeypatch):
    made = []
    check = ModelConfig.__post_init__

    def counted(config):
        made.append(config)
        check(config)

    monkeypatch.setattr(ModelConfig, "__post_init__", counted)
    train_until_built(text, "--n-layer", "1", "--steps", "2", "--out", "run")
    # Before the text is read, so that an error comes at once, and when all is known.
    assert len(made) == 2

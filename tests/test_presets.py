"""Sizes, presets and files: which overrides which, and how invalid files are refused."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from smallmind import InputError, ModelConfig, Run, RunConfig, TrainingConfig
from smallmind.forecast.memory import estimate
from smallmind.nn.network import declare_parameters
from smallmind.runs import creating
from smallmind.settings.config import SCHEDULES
from smallmind.settings.presets import ARCHITECTURES, DEFAULT_RECIPE, PRESETS, RECIPES, SIZES
from smallmind.settings.rules import Choices, Facts, rates
from smallmind.settings.settings import SECTIONS, Settings
from smallmind.settings.sources import FIELDS, read_settings
from smallmind.text.samplers import count_steps
from smallmind.text.stories import built_in_text
from tests.programs import CATS, edited, refusal, refuses

PAGE = Path(__file__).parents[1] / "smallmind/guide/sizes.md"


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file -> its path."""

    def write(text, encoding="utf-8"):
        path = tmp_path / "run.toml"
        path.write_text(text, encoding=encoding)
        return path

    return write


def resolve(*names, **sources):
    """The fields that these choices and the recipe set."""
    return Choices.of(*names, **sources).fields


def configure(settings):
    """The four configs with these settings, which also checks them."""
    return {
        section: config(**{k: v for k, v in settings.items() if FIELDS[k][0] == section})
        for section, config in SECTIONS.items()
    }


def rows_of_page(first_heading):
    """-> the rows of the guide's tables whose first column has this heading, as dictionaries."""
    rows = {}
    for block in PAGE.read_text(encoding="utf-8").split("\n\n"):
        if block.startswith(f"| {first_heading} |"):
            heads, _, *lines = (line.strip("|").split("|") for line in block.splitlines())
            for cells in lines:
                names, values = (
                    (text.strip() for text in heads),
                    (text.strip(" `") for text in cells),
                )
                row = dict(zip(names, values, strict=True))
                rows.setdefault(row[first_heading], {}).update(row)
    return [*rows.values()]


def test_no_two_configs_share_a_field_name():
    assert len(FIELDS) == sum(len(dataclasses.fields(config)) for config in SECTIONS.values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_sets_every_part_and_flags_win(arch):
    parts = {field.name for field in dataclasses.fields(ModelConfig)} - {
        "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "dropout", "tie_weights",
        "document_token", "bigram_vocab", "part_settings",
    }  # fmt: skip
    # Their defaults suit every kind.
    chosen = {"head_size", "mlp_width", "n_kv_head", "norm_epsilon", "rope_theta"}
    assert ARCHITECTURES[arch].keys() == parts - chosen
    flags = {"mlp": "swiglu", "qk_norm": True}
    resolved = resolve("nano", arch=arch, flags=flags, recipe="gpt2")
    assert resolved == SIZES["nano"] | ARCHITECTURES[arch] | flags


def test_architectures_are_those_that_are_published():
    def name(arch, **flags):
        return ModelConfig(**{**ARCHITECTURES[arch], **flags}).architecture

    assert name("gpt2") == "GPT-2"
    assert name("llama") == "Llama"
    assert name("llama", qk_norm=True) == "Qwen3"
    assert name("modern") is None
    assert ModelConfig(**ARCHITECTURES["gpt2"]) == ModelConfig()


@pytest.mark.parametrize("named", [*SIZES.values(), *PRESETS.values(), *ARCHITECTURES.values()])
def test_sizes_and_presets_are_valid(named):
    configure(named)


def test_tiny_is_the_default():
    assert configure(SIZES["tiny"]) == configure({})
    for recipe in RECIPES:
        assert configure(resolve("tiny", recipe=recipe)) == configure(resolve(recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arch", [None, *ARCHITECTURES])
@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_names_go_together(recipe, size, arch, preset):
    fields = resolve(size, preset, arch=arch, recipe=recipe)
    configure(fields)
    for named in (SIZES[size], ARCHITECTURES.get(arch, {}), PRESETS.get(preset, {})):
        rest = PRESETS.get(preset, {}) if named is not PRESETS.get(preset) else {}
        assert fields.items() >= {k: v for k, v in named.items() if k not in rest}.items()


def test_the_recipe_of_gpt2_is_that_of_earlier_versions():
    assert configure(resolve(recipe="gpt2")) == configure({})
    assert resolve("medium", recipe="gpt2") == SIZES["medium"] | {"learning_rate": 6e-4}
    assert resolve("small", recipe="gpt2") == SIZES["small"]


def test_the_default_recipe_can_be_exported_and_gives_way_to_every_choice(toml):
    configs = configure(resolve())
    assert configs["model"].architecture == "Qwen3"
    assert configs["training"].optimizer == "muon" and configs["training"].precision == "auto"
    assert configure(resolve(recipe=DEFAULT_RECIPE)) == configs
    file = toml("[training]\noptimizer = 'adamw'\n[model]\nnorm = 'layernorm'\n")
    fields = resolve(arch="gpt2", file=file, flags={"learning_rate": 1e-4, "min_lr": 1e-5})
    assert fields.items() >= (ARCHITECTURES["gpt2"] | {"optimizer": "adamw"}).items()
    assert fields["learning_rate"] == 1e-4 and fields["min_lr"] == 1e-5
    for schedule in SCHEDULES:  # each has an end that it can reach
        training = configure(resolve(flags={"schedule": schedule}))["training"]
        assert (training.resolved_min_lr == 0) == (
            schedule in ("cosine", "linear", "one-cycle", "wsd")
        )
    assert configure(resolve(flags={"use_mixed_precision": True}))["training"].precision is None


def test_the_rates_of_a_recipe_follow_from_what_is_chosen():
    rates = {name: resolve(flags=flags) for name, flags in {
        "muon": {}, "adamw": {"optimizer": "adamw"}, "large": {"batch_size": 48},
        "accumulated": {"grad_accum_steps": 4},
    }.items()}  # fmt: skip
    assert rates["adamw"]["learning_rate"] < rates["muon"]["learning_rate"]
    # An equal number of tokens halves the weight of a gradient in the second moment.
    assert rates["large"]["beta2"] == rates["accumulated"]["beta2"]
    assert rates["large"]["beta2"] == pytest.approx(rates["muon"]["beta2"] ** 4)


def test_a_run_that_starts_from_a_model_keeps_its_parts():
    fields = resolve(flags={"init_from": "runs/book"})
    assert not fields.keys() & {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields["optimizer"] == "muon"
    assert resolve(flags={"init_from": "runs/book", "dropout": 0.1})["dropout"] == 0.1
    # Fine-tuning at the rates from scratch would undo what was learned.
    for name, scratch in (("learning_rate", 0.01), ("matrix_learning_rate", 0.02)):
        assert fields[name] == pytest.approx(0.3 * scratch)
        assert resolve(flags={"init_from": "runs/book", name: scratch})[name] == scratch


def test_wide_models_are_tuned_with_adamw_at_lower_rates():
    def tuned(n_embd, **flags):
        return resolve(flags={"init_from": "runs/book", "n_embd": n_embd, **flags})

    assert tuned(128)["optimizer"] == "muon" and tuned(576)["optimizer"] == "adamw"
    # These are near the best ones that were measured, with SmolLM2-135M.
    assert tuned(576)["learning_rate"] == pytest.approx(1.26e-4, rel=0.01)
    assert tuned(576, lora_rank=16)["learning_rate"] == pytest.approx(1.78e-3, rel=0.01)
    for flags in ({}, {"lora_rank": 16}, {"optimizer": "muon"}, {"optimizer": "adamw"}):
        rates = [tuned(width, **flags)["learning_rate"] for width in (64, 128, 256, 576, 2048)]
        assert rates[0] == rates[1] and rates == sorted(rates, reverse=True)
    assert tuned(576, optimizer="muon", learning_rate=0.5)["learning_rate"] == 0.5


def test_pairs_are_learned_at_rates_that_fall_with_the_width_and_the_steps():
    """The product of rate and steps is near the best that was measured: see bench/LOG.md."""

    def tuned(n_embd, pairs, **flags):
        chosen = {"init_from": "a model", "n_embd": n_embd, "loss": "dpo", "optimizer": "adamw"}
        choices = Choices({**chosen, "epochs": 3, "batch_size": 8, **flags})
        return rates(choices, Facts(conversations=pairs))["learning_rate"]

    assert tuned(64, 200) == pytest.approx(9.6e-5) == tuned(128, 10)
    assert tuned(64, 1200) == pytest.approx(2.73e-5, rel=0.01)
    assert tuned(576, 48) == pytest.approx(2.2e-6, rel=0.02)
    assert tuned(576, 48, lora_rank=8) == pytest.approx(3.2e-5, rel=0.02)
    found = [tuned(width, pairs) for width, pairs in ((64, 10), (64, 9999), (256, 9999))]
    assert found == sorted(found, reverse=True) and len({*found}) == 3
    assert tuned(64, 0, epochs=0, steps=1280) == pytest.approx(9.6e-6)
    assert tuned(64, 1200, loss="orpo") > 10 * tuned(64, 1200)


def test_adapters_of_blocks_that_end_in_norms_learn_at_lower_rates():
    """With Gemma 3 the rate of others gave a loss of 0.936, this one 0.855."""
    choices = Choices({"lora_rank": 16, "n_embd": 640, "init_from": "a model"})
    usual = ModelConfig(vocab_size=9, n_embd=640, n_head=4)
    sandwich = usual.having_parts(block="sandwich")
    low, high = (rates(choices, Facts(start=x))["learning_rate"] for x in (sandwich, usual))
    assert low == pytest.approx(1e-3) and high == pytest.approx(1.6e-3)


def test_a_saved_run_keeps_its_settings_whatever_the_default_recipe(tmp_path):
    path = saved_run(tmp_path)
    assert configure(resolve(file=path))["training"] == TrainingConfig(steps=7)
    refuses("--recipe modern has no effect", resolve, file=path, recipe="modern")
    refuses("recipe='gpt3' must be one of gpt2, modern", resolve, recipe="gpt3")


@pytest.mark.parametrize("value", ["12", None, 10**400, 1.5, [1]])
@pytest.mark.parametrize("name", ["batch_size", "block_size", "grad_accum_steps"])
def test_what_a_recipe_computes_with_is_checked_before(name, value):
    for recipe in RECIPES:
        refuses(f"^{name}=", Choices({name: value}, recipe).settings)


@pytest.mark.parametrize(("kind", "known"), [("size", SIZES), ("preset", PRESETS)])
def test_the_guide_lists_sizes_and_presets(kind, known):
    rows = rows_of_page(f"`--{kind}`")
    assert [row[f"`--{kind}`"] for row in rows] == list(known)
    for row, (name, settings) in zip(rows, known.items(), strict=True):
        fields = {heading.strip("`") for heading in row} & FIELDS.keys()
        assert settings.keys() <= fields
        configs = configure(resolve(**{kind: name}))
        for field in fields:
            config = configs[FIELDS[field][0]]
            value = config.resolved_min_lr if field == "min_lr" else getattr(config, field)
            assert float(row[f"`{field}`"]) == value, name


def test_the_guide_lists_parameters_and_memory_of_sizes():
    vocab_size = len(set(built_in_text()))
    for row, settings in zip(rows_of_page("`--size`"), SIZES.values(), strict=True):
        flags = {**settings, "vocab_size": vocab_size, "precision": "float32"}
        configs = configure(resolve(flags=flags))
        model, training = configs["model"], configs["training"]
        assert row["parameters"] == f"{declare_parameters(model).count:,}"
        memory = estimate(model, training, configs["run"].batch_size, threads=2).total
        # The guide's number was measured.
        assert float(row["memory"].removesuffix(" MiB")) == pytest.approx(memory / 2**20, rel=0.1)


def test_the_config_file_in_the_guide_is_valid(toml):
    block = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    settings = read_settings(toml(block[1]))
    configure(settings)
    assert {FIELDS[key][0] for key in settings} == set(SECTIONS)


def test_each_source_overrides_those_before_it(toml):
    # batch_size is set by all four; every other key loses one source.
    file = toml("[run]\nbatch_size = 7\nseed = 7\n[training]\nval_every = 7\n")
    flags = {"batch_size": 9, "seed": 9}
    sources = {"size": "small", "preset": "test", "file": file, "flags": flags}
    expected = {
        (): (12, 1337, 250, 4, 1500),
        ("size",): (12, 1337, 250, 6, 1500),
        ("size", "preset"): (2, 1337, 50, 6, 100),
        ("size", "preset", "file"): (7, 7, 7, 6, 100),
        ("size", "preset", "file", "flags"): (9, 9, 7, 6, 100),
        ("size", "flags"): (9, 9, 250, 6, 1500),
        ("preset", "flags"): (9, 9, 50, 4, 100),
    }
    for names, values in expected.items():
        configs = configure(resolve(**{name: sources[name] for name in names}))
        run, training = configs["run"], configs["training"]
        got = run.batch_size, run.seed, training.val_every, configs["model"].n_layer, training.steps
        assert got == values, names


def test_a_length_overrides_all_lengths_set_before_it(toml):
    file = toml("[training]\nepochs = 3\n[run]\nseed = 2\n")
    assert resolve(preset="test", file=file)["epochs"] == 3
    assert "steps" not in resolve(preset="test", file=file)
    fields = resolve(preset="test", file=file, flags={"steps": 5})
    assert fields.items() >= {"steps": 5, "seed": 2, "warmup_steps": 10}.items()
    assert "epochs" not in resolve(file=file, flags={"minutes": 5.0})
    # A saved run by epochs has their number of steps too.
    saved = toml("[training]\nepochs = 3\nsteps = 77\n")
    assert resolve(file=saved).items() >= {("epochs", 3), ("steps", 77)}
    with pytest.raises(InputError, match="--steps and --minutes both set the length"):
        resolve(flags={"steps": 5, "minutes": 1.0})


def test_a_warmup_overrides_all_warmups_set_before_it(toml):
    file = toml("[training]\nwarmup_steps = 3\n")
    fields = resolve(preset="test", file=file, flags={"warmup_share": 0.05})
    assert fields["warmup_share"] == 0.05 and "warmup_steps" not in fields
    assert resolve(file=toml("[training]\nwarmup_epochs = 2\n"))["warmup_epochs"] == 2
    refuses("--warmup-steps and --warmup-share both set the warmup; give only one", resolve,
            flags={"warmup_steps": 5, "warmup_share": 0.1})  # fmt: skip
    refuses("warmup_share=0.1 and warmup_epochs=1.0 both set the warmup", TrainingConfig,
            warmup_share=0.1, warmup_epochs=1.0)  # fmt: skip


@pytest.mark.parametrize("fields", [{"warmup_share": 0.05}, {"warmup_epochs": 0.5}])
def test_a_run_keeps_its_warmup_as_a_number(tmp_path, fields):
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 1, "block_size": 16, "batch_size": 2}
    text = "a cat sat on a mat. " * 40  # 720 tokens to train on: 44 windows, 22 steps an epoch
    (tmp_path / "cats.txt").write_text(text, encoding="utf-8")
    run = Run.create(text=tmp_path / "cats.txt", steps=100, out=tmp_path / "run", **shape, **fields)
    expected = {"warmup_share": 5, "warmup_epochs": 11}[next(iter(fields))]
    saved = json.loads((run.path / "config.json").read_text(encoding="utf-8"))["training"]
    assert (
        saved["warmup_steps"]
        == expected
        == count_steps(TrainingConfig(steps=100, **fields), run.data).warmup_steps
    )
    assert saved["warmup_share"] is saved["warmup_epochs"] is None


def test_a_file_may_hold_values_of_every_type(toml):
    file = toml(
        "[model]\nbias = false\nn_layer = 3\n"
        "[training]\nlearning_rate = 1\nmin_lr = 1e-5\nschedule = 'wsd'\nsteps = 1_000\n"
        "[run]\ntext = 'a.txt'\nthreads = 1\n",
        "utf-8-sig",
    )
    settings = read_settings(file)
    training = {"learning_rate": 1.0, "min_lr": 1e-5, "schedule": "wsd", "steps": 1000}
    assert settings == {"bias": False, "n_layer": 3, **training, "text": "a.txt", "threads": 1}
    assert read_settings(toml("")) == read_settings(toml("[model]\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nn_layers = 4", "unknown key n_layers in [model]; did you mean n_layer in [mod"),
        ("[model]\nn-layer = 4", "did you mean n_layer in [model]?"),
        (
            "[training]\nbatch_size = 4",
            "batch_size in [training]; did you mean batch_size in [run]",
        ),
        ("[trainng]\nsteps = 4", "unknown section [trainng]; did you mean [training]?"),
        ("steps = 4", "steps=4 is outside any section; did you mean steps in [training]?"),
        ("model = 4", "model=4 must be a section, [model]"),
        ("[[model]]\nn_layer = 4", "must be a section, [model]"),
        ("[model]\nvocab_size = 4", "vocab_size=4 follows from the text; leave it out"),
        ("[model]\nn_layer = '4'", "n_layer='4' must be a number"),
        ("[model]\nn_layer = 4.5", "n_layer=4.5 must be a whole number"),
        ("[model]\nn_layer = 0", "n_layer=0 must be at least 1"),
        ("[model]\nn_layer = true", "n_layer=True must be a number"),
        ("[model]\nbias = 1", "bias=1 must be true or false"),
        ("[training]\nlearning_rate = nan", "learning_rate=nan must be finite"),
        ("[training]\nschedule = ['wsd']", "schedule=['wsd'] must be one of constant, "),
        ("[run]\nout = 3", "out=3 must be text in quotes"),
        ("[run]\nout = 2026-01-01", "out=datetime.date(2026, 1, 1) must be text in quotes"),
    ],
)
def test_errors_in_a_file_name_the_file(toml, text, message):
    file = toml(text)
    said = refusal(read_settings, file)
    assert said.startswith(f"{file}: ") and message in said


def test_an_invalid_config_file_is_refused(tmp_path, toml):
    no_run, json_file = "is not the config.json of a run: ", tmp_path / "saved.json"
    for file, content, message in [
        (toml("steps 4"), None, "run.toml is not TOML in UTF-8: Expected '='"),
        (tmp_path / "none.toml", None, "none.toml: No such file"),
        (tmp_path, None, f"cannot read {tmp_path}: "),
        (json_file, '{"model": {}, "training": 3}', f"{no_run}its 'training' is not a JSON object"),
        (json_file, '{"model": {"\\n": 1}}', no_run),
        (json_file, "[1]", f"{no_run}it has no section 'model'"),
        (json_file, '{"format": 2, "model": {}}', "a newer smallmind wrote it, in format 2"),
        (json_file, '{"model": {', f"{no_run}Expecting"),
    ]:
        if content:
            file.write_text(content, encoding="utf-8")
        assert message in refusal(read_settings, file)
    (tmp_path / "latin.toml").write_bytes(b"[run]\ntext = '\xe9'")
    said = refusal(read_settings, tmp_path / "latin.toml")
    message, _, command = said.partition(": it is probably ISO-8859-1: ")
    assert message.endswith("latin.toml is not TOML in UTF-8")
    assert command.startswith("iconv -f ISO-8859-1") and command.endswith("latin-utf8.toml")
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)
        assert read_settings(tmp_path / "latin-utf8.toml") == {"text": "é"}


def saved_run(tmp_path, **changes):
    """A config.json like that of a run -> its path."""
    configs = configure({"n_layer": 3, "steps": 7, "seed": 5, **changes})
    sections = {section: dataclasses.asdict(config) for section, config in configs.items()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sections, "text_sha256": "", "numpy": "2"}), encoding="utf-8")
    return path


def test_a_saved_run_can_be_trained_again_elsewhere(tmp_path):
    changes = {"text": "/a.txt", "vocab_size": 9, "out": "runs/x", "threads": 64}
    settings = read_settings(saved_run(tmp_path, **changes))
    assert not settings.keys() & {"vocab_size", "out", "threads"}
    configs = configure(settings)
    assert configs["model"] == ModelConfig(n_layer=3)
    assert configs["training"] == TrainingConfig(steps=7)
    assert configs["run"] == RunConfig(seed=5, text="/a.txt")
    assert resolve(file=tmp_path / "config.json", flags={"steps": 8})["steps"] == 8


def test_conversations_are_looked_for_again_in_another_text(tmp_path):
    """But questions about the built-in stories are asked for, as no text has them."""
    for chat, text in ((False, "/a.txt"), (True, "/a.jsonl"), (False, None)):
        assert "chat" not in read_settings(saved_run(tmp_path, chat=chat, text=text))
    assert read_settings(saved_run(tmp_path, chat=True))["chat"] is True


def test_a_run_of_an_earlier_version_can_be_trained_again(tmp_path):
    path = saved_run(tmp_path)
    with edited(path) as config:
        config["training"]["windows_at_once"] = 5
        del config["distillation"], config["training"]["micro_batch_size"]
    assert configure(read_settings(path))["training"] == TrainingConfig(steps=7, micro_batch_size=5)


@pytest.mark.parametrize("source", [{"size": "small"}, {"preset": "test"}])
def test_a_name_that_would_change_nothing_is_refused(tmp_path, source):
    (kind, name), *_ = source.items()
    refuses(f"--{kind} {name} has no effect", resolve, file=saved_run(tmp_path), **source)


def test_a_program_names_sizes_as_the_command_line_does(tmp_path):
    names = {"size": "nano", "arch": "llama"}
    by_flags = Choices.of(flags={"steps": 3, "n_head": 4}, **names).settings()
    found = creating.choices_of(None, None, {"steps": 3, "n_head": 4, **names}).settings()
    assert found == by_flags and found.model.n_embd == SIZES["nano"]["n_embd"]
    run = Run.create(text=CATS, out=tmp_path / "run", block_size=16, steps=1, **names)
    assert (run.settings.model.n_layer, run.settings.model.norm) == (2, "rmsnorm")
    refuses("size='huge' must be one of nano, tiny", Run.create, text=CATS, size="huge")
    refuses("size='nano' has no effect", Run.create, settings=Settings(), size="nano")

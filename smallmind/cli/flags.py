"""Command-line flags made from the fields of the configs, and settings made from the flags."""

import argparse
import dataclasses
import os
import re
import sys
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from smallmind import parts
from smallmind.checks import InputError
from smallmind.settings.config import NEUTRAL, GenerationConfig, Precision
from smallmind.settings.presets import (
    ARCHITECTURES,
    DEFAULT_RECIPE,
    PRESETS,
    RECIPES,
    SIZES,
    Fields,
)
from smallmind.settings.rules import REWARD_BETA, Choices
from smallmind.settings.settings import RENAMED, SECTIONS
from smallmind.settings.sources import (
    FIELDS,
    FOLLOWING,
    MODEL_FIELDS,
    WITHOUT_GAIN,
    flag_of,
    without_effect,
)

if typing.TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.writing.form import Form

# In the section of their config.
WITHOUT_FLAG = (*FOLLOWING, *WITHOUT_GAIN, "text", "enable_diagnostics", "part_settings")
ALIASES = {"learning_rate": "--lr"}  # how most programs name it
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}  # what a backslash makes of the letter after it
MORE_HELP = {"stop": "; \\n is a line break, \\t a tab, \\\\ a backslash"}
DEFAULTS = Choices({}).fields | {"reward_beta": REWARD_BETA}
METAVARS = {int: "N", float: "X", str: "DIR"}
MODEL_OR_RUN = "a run, a model or checkpoint file, a GGUF file, or a Hugging Face model folder"


def title_of(config: type) -> str:
    """Returns the title of the flags of a class of settings: the first sentence about it."""
    return (config.__doc__ or "").splitlines()[0].split(" (")[0].split(". ")[0].rstrip(".")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `add_setting_flags`, and those of profiling."""
    add_setting_flags(parser)
    group = parser.add_argument_group("Profiling")
    _add_flag(group, FIELDS["enable_diagnostics"][1])
    group.add_argument(
        "--profile-wide",
        action="store_true",
        help="the same with average, minimum, maximum and GB/s",
    )
    group.add_argument(
        "--profile-json", metavar="FILE", help="the same, and write a trace for ui.perfetto.dev"
    )
    group.add_argument(
        "--profile-speedscope",
        metavar="FILE",
        help="the same, and write a profile for speedscope.app, as in run.speedscope.json",
    )


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds TEXT, sources of settings, and a flag for every field of the configs."""
    parser.usage = f"{parser.prog} [-h] [TEXT ...] [FLAG [VALUE]] ..."
    add_text(parser, "*", ", or the output of `smallmind prepare`; default: built-in stories")
    add_source_flags(parser)
    for config in SECTIONS.values():
        group = parser.add_argument_group(title_of(config))
        for field in dataclasses.fields(config):
            if field.name not in WITHOUT_FLAG:
                _add_flag(group, field)


def add_text(parser: argparse.ArgumentParser, count: str, more: str = "") -> None:
    """Adds TEXT, several times; `more` continues its help."""
    parser.add_argument(
        "text",
        nargs=count,
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="text files (including .jsonl, .csv, .epub, .docx, .zip ...), folders or "
        f"patterns{more}",
    )


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --recipe, --size, --arch, --preset and --config."""
    group = parser.add_argument_group(
        "Settings by name or from a file",
        "--config overrides --preset, which overrides --size and --arch, which override --recipe; "
        "any other flag overrides all of these.",
    )
    shapes = ", ".join(f"{name} {s['n_layer']}x{s['n_embd']}" for name, s in SIZES.items())
    lengths = ", ".join(f"{name} with {s['steps']} steps" for name, s in PRESETS.items())
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    group.add_argument(
        "--recipe",
        choices=RECIPES,
        help=f"how a model learns ({DEFAULT_RECIPE}). {recipes}. Defaults below are those of "
        f"{DEFAULT_RECIPE}; from Python, TransformerModel defaults to GPT-2's parts",
    )
    group.add_argument("--size", choices=SIZES, help=f"layers x channels of the model: {shapes}")
    group.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        help="architecture of the model: GPT-2's, Llama's (with --qk-norm: Qwen3's), or the one "
        "that learns fastest in small models",
    )
    group.add_argument("--preset", choices=PRESETS, help=f"kind of run: {lengths}")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help=f"sections {', '.join(f'[{name}]' for name in SECTIONS)} with the names of the flags, "
        "as in n_layer = 4; or the config.json of a run, to train again with its settings",
    )


def add_run(
    parser: argparse.ArgumentParser, what: str = "directory of the run, or its name in runs/"
) -> None:
    """Adds RUN, for `run_of`."""
    parser.add_argument(
        "run_name",
        nargs="?",
        type=Path,
        metavar="RUN",
        help=f"{what}; default: the newest run in runs/",
    )
    # Earlier versions named the run by this flag.
    parser.add_argument("--run", dest="run_flag", type=Path, help=argparse.SUPPRESS)


def _precisions(text: str) -> list[str]:
    """Precisions with commas between them. ArgumentTypeError for one that is not known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in tuple(Precision)]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} must be one of {', '.join(Precision)}, or several separated by commas"
        )
    return names


def add_template_args(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds --template-args; `more` says what else it does."""
    parser.add_argument(
        "--template-args",
        metavar="JSON",
        help=f"variables for the chat template, as in '{{\"enable_thinking\": false}}'{more}",
    )


def add_form(parser: argparse.ArgumentParser) -> None:
    """Adds --format, --schema and --regex, for `form_of`."""
    group = parser.add_argument_group("Structured output")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--format", choices=("json",), help="write a JSON object")
    one.add_argument(
        "--schema", type=Path, metavar="FILE.json", help="write JSON that follows this JSON schema"
    )
    one.add_argument(
        "--regex",
        metavar="R",
        help="write text that matches this regular expression as a whole, as in '[0-9]{4}'",
    )


def asked_form(options: argparse.Namespace) -> str | None:
    """Returns the name of the flag that asks for a form."""
    return next((x for x in ("format", "schema", "regex") if vars(options)[x] is not None), None)


def form_of(options: argparse.Namespace, tokenizer: "Tokenizer") -> "Form | None":
    """Returns the form that the flags ask for. InputError, naming the flag, if there is none."""
    if not (name := asked_form(options)):
        return None
    from smallmind.writing.form import Form

    value = vars(options)[name]
    try:
        if name == "schema":
            value = value.read_text("utf-8")
        return Form(tokenizer, "json" if name == "format" else name, value)
    except OSError as error:
        raise InputError(f"cannot read --schema {options.schema}: {error.strerror}") from None
    except (InputError, UnicodeError) as error:
        at = f" {options.schema}" if name == "schema" else ""
        raise InputError(f"--{name}{at}: {error}") from None


def add_precision(parser: argparse.ArgumentParser, several: str = "") -> None:
    """Adds --precision of an untrained model: a list, if `several` says what is done with it."""
    first, *others = parts.QUANTISED.values()
    bits = [f"about {first.bits} per weight in {first.name}"]
    bits += [f"{kind.bits} in {kind.name}" for kind in others]
    text = (
        f"number type of the weights; fewer bits are faster for large models: {', '.join(bits)}; "
        "default: the one the run was trained in; float32 for a file or an imported model"
    )
    if several:
        more: dict[str, Any] = {
            "type": _precisions,
            "metavar": "TYPE[,TYPE...]",
            "help": f"{text}; {several}",
        }
    else:
        kinds = [str(kind) for kind in Precision if kind != Precision.AUTO]
        more = {"choices": kinds, "help": text}
    parser.add_argument("--precision", **more)


def add_runs(
    parser: argparse.ArgumentParser,
    what: str = "directories of runs, or their names in runs/; default: the newest run there",
) -> None:
    """Adds RUN, several times, for `runs_of`."""
    parser.add_argument("run_names", nargs="*", type=Path, metavar="RUN", help=what)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds --checkpoint and --adapter, as `smallmind.exchange.stored.find` takes them."""
    parser.add_argument(
        "--checkpoint",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="newest|best|STEP",
        help="checkpoint of the run to use; default: the final model, or the newest checkpoint of "
        "an unfinished run",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="RUN|DIR",
        help="adapter to apply to that model: a run with --lora-rank, or a PEFT folder; "
        "--checkpoint then refers to this run",
    )


def run_of(options: argparse.Namespace) -> Path:
    """Returns the run that a command names, or the newest; sets options.precision to its own."""
    if options.run_flag and options.run_name:
        raise InputError(f"give one run, not both {options.run_name} and {options.run_flag}")
    named = options.run_name or options.run_flag
    path = find_run(Path(named)) if named else _newest()
    if getattr(options, "precision", "") is None:
        from smallmind.runs.loading import precision_of

        options.precision = precision_of(getattr(options, "adapter", None) or path)
    return path


def runs_of(options: argparse.Namespace) -> list[Path]:
    """Returns the runs that a command names, those of a sweep that have begun, or the newest."""
    found: dict[Path, None] = {}
    for path in map(find_run, options.run_names):
        found |= dict.fromkeys(_runs_in(path) or [path])
    return list(found) or [_newest()]


def find_run(named: Path) -> Path:
    """Returns the path, or the run in runs/ of this name, as `smallmind runs` lists it."""
    from smallmind.runs.files import RUNS

    inside = Path(RUNS) / named
    is_name = len(named.parts) == 1 and not named.exists()
    return inside if is_name and inside.is_dir() else named


def _runs_in(folder: Path) -> list[Path]:
    """Returns the runs of a sweep that have begun; none for any other directory."""
    from smallmind.runs.files import CONFIG
    from smallmind.runs.sweep import SweepPlan, is_sweep

    if not is_sweep(folder):
        return []
    runs = [folder / run.name for run in SweepPlan.read(folder).runs]
    begun = [path for path in runs if (path / CONFIG).exists()]
    if not begun:
        raise InputError(f"no run of the sweep in {folder} has started yet")
    return begun


def _newest() -> Path:
    from smallmind.cli.console import Console
    from smallmind.runs.files import newest_run

    newest = newest_run()
    Console(sys.stderr).line(f"The newest run is {newest}")
    return newest


def add_config_flags(parser: Any, config: type, names: Collection[str] | None = None) -> None:
    """Adds a flag for every field of a config, or for those with these names."""
    for field in dataclasses.fields(config):
        if names is None or field.name in names:
            _add_flag(parser, field)


def choices_of(options: argparse.Namespace) -> Choices:
    """Returns what the flags, --config, --preset, --arch, --size and --recipe choose together."""
    flags = {name: value for name, value in vars(options).items() if name in FIELDS}
    names = options.size, options.preset, options.config
    return Choices.of(*names, flags | neutral_of(options), options.arch, options.recipe)


def choices_of_run(options: argparse.Namespace) -> Choices:
    """Returns the choices for a new run.

    InputError for a flag, or a key of a TOML file, that has no effect with the others. Files may be
    made for several kinds of runs: if flags or names choose another kind, keys without effect are
    ignored, as they are in the config.json of a run, which has all of them.
    """
    choices = choices_of(options)
    flags = {name for name in vars(options) if name in FIELDS}
    has_names = any((options.recipe, options.arch, options.preset))
    values = {name: field.default for name, (_, field) in FIELDS.items()} | choices.fields
    for name in sorted(flags | choices.in_file):
        other = next(iter(FIELDS[name][1].metadata["needs"]), None)
        is_open = other in flags or (has_names and other not in choices.in_file)
        if (name not in flags and is_open) or (values["init_from"] and other in MODEL_FIELDS):
            continue
        if reason := without_effect(name, values):
            where = "" if name in flags else f"{options.config}: "
            raise InputError(f"{where}{reason}")
    return choices


def neutral_of(options: argparse.Namespace) -> Fields:
    """Returns the flags that do not change what a run learns, which a resumed run may change."""
    flags = {name: value for name, value in vars(options).items() if name in NEUTRAL}
    if any(vars(options).get(f"profile_{name}") for name in ("wide", "json", "speedscope")):
        flags["enable_diagnostics"] = True
    return flags


def unescaped(text: str) -> str:
    r"""Text with the escapes \n, \t and \\ -> the characters that they stand for."""
    return re.sub(r"\\([nt\\])", lambda match: ESCAPES[match[1]], text)


def generation_of(options: argparse.Namespace) -> GenerationConfig:
    """Returns the settings of a sample."""
    names = {field.name for field in dataclasses.fields(GenerationConfig)}
    return GenerationConfig(**{name: x for name, x in vars(options).items() if name in names})


def check_writable(flag: str, file: Path) -> None:
    """Raises InputError if the file that a flag names cannot be written."""
    if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
        raise InputError(f"{flag}: cannot write {file}; name a file in a writable directory")


def _add_flag(group: Any, field: "dataclasses.Field[Any]") -> None:
    flag = flag_of(field.name)
    # Only flags that are given become attributes: a default must not override what a file sets.
    settings: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": _help(field),
    }
    if field.type in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        return
    kind: Any = field.type
    if isinstance(kind, types.UnionType):
        several = any(typing.get_origin(part) is tuple for part in typing.get_args(kind))
        if several:
            settings["action"] = "append"
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if field.metadata["choices"]:
        # As plain strings: argparse shows the others as <Precision.FLOAT32: 'float32'>.
        settings["choices"] = [str(choice) for choice in field.metadata["choices"]]
    else:
        settings["metavar"] = field.metadata["metavar"] or METAVARS[kind]
    if field.name == "stop":
        kind = unescaped
    aliases = [ALIASES[field.name]] if field.name in ALIASES else []
    group.add_argument(flag, *aliases, type=kind, **settings)
    for former, name in RENAMED.items():
        if name == field.name:
            settings["help"] = argparse.SUPPRESS
            group.add_argument(flag_of(former), type=kind, **settings)


def _help(field: "dataclasses.Field[Any]") -> str:
    """-> the help text with the default: that of the default recipe and size, if they set it."""
    help, default = str(field.metadata["help"]) + MORE_HELP.get(field.name, ""), field.default
    if field.name in DEFAULTS:
        help, default = help.split("; default:")[0], DEFAULTS[field.name]
    if default is None:
        return help
    if isinstance(default, bool):
        default = "yes" if default else "no"
    return f"{help} ({default:g})" if isinstance(default, float) else f"{help} ({default})"

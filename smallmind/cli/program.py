"""The `smallmind` program: its commands, and what their errors look like."""

import argparse
import importlib
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

# Command -> its module in this package and a line of help. A module is imported only when its
# command is given; it has `add_arguments(parser)` and `run(options) -> exit status`.
COMMANDS = {
    "train": ("train", "train a model on a text"),
    "prepare": ("prepare", "encode texts once, into files of tokens to train on"),
    "check": ("check", "check that a run would learn, before starting it"),
    "plan": ("plan", "show the best model size for a given time, and the loss to expect"),
    "sweep": ("sweep", "train with several values of settings, and compare the results"),
    "estimate": ("estimate", "show how much memory a run would take, and what fits"),
    "chat": ("chat", "talk to a model that was trained on conversations"),
    "serve": ("serve", "serve models to a page in the browser, and over OpenAI's API"),
    "generate": ("generate", "generate text with a trained model"),
    "evaluate": ("evaluate", "measure how well a trained model predicts a text"),
    "schedule": ("schedule", "show the learning rate over a run"),
    "verify": ("verify", "check a run's checkpoints, and retrain from each to the next"),
    "runs": ("runs", "list the runs in a directory"),
    "compare": ("compare", "compare the settings and the losses of runs"),
    "plot": ("plot", "plot the losses of runs, in the terminal or to a file"),
    "export": ("export", "write a trained model for transformers or llama.cpp"),
    "import": ("import_", "make a run from a Hugging Face or llama.cpp model"),
    "watch": ("watch", "watch a run from another window: curve, speed, samples"),
    "report": ("report", "write a page about a run, with curves and samples, for a browser"),
    "export-metrics": ("export_metrics", "write the metrics of a run as a CSV table"),
    "bench": ("bench", "measure kernels, training steps and starts on this machine"),
    "lessons": ("lessons", "list the lessons, and copy one to work on"),
    "guide": ("guide", "read the guide: first model, settings, speed, memory, troubleshooting"),
}

# Flag or field -> advice if it is given twice, where the advice is not just to give it once.
ADVICE_IF_TWICE = {
    "text_field": "a run reads one field: give one, or merge them in a copy of the file"
}
NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}  # types of flags


def run(arguments: Sequence[str] | None) -> int:
    """Runs a command -> exit status, as described for smallmind.cli.main."""
    from smallmind.cli.errors import EXPECTED, message_of, status_of

    try:
        parser = make_parser(sys.argv[1:] if arguments is None else arguments)
        options = parser.parse_args(arguments)
        if "run" not in options:
            parser.error(f"give a command: {', '.join(COMMANDS)}")
        from smallmind.cli.signals import ending_on_signals

        with warnings.catch_warnings(), ending_on_signals():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            return int(options.run(options))
    except EXPECTED as error:
        from smallmind.cli.console import error_line
        from smallmind.guide import with_page

        line_break = "\n" if isinstance(error, KeyboardInterrupt) else ""  # after ^C
        error_line(f"{line_break}smallmind: {with_page(message_of(error))}")
        return status_of(error)


def _show_warning(message: Warning | str, *_: Any) -> None:
    """Shows a warning in one line: Python would show the line of the source too."""
    from smallmind.cli.console import error_line
    from smallmind.guide import with_page

    error_line(f"smallmind: warning: {with_page(str(message))}")


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser for these arguments: only the command that they name has its flags."""
    parser = _Parser(
        prog="smallmind",
        description="Train a small transformer on the CPU and generate text with it.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND")
    chosen = next((word for word in arguments if word in COMMANDS), None)
    for name, (module_name, help_line) in COMMANDS.items():
        command = commands.add_parser(name, help=help_line)
        if name == chosen:
            module = importlib.import_module(f"smallmind.cli.{module_name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


class _Parser(argparse.ArgumentParser):
    """Names the nearest known word for an unknown one; prints errors like those of the commands.

    Flags whose names are in `several` take values with commas between them; a backslash before a
    comma makes it part of a value.
    """

    several: Collection[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what a command does not know, with the usage of that command."""
        self._given: dict[str, list[str]] = {}  # what sets a value -> the value as typed
        options, unknown = super().parse_known_args(args, namespace)
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag:
            from smallmind.checks import nearest

            name = flag.partition("=")[0]
            known = [word for action in self._actions for word in action.option_strings]
            similar = nearest(name, known, cutoff=0.7)  # the dashes alone are rather similar
            advice = f"did you mean {similar}?" if similar else f"see {self.prog} --help"
            self.error(f"unknown flag {name}; {advice}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}; quote names that contain spaces")
        return options, unknown

    def _get_values(self, action: argparse.Action, texts: Any) -> Any:
        """Refuses a second value for a flag that keeps one."""
        if action.option_strings and not isinstance(action, argparse._AppendAction):
            if action.dest in self._given:
                raise argparse.ArgumentError(None, self._twice(action, texts))
            self._given[action.dest] = list(texts)
        return super()._get_values(action, texts)

    def _twice(self, action: argparse.Action, texts: Sequence[str]) -> str:
        """Says what to do about a flag, or two that set the same value, given twice."""
        from smallmind.checks import shown_value

        same = [a for a in self._actions if a.dest == action.dest and a.help != argparse.SUPPRESS]
        names = [name for a in same or [action] for name in a.option_strings]
        given = (self._given[action.dest], texts)
        values = [shown_value(" ".join(part)) for part in given if part]
        shown = f", as {' and '.join(values)}" if values else ""
        advice = ADVICE_IF_TWICE.get(action.dest, "leave one of them out")
        return f"{'/'.join(names)} is given twice{shown}; {advice}"

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """Refuses values in the words of the settings' checks; returns a list if it takes one."""
        if action.dest in self.several:
            parts = re.split(r"(?<!\\),", text)
            return [self._one_value(action, part.replace("\\,", ",")) for part in parts]
        return self._one_value(action, text)

    def _one_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            if action.type not in NUMBERS:
                raise
            flag, wanted = action.option_strings[0], NUMBERS[action.type]
            raise argparse.ArgumentError(None, f"{flag} {text} must be {wanted}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Lists the choices as they are typed."""
        if isinstance(value, list):
            for each in value:
                self._check_value(action, each)
            return
        choices = list(map(str, action.choices or ()))
        if not choices or value in choices:
            return
        from smallmind.checks import nearest

        is_command = isinstance(action, argparse._SubParsersAction)
        similar = nearest(str(value), choices, cutoff=0.5)
        raise argparse.ArgumentError(
            None if is_command else action,
            f"unknown {'command' if is_command else 'value'} {value!r}"
            + (f"; did you mean {similar}? " if similar else ". ")
            + f"Choose from {', '.join(choices)}",
        )

    def error(self, message: str) -> NoReturn:
        from smallmind.cli.console import error_line
        from smallmind.parallel.environment import is_first

        if is_first():  # all processes have the same command line
            self.print_usage(sys.stderr)
            error_line(f"{self.prog}: error: {message}")
        self.exit(2)


class _Version(argparse.Action):
    """Unlike argparse's own action, imports the version only when asked for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from smallmind.settings.config import __version__

        print(f"smallmind {__version__}")
        parser.exit()

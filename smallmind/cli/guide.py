"""Read the guide: a list of its pages, or one of them."""

import argparse
import pydoc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from smallmind.checks import InputError, nearest
from smallmind.cli.console import Console, line_width, wrap
from smallmind.console.table import Table
from smallmind.guide import NAMES, text_of, title

INDENT = 4 * " "  # of blocks of code, and of what explains the line above
CELL_END = re.compile(r"(?<!\\)\|")
SETTINGS = """# Every setting
Flags of `smallmind train` (`--help` has those for profiling too, `smallmind guide preferences`
those of rewards); in config.json, TOML and `Run.create` with `_` for `-`, without `--`.

| flag | meaning |
|---|---|
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind guide`."""
    parser.add_argument(
        "page", nargs="?", metavar="PAGE", help="name of a page; default: list all of them"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the page as it is in the package"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the list, or shows a page, in a terminal with its pager -> exit status."""
    console = Console()
    if options.page is None:
        width = max(map(len, NAMES))
        for name in NAMES:
            console.line(f"{name:{width}}  {title(page(name))}", (width + 2) * " ")
        console.command("Next:", ["smallmind", "guide", NAMES[0]])
        return 0
    if options.page not in NAMES:
        raise InputError(
            f"the guide has no page {options.page!r}; did you mean {nearest(options.page, NAMES)}? "
            f"Choose from {', '.join(NAMES)}"
        )
    text = page(options.page)
    if options.markdown:
        console.piece(text)
    elif console.is_terminal:
        pydoc.pager(rendered(text, pydoc.TextDoc().bold))
    else:
        console.piece(rendered(text))
    return 0


def page(name: str) -> str:
    """Returns the Markdown of a page; that of the settings is made from their fields."""
    return settings() if name == "settings" else text_of(name)


def settings() -> str:
    """Returns a page with the flags of `smallmind train` that are settings, and their help."""
    from smallmind.cli.flags import add_training_flags, title_of
    from smallmind.losses.reward_settings import RewardsConfig

    elsewhere = "Profiling", title_of(RewardsConfig)  # the first are not kept with a run
    parser = argparse.ArgumentParser(prog="smallmind train", add_help=False)
    add_training_flags(parser)
    rows: list[str] = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings]
        actions = [action for action in actions if action.help != argparse.SUPPRESS]
        if group.title in elsewhere:
            continue
        for number, action in enumerate(actions):
            value = "" if action.nargs == 0 else action.metavar or "/".join(action.choices or ())
            flag = f"{', '.join(action.option_strings)} {value}".strip()
            meaning = (action.help or "").replace("|", "\\|").replace("%%", "%")
            title = "" if number or not rows else f"**{group.title}**: "
            rows.append(f"| `{flag}` | {title}{meaning} |")
    return SETTINGS + "\n".join(rows) + "\n"


def rendered(text: str, bold: Callable[[str], str] = str) -> str:
    """Markdown -> text for a terminal: tables aligned, code indented, paragraphs wrapped."""
    parts = []
    blocks = re.split(r"^```\w*\n(.*?)^```\n", text, flags=re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        if number % 2:  # inside a fence
            parts.append("".join(f"{INDENT}{line}\n" for line in block.splitlines()))
        else:
            parts += _prose(block, bold)
    return "\n".join(parts)


def _prose(text: str, bold: Callable[[str], str]) -> Iterator[str]:
    """Yields the paragraphs, headings, lists and tables of Markdown without code."""
    for paragraph in filter(None, (part.strip("\n") for part in text.split("\n\n"))):
        paragraph = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "")
        lines = paragraph.split("\n")
        if lines[0].startswith("#"):
            yield bold(lines[0].lstrip("# ")) + "\n"
            yield from _prose("\n".join(lines[1:]), bold)
        elif lines[0].startswith("|"):
            yield _table(lines)
        else:
            items = re.split(r"\n(?=- |\d+\. )", paragraph)
            joined = [" ".join(line.strip() for line in item.split("\n")) for item in items]
            indent = INDENT[:2] if len(joined) > 1 else ""
            yield "".join(wrap(item, line_width(), indent) + "\n" for item in joined)


def _table(lines: list[str]) -> str:
    """-> a table, aligned; if its last column is too wide, each row has that below the others."""
    heads, marks, *rows = (
        [cell.strip().replace("`", "").replace("\\|", "|") for cell in CELL_END.split(line)[1:-1]]
        for line in lines
    )
    sides = "".join(">" if mark.endswith(":") else "<" for mark in marks)
    table, width = Table("", rows, heads, sides), line_width()
    drawn = table.columns()
    if max(map(len, drawn.split("\n"))) <= width:
        return drawn + "\n"
    if ">" in sides:  # numbers below each other
        return "\n\n".join(replace(table, align="").parts(Table.columns, width)) + "\n"
    found = []
    for first, group in groupby(rows, key=lambda row: "  ".join(filter(None, row[:-1]))):
        found.append(wrap(first, width) + "\n")
        found += [
            INDENT + wrap(row[-1], width - len(INDENT), INDENT) + "\n" for row in group if row[-1]
        ]
    return "".join(found)

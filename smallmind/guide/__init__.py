"""The guide: pages of Markdown beside this file, and the page that explains a message.

An entry of the page on trouble begins with a message, in which `...` stands for anything, and may
end with the name of a page that has more.
"""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent
# The pages in the order in which they are listed; `settings` is made from the fields.
NAMES = (
    "start",
    "your-text",
    "evaluating",
    "conversations",
    "adapting",
    "preferences",
    "formats",
    "tools",
    "serving",
    "features",
    "sizes",
    "settings",
    "speed",
    "memory",
    "precision",
    "hardware",
    "troubleshooting",
    "quick-reference",
    "python",
    "kernels",
    "own-kernel",
    "teachers",
    "csharp",
)
TROUBLE = "troubleshooting"
ENTRY = re.compile(r"- `([^`]+)`:.*", re.DOTALL)
MORE = re.compile(r"More:\s`smallmind guide ([\w-]+)`$")


def text_of(name: str) -> str:
    """Returns a page as it is in the package."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def title(text: str) -> str:
    """Returns the title of a page: its first heading."""
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def with_page(message: str) -> str:
    """Returns a message, followed by the command that shows its page if one explains it."""
    for pattern, page in _explained():
        if pattern.search(message):
            return f"{message} (smallmind guide {page})"
    return message


def quoted() -> dict[str, str]:
    """Returns the messages that entries on trouble quote, and the page to name for each."""
    entries = re.split(r"\n(?=- `|\n)", text_of(TROUBLE))
    found = filter(None, map(ENTRY.match, entries))
    return {entry[1]: more[1] if (more := MORE.search(entry[0])) else TROUBLE for entry in found}


@functools.cache
def _explained() -> list[tuple[re.Pattern[str], str]]:
    """Returns a pattern for each message that an entry quotes, and the page to name."""
    return [
        (re.compile(".*".join(map(re.escape, message.split("...")))), page)
        for message, page in quoted().items()
    ]

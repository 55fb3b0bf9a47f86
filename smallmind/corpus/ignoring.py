"""Applies the rules of .gitignore files as git does: gitignore(5), its wildmatch.c and dir.c."""

import os
import re
import stat
import string
from typing import NamedTuple

from smallmind.files import durable

MAX_BYTES = 2**24  # of a file with rules
LETTERS = string.ascii_letters + string.digits
CLASSES = {  # of ASCII, as in [[:alpha:]]
    **{"alnum": LETTERS, "alpha": string.ascii_letters, "digit": string.digits},
    **{"lower": string.ascii_lowercase, "upper": string.ascii_uppercase},
    **{"graph": LETTERS + string.punctuation, "print": LETTERS + string.punctuation + " "},
    **{"punct": string.punctuation, "space": string.whitespace, "blank": " \t"},
    **{"cntrl": "".join(map(chr, (*range(32), 127))), "xdigit": string.hexdigits},
}
# A member of a set in brackets, the first of which may be a bracket itself.
MEMBER = r"\[:(?P<named>[^\]]*):\]|(?P<low>\\.|[^\\])-(?P<high>\\.|[^\]\\])|(?P<one>\\.|[^\\])"
OTHERS = re.sub(r"\?P<\w+>", "?:", MEMBER).replace(r"(?:\\.|[^\\])", r"(?:\\.|[^\]\\])")
FIRST = re.sub(r"\?P<\w+>", "?:", MEMBER)
TOKEN = re.compile(rf"(\[[!^]?)((?>{FIRST})(?:{OTHERS})*+)\]|\*\*+/|\*+|\\.|.", re.DOTALL)
NEVER = "(?!)"
FOLDER = "\0"  # follows the name of a folder


class Rules(NamedTuple):
    """The rules of one file for the entries of one folder."""

    pattern: re.Pattern[str]  # of paths from the folder of the file; the last rule comes first
    reads: tuple[bool, ...]  # by the number of a group, less 1: a rule with "!"
    prefix: str = ""  # of the entries: "a/b/"

    def decide(self, name: str) -> bool | None:
        """-> True if an entry is ignored, False if it is read, None where no rule says so.

        The name of a folder ends with FOLDER.
        """
        found = self.pattern.fullmatch(self.prefix + name)
        return None if found is None else not self.reads[(found.lastindex or 0) - 1]


def is_ignored(rules: tuple[Rules, ...], name: str, is_folder: bool) -> bool:
    """-> True if the last rule for an entry says so. A link to a folder is not a folder."""
    if not rules:
        return False
    name = _bytewise(name) + FOLDER * is_folder
    found = (each.decide(name) for each in reversed(rules))
    return next((ignored for ignored in found if ignored is not None), False)


def rules_of(folder: str, above: tuple[Rules, ...] | None, name: str = "") -> tuple[Rules, ...]:
    """-> the rules for the entries of a folder, after those of the folder above it, if it is read.

    None `above`: those of its repository are looked up. A repository in another one obeys only
    its own, as for git.
    """
    if os.path.lexists(os.path.join(folder, ".git")):
        above, name = _read(os.path.join(folder, ".git", "info", "exclude")), ""
    elif above is None:
        real = os.path.realpath(folder)
        parent = os.path.dirname(real)
        known = parent != real and _is_in_repository(parent)
        above = rules_of(parent, None) if known else ()
        name = os.path.basename(real)
    prefixed = _bytewise(name) + "/" if name else ""
    lower = tuple(each._replace(prefix=each.prefix + prefixed) for each in above)
    return lower + _read(os.path.join(folder, ".gitignore"))


def _is_in_repository(folder: str) -> bool:
    while not os.path.lexists(os.path.join(folder, ".git")):
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above
    return True


def _read(path: str) -> tuple[Rules, ...]:
    """Returns the rules of a file; none if it is missing, no regular file, or has none."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):  # git follows no link to them
            return ()
        data = durable.read(path, MAX_BYTES).removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError):
        return ()
    lines = [line.removesuffix("\r") for line in data.decode("latin-1").split("\n")]
    rules = [found for line in reversed(lines) if (found := _rule(line))]
    if not rules:
        return ()
    pattern = re.compile("|".join(f"({each})" for each, _ in rules), re.DOTALL)
    return (Rules(pattern, tuple(reads for _, reads in rules)),)


def _rule(line: str) -> tuple[str, bool] | None:
    """-> the expression for the paths that a line means, and if it has "!"; None for no rule."""
    if line.startswith("#"):
        return None
    if trimmed := re.fullmatch(r"((?:\\.|[^\\])*?) *", line, re.DOTALL):
        line = trimmed[1]
    pattern = line.removeprefix("!")
    stem = pattern.removesuffix("/")
    if not stem:
        return None
    start, end = "" if "/" in stem else "(?:.*/)?", "\0?" if stem == pattern else "\0"
    stem, is_path = stem.removeprefix("/"), "/" in stem
    fixed = len(re.split(r"[*?\[\\]", stem, maxsplit=1)[0])
    parts = []
    for found in TOKEN.finditer(stem):
        token, place, rest = found[0], found.start(), stem[found.end() :]
        if token.startswith("**"):
            # git looks for what precedes the stars only behind the text without a wildcard.
            is_deep = is_path and (place == fixed or stem[place - 1] == "/")
            if token.endswith("/"):
                parts.append("(?:.*/)?" if is_deep else "[^/\0]*/")
            else:
                parts.append(".*" if is_deep and (not rest or rest[:2] == "\\/") else "[^/\0]*")
        elif found[1]:
            parts.append(_set(found[2], is_negated=len(found[1]) > 1))
        elif token in ("[", "\\"):
            return NEVER, False
        else:
            parts.append({"*": "[^/\0]*", "?": "[^/\0]"}.get(token) or re.escape(token[-1]))
    return f"{start}{''.join(parts)}{end}", line != pattern


def _set(members: str, is_negated: bool) -> str:
    """Returns the expression for a character of a set in brackets, or for none."""
    wanted: set[str] = set()
    for found in re.finditer(MEMBER, members, re.DOTALL):
        if found["named"] is not None:
            if found["named"] not in CLASSES:
                return NEVER
            wanted.update(CLASSES[found["named"]])
        elif found["low"]:
            low, high = found["low"][-1], found["high"][-1]
            wanted.update(map(chr, range(ord(low), ord(high) + 1)))
        else:
            wanted.add(found["one"][-1])
    all_but_slash = {chr(code) for code in range(1, 256)} - {"/"}
    chosen = all_but_slash - wanted if is_negated else all_but_slash & wanted
    return f"[{''.join(map(re.escape, sorted(chosen)))}]" if chosen else NEVER


def _bytewise(name: str) -> str:
    """Returns a name with a character per byte, as git compares them."""
    return os.fsencode(name).decode("latin-1")

"""The source files that the machine code of a kernel depends on: its own, and what that imports.

Other packages of smallmind that kernels import compute nothing in them.
"""

import functools
import hashlib
import re
from pathlib import Path

KERNELS = Path(__file__).parent.parent
PACKAGE = "smallmind.kernels"
# Parsing would take ten times as long.
IMPORT = re.compile(
    rb"""^[ \t]* (?: from [ ] (smallmind\.kernels[.\w]*) [ ] import [ ] ( \([^)]*\) | .* )
                | import [ ] (smallmind\.kernels[.\w]*) )""",
    re.MULTILINE | re.VERBOSE,
)
WORD = re.compile(rb"\w+")


def imported_by(module: str) -> set[str]:
    """Returns a module of the kernels, and those of them that it imports, directly or not."""
    found: set[str] = set()
    missing = [module]
    while missing:
        name = missing.pop()
        if name not in found:
            found.add(name)
            missing += _imports(name)
    return found


@functools.cache
def digest(module: str) -> bytes:
    """Returns the SHA-256 of a module's text."""
    return hashlib.sha256(source(module)).digest()


@functools.cache
def source(module: str) -> bytes:
    """Returns the text of a module of the kernels."""
    return modules()[module].read_bytes()


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the modules of the kernels by name."""
    files = {}
    for path in KERNELS.rglob("*.py"):
        names = path.relative_to(KERNELS).with_suffix("").parts
        files[".".join((PACKAGE, *names)).removesuffix(".__init__")] = path
    return files


@functools.cache
def _imports(module: str) -> list[str]:
    names = []
    for package, imported, itself in IMPORT.findall(source(module)):
        names.append((package or itself).decode())
        names += [f"{names[-1]}.{name.decode()}" for name in WORD.findall(imported)]
    return [name for name in names if name in modules()]

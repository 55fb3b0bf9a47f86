"""Exercises of a page: what a reader fills in, what judges it, and the code that both need.

An exercise is a line `print("Exercise 1:", judge(lambda: check(candidate)))`: `check` is a function
of the page, and `candidate` a function or a class above it, which raises NotImplementedError.
"""

import ast
import builtins
import symtable
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from smallmind.lessons import CELL

QUIET = {"print", "draw"}  # functions whose calls change nothing
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FIXED = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try)


@dataclass(frozen=True)
class Exercise:
    """An exercise of a page."""

    number: int
    check: str  # the function that judges
    candidates: tuple[str, ...]  # what it is handed
    place: int  # of its line among the statements of the page


def exercises(page: ast.Module) -> list[Exercise]:
    """Returns the exercises of a page, in order."""
    found = []
    for place, node in enumerate(page.body):
        match node:
            case ast.Expr(
                ast.Call(
                    ast.Name("print"),
                    [
                        ast.Constant(str(label)),
                        ast.Call(
                            ast.Name("judge"),
                            [ast.Lambda(body=ast.Call(ast.Name(check), candidates))],
                        ),
                    ],
                )
            ):
                names = tuple(ast.unparse(each) for each in candidates)
                number = int(label.removeprefix("Exercise ").rstrip(":"))
                found.append(Exercise(number, check, names, place))
    return found


def defined(node: ast.stmt) -> str | None:
    """Returns the name of the function or class that a statement defines, if it is one."""
    return node.name if isinstance(node, DEFINITIONS) else None


def needed(statements: list[ast.stmt], wanted_at: Mapping[int, Iterable[str]]) -> list[ast.stmt]:
    """-> the statements without which some names would not be what they are at some places.

    `wanted_at` has the names that are wanted before each of these places. The statements are found
    from the last one back, as in a liveness analysis: what binds a name that is still wanted, or
    may change the object that it is bound to, and what that reads in turn. A function reads, where
    it is called, the names of the module that its body has.
    """
    read = [reads(node) for node in statements]
    fixed = {name for node in statements if isinstance(node, FIXED) for name in bound(node)}
    fixed |= set(dir(builtins))
    bodies: dict[str, set[str]] = {}  # of functions and classes
    for node, (_, inside) in zip(statements, read, strict=True):
        if name := defined(node):
            bodies[name] = bodies.get(name, set()) | inside

    def with_bodies(found: set[str]) -> set[str]:
        """Adds what the functions among these names read."""
        new = set(found)
        while new:
            new = set().union(*(bodies.get(name, ()) for name in new)) - found
            found = found | new
        return found

    wanted, chosen = set[str](), []
    for place in range(len(statements), -1, -1):
        wanted |= with_bodies(set(wanted_at.get(place, ())))
        if not place:
            break
        node, (outside, inside) = statements[place - 1], read[place - 1]
        binds = isinstance(node, FIXED) or _binds_names_only(node)
        written = bound(node) - (set() if binds else fixed)  # calls change no module or function
        if written & wanted:
            chosen.append(node)
            if binds:
                wanted -= written
            wanted |= with_bodies(outside if defined(node) else outside | inside)
    return chosen[::-1]


def reads(node: ast.stmt) -> tuple[set[str], set[str]]:
    """-> the names of the module that a statement reads, and those in functions within it."""
    table = symtable.symtable(ast.unparse(node), "page", "exec")
    outside = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    inside, scopes = set[str](), table.get_children()
    while scopes:
        scope = scopes.pop()
        inside |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
        scopes += scope.get_children()
    return outside, inside


def _binds_names_only(node: ast.stmt) -> bool:
    """Tells whether a statement binds names as a whole, and changes nothing of what they were."""
    if not isinstance(node, ast.Assign):
        return False
    parts = [x for target in node.targets for x in ast.walk(target)]
    return not any(isinstance(x, ast.Subscript | ast.Attribute) for x in parts)


def bound(node: ast.AST) -> set[str]:
    """Returns the names that a statement of a module binds, or whose objects it may change."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        case ast.Expr(ast.Call(ast.Name(name))) if name in QUIET:
            return set()
        case ast.Expr(value=called):  # a method changes its object, and a function its arguments
            return {x.id for x in ast.walk(called) if isinstance(x, ast.Name)}
        case ast.Assign(targets=targets):
            return set().union(*map(_target, targets))
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return _target(target)
        case ast.For() | ast.While() | ast.If() | ast.With() | ast.Try():
            found = _target(node.target) if isinstance(node, ast.For) else set[str]()
            for child in ast.walk(node):
                if isinstance(child, ast.withitem) and child.optional_vars:
                    found |= _target(child.optional_vars)
                elif isinstance(child, ast.stmt) and not isinstance(child, BLOCKS):
                    found |= bound(child)
            return found
    return set()


def _target(target: ast.expr) -> set[str]:
    """Returns the names in the target of an assignment: bound, or changed, as x in x[0] = 1."""
    match target:
        case ast.Subscript(value=value) | ast.Attribute(value=value) | ast.Starred(value=value):
            return _target(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return set().union(*map(_target, parts))
        case ast.Name(name):
            return {name}
    return set()


def solved(source: str, solutions: str) -> str:
    """A page, the file of its solutions -> the page with each solution in place of its exercise."""
    page, lines = ast.parse(source), source.split("\n")
    head, *parts = ("\n" + solutions).split(f"\n{CELL}")
    imports = [x for x in ast.parse(head).body if isinstance(x, ast.Import | ast.ImportFrom)]
    replaced: dict[int, tuple[int, str]] = {}  # the first line -> the line after the last, the text
    for part in parts:
        text = part.partition("\n")[2].strip("\n")
        cell = ast.parse(text)
        names = {defined(node) for node in cell.body}
        stubs = [node for node in page.body if defined(node) and defined(node) in names]
        known = [node for node in page.body if node.lineno < stubs[0].lineno]
        missing = {x.id for x in ast.walk(cell) if isinstance(x, ast.Name)}
        missing -= set().union(*(bound(node) for node in known))
        new = [line for node in imports for line in _imports(node, missing)]
        for stub in stubs:
            replaced[stub.lineno - 1] = stub.end_lineno or stub.lineno, ""
        begin = stubs[0].lineno - 1
        replaced[begin] = replaced[begin][0], "\n".join([*new, *[""] * 2 * bool(new), text])
    for begin, (end, text) in sorted(replaced.items(), reverse=True):
        lines[begin:end] = [text] if text else []
    return "\n".join(lines)


def _imports(node: ast.Import | ast.ImportFrom, names: set[str]) -> list[str]:
    """Returns the imports of a statement that bind one of these names, a line for each."""
    source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
    kept = [alias for alias in node.names if (alias.asname or alias.name) in names]
    return [f"{source}import {ast.unparse(alias)}" for alias in kept]

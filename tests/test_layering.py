"""The layout: imports point downward file by file, and only the command line and lessons print."""

import ast
import functools
import re

import pytest

import smallmind
from smallmind import parts
from smallmind.lessons import pages
from tests.programs import output_of
from tests.sources import LIBRARY, PACKAGE, ROOT, broken, nodes_of
from tests.test_old_runs import OLD_RUNS

# From the bottom up: a file may import from its own layer and from those below.
LAYERS = [
    {"checks", "parts", "randomness"},
    {"console", "charts", "guide", "page"},
    {"files"},
    {"settings", "kernels"},
    {"memory", "text"},
    {"corpus"},
    {"nn"},
    {"parallel"},
    {"optim", "writing", "losses"},
    {"exchange"},
    {"tasks"},
    {"training"},
    {"forecast"},
    {"runs"},
    {"views", "bench"},
    {"serve"},
    {"lessons"},
    {"cli"},
    {"__main__", "__init__"},
]


PAGES = {path.stem for path in pages()}


def layer(module):
    """'smallmind.nn.block' -> the number of its layer."""
    name = module.removeprefix("smallmind.lessons.")
    if name in PAGES or name.startswith("solutions."):  # programs: they import whatever they teach
        return len(LAYERS) - 1
    _, *names = module.split(".")
    part = names[0] if names else "__init__"
    for number, here in enumerate(LAYERS):
        if part in here:
            return number
    raise AssertionError(f"{module} is in no layer")


def module_name(source):
    names = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


MODULES = {module_name(source): source for source in LIBRARY}


def imported(text):
    """The modules of this package that a file imports, anywhere in the file."""
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            module = name if name in MODULES else name.rpartition(".")[0]
            if module in MODULES:
                yield module


@functools.cache
def imports():
    """The name of each module -> those that it imports."""
    found = {name: set() for name in MODULES}
    for line in broken_rules()[imported]:
        source, _, name = line.partition(": ")
        found[module_name(ROOT / source)].add(name)
    return found


def cycle(graph):
    """A path of names that leads back to its start, or an empty list."""
    done = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_imports_point_downward():
    pairs = [(name, other) for name, others in imports().items() for other in others]
    assert [(name, other) for name, other in pairs if layer(other) > layer(name)] == []


def test_imports_have_no_cycles():
    assert cycle(imports()) == []


def printed(text):
    """The lines on which a file calls print."""
    for node in nodes_of(text):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if called and node.func.id == "print":
            yield node.lineno


def test_only_the_command_line_and_lessons_print():
    assert broken_rules()[printed] == []


def test_the_checks_find_violations():
    upward = imported("from smallmind.cli import main")
    assert list(printed("if x:\n    print(1)\nfile.print(2)")) == [2]
    assert any(layer(other) > layer("smallmind.nn.block") for other in upward)
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_public_names_exist_and_are_documented():
    assert [name for name in smallmind.__all__ if not getattr(smallmind, name).__doc__] == []


HELP = "from smallmind.cli.program import COMMANDS, make_parser\nmake_parser({}).format_help()"
LOOKING = f"""from smallmind.views.listing import find_runs, row_of
import smallmind.charts.text, smallmind.charts.svg, smallmind.views.comparison
assert len([row_of(view) for view in find_runs({str(OLD_RUNS)!r})]) == 5
"""
PLAIN = f"""import tempfile
from smallmind.cli import main
with tempfile.TemporaryDirectory() as folder:
    main(["train", {str(OLD_RUNS / "README.md")!r}, "--backend", "numpy", "--tokenizer",
          "byte", "--size", "nano", "--block-size", "8", "--steps", "1", "--out", folder + "/run"])
"""
PROGRAMS = {
    "help of every command": (
        f"{HELP.format([])}\nfor name in COMMANDS: make_parser([name]).format_help()",
        "numpy numba tabulate",
    ),
    "the list of commands": (
        HELP.format([]),
        "smallmind.settings.config smallmind.cli.train smallmind.cli.flags",
    ),
    "a schedule": ("from smallmind.cli import main; main(['schedule'])", "numpy numba matplotlib"),
    "looking at runs": (LOOKING, "numpy numba"),
    "loading a model": (
        f"import smallmind; smallmind.Run.open({str(OLD_RUNS / 'float32')!r}).load()",
        "smallmind.cli",
    ),
    "a run with plain NumPy": (PLAIN, "numba"),
}


@pytest.mark.parametrize(("code", "names"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_imports_only_what_it_needs(code, names):
    found = f"import sys; print('imported:', *(sys.modules.keys() & {set(names.split())}))"
    assert output_of(f"{code}\n{found}").endswith("imported:\n")


def test_the_process_group_is_handed_to_what_divides_work_among_ranks_alone():
    used = {
        name
        for name, others in imports().items()
        if others & {"smallmind.parallel.group", "smallmind.parallel.launch"}
        and not name.startswith(("smallmind.parallel.", "smallmind.optim."))
    }
    # One place of a training, whose constructor takes it; one of a run; the command that joins it.
    commands = {"smallmind.cli.parallel", "smallmind.cli.train"}
    assert used == {"smallmind.training.training", "smallmind.runs.parallel", *commands}


TYPE_NAMES = {name for kind in parts.NUMBER_TYPES.values() for name in (kind.name, kind.precision)}


def types_named_together(text):
    """The names of number types in each literal collection of a file, where there are several."""

    def name_of(node):
        if isinstance(node, ast.Constant):
            return node.value
        is_member = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Precision"
        return node.attr.lower() if is_member else None

    for node in nodes_of(text):
        groups = [getattr(node, name, ()) for name in ("elts", "keys", "values")]
        for group in groups:
            names = {name_of(one) for one in group if one} if isinstance(group, list) else set()
            if len(found := names & TYPE_NAMES - {""}) > 1:
                yield found


def sources_outside(*names):
    """The sources of all modules but those whose names begin like one of these."""
    return [MODULES[name] for name in MODULES if not name.startswith(names)]


@functools.cache
def broken_rules():
    """'file: what' of what each file imports, and of what breaks a rule."""
    return broken(
        [
            (imported, LIBRARY),
            (printed, sources_outside("smallmind.cli", "smallmind.lessons.")),
            (types_named_together, sources_outside("smallmind.parts", "smallmind.lessons.")),
        ]
    )


def test_number_types_are_listed_in_one_table():
    assert broken_rules()[types_named_together] == []


def test_lists_of_number_types_are_found():
    lists = '("f32", "f16")', '{"q8_0": 8, "q4_0": 2}', "x in (Precision.FLOAT16, Precision.Q8_0)"
    assert all(list(types_named_together(text)) for text in lists)


def test_a_page_reads_the_number_types_that_are_said_to_be_for_pages():
    program = (PACKAGE / "exchange" / "model.js").read_text("utf-8")
    readers = program.partition("const READERS = {")[2].partition("\n  };")[0]
    names = re.findall(r"^    (\w+)[:(]", readers, re.MULTILINE)
    assert names == [kind.name for kind in parts.types_for("page")]

"""Docstrings, comments and names say what they are about, in plain words."""

import ast
import functools
import importlib
import io
import pkgutil
import re
import tokenize

import pytest

from smallmind import nn
from smallmind.checks import count_of
from smallmind.lessons import cells, pages
from smallmind.nn.layer import Branch, Layer, Norm
from tests.sources import LIBRARY, ROOT, broken, nodes_of

SOURCES = [*LIBRARY, *(path for name in ("tests", "bench") for path in (ROOT / name).rglob("*.py"))]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NOUNS = {"property", "cached_property", "setter"}  # decorators of what is read like a value
OPENING = re.compile(r"[A-Z][a-z]+s\b|`?\w+`? \(")  # a verb, or a name and its shape
UNCOUNTED = {"FEW", "FEWEST", "LAST", "LONGEST", "MANY", "MOST", "ONCE", "SEEN", "TOGETHER"}
UNCOUNTED |= {"ENOUGH", "KEPT", "OWN", "PLENTY", "ROOM", "RARE", "SHORT", "WHOLE", "APART", "GIVEN"}
CLAUSE = re.compile(r"(What|Whether|Of|Those|That of|The same)\b")


def docstrings(text):
    """The docstrings of a module, its classes and functions."""
    for node in nodes_of(text):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and (found := ast.get_docstring(node)):
            yield found


def comments(text):
    """The first lines of the comments."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            stands_alone = not token.line[:column].strip()
            if not (stands_alone and line == last + 1):
                yield token.string.lstrip("#").strip()
            last = line if stands_alone else -1


def clauses(text):
    """The docstrings and comments that begin as a clause without its sentence."""
    return [found for found in (*docstrings(text), *comments(text)) if CLAUSE.match(found)]


@pytest.mark.parametrize(
    "planted",
    [
        'def f():\n    """Whether it ends."""',
        '"""What is here."""',
        "x = 1  # Of the last step",
        "# Those that remain\n# are many.\nx = 1",
        'class A:\n    """The same for a class."""',
    ],
)
def test_a_clause_is_found(planted):
    assert len(clauses(planted)) == 1


def unopened(text):
    """The functions whose docstring opens with neither a verb nor shapes nor `->`."""
    for node in nodes_of(text):
        if isinstance(node, FUNCTIONS) and (found := ast.get_docstring(node)):
            decorators = {ast.unparse(x).split("(")[0].split(".")[-1] for x in node.decorator_list}
            opens = OPENING.match(found) or "->" in found.split("\n\n")[0]
            if not opens and not decorators & NOUNS:
                yield node.name


def packed(text):
    """The calls whose arguments are packed: as `given`, or as a literal of names and values."""
    for node in nodes_of(text):
        if isinstance(node, ast.Call):
            starred = [x.value for x in node.args if isinstance(x, ast.Starred)]
            literals = [x.value for x in node.keywords if x.arg is None]
            if any(isinstance(x, ast.Name) and x.id == "given" for x in starred) or any(
                isinstance(x, ast.Dict) and any(isinstance(key, ast.Constant) for key in x.keys)
                for x in literals
            ):
                yield ast.unparse(node.func)


def uncounted(text):
    """The constants of a module whose names say how many, but not of what."""
    for node in nodes_of(text)[0].body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = {x.id for target in targets if target for x in ast.walk(target) if hasattr(x, "id")}
        yield from names & UNCOUNTED


RULES = {unopened: LIBRARY, packed: LIBRARY, uncounted: LIBRARY, clauses: SOURCES}
NAMING = [
    path for path in LIBRARY if path.parent.name != "solutions"
]  # they replace those of lessons
broken_rules = functools.cache(lambda: broken([*RULES.items(), (classes, NAMING)]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_break_no_rule(rule):
    assert broken_rules()[rule] == []


@pytest.mark.parametrize(
    ("found", "planted"),
    [
        (unopened, 'def f():\n    """The sum."""'),
        (unopened, 'class A:\n    async def f(self):\n        """How to add."""'),
        (packed, "f(1, *given)"),
        (packed, "f(**{'a': 1, **rest})"),
        (uncounted, "MOST: int = 3"),
        (uncounted, "A, LAST = 3, 4"),
    ],
)
def test_other_words_are_found(found, planted):
    assert len(list(found(planted))) == 1


def classes(text):
    return [node.name for node in nodes_of(text) if isinstance(node, ast.ClassDef)]


def test_at_most_ten_names_of_classes_are_used_twice():
    names = [line.rpartition(": ")[2] for line in broken_rules()[classes]]
    assert len(names) > 100
    assert len([name for name in set(names) if names.count(name) > 1]) <= 10


def test_the_docstring_of_a_layer_has_its_formula_in_the_first_line():
    for name in pkgutil.iter_modules(nn.__path__):
        importlib.import_module(f"smallmind.nn.{name.name}")
    layers = [Layer]
    for layer in layers:
        layers += [x for x in layer.__subclasses__() if x.__module__.startswith("smallmind.nn.")]
    described = set(layers) - {Layer, Branch, Norm}  # these are only bases
    assert len(described) > 20
    assert [x for x in described if " = " not in x.__doc__.partition("\n")[0]] == []


# Symptoms of a translation: a pattern, and a text in which it must be found.
SYMPTOMS = {
    r"\banew\b": "The conversation begins anew",
    r"\bin vain\b": "tried three times, in vain",
    r"\b[Ww]hat is longer\b": "What is longer than a window is cut",
    r"\b(sites|programs|models|people|secrets) of others\b": "lets sites of others use it",
    r"(?<!here )\b(is|are) no (?!longer\b|faster\b|better\b)\w+": "/foo is no command",
    r"\bmore wait\b": "1 of 2 threads: more wait for each other",
    r"\bso (many|few)\b": "with so many decimals",
    r"\bthat is none\b": "a file that is none",
    r"\b[Gg]o(es)? on (with|from)\b": "go on with the next step",
    r"\bmeanwhile\b": "another program has taken it meanwhile",
    r"\b(known|built) here\b": "'yarn' is not built here",
    r"\bwith commas between\b": "several, with commas between them",
    r"\b(directory|model) of transformers\b": "a directory of transformers",
    r"\bhalf a character\b": "the text has half a character",
    r"\bwould change nothing\b": "recipe='gpt2' would change nothing",
    r"\bholds no\b": "runs holds no run",
    r"\btaken back\b": "the last question is taken back",
    r"\bwhich else\b": "its last argument, which else is the path",
    r"\bcould have stood\b": "what else could have stood there",
    r"\beverybody\b": "lets everybody in the network use it",
    r"\bsays who the model\b": "says who the model is",
    r"\b1 (windows|steps|minutes|layers|tokens|runs|turns|files)\b": "1 windows of 64",
    r"\b(a|an) \w+ of (HTML|RTF|WhatsApp|Telegram|Git LFS)\b": "a page of HTML",
    r"\b[Rr]ightly\b": "answers judged rightly",
    r"\b[Kk]nown are\b": "known are system, user, assistant",
    r"\bstands? (around|beside)\b": "what stands around the turns",
    r"\b[Ss]ome (seconds|minutes|tenths|hundred)\b": "after some seconds of training",
    r"\b(is|are) to (learn|write|read)\b": "It is to learn to write them",
    r", also (one|what|your|its|with|where|while|in)\b": "every kernel, also one of your own",
    r"\b(may|can|must|needs?|will) so\b": "Several adapters can so share one base",
    r"\b(of|on|from) elsewhere\b": "the file that a run from elsewhere names",
    r"\bwhoever (has|had)\b": "whoever has written them was in doubt",
    r"\banother \w+ needs no other\b": "so that another r needs no other learning rate",
}
SYMPTOM = re.compile("|".join(SYMPTOMS))
PAGES = [
    ROOT / "README.md",
    *(ROOT / "smallmind").rglob("*.md"),
    *(ROOT / "smallmind").glob("page/page.[hj]*"),
    *pages(),
]


def prose(path):
    """The text of a page or, of a lesson, that of its text cells, in one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = "\n".join(cell for is_text, cell in cells(text) if is_text)
    return " ".join(text.split())


def messages(text):
    """The texts of a module that people may read: all but docstrings, with {} for values."""
    nodes = nodes_of(text)
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS)]
    apart = {id(node.body[0].value) for node in documented if ast.get_docstring(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.value


def translated(text):
    """The symptoms in the messages of a module."""
    return [found[0] for message in messages(text) for found in SYMPTOM.finditer(message)]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_reads_as_translated_is_found(symptom):
    text = SYMPTOMS[symptom]
    assert re.search(symptom, text) and translated(f"raise E(f'{{x}}: ' {text!r})")
    assert not translated(f'"""{text}"""')


def test_no_message_reads_as_translated():
    assert broken([(translated, LIBRARY)])[translated] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_reads_as_translated(path):
    assert [found[0] for found in SYMPTOM.finditer(prose(path))] == []


@pytest.mark.parametrize(("count", "said"), [(1, "1 window"), (1.0, "1 window"), (2, "2 windows")])
def test_a_count_has_its_plural(count, said):
    assert count_of(count, "window") == said

"""The process in which templates of strangers are rendered; see `jinja_template`.

It runs as a file and imports nothing of the package, so that it starts fast and stays small. It
reads one line of JSON per batch of conversations, and answers with one line per conversation: the
text and where it comes from, or the error. It ends at the end of its input, or when a template has
used up its computing time, whatever has become of the process that asked.
"""

import contextlib
import functools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, SupportsIndex

MAX_MEMORY = 2**30  # bytes
MAX_CHARACTERS = 2**26  # characters of a conversation as it is rendered
# Where a character comes from: the template, some turns, or one of them: see `said`.
TEMPLATE, TURNS, FIRST = range(3)
TURN_OF: dict[str, str] = {}  # the origin of the name in a call -> that of its turn
MAX_TURNS = 500_000  # turns of a conversation: each has a character that stands for it
RUNS = re.compile(r"(.)\1*", re.DOTALL)
# These filters return their arguments, or parts that are cut from them and stay traced.
TRACED_FILTERS = {
    *("abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "first", "float"),
    *("groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "random"),
    *("reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice", "sort"),
    *("sum", "trim", "unique", "upper", "wordcount"),
}


def said(turn: int) -> str:
    """turn -> the origin of its characters."""
    return chr(FIRST + turn)


class Traced(str):
    """A text that knows the origin of each of its characters, whatever a template does with it.

    `_origin` is a text of the same length. The result of an operation that is not followed
    character by character has the origin of all that went into it: what a turn says never counts as
    the template's own text.
    """

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str = "", origin: str | None = None) -> "Traced":
        made = str.__new__(cls, text)
        made._origin = chr(TURNS) * len(made) if origin is None else origin
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> "Traced":
        return Traced(str.__getitem__(self, key), self._origin[key])

    def __iter__(self) -> Iterator["Traced"]:
        return map(self.__getitem__, range(len(self)))

    def __add__(self, other: Any) -> Any:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: Any) -> "Traced":
        return Traced(str.__mul__(self, count), self._origin * count)

    __rmul__ = __mul__

    def join(self, parts: Iterable[Any]) -> str:
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part) if pieces else (part,)
        return concat(pieces)

    def lstrip(self, *arguments: Any) -> "Traced":
        return self[len(self) - len(str.lstrip(self, *arguments)) :]

    def rstrip(self, *arguments: Any) -> "Traced":
        return self[: len(str.rstrip(self, *arguments))]

    def strip(self, *arguments: Any) -> "Traced":
        return self.rstrip(*arguments).lstrip(*arguments)

    def removeprefix(self, prefix: str) -> "Traced":
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> "Traced":
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._placed(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._placed(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._placed(str.splitlines(self, keepends), None)

    def partition(self, sep: str) -> tuple[Any, ...]:
        return tuple(self._placed(str.partition(self, sep), ""))

    def rpartition(self, sep: str) -> tuple[Any, ...]:
        return tuple(self._placed(str.rpartition(self, sep), ""))

    def _placed(self, pieces: Iterable[str], sep: str | None) -> list[Any]:
        """Cuts out pieces that have sep between them, or white space if it is None."""
        found, start = [], 0
        for piece in pieces:
            start = str.find(self, piece, start) if sep is None else start
            found.append(self[start : start + len(piece)])
            start += len(piece) + len(sep or "")
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return derived(str.replace(self, old, new, count), self, new)
        return of_template(new).join(self.split(old, count))


def _following(name: str) -> Callable[..., Any]:
    """Returns a method of texts whose results are not traced character by character."""
    method = getattr(str, name)

    def follow(self: Traced, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        if name in CASES and len(result) == len(self):
            return Traced(result, self._origin)
        return derived(result, self, arguments, named)

    return functools.wraps(method)(follow)


CASES = ("lower", "upper", "title", "capitalize", "swapcase", "casefold")
FOLLOWED = ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill")
for _name in (*CASES, *FOLLOWED, "__format__", "__mod__", "__rmod__", "__repr__"):
    setattr(Traced, _name, _following(_name))


def of_template(text: str) -> Traced:
    """Returns a text as the template's own, unless it is traced already."""
    return text if isinstance(text, Traced) else Traced(text, chr(TEMPLATE) * len(text))


def concat(pieces: Iterable[str]) -> str:
    """Joins texts; a plain one is the template's."""
    parts = [x if isinstance(x, str) else derived(str(x), x) for x in pieces]
    text = "".join(parts)
    if not any(isinstance(part, Traced) for part in parts):
        return text
    return Traced(text, "".join(of_template(part)._origin for part in parts))


def derived(result: Any, *sources: Any) -> Any:
    """Gives a resulting text the origin of its sources; that of several turns is not known."""
    if not isinstance(result, str) or isinstance(result, Traced):
        return result
    origins = set[str]()
    _collect(sources, origins)
    origins = {TURN_OF.get(origin, origin) for origin in origins} - {chr(TEMPLATE)}
    if not origins:
        return result
    return Traced(result, (origins.pop() if len(origins) == 1 else chr(TURNS)) * len(result))


def _collect(value: Any, origins: set[str]) -> None:
    """Adds the origins of all texts in a value."""
    if isinstance(value, Traced):
        origins.update(value._origin)
    elif isinstance(value, bytes | bytearray):
        origins.add(chr(TURNS))  # a text may have been encoded
    elif isinstance(value, Mapping):
        for item in value.items():
            _collect(item, origins)
    elif isinstance(value, Iterator):
        origins.add(chr(TURNS))  # it cannot be read twice
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            _collect(item, origins)


def traced(value: Any, origin: str) -> Any:
    """Returns a value of JSON whose texts, names included, are traced to an origin."""
    if isinstance(value, str):
        return Traced(value, origin * len(value))
    if isinstance(value, dict):
        return {traced(name, origin): traced(one, origin) for name, one in value.items()}
    return [traced(one, origin) for one in value] if isinstance(value, list) else value


def main() -> None:
    """Answers until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for conversation in request.pop("conversations"):
            _limit(request["seconds"])
            try:
                answer = rendered(conversation, **request)
            except MemoryError:
                answer = {"error": "it takes too much memory"}
            except Exception as error:  # a template may raise anything
                answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            _limit(0)
            sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit(seconds: float) -> None:
    """Ends the process after this many seconds of computing from now on; 0: never."""
    if hasattr(signal, "setitimer"):  # not on Windows, where the other process ends this one
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends any loop, also in C


def rendered(
    turns: list[list[str]],
    template: str,
    variables: dict[str, Any],
    thoughts: list[str],
    parts: bool,
    now: str | None,
    seconds: float,
    spells: bool = False,
    null: bool = False,
) -> dict[str, Any]:
    """[role, text, thought, more] of each turn -> the text of the template, and who says what.

    "said" has three numbers for each stretch that turns say: the turn, or -1 if it is not known
    which, where it begins and where it ends. `more` is JSON of other fields of the message, and of
    the tools of the conversation, of which it is not known who says them. `thoughts` are the fields
    of a message for a thought; with `parts`, a text is a list of one part; with `spells`, the
    arguments of a call are JSON; with `null`, a turn of calls alone has no text.

    Where a template repeats the name in a call, as beside what the tool has returned, it is not
    known who says it.
    """
    del seconds
    TURN_OF.clear()
    variables = {"tools": None, "documents": None, **variables}  # as transformers has them
    if len(turns) > MAX_TURNS:
        raise ValueError(f"it has more than {MAX_TURNS:,} turns")
    messages: list[dict[str, Any]] = []
    for number, (role, text, thought, more) in enumerate(turns):
        content: Any = Traced(text, said(number) * len(text))
        message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": content}]}
        if not parts:
            message["content"] = content
        if thought:
            message |= dict.fromkeys(thoughts, Traced(thought, said(number) * len(thought)))
        fields = json.loads(more or "{}")
        if "tools" in fields:
            variables = {**variables, "tools": traced(fields.pop("tools"), chr(TURNS))}
        message |= traced(fields, said(number))
        for call in message.get("tool_calls", [])[: MAX_TURNS - len(TURN_OF)]:
            function, origin = call["function"], said(MAX_TURNS + len(TURN_OF))
            TURN_OF[origin] = said(number)
            function["name"] = Traced(function["name"], origin * len(function["name"]))
            if spells and not isinstance(function["arguments"], str):
                spelled = json.dumps(function["arguments"], ensure_ascii=False)
                function["arguments"] = Traced(spelled, said(number) * len(spelled))
        if null and not text and "tool_calls" in message:
            message["content"] = None
        messages.append(message)
    environment, compiled_template = compiled(template)
    environment.now = datetime.fromisoformat(now) if now else datetime.now()
    pieces, length = [], 0
    for piece in compiled_template.generate(messages=messages, **variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS:,} characters")
        pieces.append(piece)
    whole = of_template(concat(pieces))
    said_by: list[tuple[int, int, int]] = []
    named, repeated = set(), []
    for run in RUNS.finditer(whole._origin):
        if run[1] in named:
            repeated.append(len(said_by))
        if run[1] in TURN_OF:
            named.add(run[1])
        if (number := ord(TURN_OF.get(run[1], run[1]))) != TEMPLATE:
            said_by.append((number - FIRST, *run.span()))
    for i in reversed(repeated):  # within a call, if more of it follows
        if [turn for turn, *_ in said_by[i + 1 : i + 2]] != [said_by[i][0]]:
            said_by[i] = (TURNS - FIRST, *said_by[i][1:])
    found = [number for stretch in said_by for number in stretch]
    return {"text": "".join(pieces), "said": found}


@functools.lru_cache(4)
def compiled(text: str) -> tuple[Any, Any]:
    """-> the environment and the template, with the functions of transformers."""
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import LoopContext, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` writes what is in it: nothing else follows from it here."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("written")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def written(self, caller: Any) -> Any:
            return caller()

    class Joining(CodeGenerator):
        """Compiles `~` to `concat`."""

        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("environment.concat((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    class Environment(ImmutableSandboxedEnvironment):
        """The environment of transformers, in which texts stay traced."""

        code_generator_class = Joining
        concat = staticmethod(concat)
        intercepted_binops = frozenset(["%"])
        now: datetime

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            result = super().call_binop(context, operator, left, right)
            return derived(result, left, right)

        def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
            owner = getattr(function, "__self__", None)
            if type(owner) is str:
                function = getattr(of_template(owner), function.__name__)
            result = super().call(context, function, *arguments, **named)
            # Macros and loops write, containers return what they hold: all of it is traced already.
            if isinstance(function, Macro | LoopContext) or isinstance(owner, dict | list | tuple):
                return result
            # Jinja adds variables of loops and blocks, as _loop_vars, which no function reads.
            named = {name: value for name, value in named.items() if not name.startswith("_")}
            return derived(result, owner, arguments, named)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def formatted(*arguments: Any, **named: Any) -> Any:
                result = str.__str__(wrapped(*arguments, **named))
                return derived(result, value.__self__, arguments, named)

            return formatted

    def following(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def follow(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            # A filter may get the environment or its context, in which nothing is said.
            values = [value for value in arguments if not hasattr(value, "eval_ctx")]
            return derived(result, [v for v in values if v is not environment], named)

        return function if name in TRACED_FILTERS else follow

    def join(values: Iterable[Any], between: str = "", attribute: Any = None) -> str:
        found = values if attribute is None else [environment.getitem(v, attribute) for v in values]
        return of_template(between).join(found)

    def replace(text: Any, old: str, new: Any, count: int | None = None) -> str:
        return of_template(str(text)).replace(str(old), str(new), -1 if count is None else count)

    def tojson(value: Any, ensure_ascii: bool = False, *arguments: Any, **settings: Any) -> str:
        names = dict(zip(("indent", "separators", "sort_keys"), arguments, strict=False))
        return derived(json.dumps(value, ensure_ascii=ensure_ascii, **names, **settings), value)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return environment.now.strftime(form)

    def shown(value: Any) -> Any:
        """Returns what `{{ value }}` writes: of a whole list or object, text with its origin."""
        return derived(str(value), value) if isinstance(value, dict | list | tuple) else value

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        finalize=shown,
    )
    for name, function in environment.filters.items():
        environment.filters[name] = following(name, function)
    environment.filters |= {"tojson": tojson, "join": join, "replace": replace}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment, environment.from_string(text)


if __name__ == "__main__":
    main()

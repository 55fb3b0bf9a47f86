"""The process in which templates of strangers are rendered; see `jinja_template`.

Reads a line of JSON for each conversation, and answers with a line: the text, or the error.
"""

import contextlib
import functools
import json
import sys
from datetime import datetime
from typing import Any, NoReturn

from smallmind.text.jinja_template import LONGEST, MEMORY


def main() -> None:
    """Answers until the input ends."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = {"text": render(request["template"], request["variables"])}
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        except Exception as error:  # a template may raise anything
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def render(text: str, variables: dict[str, Any]) -> str:
    """A template with these variables -> its text."""
    pieces, length = [], 0
    for piece in compiled(text).generate(**variables):
        length += len(piece)
        if length > LONGEST:
            raise ValueError(f"it writes more than {LONGEST:,} characters")
        pieces.append(piece)
    return "".join(pieces)


@functools.cache
def compiled(text: str) -> Any:
    """The template, with the functions that those of transformers may call."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **settings)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(text)


if __name__ == "__main__":
    main()

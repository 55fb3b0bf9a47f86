"""Finds calls of tools in what a model writes; see `text.tools` for their forms."""

from collections.abc import Collection

from smallmind.text.tools import Call, calls_in
from smallmind.writing.decoder import overlap

BEGIN, END = "<tool_call>", "</tool_call>"
ALONE = "<|python_tag|>"  # before calls that are all of an answer


class CallDivider:
    """Divides an answer, piece by piece, into what it says and the calls in it.

    `names` are those of the tools that there are: an object without a mark around it is only taken
    for a call of one of these.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._has_said = False  # more than spaces, or a call
        self._is_open = False  # within the marks of a call
        self.count = 0  # of the calls so far

    def add(self, piece: str, is_last: bool = False) -> tuple[str, list[Call]]:
        """The next piece -> what is said and called in it, as far as that is certain."""
        self._held += piece
        said, calls = "", []
        while True:
            if self._is_open:
                inner, mark, rest = self._held.partition(END)
                if not (mark or is_last):
                    break
                found = list(calls_in(inner))
                calls += found
                said += "" if found else BEGIN + inner + mark
                self._held, self._is_open = rest.lstrip() if found else rest, False
                self._has_said = True
            elif not self._has_said and self._may_be_alone():
                if not is_last:
                    break
                found = list(calls_in(self._held.strip().removeprefix(ALONE)))
                if found and all(call.name in self._names for call in found):
                    calls, self._held = found, ""
                self._has_said = True
            else:
                before, mark, rest = self._held.partition(BEGIN)
                if not mark:
                    break
                said += before.rstrip()
                self._held, self._is_open = rest, True
        if not self._is_open and (self._has_said or not self._may_be_alone()):
            certain = len(self._held)
            if not is_last:
                certain -= overlap(self._held, BEGIN)
                # Spaces may be those before a call.
                certain = len(self._held[:certain].rstrip())
            said, self._held = said + self._held[:certain], self._held[certain:]
        self._has_said = self._has_said or bool(said.strip())
        self.count += len(calls)
        return said, calls

    def _may_be_alone(self) -> bool:
        """Returns True while the answer may be nothing but calls without marks around them."""
        begun = self._held.lstrip()
        return begun.startswith(("{", "[", ALONE)) or (bool(begun) and ALONE.startswith(begun))

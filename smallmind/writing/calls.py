"""Finds calls of tools in what a model writes; see `text.tools` for their forms."""

from smallmind.text.tools import FORMS, Call, CallForm, Tools, calls_in
from smallmind.writing.decoder import overlap

ALONE = "<|python_tag|>"  # before calls that are all of an answer


class CallDivider:
    """Divides an answer, piece by piece, into what it says and the calls in it.

    `tools` are those that there are: an object without a mark around it is only taken for a call of
    one of these. `form` is the one in which the model writes calls.
    """

    def __init__(self, tools: Tools, form: CallForm | None = None) -> None:
        self._tools, self._form = tools, form or FORMS[0]
        self._held = ""
        self._has_said = False  # more than spaces, or a call
        self._is_open = False  # within the marks of a call
        self._is_after = False  # after a call, and the spaces after it
        self.count = 0  # of the calls so far

    def add(self, piece: str, is_last: bool = False) -> tuple[str, list[Call]]:
        """The next piece -> what is said and called in it, as far as that is certain."""
        self._held += piece
        said, calls, form = "", [], self._form
        while True:
            if self._is_after:
                self._held = self._held.lstrip()
                self._is_after = not self._held
            if self._is_open:
                inner, mark, rest = self._held, "", ""
                if form.end:
                    inner, mark, rest = self._held.partition(form.end)
                if not (mark or is_last):
                    break
                found = form.read(inner, self._tools) or calls_in(inner)
                calls += found
                said += "" if found else form.begin + inner + mark
                self._held, self._is_open = rest, False
                self._has_said, self._is_after = True, bool(found)
            elif not self._has_said and self._may_be_alone():
                if not is_last:
                    break
                found = calls_in(self._held.strip().removeprefix(ALONE))
                if found and all(call.name in self._tools for call in found):
                    calls, self._held = found, ""
                self._has_said = True
            else:
                before, mark, rest = self._held.partition(form.begin)
                if not mark:
                    break
                said += before.rstrip()
                self._held, self._is_open = rest, True
        if not self._is_open and (self._has_said or not self._may_be_alone()):
            certain = len(self._held)
            if not is_last:
                certain -= overlap(self._held, form.begin)
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

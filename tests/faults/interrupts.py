"""Ctrl-C at every moment of a call at which Python notices it."""

import dis
import functools
import sys

# A handler runs after a call, at the start of a function and at the end of a round of a loop.
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD")


def interrupted_everywhere(action, *files):
    """Calls action with KeyboardInterrupt at the 1st, the 2nd, ... moment within these files.

    Yields each KeyboardInterrupt, which keeps its frames alive as in a notebook, until action ends.
    """
    moment = 0
    while True:
        try:
            _call(action, moment, files)
            return
        except KeyboardInterrupt as error:
            yield error
        moment += 1


def _call(action, moment, files):
    left = moment

    def trace(frame, event, _):
        nonlocal left
        code, caller = frame.f_code, frame.f_back
        in_finaliser = "__del__" in (code.co_name, caller and caller.f_code.co_name)
        if in_finaliser or not code.co_filename.endswith(files):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)


@functools.cache
def _moments(code):
    """The offsets of the instructions that follow a check for signals."""
    moments, checked = set(), False
    for instruction in dis.get_instructions(code):
        if checked:
            moments.add(instruction.offset)
        checked = instruction.opname.startswith(CHECKS)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            moments.add(instruction.argval)
    return moments

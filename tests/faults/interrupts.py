"""Ctrl-C at every moment of a call at which Python notices it."""

import dis
import functools
import sys
from collections import Counter
from pathlib import Path

# A handler runs after a call, at the start of a function and at the end of a round of a loop.
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD")


def interrupted_everywhere(action, *files, every=1):
    """Calls action with KeyboardInterrupt at the 1st, the 2nd, ... moment within these files.

    Or only at `every` so many. Yields each KeyboardInterrupt, which keeps its frames alive as in a
    notebook, until action ends.
    """
    moment = 0
    while True:
        try:
            _call(action, moment, files)
            return
        except KeyboardInterrupt as error:
            yield error
        moment += every


def interrupted(action, moment, *files):
    """Calls action with KeyboardInterrupt at one of these moments -> whether it came that far."""
    try:
        _call(action, moment, files)
    except KeyboardInterrupt:
        return True
    return False


def count_moments(action, *files):
    """Calls action -> file -> the number of its moments there."""
    passed = []
    _trace(action, files, lambda frame: passed.append(Path(frame.f_code.co_filename).name))
    return Counter(passed)


def _call(action, moment, files):
    left = moment

    def at_moment(_):
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt

    _trace(action, files, at_moment)


def _trace(action, files, at_moment):
    """Calls action, and at_moment with the frame at each moment within these files."""

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(files) or _in_finaliser(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            at_moment(frame)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)


def _in_finaliser(frame):
    """True if Python would swallow an exception here."""
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


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

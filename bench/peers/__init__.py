"""Contestants, each in a process of its own; they answer commands."""

import json
import sys
from collections.abc import Callable
from typing import Any


def serve(**answers: Callable[[Any], Any]) -> None:
    """Answers each line of standard input, `{"name": argument}`, with answers[name](argument)."""
    for line in sys.stdin:
        ((name, argument),) = json.loads(line).items()
        print(json.dumps(answers[name](argument)), flush=True)

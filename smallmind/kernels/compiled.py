"""The compiled kernels under one name: the same functions and arguments as `reference`.

Their own docstrings say only how they differ from their plain twins. The module of a kernel is
imported once it is asked for.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from smallmind.kernels import reference
from smallmind.kernels.description import KERNELS


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in KERNELS:
        raise AttributeError(f"there is no kernel {name}")
    kernel: Callable[..., Any] = getattr(
        import_module(f"smallmind.kernels.{KERNELS[name].module}"), name
    )
    docs = map(inspect.getdoc, (getattr(reference, name), kernel))
    kernel.__doc__ = "\n\n".join(filter(None, docs))
    globals()[name] = kernel  # from now on it is found without asking
    return kernel


def __dir__() -> list[str]:
    return sorted({*globals(), *KERNELS})

"""The compiled kernels under one name: the same functions and arguments as `reference`.

Their own docstrings say only how they differ from their plain twins.
"""

import inspect
from importlib import import_module
from typing import Any

from smallmind.kernels import reference
from smallmind.kernels.description import KERNELS

for _name, _description in KERNELS.items():
    _kernel = getattr(import_module(f"smallmind.kernels.{_description.module}"), _name)
    _docs = map(inspect.getdoc, (getattr(reference, _name), _kernel))
    _kernel.__doc__ = "\n\n".join(filter(None, _docs))
    globals()[_name] = _kernel


def __getattr__(name: str) -> Any:
    raise AttributeError(f"there is no kernel {name}")

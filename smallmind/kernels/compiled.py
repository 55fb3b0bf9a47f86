"""The compiled kernels under one name: the same functions and arguments as `reference`."""

from importlib import import_module
from typing import Any

import smallmind.kernels.reference  # noqa: F401  # whose functions are described
from smallmind.kernels.description import KERNELS

for _name, _description in KERNELS.items():
    _module = import_module(f"smallmind.kernels.{_description.module}")
    globals()[_name] = getattr(_module, _name)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"there is no kernel {name}")

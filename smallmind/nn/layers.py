"""Which layers a model is made of: the config names a part, and `parts` says where it is."""

from typing import Any

from smallmind import parts
from smallmind.nn.layer import Scope
from smallmind.nn.linear import Linear
from smallmind.nn.lora import AdaptedLinear


def build(slot: str, scope: Scope, *arguments: Any, **named: Any) -> Any:
    """Builds the layer of a model for a slot of `parts.LAYERS`, such as "norm"."""
    return parts.load(parts.LAYERS[slot], scope.config.part(slot))(scope, *arguments, **named)


def build_linear(scope: Scope, shape: tuple[int, int], **options: Any) -> Linear:
    """Builds each matrix of the model, with its bias and its adapter, if the scope has one.

    Options are those of `Linear`.
    """
    kind = AdaptedLinear if scope.adapter else Linear
    return kind(scope, shape, **options)

"""Which layers a model is made of: the config names a kind, and `parts` says where it is.

Each function takes the scope of the layer.
"""

from typing import Any

from smallmind import parts
from smallmind.nn.layer import Branch, Norm, Scope
from smallmind.nn.linear import Linear
from smallmind.nn.lora import AdaptedLinear


def build_norm(scope: Scope, gain: float = 1.0) -> Norm:
    """The norm before attention, MLP and head. All its gains start at `gain`."""
    return parts.load(parts.NORMS, scope.config.norm)(scope, gain)


def build_mlp(scope: Scope) -> Branch:
    """Builds the part that mixes the channels of a token."""
    return parts.load(parts.MLPS, scope.config.mlp)(scope)


def build_linear(scope: Scope, shape: tuple[int, int], **options: Any) -> Linear:
    """Builds each matrix of the model, with its bias and its adapter, if the scope has one.

    Options are those of `Linear`.
    """
    kind = AdaptedLinear if scope.adapter else Linear
    return kind(scope, shape, **options)

"""Which layers a model is made of: the config names a kind, and `parts` says where it is.

Each function takes the scope of the layer.
"""

from typing import Any

from smallmind import parts
from smallmind.checks import InputError
from smallmind.nn.embedding import Embedding
from smallmind.nn.head import TiedHead
from smallmind.nn.layer import Branch, Norm, Scope
from smallmind.nn.linear import Linear
from smallmind.nn.lora import AdaptedLinear
from smallmind.nn.parameters import Role


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


def build_head(scope: Scope, embedding: Embedding) -> TiedHead | Linear:
    """The residual stream -> logits. A head has no bias, even if the model has biases."""
    if scope.config.tie_weights:
        if scope.adapter and "head" in scope.adapter.on:
            raise InputError(
                "the head of this model has no matrix of its own, the head is the embedding: leave "
                "head out of lora_on"
            )
        return TiedHead(scope, embedding)
    shape = scope.config.n_embd, scope.config.vocab_size
    return build_linear(scope.adapted("head"), shape, role=Role.HEAD, bias=False)

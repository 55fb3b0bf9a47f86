"""Which layers a model is made of: the config names a kind, and `parts` says where it is.

Each function takes the scope of the layer.
"""

from smallmind import parts
from smallmind.nn.embedding import Embedding
from smallmind.nn.head import Head, TiedHead, UntiedHead
from smallmind.nn.layer import Branch, Norm, Scope


def build_norm(scope: Scope, gain: float = 1.0) -> Norm:
    """The norm before attention, MLP and head. All its gains start at `gain`."""
    norm: Norm = parts.load(parts.NORMS, scope.config.norm)(scope, gain)
    return norm


def build_mlp(scope: Scope) -> Branch:
    """Builds the part that mixes the channels of a token."""
    mlp: Branch = parts.load(parts.MLPS, scope.config.mlp)(scope)
    return mlp


def build_head(scope: Scope, embedding: Embedding) -> Head:
    """The residual stream -> logits."""
    return TiedHead(scope, embedding) if scope.config.tie_weights else UntiedHead(scope)

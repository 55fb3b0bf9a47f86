"""The layers that a model is made of. Add a new kind of norm, attention, MLP or embedding here.

Each function takes the scope of the layer, whose config says which kind to build.
"""

from smallmind.nn.attention import Attention
from smallmind.nn.embedding import Embedding
from smallmind.nn.head import Head, TiedHead, UntiedHead
from smallmind.nn.layernorm import LayerNorm
from smallmind.nn.mlp import MLP
from smallmind.nn.scope import Scope


def build_embedding(scope: Scope) -> Embedding:
    """Tokens and their positions -> the residual stream."""
    return Embedding(scope)


def build_norm(scope: Scope) -> LayerNorm:
    """The norm before attention, before the MLP and before the head."""
    return LayerNorm(scope)


def build_attention(scope: Scope) -> Attention:
    """The layer that mixes tokens."""
    return Attention(scope)


def build_mlp(scope: Scope) -> MLP:
    """The layer that mixes the channels of a token."""
    return MLP(scope)


def build_head(scope: Scope, embedding: Embedding) -> Head:
    """The residual stream -> logits."""
    return TiedHead(scope, embedding) if scope.config.tie_weights else UntiedHead(scope)

"""The compiled kernels under one name: the same functions and arguments as `reference`."""

from smallmind.kernels.adamw import adamw
from smallmind.kernels.attention import attention, attention_backward
from smallmind.kernels.cross_entropy import cross_entropy
from smallmind.kernels.distillation import distillation, top_k_logits
from smallmind.kernels.dropout import dropout
from smallmind.kernels.embedding import embedding, embedding_backward
from smallmind.kernels.gelu import gelu, gelu_backward
from smallmind.kernels.layernorm import layernorm, layernorm_backward
from smallmind.kernels.matmul import matmul, matmul_gelu, matmul_transpose_a, matmul_transpose_b
from smallmind.kernels.muon import muon
from smallmind.kernels.reduce import column_sum, sum_of_squares

__all__ = [
    "adamw",
    "attention",
    "attention_backward",
    "column_sum",
    "cross_entropy",
    "distillation",
    "dropout",
    "embedding",
    "embedding_backward",
    "gelu",
    "gelu_backward",
    "layernorm",
    "layernorm_backward",
    "matmul",
    "matmul_gelu",
    "matmul_transpose_a",
    "matmul_transpose_b",
    "muon",
    "sum_of_squares",
    "top_k_logits",
]

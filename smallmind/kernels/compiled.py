"""The compiled kernels under one name: the same functions and arguments as `reference`."""

from smallmind.kernels.adamw import adamw
from smallmind.kernels.attention import attention
from smallmind.kernels.attention_backward import attention_backward
from smallmind.kernels.bigrams import bigrams
from smallmind.kernels.cached_attention import cached_attention, keep_keys_values
from smallmind.kernels.cross_entropy import cross_entropy
from smallmind.kernels.distillation import distillation, top_k_logits
from smallmind.kernels.documents import document_starts
from smallmind.kernels.dropout import dropout
from smallmind.kernels.embedding import embedding, embedding_backward
from smallmind.kernels.gelu import gelu, gelu_backward
from smallmind.kernels.head_norm import norm_heads, norm_heads_backward
from smallmind.kernels.layernorm import layernorm, layernorm_backward
from smallmind.kernels.matmul import matmul, matmul_gelu, matmul_transpose_a, matmul_transpose_b
from smallmind.kernels.mix import copy_columns, mix, mix_backward
from smallmind.kernels.muon import average_gradient, muon
from smallmind.kernels.reduce import column_sum, sum_of_squares
from smallmind.kernels.relu2 import relu2, relu2_backward
from smallmind.kernels.rmsnorm import rmsnorm, rmsnorm_backward
from smallmind.kernels.rope import rope
from smallmind.kernels.softcap import softcap, softcap_backward
from smallmind.kernels.swiglu import swiglu, swiglu_backward
from smallmind.kernels.vectors import add_vectors, clear, copy_vector

__all__ = [
    "adamw",
    "add_vectors",
    "attention",
    "attention_backward",
    "average_gradient",
    "bigrams",
    "cached_attention",
    "clear",
    "column_sum",
    "copy_columns",
    "copy_vector",
    "cross_entropy",
    "distillation",
    "document_starts",
    "dropout",
    "embedding",
    "embedding_backward",
    "gelu",
    "gelu_backward",
    "keep_keys_values",
    "layernorm",
    "layernorm_backward",
    "matmul",
    "matmul_gelu",
    "matmul_transpose_a",
    "matmul_transpose_b",
    "mix",
    "mix_backward",
    "muon",
    "norm_heads",
    "norm_heads_backward",
    "relu2",
    "relu2_backward",
    "rmsnorm",
    "rmsnorm_backward",
    "rope",
    "softcap",
    "softcap_backward",
    "sum_of_squares",
    "swiglu",
    "swiglu_backward",
    "top_k_logits",
]

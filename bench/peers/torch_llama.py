"""Llama in PyTorch, as its users write it, and its extension `modern`."""

import torch
from torch import nn
from torch.nn import functional

from bench.peers.job import Sizes

EPSILON = 1e-5
THETA = 1e4


class Rotary(nn.Module):
    """Rotates queries and keys (B, H, T, D) by their positions."""

    def __init__(self, T: int, D: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(T), THETA ** (-torch.arange(0, D, 2) / D))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        # Tables in float32 would widen what autocast computes in bfloat16.
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return x * cos + torch.cat((-b, a), dim=-1) * sin


class Mix(nn.Module):
    """a x + b y with learned a and b."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.weight
        return a * x + b * y


class Attention(nn.Module):
    """`modern` normalises queries and keys, and mixes the first block's values into the others."""

    def __init__(self, sizes: Sizes, rotary: Rotary, is_modern: bool, is_first: bool) -> None:
        super().__init__()
        C, self.n_head = sizes.n_embd, sizes.n_head
        self.rotary = rotary
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.projection = nn.Linear(C, C, bias=False)
        self.query_norm = self.key_norm = nn.Identity()
        if is_modern:
            self.query_norm = nn.RMSNorm(C // self.n_head, eps=EPSILON)
            self.key_norm = nn.RMSNorm(C // self.n_head, eps=EPSILON)
        self.value_residual = Mix() if is_modern and not is_first else None

    def forward(
        self, x: torch.Tensor, first_values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, T, C = x.shape
        q, k, v = (
            y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.qkv(x).split(C, dim=2)
        )
        if self.value_residual is not None:
            v = self.value_residual(v, first_values)
        q, k = self.rotary(self.query_norm(q)), self.rotary(self.key_norm(k))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(heads.transpose(1, 2).reshape(B, T, C)), v


class SwiGLU(nn.Module):
    def __init__(self, C: int) -> None:
        super().__init__()
        W = -(-8 * C // 3 // 32) * 32
        self.expansion = nn.Linear(C, 2 * W, bias=False)
        self.projection = nn.Linear(W, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.expansion(x).chunk(2, dim=-1)
        return self.projection(functional.silu(gate) * up)


class SquaredReLU(nn.Module):
    def __init__(self, C: int) -> None:
        super().__init__()
        self.expansion = nn.Linear(C, 4 * C, bias=False)
        self.projection = nn.Linear(4 * C, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(functional.relu(self.expansion(x)).square())


class Block(nn.Module):
    """`modern` mixes the embedding into its input."""

    def __init__(self, sizes: Sizes, rotary: Rotary, is_modern: bool, is_first: bool) -> None:
        super().__init__()
        C = sizes.n_embd
        self.embedding_residual = Mix() if is_modern else None
        self.attention_norm = nn.RMSNorm(C, eps=EPSILON)
        self.attention = Attention(sizes, rotary, is_modern, is_first)
        self.mlp_norm = nn.RMSNorm(C, eps=EPSILON)
        self.mlp = SquaredReLU(C) if is_modern else SwiGLU(C)

    def forward(
        self, x: torch.Tensor, embedding: torch.Tensor, first_values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.embedding_residual is not None:
            x = self.embedding_residual(x, embedding)
        y, values = self.attention(self.attention_norm(x), first_values)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), values


class Model(nn.Module):
    """`modern` adds an embedding of the last two tokens to that of each token."""

    def __init__(self, sizes: Sizes, is_modern: bool) -> None:
        super().__init__()
        V, C = sizes.V, sizes.n_embd
        self.token_embedding = nn.Embedding(V, C)
        self.bigram_embedding = nn.Embedding(V * V, C) if is_modern else None
        rotary = Rotary(sizes.T, C // sizes.n_head)
        self.blocks = nn.ModuleList(
            Block(sizes, rotary, is_modern, i == 0) for i in range(sizes.n_layer)
        )
        self.final_norm = nn.RMSNorm(C, eps=EPSILON)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(ids)
        if self.bigram_embedding is not None:
            before = functional.pad(ids[:, :-1], (1, 0))
            x = x + self.bigram_embedding(before * self.token_embedding.num_embeddings + ids)
        embedding, first_values = x, None
        for block in self.blocks:
            x, values = block(x, embedding, first_values)
            first_values = values if first_values is None else first_values
        logits = functional.linear(self.final_norm(x), self.token_embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

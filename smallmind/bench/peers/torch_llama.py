"""Llama in PyTorch, as its users write it, and what `modern` adds to it."""

import torch
from torch import nn
from torch.nn import functional

from smallmind.settings.config import ModelConfig


class Rotary(nn.Module):
    """Rotates queries and keys (B, H, T, D) by their positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        T, D = config.block_size, config.head_channels
        angles = torch.outer(torch.arange(T), config.rope_theta ** (-torch.arange(0, D, 2) / D))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T, (a, b) = x.shape[-2], x.chunk(2, dim=-1)
        # Tables in float32 would widen what autocast computes in bfloat16.
        cos, sin = self.cos[:T].to(x.dtype), self.sin[:T].to(x.dtype)
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
    """Causal, with rotary positions; may mix the first block's values into those of the others."""

    def __init__(self, config: ModelConfig, rotary: Rotary, is_first: bool) -> None:
        super().__init__()
        C, D, H = config.n_embd, config.head_channels, config.n_head
        self.widths = [H * D, config.kv_heads * D, config.kv_heads * D]
        self.rotary, self.grouped = rotary, config.kv_heads < H
        self.head_channels = D
        self.qkv = nn.Linear(C, sum(self.widths), bias=False)
        self.projection = nn.Linear(H * D, C, bias=False)
        self.query_norm = self.key_norm = nn.Identity()
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(D, eps=config.norm_epsilon)
            self.key_norm = nn.RMSNorm(D, eps=config.norm_epsilon)
        self.value_residual = Mix() if config.value_residual and not is_first else None

    def forward(
        self, x: torch.Tensor, first_values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (
            y.unflatten(2, (-1, self.head_channels)).transpose(1, 2)
            for y in self.qkv(x).split(self.widths, dim=2)
        )
        if self.value_residual is not None:
            v = self.value_residual(v, first_values)
        q, k = self.rotary(self.query_norm(q)), self.rotary(self.key_norm(k))
        heads = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.grouped
        )
        return self.projection(heads.transpose(1, 2).flatten(2)), v


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, W = config.n_embd, config.hidden_size
        self.expansion = nn.Linear(C, 2 * W, bias=False)
        self.projection = nn.Linear(W, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.expansion(x).chunk(2, dim=-1)
        return self.projection(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, rotary: Rotary, is_first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.n_embd, eps=config.norm_epsilon)
        self.attention = Attention(config, rotary, is_first)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: torch.Tensor, first_values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, values = self.attention(self.attention_norm(x), first_values)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), values


class Model(nn.Module):
    """May add an embedding of the last two tokens to that of each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        V, C = config.vocab_size, config.n_embd
        self.token_embedding = nn.Embedding(V, C)
        self.bigram_embedding = nn.Embedding(V * V, C) if config.bigram_rows else None
        rotary = Rotary(config)
        self.blocks = nn.ModuleList(Block(config, rotary, i == 0) for i in range(config.n_layer))
        self.final_norm = nn.RMSNorm(C, eps=config.norm_epsilon)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """-> the loss, or without targets the logits."""
        x = self.token_embedding(ids)
        if self.bigram_embedding is not None:
            before = functional.pad(ids[:, :-1], (1, 0))
            x = x + self.bigram_embedding(before * self.token_embedding.num_embeddings + ids)
        first_values = None
        for block in self.blocks:
            x, values = block(x, first_values)
            first_values = values if first_values is None else first_values
        logits = functional.linear(self.final_norm(x), self.token_embedding.weight)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

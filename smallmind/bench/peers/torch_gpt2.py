"""GPT-2 in PyTorch, as its users write it: modules and fused attention."""

import torch
from torch import nn
from torch.nn import functional

from smallmind.bench.peers.job import Sizes


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        C = sizes.n_embd
        self.n_head = sizes.n_head
        self.attention_norm, self.mlp_norm = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(C, 3 * C), "projection": nn.Linear(C, C)})
        self.mlp = nn.ModuleDict(
            {"expansion": nn.Linear(C, 4 * C), "projection": nn.Linear(4 * C, C)}
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x)).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in qkv)
        heads = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.attention["projection"](heads.transpose(1, 2).reshape(B, T, C))
        hidden = functional.gelu(self.mlp["expansion"](self.mlp_norm(x)), approximate="tanh")
        return x + self.mlp["projection"](hidden)


class Model(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(sizes.V, sizes.n_embd)
        self.position_embedding = nn.Embedding(sizes.T, sizes.n_embd)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.n_layer))
        self.final_norm = nn.LayerNorm(sizes.n_embd)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.logits(ids)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = self.position_embedding.weight
        rows = rows[: ids.shape[1]] if positions is None else rows[positions]
        x = self.token_embedding(ids) + rows
        for block in self.blocks:
            x = block(x, mask)
        return functional.linear(self.final_norm(x), self.token_embedding.weight)

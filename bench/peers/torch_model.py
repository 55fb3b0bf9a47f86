"""The step in PyTorch, as its users write it: modules, fused attention, fused AdamW."""

import torch
from torch import nn
from torch.nn import functional

from bench.peers import job
from bench.peers.job import Job, Sizes, Step


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x)).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in qkv)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        x = self.token_embedding(ids) + self.position_embedding.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.final_norm(x), self.token_embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(work: Job, compiled: bool, bfloat16: bool) -> Step:
    """The step, if compiled by torch.compile, if bfloat16 with autocast."""
    model = Model(work.sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(work.weights[name])
            # A linear layer's matrix is (out, in) here.
            is_linear = value.ndim == 2 and "embedding" not in name
            parameter.copy_(value.T if is_linear else value)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": job.WEIGHT_DECAY}, {"params": vectors}],
        lr=job.LEARNING_RATE,
        betas=job.BETAS,
        eps=job.EPSILON,
        weight_decay=0.0,
        fused=True,
    )
    forward = torch.compile(model) if compiled else model

    def step(index: int) -> float:
        ids, targets = (torch.from_numpy(array) for array in work.batch(index))
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = forward(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step

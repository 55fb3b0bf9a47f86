"""GPT-2 as readers of the book write it: single operations of PyTorch, a head of its own."""

import math

import torch
from torch import nn

from smallmind.bench.peers import torch_gpt2


class Norm(nn.Module):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.epsilon = norm.weight, norm.bias, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + self.epsilon)) + self.bias


def gelu(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
    return 0.5 * x * (1 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(self, block: torch_gpt2.Block) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(block.attention_norm), Norm(block.mlp_norm)
        self.n_head, self.mlp = block.n_head, block.mlp
        self.projection, qkv = block.attention["projection"], block.attention["qkv"]
        weights, biases = qkv.weight.detach().chunk(3), qkv.bias.detach().chunk(3)
        self.qkv = nn.ModuleList(nn.Linear(len(bias), len(bias)) for bias in biases)
        with torch.no_grad():
            for linear, weight, bias in zip(self.qkv, weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        normed, D = self.attention_norm(x), C // self.n_head
        q, k, v = (each(normed).view(B, T, self.n_head, D).transpose(1, 2) for each in self.qkv)
        scores = q @ k.transpose(2, 3)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        heads = torch.softmax(scores / D**0.5, dim=-1) @ v
        x = x + self.projection(heads.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["projection"](gelu(self.mlp["expansion"](self.mlp_norm(x))))


class Model(nn.Module):
    """It has the weights of another model, some of which it shares."""

    def __init__(self, model: torch_gpt2.Model) -> None:
        super().__init__()
        self.token_embedding = model.token_embedding
        self.position_embedding = model.position_embedding
        self.blocks = nn.Sequential(*map(Block, model.blocks))
        self.final_norm = Norm(model.final_norm)
        V, C = model.token_embedding.weight.shape
        self.head = nn.Linear(C, V, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(model.token_embedding.weight)

    def logits(self, ids: torch.Tensor, *_: None) -> torch.Tensor:
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        return self.head(self.final_norm(self.blocks(x)))

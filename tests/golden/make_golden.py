"""Writes the golden files next to it with PyTorch 2.13 (python tests/golden/make_golden.py).

The model is written with PyTorch's own layers and differentiated by its autograd. Only the names
of parameters, their shapes and the file format come from smallmind.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from smallmind import safetensors
from smallmind.config import ModelConfig
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role

B, STEPS = 3, 10


def logits_of(p, ids, config):
    H, C = config.n_head, config.n_embd
    T = ids.shape[1]

    def linear(x, name):
        y = x @ p[f"{name}.weight"]
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def norm(x, name):
        return F.layer_norm(x, (C,), p[f"{name}.weight"], p.get(f"{name}.bias"))

    x = p["token_embedding.weight"][ids] + p["position_embedding.weight"][:T]
    for i in range(config.n_layer):
        block = f"blocks.{i}"
        qkv = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv")
        q, k, v = (t.view(len(ids), T, H, C // H).transpose(1, 2) for t in qkv.split(C, dim=2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        heads = heads.transpose(1, 2).reshape(len(ids), T, C)
        x = x + linear(heads, f"{block}.attention.projection")
        hidden = linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.expansion")
        x = x + linear(F.gelu(hidden, approximate="tanh"), f"{block}.mlp.projection")
    head = p["token_embedding.weight"].T if config.tie_weights else p["head.weight"]
    return norm(x, "final_norm") @ head


def make(path, config, seed):
    generator = torch.Generator().manual_seed(seed)
    p = {}
    for spec in declare_parameters(config).specs:
        # Larger than a real initialisation, so that every part of the model matters.
        value = 0.2 * torch.randn(spec.shape, generator=generator)
        if spec.role == Role.GAIN:
            value = value + 1
        p[spec.name] = value.requires_grad_()
    data = torch.randint(0, config.vocab_size, (B, config.block_size + 1), generator=generator)
    ids, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()

    def loss_of():
        logits = logits_of(p, ids, config)
        return logits, F.cross_entropy(logits.reshape(-1, config.vocab_size), targets.reshape(-1))

    tensors = {f"parameters/{name}": value.detach().numpy().copy() for name, value in p.items()}
    logits, loss = loss_of()
    loss.backward()
    tensors["logits"] = logits.detach().numpy()
    tensors["loss"] = loss.detach().numpy().reshape(1)
    tensors |= {f"gradients/{name}": value.grad.numpy().copy() for name, value in p.items()}

    optimizer = torch.optim.AdamW(
        [
            {"params": [v for v in p.values() if v.ndim == 2], "weight_decay": 0.1},
            {"params": [v for v in p.values() if v.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.99),
    )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    tensors["losses"] = np.array(losses, np.float32)
    tensors["ids"] = ids.numpy().astype(np.int32)
    tensors["targets"] = targets.numpy().astype(np.int32)
    settings = safetensors.to_json({name: getattr(config, name) for name in vars(config)})
    safetensors.write(path, tensors, {"config": settings, "torch": torch.__version__})


if __name__ == "__main__":
    here = Path(__file__).parent
    tied = ModelConfig(vocab_size=65, block_size=17, n_layer=2, n_head=3, n_embd=24)
    untied = ModelConfig(
        vocab_size=33, block_size=9, n_layer=2, n_head=2, n_embd=20, tie_weights=False, bias=False
    )
    make(here / "tied.safetensors", tied, seed=1)
    make(here / "untied.safetensors", untied, seed=2)

"""Writes the golden files next to it with PyTorch 2.13 (python tests/golden/make_golden.py).

The model is written with PyTorch's own layers and differentiated by its autograd. Only the names
of parameters, their shapes and the file format come from smallmind.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from smallmind.files import safetensors
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role
from smallmind.settings.config import ModelConfig

B, STEPS = 3, 10


def rotate(x, theta):
    """x (B, H, T, D) -> the same, rotated as in Llama: pairs of channels D / 2 apart."""
    T, D = x.shape[-2:]
    half = D // 2
    angles = torch.outer(torch.arange(T), theta ** (-torch.arange(half) / max(1, half)))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def logits_of(p, ids, config):
    H, G, C, D = config.n_head, config.kv_heads, config.n_embd, config.head_channels
    B, T = ids.shape

    def linear(x, name):
        y = x @ p[f"{name}.weight"]
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def norm(x, name):
        if config.norm == "rmsnorm":
            return F.rms_norm(x, (C,), p[f"{name}.weight"], eps=config.norm_epsilon)
        return F.layer_norm(
            x, (C,), p[f"{name}.weight"], p.get(f"{name}.bias"), config.norm_epsilon
        )

    def attend(x, name, first_values):
        q, k, v = linear(x, f"{name}.qkv").split((H * D, G * D, G * D), dim=2)
        if config.value_residual:
            if first_values is None:
                first_values = v
            else:
                a, b = p[f"{name}.value_residual.weight"]
                v = a * v + b * first_values
        q, k, v = (t.view(B, T, -1, D).transpose(1, 2) for t in (q, k, v))
        if config.qk_norm:
            q = F.rms_norm(q, (D,), p[f"{name}.query_norm.weight"], eps=config.norm_epsilon)
            k = F.rms_norm(k, (D,), p[f"{name}.key_norm.weight"], eps=config.norm_epsilon)
        if config.position == "rope":
            q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G < H)
        return linear(
            heads.transpose(1, 2).reshape(B, T, H * D), f"{name}.projection"
        ), first_values

    def perceptron(x, name):
        hidden = linear(x, f"{name}.expansion")
        if config.mlp == "swiglu":
            gate, up = hidden.chunk(2, dim=2)
            hidden = F.silu(gate) * up
        elif config.mlp == "relu2":
            hidden = F.relu(hidden).square()
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return linear(hidden, f"{name}.projection")

    x = p["token_embedding.weight"][ids]
    if config.position == "learned":
        x = x + p["position_embedding.weight"][:T]
    if config.bigram_rows:
        before = F.pad(ids[:, :-1], (1, 0))
        x = x + p["bigram_embedding.weight"][config.vocab_size * before + ids]
    x0, first_values = x, None
    for i in range(config.n_layer):
        block = f"blocks.{i}"
        if config.x0_scalars:
            a, b = p[f"{block}.embedding_residual.weight"]
            x = a * x + b * x0
        y, first_values = attend(
            norm(x, f"{block}.attention_norm"), f"{block}.attention", first_values
        )
        x = x + y
        x = x + perceptron(norm(x, f"{block}.mlp_norm"), f"{block}.mlp")
    head = p["token_embedding.weight"].T if config.tie_weights else p["head.weight"]
    logits = norm(x, "final_norm") @ head
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


def make(path, config, seed):
    generator = torch.Generator().manual_seed(seed)
    p = {}
    for spec in declare_parameters(config).specs:
        # Larger than a real initialisation, so that every part of the model matters.
        value = 0.2 * torch.randn(spec.shape, generator=generator)
        if spec.role in (Role.GAIN, Role.SCALAR):
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
    modern = {"norm": "rmsnorm", "position": "rope", "qk_norm": True, "bias": False}
    shapes = {
        "tied": {"vocab_size": 65, "block_size": 17, "n_layer": 2, "n_head": 3, "n_embd": 24},
        "untied": {"vocab_size": 33, "block_size": 9, "n_layer": 2, "n_head": 2, "n_embd": 20},
        "llama": {"vocab_size": 31, "block_size": 11, "n_layer": 3, "n_head": 4, "n_embd": 20},
        "everything": {"vocab_size": 17, "block_size": 13, "n_layer": 3, "n_head": 3, "n_embd": 15},
        "wide_heads": {"vocab_size": 19, "block_size": 10, "n_layer": 2, "n_head": 3, "n_embd": 16},
    }
    swiglu, wide = {"mlp": "swiglu", "mlp_width": 37}, {"mlp": "swiglu", "mlp_width": 23}
    residuals = {"value_residual": True, "x0_scalars": True, "bigram_rows": 1000}
    parts = {
        "tied": {},
        "untied": {"tie_weights": False, "bias": False},
        "llama": {**modern, **swiglu, "n_kv_head": 2, "tie_weights": False},
        "everything": {**modern, **residuals, "mlp": "relu2", "n_kv_head": 1, "rope_theta": 500.0},
        "wide_heads": {**modern, **wide, "n_kv_head": 1, "head_size": 10, "norm_epsilon": 0.02},
    }
    parts["everything"]["logit_softcap"] = 5.0
    for seed, (name, shape) in enumerate(shapes.items(), 1):
        make(here / f"{name}.safetensors", ModelConfig(**shape, **parts[name]), seed)

"""The step in PyTorch: eager or compiled, with autocast or without, and fused AdamW."""

import numpy as np
import torch
from torch import nn

from smallmind.bench.peers import job, torch_gpt2, torch_llama
from smallmind.bench.peers.job import Job, Step


def _model(work: Job) -> nn.Module:
    if work.arch == "gpt2":
        return torch_gpt2.Model(work.sizes)
    return torch_llama.Model(job.model_config(work.sizes, work.arch))


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Copies the weights. ValueError unless the model has the same parameters as ours."""
    parameters = dict(model.named_parameters())
    if differing := parameters.keys() ^ weights.keys():
        raise ValueError(f"only one of PyTorch's model and ours has {sorted(differing)}")
    for name, parameter in parameters.items():
        value = torch.from_numpy(weights[name])
        # A linear layer's matrix is (out, in) here.
        value = value.T if value.ndim == 2 and "embedding" not in name else value
        if value.shape != parameter.shape:
            raise ValueError(f"{name} is {(*parameter.shape,)}; ours is {(*value.shape,)}")
        parameter.copy_(value)


def build(work: Job, compiled: bool, bfloat16: bool) -> Step:
    """Returns the step, if compiled by torch.compile, if bfloat16 with autocast."""
    model = _model(work)
    load(model, work.weights)
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

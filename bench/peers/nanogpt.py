"""Runs nanoGPT's recipe for a CPU in PyTorch: python -m bench.peers.nanogpt TEXT SEED TARGET.

4 layers of 128 channels, 12 windows of 64 characters, 2000 steps of AdamW at 1e-3 with a cosine to
1e-4, 100 steps of warmup, betas 0.9 and 0.99, no dropout (its README, "on a CPU"). Evaluates every
250 steps on 20 batches. With TARGET above 0 it ends at the first evaluation that reaches it. Prints
a line of JSON.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch

from smallmind.bench.peers.job import Sizes
from smallmind.bench.peers.torch_gpt2 import Model

B, T, STEPS, EVERY, BATCHES = 12, 64, 2000, 250, 20


def rate(step: int) -> float:
    """The learning rate of a step, from 0."""
    if step < 100:
        return 1e-3 * (step + 1) / 101
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / (STEPS - 100))) * 9e-4


def main() -> None:
    text, seed, target = Path(sys.argv[1]).read_text(encoding="utf-8"), *sys.argv[2:]
    torch.manual_seed(int(seed))
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([characters[c] for c in text])
    training, held_out = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    model = Model(Sizes(B, T, 128, 4, 4, len(characters)))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            deviation = 0.02 / math.sqrt(8) if "projection" in name else 0.02
            torch.nn.init.normal_(parameter, 0, deviation)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

    def batch(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(source) - T, (B,))
        x = torch.stack([source[i : i + T] for i in starts])
        return x, torch.stack([source[i + 1 : i + T + 1] for i in starts])

    @torch.no_grad()
    def evaluate() -> float:
        return sum(float(model(*batch(held_out))) for _ in range(BATCHES)) / BATCHES

    start, evaluations, step = time.perf_counter(), [], 0
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step - 1)
        loss = model(*batch(training))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % EVERY == 0:
            evaluations.append([step, evaluate()])
            if evaluations[-1][1] <= float(target):
                break
    result = {
        "training_seconds": time.perf_counter() - start,
        "steps": step,
        "tokens": step * B * T,
        "loss": evaluations[-1][1],
        "evaluations": evaluations,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

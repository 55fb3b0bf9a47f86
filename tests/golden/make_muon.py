"""Writes muon.safetensors next to it with PyTorch 2.13 (python tests/golden/make_muon.py).

Updates the parameters of a small model by given gradients: hidden matrices with torch.optim.Muon,
queries, keys and values apart, everything else with torch.optim.AdamW.
"""

from pathlib import Path

import numpy as np

from smallmind.files import safetensors
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role
from smallmind.settings.config import ModelConfig

STEPS, KEPT = 100, (1, 10, 100)
CONFIG = ModelConfig(vocab_size=7, block_size=5, n_layer=1, n_head=2, n_embd=8, tie_weights=False)
LEARNING_RATE, MATRIX_LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-2, 0.02, (0.9, 0.99), 0.1
GRADIENTS = 7  # in the file; each step combines two of them


def gradient_of(step, gradients):
    """step (from 0), gradients (GRADIENTS, ...) -> the gradient of that step, in float64."""
    first, second = gradients[step % GRADIENTS], gradients[3 * step % GRADIENTS]
    return (1 + step / 50) * first.astype(np.float64) - 0.5 * second


def momentum_of(step):
    """The momentum of a step: it rises from 0.85 to 0.95 within 40 steps."""
    return 0.85 + 0.1 * min(1, step / 40)


def share_of_peak(step):
    """The learning rates of a step, as a share of the highest."""
    return 1 - step / 200


def make(path):
    import torch  # the test of this file uses what is above, without PyTorch

    # It multiplies in bfloat16; only in float64 can anything be compared with it closely.
    torch.Tensor.bfloat16 = torch.Tensor.clone
    random = np.random.default_rng(1)
    tensors, matrices, others, decayed = {}, {}, {}, []
    for spec in declare_parameters(CONFIG).specs:
        value = random.standard_normal(spec.shape).astype(np.float32) / 4
        gradients = random.standard_normal((GRADIENTS, *spec.shape)).astype(np.float32)
        tensors[f"parameters/{spec.name}"] = value
        tensors[f"gradients/{spec.name}"] = gradients
        if spec.role == Role.MATRIX:
            ends = np.cumsum(spec.widths or spec.shape[1:])
            for part in np.split(np.arange(spec.shape[1]), ends[:-1]):
                # (out, in), as in torch.nn.Linear: the factor of the learning rate follows from it.
                matrix = torch.tensor(value[:, part].T.astype(np.float64)).requires_grad_()
                matrices[spec.name, part[0]] = matrix, gradients[:, :, part].swapaxes(1, 2)
        else:
            others[spec.name] = torch.tensor(value.astype(np.float64)).requires_grad_(), gradients
            if spec.role in (Role.EMBEDDING, Role.HEAD):
                decayed.append(others[spec.name][0])
    muon = torch.optim.Muon(
        [parameter for parameter, _ in matrices.values()],
        lr=MATRIX_LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="original",
    )
    decays = [p for p, _ in others.values() if any(p is d for d in decayed)]
    keeps = [p for p, _ in others.values() if all(p is not d for d in decayed)]
    adamw = torch.optim.AdamW(
        [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": keeps, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
    )
    for step in range(STEPS):
        for parameter, gradients in (*matrices.values(), *others.values()):
            parameter.grad = torch.tensor(gradient_of(step, gradients))
        muon.param_groups[0]["lr"] = MATRIX_LEARNING_RATE * share_of_peak(step)
        muon.param_groups[0]["momentum"] = momentum_of(step)
        for group in adamw.param_groups:
            group["lr"] = LEARNING_RATE * share_of_peak(step)
        muon.step()
        adamw.step()
        if step + 1 in KEPT:
            for name, (parameter, _) in others.items():
                tensors[f"{step + 1}/{name}"] = parameter.detach().numpy().copy()
            for name in {name: None for name, _ in matrices}:
                parts = [p.detach().numpy().T for (n, _), (p, _) in matrices.items() if n == name]
                tensors[f"{step + 1}/{name}"] = np.hstack(parts)
    safetensors.write(path, tensors, {"torch": torch.__version__})


if __name__ == "__main__":
    make(Path(__file__).parent / "muon.safetensors")

"""Sixty steps of plain NumPy in float64 still end at the figures recorded here, on any CPU.

The tolerance allows sums in another order. Whatever changes a figure changes what every run learns:
record new figures only if that is intended.
"""

import numpy as np
import pytest

from smallmind import Distillation, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.training.records import StepRecord

TEXT = "".join(
    f'the cat {i} sat on the mat and saw {i * i % 97} dogs; "how odd!" said she.\n'
    for i in range(400)
)
RECOMPUTE = {"use_gradient_checkpointing": True}

# Settings of the model and of its training, the loss of step 60, the absolute sum of the weights.
RUNS = {
    "plain": ({}, {}, 3.083881827104353, 132.85361188346755),
    "dropout, recompute": ({"dropout": 0.1}, RECOMPUTE, 3.0913395266199895, 130.94768329768615),
    "untied, no biases": (
        {"tie_weights": False, "bias": False},
        {},
        3.048834317066754,
        133.97453483873713,
    ),
    "accumulation": (
        {},
        {"grad_accum_steps": 3, "max_grad_value": 0.01},
        3.063736027571707,
        138.63752343399105,
    ),
    "epochs": (
        {},
        {"epochs": 1, "grad_accum_steps": 8, "schedule": "plateau"},
        2.819581584340312,
        168.17730858873585,
    ),
    "teacher": ({}, {}, 1.560530495349398, 131.22740524341856),
}


def train(name):
    model_settings, settings, *_ = RUNS[name]
    tokenizer = Tokenizer(TEXT)

    def build(n_layer, seed, **more):
        more |= {"seed": seed, "backend": "numpy", "dtype": np.float64}
        return TransformerModel(tokenizer.vocab_size, 12, 12, n_layer, 3, **more)

    model, distillation = build(2, 5, **model_settings), None
    if name == "teacher":
        teacher = build(1, 9)
        Training(teacher, tokenizer, TEXT, batch_size=4, seed=3).train(steps=10)
        distillation = Distillation(teacher, learn_temperature=True)
    training = Training(model, tokenizer, TEXT, batch_size=4, seed=5, distillation=distillation)
    config = TrainingConfig(
        **{"steps": 60, "warmup_steps": 5, "val_every": 20, "val_batches": 1, **settings}
    )
    records = [record for record in training.steps(config) if isinstance(record, StepRecord)]
    weights = sum(float(np.abs(value).sum()) for value in model.parameters.values())
    return records[-1].loss, weights


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_at_the_recorded_figures(name):
    loss, weights = train(name)
    assert loss == pytest.approx(RUNS[name][2], rel=1e-9)
    assert weights == pytest.approx(RUNS[name][3], rel=1e-9)

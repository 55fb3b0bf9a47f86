"""A small model with random gradients."""

import numpy as np

from smallmind import TransformerModel


def small_model(**settings):
    return TransformerModel(11, 6, 24, 2, 3, **settings)


def with_gradients(model, seed=0):
    random = np.random.default_rng(seed)
    for gradient in model.gradients.values():
        gradient[...] = random.standard_normal(gradient.shape)
    return model

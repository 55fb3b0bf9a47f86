"""Adapters beside the tiny models of every published architecture."""

import numpy as np

from smallmind import TransformerModel
from smallmind.nn.adapter import SavedAdapter
from smallmind.settings.config import Adapter

PARTS = ("attention", "mlp")


def adapted(model, on=PARTS, rank=3, alpha=5.0, dropout=0.0, backend="numpy"):
    """A copy of the model with an adapter that changes each matrix."""
    adapter = Adapter(rank, alpha, dropout, tuple(on))
    made = TransformerModel(model.config, backend=backend, adapter=adapter)
    made.flat.write(model.parameters)
    random = np.random.default_rng(5)
    for name in made.flat.kept:
        made.parameters[name][...] = random.normal(0, 0.2, made.flat.shapes[name])
    made.flat.refresh()
    return made


def saved(model, base=None):
    """The adapter of such a model alone."""
    tensors = {name: model.parameters[name] for name in model.flat.kept}
    return SavedAdapter("here", model.config, model.adapter, base, tensors)

"""The parameters of a model as a table."""

from smallmind.nn.parameters import Parameters
from smallmind.settings.config import ModelConfig


def size_rows(config: ModelConfig, parameters: Parameters) -> list[list[str]]:
    """-> rows of a layer, the shapes of its matrices and its number of parameters, and their sum.

    One row for what all blocks have in common. If some are frozen, also how many are trained.
    """
    shapes: dict[str, list[str]] = {}  # of the matrices of each layer
    counts: dict[str, int] = {}
    for spec in parameters.specs:
        words = spec.name.split(".")
        layer = f"{config.n_layer} x {words[2]}" if words[0] == "blocks" else words[0]
        layer = layer.replace("_", " ")
        known = shapes.setdefault(layer, [])
        shape = " x ".join(map(str, spec.shape))
        if len(spec.shape) == 2 and shape not in known:
            known.append(shape)
        counts[layer] = counts.get(layer, 0) + spec.size
    rows = [[layer, ", ".join(shapes[layer]), f"{count:,}"] for layer, count in counts.items()]
    if config.tie_weights:
        rows.append(["head", "the token embedding", "0"])
    rows.append(["parameters", "", f"{parameters.count:,}"])
    trained = sum(spec.size for spec in parameters.trained)
    return rows if trained == parameters.count else [*rows, ["trained", "", f"{trained:,}"]]

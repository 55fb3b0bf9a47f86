"""The parts of a model that keep their weights while the others are trained."""

import re
from collections.abc import Collection, Mapping, Sequence

from smallmind.checks import InputError, shown_value
from smallmind.nn.parameters import ParameterSpec
from smallmind.settings.config import ModelConfig

BLOCKS = re.compile(r"blocks\.(\d{1,9})(?:-(\d{1,9}))?")


def frozen_parts(names: str | None, config: ModelConfig) -> frozenset[str]:
    """The parts that a setting names: "embedding,blocks.0-1" -> embedding, blocks.0, blocks.1.

    InputError if the model does not have one of them, or would have nothing to train.
    """
    blocks = [f"blocks.{i}" for i in range(config.n_layer)]
    parts = ["embedding", *blocks, "final_norm", *([] if config.tie_weights else ["head"])]
    frozen: set[str] = set()
    for name in names.split(",") if names is not None else ():
        named = {name.strip()}
        if match := BLOCKS.fullmatch(name.strip()):
            first, last = int(match[1]), int(match[2] or match[1])
            named = {f"blocks.{i}" for i in range(first, min(last, config.n_layer) + 1)}
        if not named or not named <= set(parts):
            numbers = f"0-{config.n_layer - 1}" if config.n_layer > 1 else "0"
            shown = ["embedding", f"blocks.{numbers}", *parts[1 + config.n_layer :]]
            tied = "; the head is the embedding" if config.tie_weights else ""
            raise InputError(
                f"freeze={shown_value(names)}: the model has no part {shown_value(name.strip())}, "
                f"only {', '.join(shown)}{tied}"
            )
        frozen |= named
    if len(frozen) == len(parts):
        raise InputError(f"freeze={shown_value(names)} leaves nothing to train; name fewer parts")
    return frozenset(frozen)


def frozen_numbers(
    frozen: Collection[str], parts: Mapping[str, range], specs: Sequence[ParameterSpec]
) -> set[int]:
    """Parts of a model -> the numbers of the parameters that are not trained then.

    With an adapter these are all but its own. InputError if that is on none of the other parts.
    """
    numbers = {number for name in frozen for number in parts[name]}
    adapter = {number for number, spec in enumerate(specs) if spec.is_adapter}
    if not adapter:
        return numbers
    if adapter <= numbers:
        raise InputError("the adapter is on no part that is trained; choose other parts")
    return numbers | (set(range(len(specs))) - adapter)

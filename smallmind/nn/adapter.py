"""An adapter as files hold it: what it is, its A and B, and the model that it belongs to."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.nn.loading import Base
from smallmind.nn.lora import low_rank_product, separate_widths
from smallmind.nn.network import declare_parameters
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import Adapter, ModelConfig
from smallmind.settings.settings import from_saved


class SavedAdapter(NamedTuple):
    """An adapter without the model that it was trained beside."""

    place: str  # where it was found, such as a path
    config: ModelConfig  # of both together
    adapter: Adapter
    base: Base | None  # None: not known
    tensors: Mapping[str, np.ndarray]  # by the names of parameters

    @classmethod
    def of(
        cls, place: str, config: Any, facts: Any, tensors: Mapping[str, np.ndarray]
    ) -> "SavedAdapter":
        """Checks the `adapter_facts` of a file. InputError if they are wrong."""
        try:
            base = facts["base"] and Base(
                *(check_type(name, facts["base"][name], str) for name in Base._fields)
            )
            adapter, model = Adapter.from_saved(facts), from_saved(ModelConfig, config)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            if model.n_layer > len(shapes):
                raise ValueError("it has too few tensors")
            flat = declare_parameters(model, adapter)
            if shapes != {name: flat.shapes[name] for name in flat.kept}:
                raise ValueError("its tensors are not those of such an adapter")
            for name, tensor in tensors.items():
                if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
                    raise ValueError(f"{name} is not finite float32")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{place} is not an adapter saved by smallmind: {error}") from None
        return cls(place, model, adapter, base, tensors)

    def added(
        self, parameters: Iterable[tuple[str, np.ndarray]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The parameters of the base by name -> those of a model that computes the same as both."""
        specs = {spec.name: spec for spec in declare_parameters(self.config).specs}
        for name, value in parameters:
            layer = name.removesuffix("weight")
            if (a := self.tensors.get(layer + "lora_a")) is not None:
                b, spec = self.tensors[layer + "lora_b"], specs[name]
                widths = separate_widths(self.config, spec.shape, spec.widths)
                value = value + low_rank_product(a, b, widths, self.adapter.scale)
            yield name, value

    def model(self, backend: str = "numpy", precision: str | None = None) -> TransformerModel:
        """Returns the adapter beside a base of zeros. With a precision it only runs."""
        model = TransformerModel.unfilled(self.config, backend, precision, adapter=self.adapter)
        model.flat.write(self.tensors)
        model.base = self.base
        return model

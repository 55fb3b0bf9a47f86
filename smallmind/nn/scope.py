"""What a layer is built from: all that it shares with the others, and its name."""

from typing import NamedTuple

from smallmind.config import ModelConfig
from smallmind.nn.parameters import (
    NO_PARAMETER,
    ZEROS,
    Constant,
    Normal,
    Parameter,
    Parameters,
    Role,
)
from smallmind.nn.workspace import Workspace


class Scope(NamedTuple):
    """What the constructor of every layer takes. Names are dotted: blocks.0.mlp.expansion."""

    workspace: Workspace
    parameters: Parameters
    config: ModelConfig
    name: str = ""

    def inner(self, name: str) -> "Scope":
        """The scope of a layer within this one."""
        return self._replace(name=f"{self.name}.{name}" if self.name else name)

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        initialisation: Normal | Constant,
        role: Role,
        widths: tuple[int, ...] = (),
    ) -> Parameter:
        """Declares a parameter of this layer."""
        return self.parameters.declare(self.inner(name).name, shape, initialisation, role, widths)

    def declare_bias(self, size: int) -> Parameter:
        """Declares a bias, initially zero -> NO_PARAMETER in a model without biases."""
        if not self.config.bias:
            return NO_PARAMETER
        return self.declare("bias", (size,), ZEROS, Role.BIAS)

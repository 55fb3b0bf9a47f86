"""Divides the update of a model's parameters among the ranks of a run: each updates its part."""

from collections.abc import Sequence

import numpy as np

from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.group import ALONE, Group


class Sharding:
    """The parts of an update, one for each rank. An optimizer says where these begin and end.

    Its `ends` are the places in a vector where the part of each rank begins, and the end.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.count = group.size  # of parts

    def own(self, ends: Sequence[int]) -> slice:
        """The part that is updated here."""
        return slice(*ends[self._group.rank : self._group.rank + 2])

    def share_parameters(self, model: TransformerModel, part: slice, ends: Sequence[int]) -> None:
        """Gives everybody the parameters in a part of the vector that each has updated.

        The ends are places in this part. Clears all of its gradients.
        """
        flat = model.flat
        self._group.collect(flat.data[part], ends).wait()
        flat.grad[part] = 0
        if flat.working is not None:
            model.workspace.kernels.copy_vector(flat.working[part], flat.data[part])

    def whole(self, part: np.ndarray, ends: Sequence[int]) -> np.ndarray:
        """The parts that all ranks have of a vector -> on rank 0 all of it, on others their part.

        All ranks call it.
        """
        return self._group.gather(part, ends)


WHOLE = Sharding(ALONE)  # a single part

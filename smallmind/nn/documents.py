"""Where documents begin: attention stays inside them."""

import numpy as np

from smallmind.nn.layer import Layer, Scope


class Documents(Layer):
    """The first key that each query of this pass sees: where its document begins in the window.

    A document begins at `document_token`. Without one, a window is a single document.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.token = scope.config.document_token

    def find(self, ids: np.ndarray) -> None:
        """ids (B, T) -> keeps their firsts until the end of the pass."""
        if self.token is None:
            return
        self.workspace.carried[self.name] = firsts = self.workspace.rent_ids(*ids.shape)
        cache = self.workspace.cache
        continued = (cache.documents, cache.position) if cache else ()
        self.kernels.document_starts(firsts, ids, self.token, *continued)

    @property
    def firsts(self) -> np.ndarray | None:
        """The kept array (B, T); None if a window is a single document."""
        return self.workspace.carried.get(self.name)

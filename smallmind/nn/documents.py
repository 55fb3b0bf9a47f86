"""Where documents and windows of attention begin: attention stays inside them."""

import numpy as np

from smallmind.nn.layer import Layer, Scope
from smallmind.nn.position import position_class

# In what a pass carries: the firsts of its batch, and the places of tokens in their documents.
BATCH_FIRSTS, POSITIONS = "batch_firsts", "positions"


class Documents(Layer, only_kernels=True):
    """firsts[t] = max(s <= t with ids[s] = document_token): the first key that query t sees.

    They may be given with a batch, whose windows then hold several documents: attention stays
    inside each, and learned positions and bigrams begin anew in it. Rotations of queries and keys
    depend on their distance alone. Otherwise a document begins at `document_token`; without one, a
    window is a single document.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.token = scope.config.document_token
        self.learns_positions = position_class(scope.config).limits_context

    def find(self, ids: np.ndarray, firsts: np.ndarray | None = None) -> None:
        """ids (B, T) -> keeps their firsts until the end of the pass, or these."""
        carried = self.workspace.carried
        if firsts is not None:
            carried[self.name] = carried[BATCH_FIRSTS] = firsts
            if self.learns_positions:
                carried[POSITIONS] = positions = self.workspace.rent_ids(*ids.shape)
                self.kernels.document_positions(positions, firsts)
            return
        if self.token is None:
            return
        carried[self.name] = firsts = self.workspace.rent_ids(*ids.shape)
        cache = self.workspace.cache
        continued = (cache.documents, cache.starts) if cache else ()
        self.kernels.document_starts(firsts, ids, self.token, *continued)

    def firsts(self, B: int, window: int | None = None) -> np.ndarray | None:
        """Returns the first key that each of T queries of B sequences sees (B, T); None: the first.

        That of its document or, if it is later, of the last `window` tokens up to the query.
        """
        workspace, carried = self.workspace, self.workspace.carried
        firsts: np.ndarray | None = carried.get(self.name)
        longest = workspace.cache.length if workspace.cache else workspace.T
        if window is None or window >= longest:
            return firsts
        name = f"{self.name}.{window}"
        if name not in carried:  # the first layer with this window
            carried[name] = workspace.rent_ids(B, workspace.T)
            self.kernels.window_firsts(carried[name], window, workspace.starts, firsts)
        return carried[name]

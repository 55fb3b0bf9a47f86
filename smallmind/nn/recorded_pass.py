"""A pass that is repeated with the same shapes: the layers call their kernels only once."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np


class Workspace(Protocol):
    """What has to be known of a workspace."""

    new_recording: Callable[[], Any] | None

    def keeping_arrays(self) -> AbstractContextManager[None]: ...


class RecordedPass:
    """Repeats the kernels' calls of a pass, in the same arrays, without the Python in between.

    For small models that is most of the time. The next pass is computed both ways: if the results
    differ in any bit, layers compute with something other than kernels, and all further passes go
    through the layers.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._recording: Any = None
        self._ids = self._recorded_ids = np.empty((0, 0), np.int32)
        self._result = np.empty(0)
        self._is_equal: bool | None = None  # to what the layers compute; None: not known

    def run(
        self,
        workspace: Workspace,
        key: Any,
        ids: np.ndarray,
        compute: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """ids (B, T) -> compute(ids), in an array that the next run overwrites.

        A new key means other arrays or constants: then the pass is recorded anew.
        """
        if workspace.new_recording is None or (self._is_equal is False and key == self._key):
            return compute(ids)
        if key != self._key or not self._recording.is_current:
            self._ids, recording = ids.copy(), workspace.new_recording()
            with recording.recording(), workspace.keeping_arrays():
                self._result = compute(self._ids)
            self._recorded_ids = ids.copy()
            self._key, self._recording, self._is_equal = key, recording, None
            return self._result
        np.copyto(self._ids, ids)
        self._recording.repeat()
        if self._is_equal:
            return self._result
        # The layers last: what they write to the cache stays.
        computed = compute(ids)
        if computed.tobytes() != self._result.tobytes():
            self._is_equal = False
        elif (ids != self._recorded_ids).any():  # else what is left of the recording fits too
            self._is_equal = True
        return computed

"""A pass that is repeated with the same shapes: the layers call their kernels only once."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np


class Workspace(Protocol):
    """The interface of a workspace that recordings need."""

    new_recording: Callable[[], Any] | None
    threads: Callable[[], int]

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
        # True if it equals what the layers compute, with the ids of the recording or with
        # others; None: not known.
        self._is_equal: dict[bool, bool | None] = {}

    def run(
        self,
        workspace: Workspace,
        key: Any,
        ids: np.ndarray,
        compute: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """ids (B, T) -> compute(ids), in an array that the next run overwrites.

        A new key means other arrays or constants: then the pass is recorded anew, as on another
        number of threads.
        """
        key = key, workspace.threads()
        is_wrong = key == self._key and False in self._is_equal.values()
        if workspace.new_recording is None or is_wrong:
            return compute(ids)
        if key != self._key:
            own, recording = ids.copy(), workspace.new_recording()
            with recording.recording(), workspace.keeping_arrays():
                result = compute(own)
            # Together: an interrupt before this leaves the earlier recording whole.
            self._key, self._recording, self._ids, self._result = key, recording, own, result
            self._recorded_ids, self._is_equal = ids.copy(), {True: None, False: None}
            return result
        np.copyto(self._ids, ids)
        self._recording.repeat()
        if self._is_equal[False]:
            return self._result
        # With the same ids, what a layer computed while recording fits by chance.
        is_same = bool((ids == self._recorded_ids).all())
        if is_same and self._is_equal[True]:
            return self._result
        # The layers last: what they write to the cache stays.
        computed = compute(ids)
        self._is_equal[is_same] = computed.tobytes() == self._result.tobytes()
        return computed

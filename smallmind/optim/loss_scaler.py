"""Dynamic loss scaling (Micikevicius et al. 2018): keeps gradients inside the range of float16."""

import numbers
from typing import Any

from smallmind.checks import check_type, suggesting

MAX_SCALE = 2.0**24
CLEAN_STEPS = 1000  # in a row until the scale is doubled
MAX_SKIPS = 10  # in a row; then a smaller scale does not help
FALLS, PERIOD = 5, 200  # halvings within these steps: the scale keeps falling


@suggesting()
class LossScaler:
    """The factor by which loss and gradients are multiplied in a backward pass.

    Starts at 65536. It is halved, down to 1, when a gradient overflows, and doubled, up to 2^24,
    after 1000 steps in a row without an overflow.
    """

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = check_type("scale", scale, numbers.Real)
        self.clean_steps = 0
        self.skips = 0  # in a row
        self.keeps_falling = False  # the last step halved it the fifth time within 200 steps
        self._steps, self._halved = 0, list[int]()

    def __repr__(self) -> str:
        return f"<LossScaler: {self.scale:g}, {self.clean_steps} steps without an overflow>"

    def update(self, overflowed: bool) -> None:
        """Adjusts the scale after a step."""
        self._steps, self.keeps_falling = self._steps + 1, False
        if overflowed:
            self.scale = max(1.0, self.scale / 2)
            self.clean_steps, self.skips = 0, self.skips + 1
            recent = [step for step in self._halved if step > self._steps - PERIOD]
            self._halved = [*recent, self._steps]
            if len(self._halved) == FALLS:
                self.keeps_falling, self._halved = True, []  # said once per period
            return
        self.clean_steps, self.skips = self.clean_steps + 1, 0
        if self.clean_steps == CLEAN_STEPS:
            self.scale, self.clean_steps = min(MAX_SCALE, self.scale * 2), 0

    @property
    def is_lost(self) -> bool:
        """True if smaller scales no longer help."""
        return self.skips >= MAX_SKIPS

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs, JSON-able."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "skips": self.skips}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what state() returned."""
        if not 1 <= state["scale"] <= MAX_SCALE:
            raise ValueError(f"a loss scale of {state['scale']:g} is not from 1 to {MAX_SCALE:g}")
        self.scale, self.clean_steps = state["scale"], state["clean_steps"]
        self.skips = state["skips"]

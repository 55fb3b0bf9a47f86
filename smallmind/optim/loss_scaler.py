"""Dynamic loss scaling (Micikevicius et al. 2018): keeps gradients inside the range of float16."""

from typing import Any

GREATEST = 2.0**24
CLEAN_STEPS = 1000  # until the scale is doubled
SKIPS = 10  # in a row, after which the run cannot be saved by a smaller scale


class LossScaler:
    """The factor on the loss that a backward pass starts from; its gradients carry it too.

    Starts at 65536. It is halved, down to 1, when a gradient overflows, and doubled, up to 2^24,
    after 1000 steps in a row without.
    """

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale
        self.clean_steps = 0
        self.skips = 0  # in a row

    def update(self, overflowed: bool) -> None:
        """Told after each step whether its gradient was finite."""
        if overflowed:
            self.scale = max(1.0, self.scale / 2)
            self.clean_steps, self.skips = 0, self.skips + 1
            return
        self.clean_steps, self.skips = self.clean_steps + 1, 0
        if self.clean_steps == CLEAN_STEPS:
            self.scale, self.clean_steps = min(GREATEST, self.scale * 2), 0

    @property
    def is_lost(self) -> bool:
        """Whether smaller scales have stopped helping."""
        return self.skips >= SKIPS

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, fit for JSON."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "skips": self.skips}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what state() gave."""
        self.scale, self.clean_steps = state["scale"], state["clean_steps"]
        self.skips = state["skips"]

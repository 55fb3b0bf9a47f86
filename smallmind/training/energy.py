"""The energy that the CPU takes, from its own counters where the system lets them be read."""

import time
from contextlib import suppress
from pathlib import Path

from smallmind.training.records import EnergyRecord

COUNTERS = Path("/sys/class/powercap")  # Linux: RAPL of Intel and AMD


class EnergyMeter:
    """Adds up the joules of all processor packages since its creation, other programs' included.

    The counters start again at zero after some 250,000 joules: call `update` more often than they
    do, which is every few minutes on a large server. They are readable for the administrator only,
    unless the system says otherwise; `joules` is None then.
    """

    def __init__(self, counters: Path = COUNTERS) -> None:
        self.joules: float | None = None
        self._begun = time.monotonic()
        self._packages: dict[Path, tuple[int, int]] = {}  # last value and largest, in microjoules
        # The zones of a package, such as intel-rapl:0:1, are parts of it.
        for package in sorted(counters.glob("*-rapl:*")):
            if package.name.count(":") == 1:
                with suppress(OSError, ValueError):
                    largest = int((package / "max_energy_range_uj").read_text())
                    self._packages[package] = _value(package), largest
        if self._packages:
            self.joules = 0.0

    def update(self) -> None:
        """Adds what has been taken since the last call; None for good if a counter is gone."""
        for package, (last, largest) in self._packages.items():
            try:
                value = _value(package)
            except (OSError, ValueError):
                self.joules, self._packages = None, {}
                return
            taken = value - last if value >= last else value + largest - last
            self._packages[package] = value, largest
            self.joules = (self.joules or 0.0) + taken / 1e6

    def record(self, step: int) -> EnergyRecord | None:
        """Returns the record of what has been taken so far; None if that is not known."""
        self.update()
        if self.joules is None:
            return None
        return EnergyRecord(step, self.joules, time.monotonic() - self._begun)

    def __str__(self) -> str:
        """Returns the energy and the mean power; empty if they are not known."""
        record = self.record(0)
        return energy_text(record.joules, record.energy_seconds) if record else ""


def energy_text(joules: float, seconds: float) -> str:
    """Returns the energy and the mean power, in a sentence."""
    return f"The CPU took {joules:,.0f} J, {joules / max(1e-9, seconds):.1f} W"


def _value(package: Path) -> int:
    return int((package / "energy_uj").read_text())

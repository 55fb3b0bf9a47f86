"""What all tests have in common."""

import pytest

from smallmind.runs import pace


@pytest.fixture(autouse=True)
def untimed_start(monkeypatch):
    """No passes are timed before a run starts: tests count the passes that train."""
    monkeypatch.setattr(pace, "rough_pace", lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01))

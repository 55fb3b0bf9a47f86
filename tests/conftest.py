"""What all tests have in common: their runs start and end quickly."""

import pytest

from smallmind.runs import ending, pace


@pytest.fixture(autouse=True)
def untimed_start(monkeypatch):
    """No passes are timed before a run starts.

    Tests plant faults in the nth pass of a model and mean a pass that trains; and timing the model
    of `smallmind estimate` takes longer than most tests. The fixtures of modules and separate
    processes time their passes, and tests/runs/test_pace.py tests that this changes nothing.
    """
    monkeypatch.setattr(pace, "rough_pace", lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01))


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    """A run ends with a sample of 20 tokens: 400 take longer than training a small model."""
    monkeypatch.setattr(ending, "SAMPLE_TOKENS", 20)

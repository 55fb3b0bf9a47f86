"""A damaged kernel cache costs time, never the result: `python -m bench faults` does it often."""

from pathlib import Path

from tests.faults.cache_damage import damage, outcome

NORM = """
import numpy as np
from smallmind.kernels.reduce import sum_of_squares
print(sum_of_squares(np.ones(1000, np.float32)))
"""


def test_damaged_kernels_are_compiled_again(tmp_path):
    expected = outcome(tmp_path, NORM)
    assert expected == (0, "1000.0\n", "")
    sound = {path: path.read_bytes() for path in Path(tmp_path).rglob("*.nbc")}
    damage(tmp_path, number=0, files=len(sound))
    assert outcome(tmp_path, NORM) == expected
    assert outcome(tmp_path, NORM) == expected

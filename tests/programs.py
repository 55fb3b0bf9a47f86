"""Programs that need a process of their own, for their number of threads or threading layer."""

import os
import subprocess
import sys


def output_of(program, *arguments, **environment):
    """What a program prints; a warning or an error fails the test."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout

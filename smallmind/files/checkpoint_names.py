"""The names of checkpoints, by which their steps are known without opening them."""

import os
import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
TIMING = ".timing-"  # how a directory begins that is there while a save is timed
NAME = re.compile(r"step-([0-9]{8,18})\.safetensors")


def file_name(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"step-{step:08d}.safetensors"


def saved_steps(folder: Path) -> list[int]:
    """-> the steps that have a checkpoint in a folder, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    numbers = [int(match[1]) for match in map(NAME.fullmatch, names) if match]
    return sorted((step for step in numbers if file_name(step) in names), reverse=True)

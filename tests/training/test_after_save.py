"""A command that runs after each save of a checkpoint."""

import re
import shlex
import sys
import threading

import numpy as np
import pytest

from smallmind import InputError
from smallmind.training.after_save import AfterSave
from smallmind.training.checkpoint import BackgroundSaver, load
from smallmind.training.records import FileWarningRecord
from smallmind.training.state import RunState
from tests.faults.disk import assert_sound, checkpoint

pytestmark = pytest.mark.usefixtures("quick_disk")


def python(code, *arguments):
    """A command that runs Python code, whose sys.argv[1:] are the arguments."""
    return shlex.join([sys.executable, "-S", "-c", code, *arguments])


COPY = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"


def saved(directory, command, steps, **options):
    """Saves checkpoints of these steps -> the records that come of it."""
    with BackgroundSaver(directory, after_save=AfterSave(command, **options)) as saver:
        for step in steps:
            saver.save(checkpoint(step))
        return saver.news(wait=True)


def test_the_command_gets_every_complete_checkpoint_in_order(tmp_path):
    log = tmp_path / "log"
    code = (
        "import pathlib, sys; path = pathlib.Path(sys.argv[-1]); assert path.stat().st_size; "
        "open(sys.argv[1], 'a').write(path.name + chr(10))"
    )
    assert saved(tmp_path, python(code, str(log)), (1, 2)) == []
    assert log.read_text().split() == ["step-00000001.safetensors", "step-00000002.safetensors"]


def test_the_path_takes_the_place_of_braces(tmp_path):
    copied = tmp_path / "a copy" / "step-00000005.safetensors"
    copied.parent.mkdir()
    assert saved(tmp_path, python(COPY, "{}", str(copied)), (5,)) == []
    assert_sound(load(copied), {5})


def test_no_shell_runs(tmp_path):
    witness = tmp_path / "witness"
    command = f"{python('import sys; sys.exit(len(sys.argv) - 1)')} ; touch {witness}"
    (warning,) = saved(tmp_path, command, (1,))
    assert "failed with status 4" in warning.warning  # ";", "touch", its argument and the path
    assert not witness.exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program-anywhere {}", "could not be run: No such file"),
        (python("print('begun'); raise SystemExit('disk is full')"), "status 1: disk is full"),
        (python("raise SystemExit(3)"), r"failed with status 3$"),
        (python("print('it is full'); raise SystemExit(4)"), "status 4: it is full"),
    ],
)
def test_a_command_that_fails_is_a_warning(tmp_path, capfd, command, message):
    first, second = saved(tmp_path, command, (1, 2))
    for step, record in ((1, first), (2, second)):
        assert isinstance(record, FileWarningRecord) and record.step == step
        assert f"The command after the save of step {step}" in record.warning
        assert re.search(message, record.warning)
    assert capfd.readouterr() == ("", "")  # nothing of it on the screen


def test_a_command_that_hangs_is_ended(tmp_path):
    hanging = python("import time; time.sleep(60)")
    (warning,) = saved(tmp_path, hanging, (1,), limit=0.2)
    assert "was killed: it took over 0.2 seconds" in warning.warning


def test_saves_do_not_wait_for_the_command(tmp_path):
    saver = BackgroundSaver(tmp_path, after_save=AfterSave(python("import time; time.sleep(60)")))
    for step in (1, 2, 3):
        saver.save(RunState(step, {"w": np.zeros(3, np.float32)}, {}))
        saver.wait()
    assert saver.news() == []  # the first one is still running
    with pytest.raises(KeyboardInterrupt), saver:
        raise KeyboardInterrupt  # ends it
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    assert load(tmp_path / "checkpoints" / "step-00000003.safetensors").step == 3


@pytest.mark.parametrize("command", ["", " ", "cp 'unfinished {}"])
def test_a_command_that_is_none_is_refused(command):
    with pytest.raises(InputError, match="after_save"):
        AfterSave(command)

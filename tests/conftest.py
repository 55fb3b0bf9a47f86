"""Fixtures for all tests: several processes, and runs that start and end quickly."""

import platform
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from smallmind.files import durable
from smallmind.kernels.codegen import cpus, threads
from smallmind.training import evaluation
from tests.faults.disk import Quick
from tests.programs import CATS, CommandLine, start_untimed

PROCESSES = 3  # on any number of cores: a tenth of the time tests wait for other programs

LONG_PROOF = 4 * 3600  # seconds; the limit of other tests is in pyproject.toml

# An example may take any time: on a busy machine the usual 200 ms pass without a fault. Every run
# has the same examples; others are tried with --hypothesis-profile random.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Directories are tested in PROCESSES, if pytest-xdist is there; files in this one, at once.

    A file stays in one process, which trains only once what its tests share. -n 0 turns it off.
    """
    is_chosen = getattr(config.option, "numprocesses", 0) is not None  # or there is no xdist
    if is_chosen or config.option.usepdb or hasattr(config, "workerinput"):
        return
    if all(Path(argument).is_dir() for argument in config.args):
        config.option.numprocesses, config.option.dist = PROCESSES, "loadfile"


def pytest_configure(config):
    """On ARM the BLAS of NumPy computes with what is beside a matrix, and NumPy warns of that."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        kinds = "divide by zero|overflow|invalid value"
        line = f"ignore:({kinds}) encountered in matmul:RuntimeWarning"
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items):
    """Long proofs have a limit of their own."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(LONG_PROOF))


@pytest.fixture(scope="session", autouse=True)
def default_signals():
    """Programs that tests start have the system's default for every signal.

    What nohup or a shell's background job ignores, all that it starts would ignore too; what it
    handles is at its default there. Ctrl-C then ends the tests, and they survive the rest.
    """
    kept = {getattr(signal, name, None) for name in ("SIGPIPE", "SIGXFSZ")}  # Python ignores these
    for number in signal.valid_signals() - kept:
        if signal.getsignal(number) == signal.SIG_IGN:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Kernels run on one thread, unless a test says on how many.

    Results do not depend on it, and threads that share their cores with those of another process
    wait for each other in every kernel.
    """
    threads.set_threads(1, are_fixed=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpus, "cores", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def untimed_start(monkeypatch):
    """No tiny model is trained and no passes are timed before a run starts.

    Tests plant faults in the nth pass of a model and mean a pass that trains; and timing the model
    of `smallmind estimate` takes longer than most tests. The fixtures of modules and separate
    processes do both, and tests/runs/test_pace.py tests that this changes nothing.
    """
    start_untimed(monkeypatch)


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    """A run ends with a sample of 20 tokens: 400 take longer than training a small model."""
    monkeypatch.setattr(evaluation, "SAMPLE_TOKENS", 20)


@pytest.fixture
def cli(capsys):
    """Runs command lines in this process."""
    return CommandLine(capsys)


@pytest.fixture
def text(tmp_path):
    """The path of a short text about cats."""
    path = tmp_path / "cats.txt"
    path.write_text(CATS, encoding="utf-8")
    return str(path)


@pytest.fixture
def quick_disk(monkeypatch):
    """A disk that does not wait until what is written has arrived."""
    monkeypatch.setattr(durable, "files", Quick())


@pytest.fixture(scope="module")
def browser():
    """A Chromium without a window, where it and playwright are installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = "chromium", "google-chrome", "chrome"
    program = next(filter(None, map(shutil.which, names)), None) or pytest.skip("no Chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()

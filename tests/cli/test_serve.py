"""`smallmind serve`: what it refuses, what it says, and how it ends."""

import signal
import socket
import sys
import time

import pytest

from smallmind.cli.serve import MISSING
from tests.programs import started
from tests.serve.conftest import saved_model

httpx = pytest.importorskip("httpx")
LAST_SECONDS = 5  # for answers, when the server is stopped


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("served") / "small.safetensors")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 65536", "--port 65536 must be from 0 to 65535"),
        ("--port -1", "--port -1 must be from 0 to 65535"),
        ("--slots 0", "--slots 0 must be at least 1"),
        ("--waiting -3", "--waiting -3 must be at least 1"),
        ("--max-tokens 0", "--max-tokens 0 must be at least 1"),
        ("--max-prompt 0", "--max-prompt 0 must be at least 1"),
        ("--max-seconds 0.5", "--max-seconds 0.5 must be at least 1"),
        ("--max-seconds nan", "--max-seconds nan must be at least 1"),
        ("--context 0", "--context 0 must be at least 1"),
        ("--host 0.0.0.0", "--host 0.0.0.0 lets everybody in the network use the models: add"),
        ("--host example.org", "--host example.org lets everybody in the network use the models"),
        ("--token é", "the token must be ASCII"),
        ("nowhere", "nowhere does not exist"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(cli, flags, message):
    cli.refuses(message, "serve --no-browser", flags)


def test_a_port_that_is_taken_is_refused(cli, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cli.refuses(f"port {port}: ", "serve --no-browser --port", str(port), model)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named(cli, model, package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("smallmind.serve")]:
        monkeypatch.delitem(sys.modules, name)  # what has been imported already is not again
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(package), *sys.meta_path])
    cli.refuses(MISSING, "serve --no-browser", model)


class Without:
    """A finder by which a package is not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, *_):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)


def serving(model, *flags):
    words = [sys.executable, "-m", "smallmind", "serve", str(model), "--no-browser", *flags]
    return started([*words, "--port", "0"])


def address_in(server):
    line = server.stdout.readline()
    assert line.startswith("Talk at http://localhost:"), line
    assert line.endswith("; Ctrl-C ends)\n"), line
    return line.split()[2].rstrip("/")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it(model, name):
    with serving(model) as server:
        address = address_in(server)
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "small"
        server.send_signal(getattr(signal, name))
        rest = server.stdout.read()
    assert rest.startswith("Stopping after the answers") and server.returncode == 0, rest


def test_an_answer_is_finished_first(model):
    with serving(model) as server:
        address = address_in(server)
        asked = {"model": "small", "prompt": "a", "max_tokens": 300, "stream": True}
        httpx.post(f"{address}/v1/completions", json={**asked, "max_tokens": 1}, timeout=60)
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.send_signal(signal.SIGINT)
            last = [line for line in (first, *lines) if line][-1]
    assert last == "data: [DONE]" and server.returncode == 0


def test_clients_that_leave_in_the_middle_of_a_request_are_not_reported(model, capfd):
    with serving(model) as server:
        address = address_in(server)
        host, port = address.removeprefix("http://").split(":")
        for sent in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"):
            for body in (b"", b"Content-Length: 100\r\n\r\n{", b"Content-Length: x\r\n\r\n"):
                with socket.create_connection((host, int(port))) as client:
                    client.sendall(sent + body)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(1000):
                        pass
        assert httpx.get(f"{address}/v1/models").status_code == 200
        server.send_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_an_answer_that_takes_too_long_is_not_waited_for(model):
    with serving(model, "--max-tokens", "10000000") as server:
        address = address_in(server)
        asked = {"model": "small", "prompt": "a", "max_tokens": 10_000_000, "stream": True}
        with (
            httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as answer,
            pytest.raises(httpx.HTTPError),
        ):
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGINT)
            begin = time.monotonic()
            for _ in lines:
                pass
        took = time.monotonic() - begin
    assert took > LAST_SECONDS / 2 and server.returncode == 0


def test_what_is_not_of_this_machine_needs_the_token(model):
    with serving(model, "--host", "0.0.0.0", "--token", "secret") as server:
        address = address_in(server)
        assert httpx.get(f"{address}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
        server.send_signal(signal.SIGINT)

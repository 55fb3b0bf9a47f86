"""`smallmind serve`: what it refuses, what it says, and how it ends."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

import smallmind
from smallmind.cli import main, serve
from smallmind.cli.serve import MISSING
from tests.programs import PATIENCE, started
from tests.serve.conftest import saved_model

httpx = pytest.importorskip("httpx")
connections = pytest.importorskip("smallmind.serve.connections")
TEXTS = {
    "completion": ("/v1/completions", {"prompt": "a" * 2**20}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 30_000}),
    "stream": ("/v1/completions", {"prompt": "a", "max_tokens": 4096, "stream": True}),
}


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
        ("--host 0.0.0.0", "--host 0.0.0.0 lets everyone on the network use the models: add"),
        ("--host example.org", "--host example.org lets everyone on the network use the models"),
        (
            "--allow-host *",
            "--allow-host * lets sites that are not yours use the models: add --token-file",
        ),
        ("--allow-host *.lan", "--allow-host *.lan lets sites that are not yours use the models"),
        ("--allow-host a,b", "--allow-host a,b is not a name; give one such as gpu.lan"),
        ("--allow-origin *", "--allow-origin * lets sites that are not yours use the models"),
        ("--allow-origin null", "--allow-origin null lets sites that are not yours use the models"),
        (
            "--allow-origin https://*.org",
            "https://*.org lets sites that are not yours use the models",
        ),
        ("--allow-origin localhost:3000", "localhost:3000 is not an origin: give scheme"),
        ("--allow-origin http://me@a", "http://me@a is not an origin: give scheme, host and"),
        ("--token é", "the token must be ASCII"),
        ("nowhere", "nowhere does not exist"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(cli, flags, message):
    cli.refuses(message, "serve --no-browser", flags)


NAMES = [
    (serve._host, "GPU.lan", "gpu.lan"),
    (serve._host, "gpu.lan.", "gpu.lan"),
    (serve._host, "nas", "nas"),
    (serve._host, "gpu.lan:8000", "gpu.lan:8000"),
    (serve._host, "https://gpu.lan:8443/v1", "gpu.lan:8443"),
    (serve._host, "müller.local", "xn--mller-kva.local"),
    (serve._host, "fd00::1", "[fd00::1]"),
    (serve._host, "[fd00::1]:8000", "[fd00::1]:8000"),
    (serve._host, "my_model.docker", "my_model.docker"),
    (serve._origin, "http://LOCALHOST:3000/", "http://localhost:3000"),
    (serve._origin, "https://chat.example:443", "https://chat.example"),
    (serve._origin, "http://chat.example:80", "http://chat.example"),
    (serve._origin, "http://chat.example:443", "http://chat.example:443"),
    (serve._origin, "http://chat.example/chat/1?a=b", "http://chat.example"),
    (serve._origin, "app://obsidian.md", "app://obsidian.md"),
    (serve._origin, "http://localhost:*", "http://localhost:*"),
]


@pytest.mark.parametrize(("read", "value", "name"), NAMES)
def test_names_are_allowed_as_people_write_them(read, value, name):
    assert read(value, None) == name


@pytest.mark.parametrize("value", ["*", "*.lan"])
def test_with_a_token_any_name_may_be_allowed(value):
    assert serve._host(value, "s3cret") == value
    assert serve._origin("*", "s3cret") == "*" and serve._origin("null", "s3cret") == "null"


def test_the_flags_reach_the_server(model):
    flags = ["--allow-host=gpu.lan", "--allow-host=nas", "--allow-origin=http://localhost:3000"]
    with serving(model, *flags) as server:
        address = address_in(server)
        for host, status in (("gpu.lan:1", 200), ("nas", 200), ("other.lan", 403)):
            asked = {"Host": host, "Origin": "http://localhost:3000"}
            answer = httpx.get(f"{address}/v1/models", headers=asked, timeout=PATIENCE)
            assert answer.status_code == status
        server.send_signal(signal.SIGINT)


def test_a_port_that_is_taken_is_refused(cli, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cli.refuses(f"port {port}: ", "serve --no-browser --port", str(port), model)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named(cli, model, package, monkeypatch):
    importlib.import_module("smallmind.serve.app")
    monkeypatch.setattr(smallmind, "serve", smallmind.serve)  # imported anew, it would stay there
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


def serving(model, *flags, program=("-m", "smallmind"), **settings):
    words = [sys.executable, *program, "serve", str(model), "--no-browser", *flags]
    return started([*words, "--port", "0"], **settings)


# On a busy machine an answer may take longer than the seconds that it has at the end.
PATIENT = """
import sys
from smallmind.cli import main
from smallmind.serve import connections
connections.SHUTDOWN_SECONDS += 600
main(sys.argv[1:])
"""


def address_in(server):
    line = server.stdout.readline()
    assert line.startswith("Talk at http://localhost:"), line
    assert line.endswith("; Ctrl-C stops)\n"), line
    return line.split()[2].rstrip("/")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it(model, name):
    with serving(model) as server:
        address = address_in(server)
        answer = httpx.get(f"{address}/v1/models", timeout=PATIENCE)
        assert answer.json()["data"][0]["id"] == "small"
        server.send_signal(getattr(signal, name))
        rest = server.stdout.read()
    assert rest.startswith("Finishing answers in progress") and server.returncode == 0, rest


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("completion", "SIGTERM"),
        ("chat", "SIGINT twice"),
        *(("stream", ending) for ending in ("SIGTERM", "SIGINT twice")),
    ],
)
def test_signals_end_it_while_requests_are_read_or_answered(tmp_path, text, ending, capfd):
    path, fields = TEXTS[text]
    model = saved_model(tmp_path / "small.safetensors", chat=True)

    def ask(address):
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{address}{path}", json={"model": "small", **fields}, timeout=PATIENCE)

    with serving(model) as server:
        address = address_in(server)
        asked = {"model": "small", "prompt": "a", "max_tokens": 1}
        httpx.post(f"{address}/v1/completions", json=asked, timeout=PATIENCE)
        clients = [threading.Thread(target=ask, args=(address,)) for _ in range(3)]
        for client in clients:
            client.start()
        time.sleep(0.1)
        server.send_signal(getattr(signal, ending.split()[0]))
        if ending == "SIGINT twice":
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(1.2)
            server.send_signal(signal.SIGINT)  # nothing, where it has ended
        rest = server.stdout.read()
        for client in clients:
            client.join(60)
    assert rest.startswith("Finishing answers in progress") and server.returncode == 0, rest
    assert capfd.readouterr().err == "" and "Traceback" not in rest


def test_the_token_is_that_of_a_file_or_a_variable_and_nobody_else_sees_it(model, tmp_path):
    (tmp_path / "token").write_text("from-file\n")
    for flags, variable, token in [
        (["--token-file", str(tmp_path / "token")], None, "from-file"),
        ([], "from-variable", "from-variable"),
        (["--token-file", str(tmp_path / "token")], "from-variable", "from-file"),
    ]:
        environment = {"SMALLMIND_TOKEN": variable} if variable else {}
        with serving(model, *flags, env={**os.environ, **environment}) as server:
            address = address_in(server)
            assert httpx.get(f"{address}/v1/models", timeout=PATIENCE).status_code == 401
            headers = {"Authorization": f"Bearer {token}"}
            answer = httpx.get(f"{address}/v1/models", headers=headers, timeout=PATIENCE)
            assert answer.status_code == 200
            assert not any(token in word for word in psutil.Process(server.pid).cmdline())
            server.send_signal(signal.SIGINT)


def test_the_browser_is_not_given_the_token_in_its_address(model, monkeypatch):
    opened = []
    monkeypatch.setattr(serve.webbrowser, "open", opened.append)
    monkeypatch.setattr(serve.sys, "setswitchinterval", lambda _seconds: None)
    monkeypatch.setattr(serve.gc, "freeze", lambda: None)

    class Server:
        started, should_exit = True, False

        def run(self, sockets):
            end = time.monotonic() + PATIENCE
            while not opened and time.monotonic() < end:
                time.sleep(0.01)
            sockets[0].close()

    monkeypatch.setattr(connections, "server_of", lambda _app: Server())
    main(["serve", str(model), "--port", "0", "--token", "s3cret"])
    assert len(opened) == 1 and "s3cret" not in opened[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read --token-file"),
        (b"\n", "is empty"),
        (b"\xff\xfe\x00", "it is not text"),
        ("\u00e9".encode(), "the token must be ASCII"),
    ],
)
def test_a_file_without_a_token_is_refused(cli, tmp_path, content, message):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    cli.refuses(message, "serve --no-browser --token-file", str(path))


def test_two_tokens_are_refused(cli):
    cli.refuses("--token or --token-file, not both", "serve --token a --token-file b")


def test_an_answer_is_finished_first(model):
    with serving(model, program=("-c", PATIENT)) as server:
        address = address_in(server)
        asked = {"model": "small", "prompt": "a", "max_tokens": 300, "stream": True}
        httpx.post(f"{address}/v1/completions", json={**asked, "max_tokens": 1}, timeout=PATIENCE)
        with httpx.stream(
            "POST", f"{address}/v1/completions", json=asked, timeout=PATIENCE
        ) as answer:
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
        assert httpx.get(f"{address}/v1/models", timeout=PATIENCE).status_code == 200
        server.send_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_an_answer_that_takes_too_long_is_not_waited_for(model):
    with serving(model, "--max-tokens", "10000000") as server:
        address = address_in(server)
        asked = {"model": "small", "prompt": "a", "max_tokens": 10_000_000, "stream": True}
        with (
            httpx.stream(
                "POST", f"{address}/v1/completions", json=asked, timeout=PATIENCE
            ) as answer,
            pytest.raises(httpx.HTTPError),
        ):
            lines = answer.iter_lines()
            next(lines)
            begin = time.monotonic()
            server.send_signal(signal.SIGINT)
            for _ in lines:
                pass
        took = time.monotonic() - begin
    assert took > connections.SHUTDOWN_SECONDS / 2 and server.returncode == 0


def test_what_is_not_of_this_machine_needs_the_token(model):
    with serving(model, "--host", "0.0.0.0", "--token", "secret") as server:
        address = address_in(server)
        assert httpx.get(f"{address}/v1/models", timeout=PATIENCE).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        answer = httpx.get(f"{address}/v1/models", headers=headers, timeout=PATIENCE)
        assert answer.status_code == 200
        server.send_signal(signal.SIGINT)

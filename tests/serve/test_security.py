"""Attacks on a server on one's own machine, and what comes back."""

import errno
import http.client
import http.server
import json
import shutil
import socket
import subprocess
import threading

import pytest

from tests.programs import PATIENCE
from tests.serve.conftest import httpx, new_client, saved_model, serving, talking

BODY = {"model": "text", "prompt": "fox", "max_tokens": 2}


def status(address, method="GET", path="/v1/models", headers=None, body=None):
    """The status that a request gets with exactly these headers.

    It is sent in one piece: who refuses by the headers may close before a body that comes later.
    """
    host, port = address.removeprefix("http://").split(":")
    content = b"" if body is None else json.dumps(body).encode()
    given = {"Host": f"{host}:{port}", **(headers or {}), "Content-Length": len(content)}
    lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(head + content)
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        answer.read()
    return answer.status


ATTACKS = [
    ("a name of another site that leads here", {"Host": "evil.example"}, 403),
    ("with the right port", {"Host": "evil.example:8000"}, 403),
    ("a name that begins like this machine's", {"Host": "localhost.evil.example"}, 403),
    ("a name that ends like it", {"Host": "evil-localhost"}, 403),
    ("a name of a private network", {"Host": "evil.internal:8000"}, 403),
    ("a name that ends like that of a container's host", {"Host": "xhost.docker.internal"}, 403),
    ("no name", {"Host": None}, 400),
    ("an empty name", {"Host": ""}, 403),
    ("a page elsewhere", {"Origin": "https://evil.example"}, 403),
    ("a page in a file or a frame", {"Origin": "null"}, 403),
    ("another port of this machine", {"Origin": "http://127.0.0.1:1"}, 403),
    ("a name before an at sign", {"Origin": "http://127.0.0.1@evil.example"}, 403),
    ("an image elsewhere", {"Sec-Fetch-Site": "cross-site"}, 403),
    ("a page of a neighbour", {"Sec-Fetch-Site": "same-site"}, 403),
]


@pytest.mark.parametrize(("attack", "headers", "expected"), ATTACKS, ids=[a[0] for a in ATTACKS])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_of_other_sites_are_refused(address, attack, headers, expected, method):
    paths = {"GET": "/api/state", "POST": "/v1/completions"}
    body = BODY if method == "POST" else None
    more = {"Content-Type": "text/plain"} if method == "POST" else {}  # asks no permission before
    assert status(address, method, paths[method], {**headers, **more}, body) == expected


OWN = ["localhost", "127.0.0.1", "LOCALHOST:9", "[::1]:8000", "0.0.0.0:8000"]
OWN += ["localhost.", "model.localhost:8000"]
OUTSIDE = ["host.docker.internal:8000", "host.containers.internal", "host.lima.internal:1"]


@pytest.mark.parametrize("host", [*OWN, *OUTSIDE])
def test_requests_by_names_of_this_machine_are_answered(address, host):
    assert status(address, headers={"Host": host}) == 200


ALLOWED = ["gpu.lan", "proxy.lan:8443", "*.example.org", "[fd00::1]"]
HOSTS = [
    *[("gpu.lan", 200), ("GPU.lan:8000", 200), ("gpu.lan.:8000", 200), ("a.b.example.org:1", 200)],
    *[("proxy.lan:8443", 200), ("proxy.lan", 403), ("proxy.lan:80", 403), ("example.org", 403)],
    *[("[fd00::1]:8000", 200), ("[fd00::2]", 403), ("gpu.lan.evil.example", 403)],
    *[("xgpu.lan", 403), ("a.example.org.evil.example", 403), ("evil.example", 403)],
]


@pytest.fixture(scope="module")
def open_address(models):
    """A server that more names lead to, and that pages of other sites may use."""
    origins = ["https://chat.example", "http://localhost:*", "app://obsidian.md"]
    options = {"hosts": ALLOWED, "origins": origins, "token": "s3cret"}
    with serving(models, **options) as (address, _):
        yield address


TOKEN = {"Authorization": "Bearer s3cret"}


@pytest.mark.parametrize(("host", "expected"), HOSTS)
def test_requests_by_names_that_are_allowed_are_answered(open_address, host, expected):
    assert status(open_address, headers={"Host": host, **TOKEN}) == expected


ORIGINS = {
    **dict.fromkeys(("https://chat.example", "http://localhost:3000", "app://obsidian.md"), True),
    **dict.fromkeys(("http://chat.example", "https://chat.example:1", "null", ""), False),
    **dict.fromkeys(("http://localhost.evil.example", "http://localhost:1@evil.example"), False),
}


@pytest.mark.parametrize(("origin", "is_allowed"), ORIGINS.items())
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_sites_that_are_allowed_can_use_the_server(
    open_address, origin, is_allowed, method
):
    asked = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    if method == "OPTIONS":  # without the token: a browser asks what it may send
        asked["Access-Control-Request-Method"] = "POST"
        asked["Access-Control-Request-Headers"] = "authorization,x-stainless-os"
    else:
        asked |= TOKEN
    path = "/v1/models" if method == "GET" else "/v1/completions"
    body = BODY if method == "POST" else None
    answer = httpx.request(method, open_address + path, headers=asked, json=body)
    assert answer.status_code == (403 if not is_allowed else 204 if method == "OPTIONS" else 200)
    allowed = answer.headers.get("access-control-allow-origin")
    assert allowed == (origin if is_allowed else None)
    assert "access-control-allow-credentials" not in answer.headers
    if is_allowed and method == "OPTIONS":
        assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in answer.headers["access-control-allow-methods"]


def test_a_site_that_is_allowed_needs_the_token_itself(open_address):
    """The cookie is the page's own, and other pages of this machine make a browser send it."""
    cookie = {"Cookie": "smallmind_token=s3cret"}
    other = {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}
    assert status(open_address, headers=cookie) == 200
    assert status(open_address, headers={**cookie, **other}) == 401
    answer = httpx.get(f"{open_address}/v1/models", headers=other, timeout=PATIENCE)
    assert answer.headers["access-control-allow-origin"] == other["Origin"]  # it can read why
    assert status(open_address, headers={"Host": "evil.example", **other, **TOKEN}) == 403


REFUSALS = [
    ({"Host": "gpu.lan:8000"}, "'gpu.lan'", "start the server with --allow-host gpu.lan"),
    ({"Host": "[fd00::1]:8000"}, "'[fd00::1]'", "start the server with --allow-host fd00::1"),
    ({"Host": "evil';x"}, "evil';x", ""),
    ({"Origin": "http://localhost:3000"}, "'http://localhost:3000'", "--allow-origin http://local"),
    ({"Origin": "null"}, "'null'", "start the server with --allow-origin null --token-file FILE"),
    ({"Sec-Fetch-Site": "cross-site"}, "pages of other sites", ""),
]


@pytest.mark.parametrize(("headers", "name", "advice"), REFUSALS)
def test_a_refusal_names_what_was_asked_for_and_the_flag(address, headers, name, advice):
    answer = httpx.get(f"{address}/v1/models", headers=headers, timeout=PATIENCE)
    error = answer.json()["error"]
    assert answer.status_code == 403 and error["type"] == "permission_error"
    assert name in error["message"] and advice in error["message"]
    assert ("--allow" in error["message"]) == bool(advice) and "\n" not in error["message"]


def test_a_link_elsewhere_leads_to_the_page_and_to_nothing_else(address):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
    assert status(address, path="/", headers=link) == 200
    assert status(address, path="/v1/models", headers=link) == 403
    assert status(address, path="/", headers={**link, "Sec-Fetch-Dest": "iframe"}) == 403


def test_the_health_of_a_server_needs_no_token(open_address):
    answer = httpx.get(f"{open_address}/health", timeout=PATIENCE)
    assert answer.status_code == 200 and answer.json() == {"status": "ok"}
    assert status(open_address, "HEAD", "/health") == 200
    assert status(open_address, path="/health", headers={"Host": "evil.example"}) == 403


PAGE = """<!doctype html><body><script>
const asked = {method: "POST", body: JSON.stringify(BODY),
  headers: {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}}
fetch("ADDRESS/v1/completions", asked).then(answer => answer.json())
  .then(found => document.body.innerText = "written: " + found.choices[0].finish_reason,
        error => document.body.innerText = "failed: " + error.name)
</script>"""


@pytest.mark.parametrize(("port", "shown"), [("*", "written: length"), ("1", "failed: TypeError")])
def test_a_browser_lets_a_page_that_is_allowed_use_the_server(models, tmp_path, port, shown):
    chromium = shutil.which("chromium") or pytest.skip("needs Chromium")

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_):
            pass

    options = {"origins": [f"http://localhost:{port}"], "token": "s3cret"}
    with (
        serving(models[:1], **options) as (address, _),
        http.server.HTTPServer(("127.0.0.1", 0), Site) as site,
    ):
        page = PAGE.replace("ADDRESS", address).replace("BODY", json.dumps(BODY))
        threading.Thread(target=site.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        flags += ["--virtual-time-budget=20000", "--dump-dom"]
        program = [chromium, *flags, f"http://localhost:{site.server_port}/"]
        found = subprocess.run(program, check=True, capture_output=True, text=True)
        site.shutdown()
    assert shown in found.stdout, found.stdout + found.stderr[-1000:]


def test_the_page_itself_and_programs_are_answered(address):
    own = {"Origin": address, "Sec-Fetch-Site": "same-origin"}
    assert status(address, "POST", "/v1/completions", own, BODY) == 200
    assert status(address, "POST", "/v1/completions", None, BODY) == 200


def test_browsers_are_not_told_that_other_sites_may(address):
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{address}/v1/completions", headers=headers)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_token_is_asked_for_and_compared(models):
    with serving(models[:1], token="s3cret") as (address, _):

        def found(**headers):
            return status(address, headers=headers)

        assert status(address, path="/") == 200  # the page, which asks for it
        assert found() == found(Authorization="Bearer wrong") == 401
        assert found(Authorization="Basic s3cret") == found(Authorization="Bearer ") == 401
        assert found(Authorization="Bearer s3crets") == found(Authorization="Bearer S3CRET") == 401
        assert found(Authorization="Bearer s3crét".encode().decode("latin-1")) == 401
        assert status(address, path="/v1/models?token=s3cret") == 401
        assert status(address, path="/api/state?#token=s3cret") == 401
        assert found(Cookie="smallmind_token=wrong") == found(Cookie="a=\x7f;;=") == 401
        assert found(Authorization="Bearer s3cret") == 200
        with new_client(address) as client:
            login = client.post("/api/session", headers={"Authorization": "Bearer s3cret"})
            cookie = login.headers["set-cookie"].lower()
            assert login.status_code == 204 and "httponly" in cookie and "samesite=strict" in cookie
            assert client.get("/v1/models").status_code == 200
        assert httpx.post(f"{address}/api/session", timeout=PATIENCE).status_code == 401


PATHS = [
    "/api/runs/../../etc/passwd",
    "/api/runs/..%2f..%2fetc%2fpasswd",
    "/api/runs/%2e%2e/report",
    "/api/runs/%00/report",
    "/v1/models/..%2F..%2Fetc",
    "/page.js",
    "/../pyproject.toml",
    "//evil.example/",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_to_nothing_else(address, path):
    assert status(address, path=path) == 404


def test_answers_are_never_taken_for_pages(address):
    hostile = "<script>alert(1)</script>"
    answers = [
        httpx.get(f"{address}/v1/models/{hostile}", timeout=PATIENCE),
        httpx.post(f"{address}/v1/completions", json={"model": hostile}, timeout=PATIENCE),
        httpx.get(f"{address}/{hostile}", timeout=PATIENCE),
        httpx.post(f"{address}/v1/completions", content=hostile, timeout=PATIENCE),
    ]
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_policy_of_the_page_lets_only_its_own_script_run(address):
    answer = httpx.get(f"{address}/", timeout=PATIENCE)
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert policy.count("'sha256-") == 2 and "connect-src 'self'" in policy
    for unsafe in (" style=", " onclick=", "innerHTML", "insertAdjacentHTML", "eval("):
        assert unsafe not in answer.text
    assert "//" not in answer.text.split("<script>")[0]


def test_names_of_models_are_text(tmp_path):
    path = saved_model(tmp_path / "<img src=x onerror=alert(1)>.safetensors")
    with talking([path]) as (client, _):
        state = client.get("/api/state")
        assert state.headers["content-type"] == "application/json"
        assert state.json()["models"][0]["id"] == path.stem


HUNG_UP = {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}


def raw(address, request):
    """Returns the answer to these bytes: what arrived, should the server hang up before it has
    read them all."""
    host, port = address.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
        except OSError as error:
            if error.errno not in HUNG_UP:  # a time-out fails the test
                raise
    return found


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: evil\r\n\r\n",
    b"A" * 100_000,
]


@pytest.mark.parametrize("request_bytes", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_gets_no_answer_of_a_model_and_the_server_goes_on(address, request_bytes):
    answer = raw(address, request_bytes)
    assert b'"choices"' not in answer and b"101 Switching" not in answer
    assert status(address) == 200

"""Clients that send slowly, not at all, or too much, and those that do not read."""

import http.client
import json
import socket
import time

import pytest

from smallmind.serve import connections
from smallmind.serve.api import RequestLimits
from tests.programs import PATIENCE
from tests.serve.conftest import httpx, line_of, serving, slow_down, talking, wait_for

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BEGINNINGS = {
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half of the headers": HEAD,
    "no body": HEAD + b"Content-Length: 40\r\n\r\n",
    "half a body": HEAD + b"Content-Length: 40\r\n\r\n" + b'{"model": ',
    "half of the chunks": HEAD + b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"\r\n',
    "a body that nobody reads": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 40\r\n\r\n{",
}


def connected(address, beginning=b""):
    host, port = address.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=PATIENCE)
    client.sendall(beginning)
    return client


def rest(client):
    """All that is sent until the connection ends."""
    found = b""
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_request_that_is_not_complete_is_not_waited_for(models, monkeypatch, beginning):
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.2)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.2)
    with serving(models[:1]) as (address, _), connected(address, BEGINNINGS[beginning]) as client:
        found = rest(client)
        assert found.startswith((b"HTTP/1.1 408 Request Timeout", b"HTTP/1.1 200 OK"))
        monkeypatch.setattr(connections, "HEADERS_SECONDS", PATIENCE)  # of a client that is whole
        if b" 408 " in found:
            error = json.loads(found.partition(b"\r\n\r\n")[2])["error"]
            assert error["message"] == "the request was not complete after 0.2 seconds"
        assert httpx.get(f"{address}/v1/models", timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(
    "beginning", [b"GET / HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 100000\r\n\r\n{"]
)
def test_a_client_that_sends_byte_by_byte_is_not_waited_for_longer(models, monkeypatch, beginning):
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.3)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.3)
    with serving(models[:1]) as (address, _), connected(address, beginning) as client:
        client.settimeout(0.01)
        end, found = time.monotonic() + PATIENCE, b""
        while time.monotonic() < end and not found:
            try:
                client.sendall(b" ")
                found = client.recv(100)
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() < end and (not found or b" 408 " in found)


REFUSED = [
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", 413),
    (b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\n", 403),
    (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\n", 404),
    (HEAD + b"Content-Encoding: gzip\r\n", 415),
]


@pytest.mark.parametrize(("head", "expected"), REFUSED)
def test_a_refusal_is_read_by_a_client_that_sends_all_of_its_body_first(address, head, expected):
    body = b" " * 6_000_000
    more = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(address, head + more + body) as client:
        assert rest(client).startswith(b"HTTP/1.1 %d " % expected)


def test_a_client_that_waits_to_be_asked_for_its_body_is_refused_before(address):
    more = b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 6000000\r\n\r\n"
    with connected(address, HEAD + more) as client:
        assert rest(client).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_asks_again_has_as_long_as_the_first_time(models, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 2.0)
    with serving(models[:1]) as (address, _):
        client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE)
        client.connect()
        first = client.sock
        for _ in range(12):
            client.request("GET", "/v1/models")
            answer = client.getresponse()
            assert answer.status == 200 and answer.read() and client.sock is first
            time.sleep(0.25)
        client.close()


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_half_open_connections_do_not_shut_others_out(models, monkeypatch, beginning):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 6)
    with serving(models[:1]) as (address, _):
        clients = [connected(address, BEGINNINGS[beginning]) for _ in range(20)]
        body = {"model": "text", "prompt": "fox", "max_tokens": 2}
        for _ in range(3):
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE)
            assert answer.status_code == 200
        closed = [rest(client) for client in clients[:10]]  # those that have waited for longest
        # The system resets a connection that is closed before all that it has sent was read.
        assert all(not found or b" 503 " in found or b" 200 " in found for found in closed)
        for client in clients:
            client.close()


def test_clients_that_are_answered_are_not_closed_for_others(models, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    body = {"model": "text", "prompt": "fox", "max_tokens": 60, "stream": True}
    with talking(models[:1]) as (client, app):
        slow_down(client, app, 0.02)
        url = str(client.base_url)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            clients = [connected(url) for _ in range(12)]
            assert [line for line in lines if line][-1] == "data: [DONE]"
            for client in clients:
                client.close()


def test_a_client_that_does_not_read_is_let_go(models, monkeypatch):
    monkeypatch.setattr(connections, "STALLED_SECONDS", 0.2)
    made = connections.Connection.connection_made

    def with_little_memory(connection, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(connection, transport)

    monkeypatch.setattr(connections.Connection, "connection_made", with_little_memory)
    body = {"model": "text", "prompt": "fox", "max_tokens": 10**6, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    with serving(models[:1], limits=RequestLimits(max_tokens=10**6)) as (address, app):
        httpx.post(f"{address}/v1/completions", json={**body, "max_tokens": 1}, timeout=PATIENCE)
        line = line_of(app)
        host, port = address.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            wait_for(lambda: line.requests)
            wait_for(lambda: not line.requests)
        assert httpx.get(f"{address}/v1/models", timeout=PATIENCE).status_code == 200

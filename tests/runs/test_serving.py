"""`run.serve()`: a server beside the program, which a notebook shows in a frame and which ends."""

import http.server
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.programs import PATIENCE, refuses
from tests.runs.small import FIELDS, TEXT, create

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def answer(url, **settings):
    with urllib.request.urlopen(
        urllib.request.Request(url, **settings), timeout=PATIENCE
    ) as response:
        return response.headers, response.read().decode()


def is_reachable(url):
    try:
        answer(url)
    except OSError:  # refused, or reset while it ends
        return False
    return True


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = create(tmp_path_factory.mktemp("runs") / "cats")
    run.train(progress=False)
    return run


def test_a_run_is_served_until_it_is_stopped(run):
    with run.serve() as served:
        assert served.url in repr(served) and "stopped" not in repr(served)
        (listed,) = json.loads(answer(f"{served.url}v1/models")[1])["data"]
        assert listed["id"] == "cats"
        body = json.dumps({"model": "cats", "prompt": "the ", "max_tokens": 5}).encode()
        headers = {"Content-Type": "application/json"}
        written = answer(f"{served.url}v1/completions", data=body, headers=headers)[1]
        assert json.loads(written)["usage"]["completion_tokens"] == 5
    assert repr(served).endswith(", stopped>") and not is_reachable(served.url)
    served.stop()  # once more has no effect


PROGRAM = f"""
from smallmind import Run
run = Run.create(text={TEXT!r}, out="run", **{FIELDS!r})
run.train(progress=False)
print(run.serve().url, flush=True)
input()
"""


@pytest.mark.parametrize("end", ["by itself", "killed"])
def test_the_server_ends_with_the_program(tmp_path, end):
    words = [sys.executable, "-W", "error", "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, text=True, **pipes) as program:
        url = program.stdout.readline().strip()
        assert is_reachable(url)
        if end == "killed":
            program.kill()
        else:
            program.stdin.write("\n")
    while is_reachable(url):
        time.sleep(0.05)
    assert end == "killed" or program.returncode == 0


def test_a_server_that_cannot_start_says_why(run):
    refuses("^--port 70000 must be from 0 to 65535$", run.serve, port=70_000)


def from_site(served, path, **headers):
    """The status of what a browser asks for from a page of another site."""
    try:
        answer(served.url + path, headers={"Sec-Fetch-Site": "same-site", **headers})
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


def test_other_pages_of_this_machine_may_frame_the_page_and_do_nothing_else(run):
    with run.serve() as served:
        policy = answer(served.url)[0]["Content-Security-Policy"]
        ancestors = policy.partition("frame-ancestors ")[2].split(";")[0].split()
        assert ancestors == ["'self'", "http://localhost:*", "http://127.0.0.1:*"]
        frame = {"Sec-Fetch-Dest": "iframe"}
        assert from_site(served, "", **frame) == 200
        assert from_site(served, "v1/models", **frame) == from_site(served, "") == 403
        assert from_site(served, "", Origin="http://localhost:1", **frame) == 403
        assert from_site(served, "", Host="example.org", **frame) == 403


class Quiet(http.server.BaseHTTPRequestHandler):
    """A page with a frame, as a notebook is."""

    shown = ""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<!doctype html><body>{self.shown}</body>".encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_page_elsewhere_on_this_machine_shows_it_in_a_frame(run, host, browser):
    with run.serve() as served, http.server.HTTPServer((host, 0), Quiet) as notebook:
        Quiet.shown = served._repr_html_()
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        page, errors = browser.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else 0)
        page.goto(f"http://{host}:{notebook.server_port}/")
        (frame,) = page.main_frame.child_frames
        frame.get_by_text("cats").first.wait_for(state="attached")
        assert frame.url.startswith(served.url) and not errors
        page.close()
        notebook.shutdown()

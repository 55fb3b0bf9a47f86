"""Servers in this process, with small models."""

import contextlib
import threading
import time

import pytest

from smallmind import ModelConfig, Tokenizer, TransformerModel
from smallmind.text.templates import fit_template
from tests.exchange.models import varied
from tests.programs import PATIENCE

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

TEXT = "The quick brown fox jumps over the lazy dog. Be QA:? <|_>\n"


def saved_model(path, chat=False, block_size=64, tokenizer=None, template="chatml"):
    """A model with large random weights, whose texts vary."""
    tokenizer = tokenizer or Tokenizer(TEXT + "systemuserassistant")
    if chat:
        tokenizer, _ = fit_template(tokenizer, template)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, block_size=block_size, n_layer=2, n_embd=32, n_head=4
    )
    model = varied(TransformerModel(config, seed=5), 0.15, seed=5)
    model.save(path, {"tokenizer": tokenizer.saved})
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A model that continues texts, and one that answers."""
    folder = tmp_path_factory.mktemp("models")
    text = saved_model(folder / "text.safetensors")
    return [text, saved_model(folder / "chat.safetensors", chat=True, block_size=128)]


@contextlib.contextmanager
def serving(paths, port=0, **options):
    """Serves models -> the address, and the application."""
    from smallmind.serve.app import application
    from smallmind.serve.connections import server_of

    app = application(paths, **options)
    server = server_of(app, port=port, timeout_graceful_shutdown=2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    number = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{number}", app
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def new_client(address):
    """A client that reads no certificates, which takes longer than most tests."""
    return httpx.Client(base_url=address, timeout=PATIENCE, verify=False)


@contextlib.contextmanager
def talking(paths, **options):
    """Serves models -> a client, and the application."""
    with (
        serving(paths, **options) as (address, app),
        new_client(address) as client,
    ):
        yield client, app


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def line_of(app):
    """The requests of the only model that is loaded."""
    models = app.app.state.api.models
    (line,) = (entry.loaded.line for entry in models.entries() if entry.loaded)
    return line


def slow_down(client, app, seconds=0.03):
    """Makes every step of the only model take longer: on any machine it is still writing."""
    client.post("/v1/completions", json={"model": "text", "max_tokens": 1})
    decoder = line_of(app).decoder
    step = decoder.step
    decoder.step = lambda: time.sleep(seconds) or step()


def refused(answer, words="", param=None, status=400):
    """The answer is an error about this field, in words that occur."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and param in (None, error["param"]), error
    return error


@pytest.fixture(scope="module")  # tests elsewhere disturb a process as much as they can
def address(models):
    with serving(models, slots=4) as (address, _):
        yield address


@pytest.fixture
def client(address):
    with new_client(address) as client:
        yield client

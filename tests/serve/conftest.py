"""Servers in this process, with small models."""

import contextlib
import threading
import time

import numpy as np
import pytest

from smallmind import ModelConfig, Tokenizer, TransformerModel
from smallmind.text.templates import fit_template

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
    model, random = TransformerModel(config, seed=5), np.random.default_rng(5)
    for values in model.parameters.values():
        values += random.normal(0, 0.15, values.shape).astype(values.dtype)
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
        thread.join(100)  # however busy the machine is
        assert not thread.is_alive()


@pytest.fixture(scope="module")  # tests elsewhere disturb a process as much as they can
def address(models):
    with serving(models, slots=4) as (address, _):
        yield address


@pytest.fixture
def client(address):
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client

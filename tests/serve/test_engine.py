"""The thread that computes: clients that leave at any moment, failures, turns of many clients."""

import asyncio
import contextlib
import json
import random

import numpy as np
import pytest

import smallmind
from smallmind.serve.engine import Busy, Engine, ModelQueue, Request
from smallmind.settings.config import GenerationConfig
from smallmind.writing.decoder import Continuation, Decoder
from tests.programs import PATIENCE
from tests.serve.conftest import httpx, serving, wait_for

SLOTS = 2


class Leaving(Request):
    """A request whose client leaves between one look and the next."""

    def __init__(self, prompts, looks):
        self.looks = looks
        super().__init__(prompts, 60)

    @property
    def is_cancelled(self):
        self.looks -= 1
        return self.looks < 0

    @is_cancelled.setter
    def is_cancelled(self, value):
        self.looks = 0 if value else self.looks


@pytest.fixture(scope="module")
def loaded(models):
    return smallmind.load(models[0])


@pytest.fixture
def decoder(loaded):
    with Decoder(*loaded, SLOTS) as decoder:
        yield decoder


def text(loaded, prompt="fox", max_tokens=6, seed=0):
    tokenizer = loaded[1]
    config = GenerationConfig(max_tokens=max_tokens, seed=seed)
    return Continuation(tokenizer, tokenizer.encode(prompt), config)


@contextlib.asynccontextmanager
async def engine_of(line, waiting=32):
    with Engine(waiting) as engine:
        engine.add(line)
        yield engine
        while line.requests:
            await asyncio.sleep(0.001)


async def written(request):
    async with asyncio.timeout(PATIENCE):
        tokens = [token async for news in request.tokens() for token in news]
    return "".join(token.piece for token in tokens)


async def alone(line, loaded, **settings):
    async with engine_of(line) as engine:
        engine.submit(line, request := Request([[text(loaded, **settings)]], 60))
        return await written(request)


@pytest.mark.parametrize("looks", range(7))
@pytest.mark.parametrize("texts", [1, 2])
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(loaded, decoder, looks, texts):
    async def ask():
        line = ModelQueue(decoder)
        expected = await alone(line, loaded)
        async with engine_of(line) as engine:
            leaving = Leaving([[text(loaded, max_tokens=20) for _ in range(texts)]], looks)
            other = Request([[text(loaded)]], 60)
            engine.submit(line, leaving)
            engine.submit(line, other)
            assert await written(other) == expected
        assert decoder.free == SLOTS and len(decoder) == 0
        assert await alone(line, loaded) == expected

    asyncio.run(ask())


def test_a_failure_in_the_middle_of_a_pass_empties_the_decoder(loaded, decoder):
    model = loaded[0]
    left = 20

    def wrap(_name, kernel):
        def run(*arguments):
            nonlocal left
            left -= 1
            if left == 0:
                raise MemoryError("no memory is left")
            return kernel(*arguments)

        return run

    async def ask():
        line = ModelQueue(decoder)
        expected = await alone(line, loaded)
        async with engine_of(line) as engine:
            requests = [Request([[text(loaded, max_tokens=200)]], 60) for _ in range(3)]
            with model.workspace.wrapped_kernels(wrap):
                for request in requests[:2]:
                    engine.submit(line, request)
                await written(requests[0])
            assert isinstance(requests[0].error, MemoryError) and left < 1
        assert decoder.free == SLOTS
        assert await alone(line, loaded) == expected

    asyncio.run(ask())


def test_a_text_that_nobody_waits_for_fails_one_step_and_not_the_next(loaded, decoder):
    async def ask():
        line = ModelQueue(decoder)
        expected = await alone(line, loaded)
        decoder.add(text(loaded, max_tokens=500))
        async with engine_of(line) as engine:
            engine.submit(line, request := Request([[text(loaded)]], 60))
            await written(request)
            assert request.error
        assert await alone(line, loaded) == expected

    asyncio.run(ask())


def test_many_prompts_of_one_client_let_others_in_between(loaded, decoder):
    async def ask():
        line = ModelQueue(decoder)
        async with engine_of(line) as engine:
            many = Request([[text(loaded, max_tokens=9)] for _ in range(40)], 60)
            one = Request([[text(loaded, max_tokens=9)]], 60)
            engine.submit(line, many)
            engine.submit(line, one)
            await written(one)
            assert many.waiting  # most of its prompts
            assert await written(many) and not many.error
        assert all(text.count == 9 for text in many.texts)

    asyncio.run(ask())


def test_a_request_of_many_prompts_counts_once_as_waiting(loaded, decoder):
    async def ask():
        line = ModelQueue(decoder)
        with Engine(1) as engine:  # without the line, whose requests then wait
            many = [Request([[text(loaded)] for _ in range(40)], 60) for _ in range(2)]
            engine.submit(line, many[0])
            with pytest.raises(Busy, match="1 requests are waiting"):
                engine.submit(line, many[1])

    asyncio.run(ask())


def test_a_text_holds_nothing_as_large_as_the_vocabulary_while_it_waits(loaded):
    waiting = text(loaded)
    sizes = [value.size for value in vars(waiting).values() if isinstance(value, np.ndarray)]
    assert max(sizes) == len("fox") and waiting._seen is None


@pytest.mark.slow
def test_none_of_the_others_notices_5000_clients_that_leave_at_random_moments(models):
    left, wrong = 5000, []
    body = {"model": "text", "prompt": "fox", "max_tokens": 12, "seed": 3}
    with serving(models, slots=4, waiting=200) as (address, app):
        host, port = address.removeprefix("http://").split(":")
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE)
        expected = answer.json()["choices"]

        async def leave(chance):
            fields = {
                **body,
                "model": chance.choice(["text", "chat"]),
                "max_tokens": chance.choice([1, 5, 40, 200]),
                "n": chance.choice([1, 1, 2]),
                "stream": chance.random() < 0.7,
            }
            data = json.dumps(fields).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
            )
            sent = head.encode() + b"\r\n\r\n" + data
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent if chance.random() < 0.9 else sent[: chance.randrange(len(sent))])
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(chance.random() ** 3 * 0.3):
                    while await reader.read(4096):
                        pass
            if chance.random() < 0.5:
                writer.transport.abort()
            writer.close()

        async def clients(seed):
            nonlocal left
            chance = random.Random(seed)
            while left > 0:
                left -= 1
                await leave(chance)

        async def others():
            async with httpx.AsyncClient(timeout=PATIENCE) as client:
                while left > 0:
                    answer = await client.post(f"{address}/v1/completions", json=body)
                    if answer.status_code != 200 or answer.json()["choices"] != expected:
                        wrong.append(answer.text)

        async def together():
            await asyncio.gather(*map(clients, range(20)), others(), others())

        asyncio.run(together())
        assert not wrong
        for entry in app.app.state.api.models.entries():
            wait_for(lambda line=entry.loaded.line: line.is_idle)
            assert entry.loaded.line.decoder.free == 4 and not entry.loaded.line.texts
        again = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE)
        assert again.json()["choices"] == expected

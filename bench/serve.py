"""Measures the server under load: python -m bench serve.

A model of 6 x 384 with random weights is served by the command itself, in a process of its own.
Clients are as cheap as can be, since they share the machine with it: sockets of this process. The
same tokens from `generate`, alone and in turn with the server, are what one client is compared
with. Every request draws tokens as the command does by default.

With --soak, 50 clients are busy for as many minutes: a third of them leave in the middle, stall, or
send what is no request. The others must get all they asked for, and the server must need no more
memory and descriptors at the end than at a tenth of the time.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

from smallmind import Tokenizer, TransformerModel
from smallmind.bench.machine import answer_of
from smallmind.checks import InputError
from smallmind.cli.bench import saying
from smallmind.settings.presets import ARCHITECTURES

SHAPE = {"block_size": 1536, "n_embd": 384, "n_layer": 6, "n_head": 6}
MODEL = "model"
PROMPT, TOKENS = "It was a day like no other. ", 250
LONG = PROMPT * 36  # 1,008 tokens, one per character
CLIENTS, OTHERS = 8, 4
BUSY, BAD = 50, 3  # clients of the long load, of which one in so many misbehaves
WATCHED = 20  # times that its memory is read
# Measures `generate` in a process that has the machine to itself.
GENERATE = """
import json, sys, smallmind
from smallmind.writing.generation import Writer
from smallmind.settings.config import GenerationConfig
model, tokenizer = smallmind.load(sys.argv[1])
config = GenerationConfig(max_tokens=int(sys.argv[3]))
seconds = []
for _ in range(3):
    writer = Writer(model, tokenizer, sys.argv[2], config)
    list(writer.pieces())
    seconds.append(writer.seconds)
print(json.dumps(sorted(seconds)[1]))
"""


def run(options: argparse.Namespace, _machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures and prints -> a record of each turn, and one of the long load."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{MODEL}.safetensors"
        # Characters: parts of one, as bytes are, would come with the next.
        tokenizer = Tokenizer("".join(map(chr, range(32, 32 + 256))), "char")
        model = TransformerModel(tokenizer.vocab_size, **SHAPE, **ARCHITECTURES["llama"])
        model.save(path, {"tokenizer": tokenizer.saved})
        with _server(path) as server:
            records = []
            for number in range(options.rounds):
                with saying(f"turn {number + 1} of {options.rounds}"):
                    record = {"generate": TOKENS / float(_generated(path))}
                    records.append(record | asyncio.run(server.turn()))
            _show(records)
            if options.soak:
                soaked = asyncio.run(server.soak(60 * options.soak))
                print(_told(soaked))
                records.append(soaked)
    return records


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for each answer that an honest client missed, and what the server should not do."""
    failed = []
    for record in records:
        if "missed" in record:
            failed += [f"an honest client: {text}" for text in record["missed"]]
            failed += [f"the server said: {record['said'][-1000:]}"] if record["said"] else []
            first, last = record["watched"][len(record["watched"]) // 10], record["watched"][-1]
            for what, most in (("bytes", 1.1), ("descriptors", 1)):
                if last[what] > most * first[what]:
                    failed.append(f"{what} of the server: {first[what]:,}, later {last[what]:,}")
    return failed


def _generated(path: str) -> Any:
    return answer_of("-c", GENERATE, path, PROMPT, str(TOKENS))


@contextmanager
def _server(path: str) -> "Iterator[Server]":
    command = [sys.executable, "-m", "smallmind", "serve", path, "--no-browser", "--port", "0"]
    log = Path(path).with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout
        for line in process.stdout:
            if "http://" in line:
                port = int(line.partition("http://")[2].partition("/")[0].rpartition(":")[2])
                yield Server(port, process.pid, log)
                break
        else:
            raise InputError(f"the server did not start: {log.read_text()[-1000:]}")
    finally:
        process.terminate()
        process.wait()


class Server:
    """A server at a port of this machine, and what clients ask of it."""

    def __init__(self, port: int, pid: int, log: Path) -> None:
        self.port, self.process, self.log = port, psutil.Process(pid), log

    async def turn(self) -> dict[str, float]:
        """Each case once. Units: tokens per second, seconds."""
        await self.times(PROMPT, TOKENS)  # the model has been read, the kernels compiled
        record = {"one": await self._rate(1), "eight": await self._rate(CLIENTS)}
        record["first, alone"] = await self._first()
        async with self._others(OTHERS):
            record["first"] = await self._first()
        record |= await self._pauses()
        return record

    async def _rate(self, clients: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(self.times(PROMPT, TOKENS, seed) for seed in range(clients)))
        return clients * TOKENS / (time.perf_counter() - start)

    async def _first(self) -> float:
        """The longest of ten waits for a first token."""
        each = [await self.times(PROMPT, 1) for _ in range(10)]
        return max(times[1] - times[0] for times in each)

    async def _pauses(self) -> dict[str, float]:
        """The longest wait of a client for a token: alone, and while a long prompt is read."""
        found = {}
        for name, others in (("pause, alone", 0), ("pause", 1)):
            writing = asyncio.create_task(self.times(PROMPT, TOKENS))
            await asyncio.sleep(0.2)
            start = time.perf_counter()
            for _ in range(others):
                await self.times(LONG, 1)
            end = time.perf_counter() if others else start + 0.3
            start, *times = await writing
            pauses = [b - a for a, b in itertools.pairwise(times)]
            found[name] = max(pauses)
            if others:
                assert times[-1] > end, "the text ended before the prompt had been read"
        return found

    async def times(self, prompt: str, tokens: int, seed: int = 1) -> list[float]:
        """Asks for tokens, as they are written -> when it was asked, and when more came."""
        asked = {"prompt": prompt, "max_tokens": tokens, "seed": seed, "stream": True}
        times = [time.perf_counter()]
        # Tokens that are ready together come together; the last line has the count.
        asked["stream_options"] = {"include_usage": True}
        async for line in self.lines(asked):
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                last = line
        written = json.loads(last[6:])["usage"]["completion_tokens"]
        assert written == tokens, f"{written} of {tokens} tokens"
        return times[:-1]

    @asynccontextmanager
    async def _others(self, clients: int) -> AsyncIterator[None]:
        """Other clients that have texts written all the time."""

        async def go_on(seed: int) -> None:
            while True:
                await self.times(PROMPT, TOKENS, seed)

        tasks = [asyncio.create_task(go_on(seed)) for seed in range(clients)]
        await asyncio.sleep(0.3)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def lines(self, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        """The lines of an answer, its head first."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(_request(asked))
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    async def soak(self, seconds: float) -> dict[str, Any]:
        """Keeps the server busy -> what came back, and what it needed meanwhile."""
        counts: Counter[str] = Counter()
        missed: list[str] = []
        end = time.monotonic() + seconds
        clients = [self._client(number, end, counts, missed) for number in range(BUSY)]
        tasks = [asyncio.create_task(client) for client in clients]
        watched = []
        for number in range(WATCHED + 1):
            with saying(f"load: {number * seconds / WATCHED / 60:.1f} of {seconds / 60:g} minutes"):
                await asyncio.sleep(
                    max(0, end - time.monotonic() - (WATCHED - number) * seconds / WATCHED)
                )
            watched.append(self._needs())
        await asyncio.gather(*tasks)
        await asyncio.sleep(2)  # what left last has been noticed
        watched.append(self._needs())
        return {
            "minutes": seconds / 60,
            "counts": counts,
            "missed": missed,
            "watched": watched,
            "said": self.log.read_text(),
        }

    def _needs(self) -> dict[str, int]:
        return {
            "bytes": self.process.memory_info().rss,
            "descriptors": self.process.num_fds(),
            "threads": self.process.num_threads(),
        }

    async def _client(
        self, number: int, end: float, counts: Counter[str], missed: list[str]
    ) -> None:
        """One of the clients of the long load: honest, or one that misbehaves."""
        draw = random.Random(number)
        acts = (self._leave, self._stall, self._send_garbage)
        while time.monotonic() < end:
            if number % BAD == 0:
                act = draw.choice(acts)
                with suppress(OSError, asyncio.IncompleteReadError):
                    await act(draw)
                counts[act.__name__.lstrip("_")] += 1
                await asyncio.sleep(draw.random())
                continue
            try:
                counts[await self._ask(draw)] += 1
            except (OSError, AssertionError, ValueError, KeyError) as error:
                missed.append(f"{type(error).__name__} {error}")
                await asyncio.sleep(1)

    async def _ask(self, draw: random.Random) -> str:
        """Asks for an answer of a random kind, and checks it -> what came of it."""
        tokens, n = draw.randint(1, 64), draw.choice((1, 1, 1, 2))
        asked: dict[str, Any] = {"prompt": PROMPT * draw.randint(1, 40), "max_tokens": tokens}
        asked |= {"n": n, "seed": draw.randint(0, 9), "stream": draw.random() < 0.5}
        if draw.random() < 0.2:
            asked["logprobs"] = 3
        lines = [line async for line in self.lines(asked)]
        status = int(lines[0].split()[1])
        body = b"".join(lines).partition(b"\r\n\r\n")[2]
        if status == 429:
            assert b"retry-after" in b"".join(lines).lower()
            await asyncio.sleep(0.5 + draw.random())
            return "asked to come later"
        assert status == 200, body[:200]
        if asked["stream"]:
            assert b"data: [DONE]" in body, body[-200:]
            return "streamed"
        answer = json.loads(body)
        assert answer["usage"]["completion_tokens"] == n * tokens, answer["usage"]
        return "answered"

    async def _leave(self, draw: random.Random) -> None:
        """Leaves in the middle of an answer."""
        left = draw.randint(1, 20)
        asked = {"prompt": PROMPT, "max_tokens": 500, "stream": draw.random() < 0.7}
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.random()):
                async for _ in self.lines(asked):
                    left -= 1
                    if not left:
                        return

    async def _stall(self, draw: random.Random) -> None:
        """Stops in the middle of a request, or does not read the answer."""
        _reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        asked = {"prompt": PROMPT, "max_tokens": 500, "stream": True, "logprobs": 5}
        request = _request(asked)
        writer.write(request[: draw.choice((draw.randrange(len(request)), len(request)))])
        await asyncio.sleep(10 * draw.random())
        writer.close()

    async def _send_garbage(self, draw: random.Random) -> None:
        """Sends what is no request, or one that asks for nonsense."""
        bodies = (b"{", b"[]", b"\xff" * 100, b"[" * 100_000)
        fields: tuple[dict[str, Any], ...] = ({"prompt": 1}, {"prompt": "a", "n": -1})
        sent = draw.choice(
            (
                draw.randbytes(draw.randint(1, 5000)),
                b"GET / HTTP/9.9\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
                b"A" * 100_000,
                *(_with_head(body) for body in bodies),
                *(_request(each) for each in fields),
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await reader.read(1000)
        finally:
            writer.close()


def _request(asked: dict[str, Any]) -> bytes:
    return _with_head(json.dumps({"model": MODEL, **asked}).encode())


def _with_head(body: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _show(records: list[dict[str, Any]]) -> None:
    middle = {key: statistics.median(each[key] for each in records) for key in records[0]}
    rows = [
        ["generate, alone", f"{middle['generate']:,.0f} tokens/s", ""],
        [
            "one client",
            f"{middle['one']:,.0f} tokens/s",
            f"{middle['one'] / middle['generate']:.0%}",
        ],
    ]
    gain = statistics.median(each["eight"] / each["one"] for each in records)
    rows.append([f"{CLIENTS} clients", f"{middle['eight']:,.0f} tokens/s", f"x {gain:.2f} of one"])
    for name, key in (
        ("first token, alone", "first, alone"),
        (f"first token, {OTHERS} others busy", "first"),
        ("longest pause, alone", "pause, alone"),
        (f"longest pause, a prompt of {len(LONG):,} beside it", "pause"),
    ):
        worst = max(each[key] for each in records)
        rows.append([name, f"{1000 * middle[key]:.0f} ms", f"{1000 * worst:.0f} ms at most"])
    print(tabulate(rows, ["6 x 384", "median", ""], disable_numparse=True))


def _told(soaked: dict[str, Any]) -> str:
    lines = [f"{BUSY} clients for {soaked['minutes']:g} minutes, one in {BAD} of them misbehaving"]
    lines += [f"  {name}: {count:,}" for name, count in sorted(soaked["counts"].items())]
    lines.append(f"  answers that honest clients missed: {len(soaked['missed']):,}")
    rows = [
        [number, f"{each['bytes'] / 1e6:.1f}", each["descriptors"], each["threads"]]
        for number, each in enumerate(soaked["watched"])
    ]
    return "\n".join([*lines, tabulate(rows, ["", "MB", "descriptors", "threads"])])

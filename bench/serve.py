"""Measures the server under load: python -m bench serve.

A model of 6 x 384 with random weights is served by the command itself, in a process of its own.
Clients are as cheap as can be, since they share the machine with it: sockets of this process. The
same tokens from `generate`, alone and in turn with the server, are what one client is compared
with. Every request draws tokens as the command does by default.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
    """Measures and prints -> a record of each turn."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{MODEL}.safetensors"
        # Characters: parts of one, as bytes are, would come with the next.
        tokenizer = Tokenizer("".join(map(chr, range(32, 32 + 256))), "char")
        model = TransformerModel(tokenizer.vocab_size, **SHAPE, **ARCHITECTURES["llama"])
        model.save(path, {"tokenizer": tokenizer.saved})
        with served(path, Path(folder) / "log") as server:
            records = []
            for number in range(options.rounds):
                with saying(f"turn {number + 1} of {options.rounds}"):
                    record = {"generate": TOKENS / float(_generated(path))}
                    records.append(record | asyncio.run(server.turn()))
            _show(records)
    return records


def _generated(path: str) -> Any:
    return answer_of("-c", GENERATE, path, PROMPT, str(TOKENS))


@contextmanager
def served(path: str, log: Path) -> "Iterator[Server]":
    """Serves a model, with its errors in `log` -> the server."""
    command = [sys.executable, "-m", "smallmind", "serve", path, "--no-browser", "--port", "0"]
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

    def needs(self) -> dict[str, int]:
        """Memory and descriptors of the server now."""
        return {
            "bytes": self.process.memory_info().rss,
            "descriptors": self.process.num_fds(),
            "threads": self.process.num_threads(),
        }


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

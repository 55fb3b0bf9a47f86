"""Keeps a server busy with requests of all kinds: python -m bench soak [MODEL].

`smallmind serve` runs in a process of its own, as it does for a person. Clients send requests of
all kinds in an order drawn at random; a third of them leave in the middle. Meanwhile /v1/models is
asked again and again, also of an idle server, and memory, descriptors and threads are read. An
answer with a status that its kind does not expect, as any of 500 or above, and memory or
descriptors that grow are failures.
"""

import argparse
import asyncio
import gzip
import json
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from tabulate import tabulate

from bench.serve import Server, served
from smallmind.cli.bench import saying

CLIENTS, LEAVING = 8, 3  # one request in LEAVING is left
PATIENCE = 0.5  # seconds at most that a client waits for an answer before it leaves
WATCHED, PROBED = 10, 0.25  # seconds between two looks at memory, at /v1/models
FIRST_MINUTES = 1  # from then on memory does not grow
GROWTH, MORE_DESCRIPTORS = 1.05, 8  # but for that
MOST_MILLISECONDS = 100  # that 99 in 100 answers with the models take
SETTLED = 12  # seconds in which the server notices who has left
TEXT = "It was a day like no other. "
QUESTION = {"role": "user", "content": TEXT}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
PIPELINE = "in a pipeline"
CLOSE = b"connection: close\r\n"
# Runs in a process of its own, so that what it measures does not wait for the clients.
PROBE = """
import http.client, json, sys, time
port, seconds, pause = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
found, end = [], time.monotonic() + seconds
while time.monotonic() < end:
    start = time.perf_counter()
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("GET", "/v1/models")
    answer = client.getresponse()
    assert answer.status == 200 and answer.read()
    client.close()
    found.append(time.perf_counter() - start)
    time.sleep(pause)
print(json.dumps(found))
"""


class Kind(NamedTuple):
    """Requests that are alike: what is sent, piece by piece, and which statuses are right."""

    sent: tuple[bytes, ...]
    statuses: tuple[int, ...] = (200,)  # none: the answer is not read
    seconds: float = 0  # between two pieces


def kinds(model: str, is_chat: bool, ids: list[int]) -> dict[str, Kind]:
    """The name of a model, and tokens -> the kinds of requests, by name."""

    def text(status: int = 200, **fields: Any) -> Kind:
        asked = {"model": model, "prompt": TEXT, "max_tokens": 8, **fields}
        return Kind((_request(asked),), (status,))

    def chat(status: int = 200, **fields: Any) -> Kind:
        asked = {"model": model, "messages": [QUESTION], "max_tokens": 8, **fields}
        return Kind((_request(asked, "/v1/chat/completions"),), (status if is_chat else 400,))

    def get(path: str, status: int = 200, method: str = "GET", host: str = "127.0.0.1") -> Kind:
        return Kind((_head(method, path, host) + b"\r\n",), (status,))

    def body(content: bytes, status: int, more: str = "") -> Kind:
        return Kind((_with_head(content, more=more),), (status,))

    plain = _request({"model": model, "prompt": TEXT, "max_tokens": 4})
    head, _, content = plain.partition(b"\r\n\r\n")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (content[:9], content[9:]))
    chunked = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
    stays = (plain + get("/health").sent[0]).replace(CLOSE, b"")
    look = _request({"model": model, "text": TEXT}, "/api/inspect")
    turns = [QUESTION, {"role": "assistant", "content": TEXT}] * 20
    parts = [{"type": "text", "text": TEXT}] * 3
    return {
        "completion": text(),
        "completion, streamed": text(stream=True, stream_options={"include_usage": True}),
        "completion, long": text(max_tokens=48, temperature=1.2, min_p=0.05, seed=-1),
        "several answers": text(n=3, presence_penalty=0.5),
        "stop strings": text(stop=["e", " the"], max_tokens=16),
        "echo with logprobs": text(echo=True, logprobs=5, max_tokens=0),
        "echo with logprobs, streamed": text(echo=True, logprobs=2, stream=True),
        "many prompts": text(prompt=[TEXT] * 12, max_tokens=2),
        "prompt of tokens": text(prompt=ids),
        "prompts of tokens": text(prompt=[ids, ids[:3]], logprobs=1),
        "longer prompt": text(prompt=TEXT * 30, max_tokens=4),
        "prompt that is too long": text(400, prompt=TEXT * 80_000),
        "chat": chat(),
        "chat, streamed": chat(stream=True, max_tokens=24),
        "chat with logprobs": chat(logprobs=True, top_logprobs=5),
        "chat in parts of text": chat(messages=[{**QUESTION, "content": parts}]),
        "chat of many turns": chat(messages=[*turns, QUESTION]),
        "chat without tools": chat(tools=TOOLS, tool_choice="none"),
        "tools": chat(400, tools=TOOLS),
        "an image": chat(400, messages=[{"role": "user", "content": [IMAGE]}]),
        "response_format": chat(200 if find_spec("llguidance") else 400, response_format=SCHEMA),
        "unknown field": text(400, something_new=1),
        "wrong types": text(400, prompt=1, stream="yes", temperature=[]),
        "out of range": text(400, n=-1),
        "unknown model": text(404, model="gpt-4o"),
        "not JSON": body(b'{"model": ', 400),
        "not an object": body(b"[]", 400),
        "no UTF-8": body(b"\xff" * 100, 400),
        "deep JSON": body(b"[" * 100_000, 400),
        "many values": body(b"[" + b"0," * 1_500_000 + b"0]", 413),
        "huge body": body(b" " * 6_000_000, 413),
        "gzip": body(gzip.compress(content), 415, "content-encoding: gzip\r\n"),
        "unknown address": get("/v1/engines", 404),
        "wrong method": get("/v1/completions", 405),
        "OPTIONS": get("/v1/completions", 405, "OPTIONS"),
        "HEAD": get("/v1/models", 200, "HEAD"),
        "models": get("/v1/models"),
        "health": get("/health"),
        "page": get("/"),
        "state of the page": get("/api/state"),
        "a look inside": Kind((look,), (200, 429)),
        "another host": get("/v1/models", 403, host="evil.example"),
        "by drips": Kind(tuple(plain[i : i + 20] for i in range(0, len(plain), 20)), seconds=0.1),
        "half a request": Kind((plain[: len(plain) // 2],), (408,)),
        PIPELINE: Kind((stays + plain,)),
        "Expect: 100-continue": Kind(
            (head + b"\r\nexpect: 100-continue\r\n\r\n", content), (200,), 0.1
        ),
        "in chunks": Kind((chunked + b"\r\n\r\n" + chunks + b"0\r\n\r\n",)),
        "no HTTP": Kind((random.Random(1).randbytes(3000),), (400, 408)),
        "no answer read": text(max_tokens=64, stream=True, logprobs=5)._replace(statuses=()),
    }


def run(options: argparse.Namespace, _machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures and prints -> a record."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or _trained(Path(folder))
        with (
            served(str(path), Path(folder) / "log") as server,
            served(str(path), Path(folder) / "idle.log") as idle,
        ):
            soak = Soak(server, idle, _known(server))
            record = asyncio.run(soak.run(60 * options.minutes))
    print(_told(record))
    return [record]


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for each kind of wrong answer, and for what the server should not do."""
    (record,) = records
    failed = [f"{count} x {text}" for text, count in Counter(record["missed"]).most_common()]
    if record["said"]:
        failed.append(f"the server said: {record['said'][-2000:]}")
    first, last = _at(record, FIRST_MINUTES), record["watched"][-2]
    if last["bytes"] > GROWTH * first["bytes"]:
        failed.append(f"bytes of the server: {first['bytes']:,}, later {last['bytes']:,}")
    if last["descriptors"] > first["descriptors"] + MORE_DESCRIPTORS:
        failed.append(f"its descriptors: {first['descriptors']}, later {last['descriptors']}")
    slow = 1000 * np.percentile(record["models"], 99)
    if slow > MOST_MILLISECONDS:
        failed.append(f"/v1/models: 1 in 100 answers takes more than {slow:.0f} ms")
    return failed


def _trained(folder: Path) -> Path:
    """Trains a small model on conversations -> its run."""
    answers = [{"role": "assistant", "content": f"So it was, {i} times."} for i in range(400)]
    text = folder / "chats.jsonl"
    text.write_text("".join(json.dumps({"messages": [QUESTION, x]}) + "\n" for x in answers))
    words = [sys.executable, "-m", "smallmind", "train", str(text), "--out", str(folder / "run")]
    words += ["--size", "nano", "--steps", "40", "--block-size", "1024", "--batch-size", "2"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


def _known(server: Server) -> dict[str, Kind]:
    """-> the kinds of requests to the model of a server, which is in memory after this."""
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=600) as client:
        (model,) = client.get("/api/state").json()["models"]
        named = {"model": model["id"]}
        tokens = client.post("/api/inspect", json={**named, "text": TEXT}).json()["tokens"]
        asked = {**named, "prompt": [TEXT] * 8, "logprobs": 1, "echo": True}
        client.post("/v1/completions", json=asked).raise_for_status()
    return kinds(model["id"], model["kind"] == "chat", [token["id"] for token in tokens])


class Soak:
    """The clients of a server, and what comes back."""

    def __init__(self, server: Server, idle: Server, kinds: dict[str, Kind]) -> None:
        self.server, self.idle, self.kinds = server, idle, kinds
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.missed: list[str] = []
        self._said = server.log.stat().st_size  # that kernels were compiled

    async def run(self, seconds: float) -> dict[str, Any]:
        """Keeps the server busy -> a record."""
        start = time.monotonic()
        end, watched = start + seconds, []

        def watch() -> None:
            watched.append({"minutes": (time.monotonic() - start) / 60, **self.server.needs()})

        tasks = [asyncio.create_task(self._client(i, end)) for i in range(CLIENTS)]
        probes = [await self._probe(server, seconds) for server in (self.server, self.idle)]
        with saying(f"load for {seconds / 60:g} minutes"):
            while (now := time.monotonic()) < end:
                await asyncio.sleep(min(WATCHED, end - now))
                watch()
            await asyncio.gather(*tasks)
            models, idle = [json.loads((await probe.communicate())[0]) for probe in probes]
            await asyncio.sleep(SETTLED)
        watch()
        return {
            "minutes": seconds / 60,
            "counts": self.counts,
            "seconds": self.seconds,
            "models": models,
            "idle": idle,
            "missed": self.missed,
            "watched": watched,
            "said": self.server.log.read_text()[self._said :],
        }

    async def _probe(self, server: Server, seconds: float) -> asyncio.subprocess.Process:
        words = [sys.executable, "-c", PROBE, str(server.port), str(seconds), str(PROBED)]
        return await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)

    async def _client(self, number: int, end: float) -> None:
        """Sends requests of all kinds, in an order of its own."""
        draw = random.Random(number)
        while True:
            for name in draw.sample(list(self.kinds), len(self.kinds)):
                if time.monotonic() >= end:
                    return
                await self._ask(name, draw)

    async def _ask(self, name: str, draw: random.Random) -> None:
        """Sends a request, and counts what comes back."""
        kind, leaves = self.kinds[name], draw.randrange(LEAVING) == 0
        start, answer = time.perf_counter(), bytearray()
        with suppress(OSError):  # the server may close before all was sent, after its answer
            await self._talk(kind, answer, draw if leaves else None)
        if leaves:
            self.counts[name]["left"] += 1
            return
        statuses = [*map(int, re.findall(rb"(?:^|[}\n])HTTP/1\.1 ([2-5]\d\d) ", answer))]
        counted = "+".join(map(str, statuses)) or "none"
        self.counts[name][counted] += 1
        self.seconds[name].append(time.perf_counter() - start)
        is_right = not kind.statuses or (statuses and {*statuses} <= {*kind.statuses})
        if name == PIPELINE:
            is_right = statuses == [200] * 3
        elif b"text/event-stream" in answer and b"data: [DONE]" not in answer:
            is_right = False
        if not is_right:
            self.missed.append(f"{name}: {counted}: {bytes(answer[-300:])!r}")

    async def _talk(self, kind: Kind, answer: bytearray, draw: random.Random | None) -> None:
        """Sends a request and reads the answer; with `draw` leaves before the end of one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        sent = kind.sent
        if draw and draw.random() < 0.5:
            whole = b"".join(sent)
            sent = (whole[: draw.randrange(len(whole))],)
        try:
            for i, piece in enumerate(sent):
                await asyncio.sleep(kind.seconds if i else 0)
                writer.write(piece)
                await writer.drain()
            if draw or not kind.statuses:
                await asyncio.sleep(PATIENCE * draw.random() if draw else 2)
                return
            while part := await reader.read(65536):
                answer += part
        finally:
            if draw and draw.random() < 0.5:  # resets the connection
                with suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
            writer.close()


def _head(method: str, path: str, host: str = "127.0.0.1") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n".encode() + CLOSE


def _with_head(body: bytes, path: str = "/v1/completions", more: str = "") -> bytes:
    more += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return _head("POST", path) + more.encode() + body


def _request(asked: dict[str, Any], path: str = "/v1/completions") -> bytes:
    return _with_head(json.dumps(asked).encode(), path)


def _at(record: dict[str, Any], minutes: float) -> dict[str, Any]:
    """Memory and descriptors of the server after some minutes, or at the end."""
    return next((x for x in record["watched"] if x["minutes"] >= minutes), record["watched"][-2])


def _told(record: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for name, counts in record["counts"].items():
        found = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        quantiles = np.percentile(record["seconds"].get(name) or [np.nan], [50, 99])
        rows.append(
            [name, sum(counts.values()), found, *(f"{1000 * x:,.0f} ms" for x in quantiles)]
        )
    left = sum(counts["left"] for counts in record["counts"].values())
    lines = [
        tabulate(rows, ["kind", "requests", "answers", "median", "99 %"]),
        f"{sum(row[1] for row in rows):,} requests of {len(rows)} kinds from {CLIENTS} clients in "
        f"{record['minutes']:g} minutes; {left:,} were left, {len(record['missed'])} went wrong",
    ]
    for name, found in (("/v1/models", record["models"]), ("of an idle server", record["idle"])):
        times = [f"{q} % {1000 * np.percentile(found, q):.1f} ms" for q in (50, 90, 99, 100)]
        lines.append(f"{name}, {len(found):,} times: {', '.join(times)}")
    minutes = [each for each in (0, FIRST_MINUTES, 2, 5) if each < record["minutes"]]
    watched = [*(_at(record, each) for each in minutes), *record["watched"][-2:]]
    needs = [
        [f"{x['minutes']:.1f}", f"{x['bytes'] / 1e6:.1f}", x["descriptors"], x["threads"]]
        for x in watched
    ]
    lines.append(tabulate(needs, ["minute", "MB", "descriptors", "threads"]))
    return "\n".join(lines)

"""Where the time of a run goes: nested scopes, a report as a table, a trace for the browser."""

import functools
import json
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from smallmind.console.activity import clock_ns
from smallmind.console.live_line import can_print
from smallmind.console.table import BOX, Table, Tabular
from smallmind.kernels.description import described
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Kernel
from smallmind.settings.config import __version__

TITLE = "TRAINING PERFORMANCE REPORT"
COLUMN_WIDTHS = [22, 10, 9, 6, 7, 6]  # of the columns
MAX_EVENTS = 1_000_000  # of a trace: more are too many for a browser


_Event = tuple[str, int, int, int, int]  # name, start, elapsed nanoseconds, bytes, thread


@dataclass(frozen=True)
class ProfileRow:
    """One operation within certain scopes. Units: nanoseconds, bytes, operations."""

    name: str
    path: tuple[str, ...]  # the scopes around it, outermost first, and its name
    total: int  # from entry to exit
    own: int  # without inner scopes
    count: int
    minimum: int
    maximum: int
    nbytes: int
    operations: int = 0

    @property
    def depth(self) -> int:
        return len(self.path) - 1


class _Node:
    """A node in the tree of scopes."""

    __slots__ = (
        *("children", "count", "maximum", "minimum", "name", "nbytes", "operations", "total"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: dict[str, _Node] = {}
        self.count = self.total = self.maximum = self.nbytes = self.operations = 0
        self.minimum = sys.maxsize


class _Stack(threading.local):
    """The scopes that a thread is in, outermost first, after a root without a name."""

    def __init__(self, profiler: "TrainingProfiler") -> None:
        self.nodes = [_Node("")]
        profiler._roots.append(self.nodes[0])


class _Scope:
    __slots__ = ("depth", "name", "nbytes", "node", "profiler", "stack", "start")

    def __init__(self, profiler: "TrainingProfiler", name: str, nbytes: int) -> None:
        self.profiler = profiler
        self.name = name
        self.nbytes = nbytes

    def __enter__(self) -> None:
        self.stack = nodes = self.profiler._stack.nodes
        children = nodes[-1].children
        node = children.get(self.name)
        if node is None:
            node = children[self.name] = _Node(self.name)
        self.node = node
        self.depth = len(nodes)
        nodes.append(node)
        self.start = clock_ns()

    def __exit__(self, *_: object) -> None:
        elapsed = clock_ns() - self.start
        node = self.node
        del self.stack[self.depth :]  # inner scopes too, if an interrupt kept them from closing
        node.count += 1
        node.total += elapsed
        node.nbytes += self.nbytes
        if elapsed < node.minimum:
            node.minimum = elapsed
        if elapsed > node.maximum:
            node.maximum = elapsed
        if self.profiler._events is not None:
            self.profiler._keep((self.name, self.start, elapsed, self.nbytes))


_NOTHING = nullcontext()


class TrainingProfiler(Tabular):
    """Measures named scopes, which may be nested.

        profiler = TrainingProfiler()
        with profiler.profile("Forward"):
            with profiler.profile("matmul", bytes=3 * 4096):
                ...
        profiler.print_report()

    The same name in two places gives two rows. The time of a scope itself, without the scopes
    inside it, is counted nowhere else, so that its percentages add to 100. With `enabled=False`
    nothing is measured. `keep_events` keeps every scope for `save_trace` and `save_speedscope`. In
    a REPL and in a notebook it shows its rows.
    """

    def __init__(self, enabled: bool = True, keep_events: bool = False) -> None:
        self.enabled = enabled
        self._roots: list[_Node] = []
        self._events: list[_Event] | None = [] if keep_events else None
        self._dropped = 0
        self._stack = _Stack(self)

    def profile(self, name: str, bytes: int = 0) -> AbstractContextManager[None]:
        """-> a context manager; `bytes` is what the scope reads and writes, to report a rate."""
        return _Scope(self, name, bytes) if self.enabled else _NOTHING

    @contextmanager
    def watch(self, model: TransformerModel) -> Iterator[None]:
        """Measures the model's passes, its optimizer and every kernel within the block."""
        workspace = model.workspace
        profile = workspace.profile
        if not self.enabled:
            yield
            return
        workspace.profile = self.profile
        del self._stack.nodes[1:]  # of a run that an interrupt ended
        try:
            with workspace.wrapped_kernels(self._profiled):
                yield
        finally:
            workspace.profile = profile

    def _profiled(self, name: str, kernel: Kernel) -> Kernel:
        """Returns the kernel, measured in a scope of its name, with the bytes of its arrays."""

        @functools.wraps(kernel)
        def profiled(*arguments: Any, **named: Any) -> Any:
            arrays = [x for x in (*arguments, *named.values()) if isinstance(x, np.ndarray)]
            with self.profile(name, sum(x.nbytes for x in arrays)):
                result = kernel(*arguments, **named)
            if count := described(name).operations:
                self._stack.nodes[-1].children[name].operations += count(*arguments, **named)
            return result

        return profiled

    def _keep(self, event: tuple[str, int, int, int]) -> None:
        assert self._events is not None
        if len(self._events) < MAX_EVENTS:
            self._events.append((*event, threading.get_ident()))
        else:
            self._dropped += 1

    def rows(self) -> list[ProfileRow]:
        """-> all operations: each level sorted by total time, inner scopes below their parent."""
        rows: list[ProfileRow] = []
        _collect(rows, list(self._roots), ())
        return rows

    def report(self, wide: bool = False, ascii_only: bool = False) -> str:
        """Returns the rows as a table; in the wide form with average, minimum, maximum and GB/s.

        Self is the time of a scope without the scopes inside it; everything else includes them.
        """
        widths = [*COLUMN_WIDTHS, 8, 8, 8, 6] if wide else COLUMN_WIDTHS
        return self._table(TITLE, wide).box(widths, ascii_only)

    def table(self) -> Table:
        return self._table("Where the time went")

    def _table(self, title: str, wide: bool = False) -> Table:
        rows = self.rows()
        whole = sum(row.own for row in rows)
        heads = ["Operation", "Total (ms)", "Self (ms)", "Count", "% Total", "% Self"]
        heads += ["Avg (ms)", "Min (ms)", "Max (ms)", "GB/s"] if wide else []
        table = []
        for row, share in zip(rows, _percentages([row.own for row in rows]), strict=True):
            cells = [
                "  " * row.depth + row.name,
                f"{row.total / 1e6:.2f}",
                f"{row.own / 1e6:.2f}",
                f"{row.count}",
                f"{row.total / max(1, whole):.1%}",
                share,
            ]
            if wide:
                rate = f"{row.nbytes / row.total:.1f}" if row.nbytes and row.total else ""
                times = (row.total / row.count, row.minimum, row.maximum)
                cells += [*(f"{time / 1e6:.3f}" for time in times), rate]
            table.append(cells)
        share = "100.0%" if rows else "0.0%"
        footer = ["TOTAL", f"{whole / 1e6:.2f}", f"{whole / 1e6:.2f}", "", share, share]
        footer += ["", "", "", ""] if wide else []
        return Table(title, table, heads, footer=footer)

    def print_report(self, wide: bool = False, stream: TextIO | None = None) -> None:
        """Writes the report to a stream, in ASCII if its encoding lacks the box characters."""
        stream = sys.stdout if stream is None else stream
        stream.write(self.report(wide, ascii_only=not can_print(stream, BOX)))

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Writes every scope in the Chrome trace format, for chrome://tracing or ui.perfetto.dev.

        ValueError if the profiler does not keep events.
        """
        events = [
            {
                "name": name,
                "ph": "X",  # an event with a duration
                "ts": start / 1e3,
                "dur": elapsed / 1e3,
                "pid": os.getpid(),
                "tid": thread,
                "args": {"bytes": nbytes} if nbytes else {},
            }
            for name, start, elapsed, nbytes, thread in self._kept_events()
        ]
        trace = {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"events left out": self._dropped},
        }
        Path(path).write_text(json.dumps(trace) + "\n", encoding="utf-8")

    def save_speedscope(self, path: str | PathLike[str]) -> None:
        """Writes every scope in the format of speedscope.app, a profile for each thread.

        ValueError if the profiler does not keep events.
        """
        threads: dict[int, list[_Event]] = {}
        for event in self._kept_events():
            threads.setdefault(event[-1], []).append(event)
        frames: dict[str, int] = {}  # name -> its number
        profiles = [
            {
                "type": "evented",
                "name": f"thread {number}",
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": max(start + elapsed for _, start, elapsed, _, _ in events),
                "events": list(_opened_and_closed(events, frames)),
            }
            for number, events in enumerate(threads.values(), 1)
        ]
        file = {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "name": Path(path).name,
            "exporter": f"smallmind@{__version__}",
            "activeProfileIndex": 0,
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": profiles,
        }
        Path(path).write_text(json.dumps(file) + "\n", encoding="utf-8")

    def _kept_events(self) -> list[_Event]:
        """-> every scope that was left, inner ones first, in nanoseconds since the first began."""
        if self._events is None:
            raise ValueError("a trace needs TrainingProfiler(keep_events=True)")
        begin = min((event[1] for event in self._events), default=0)
        return [
            (name, start - begin, elapsed, nbytes, thread)
            for name, start, elapsed, nbytes, thread in self._events
        ]


def _opened_and_closed(
    events: list[_Event], frames: dict[str, int]
) -> Iterator[dict[str, str | int]]:
    """Yields the scopes of a thread as they opened and closed, with the numbers of their frames.

    New names get a number in `frames`.
    """
    still_open: list[tuple[int, int]] = []  # the end of a scope and its frame, outermost first

    def close(until: float) -> Iterator[dict[str, str | int]]:
        while still_open and still_open[-1][0] <= until:
            end, frame = still_open.pop()
            yield {"type": "C", "frame": frame, "at": end}

    # A scope that began and ended with another is outside of it if it was left later.
    numbered = list(enumerate(events))
    for _, (name, start, elapsed, _, _) in sorted(
        numbered, key=lambda pair: (pair[1][1], -pair[1][2], -pair[0])
    ):
        yield from close(start)
        frame = frames.setdefault(name, len(frames))
        # Never longer than what it is in: an interrupt may keep inner scopes from closing in order.
        end = min(start + elapsed, still_open[-1][0]) if still_open else start + elapsed
        yield {"type": "O", "frame": frame, "at": start}
        still_open.append((end, frame))
    yield from close(math.inf)


def _collect(rows: list[ProfileRow], parents: list[_Node], path: tuple[str, ...]) -> None:
    """Appends the rows below nodes that have the same path in the trees of their threads."""
    by_name: dict[str, list[_Node]] = {}
    for parent in parents:
        for child in list(parent.children.values()):
            by_name.setdefault(child.name, []).append(child)
    merged = [(sum(node.total for node in nodes), nodes) for nodes in by_name.values()]
    for total, nodes in sorted(merged, key=lambda pair: -pair[0]):
        count = sum(node.count for node in nodes)
        inside = sum(child.total for node in nodes for child in node.children.values())
        here = (*path, nodes[0].name)
        if count:  # otherwise it is still open
            rows.append(
                ProfileRow(
                    name=nodes[0].name,
                    path=here,
                    total=total,
                    own=max(0, total - inside),  # negative if a scope is open again
                    count=count,
                    minimum=min(node.minimum for node in nodes),
                    maximum=max(node.maximum for node in nodes),
                    nbytes=sum(node.nbytes for node in nodes),
                    operations=sum(node.operations for node in nodes),
                )
            )
        _collect(rows, nodes, here)


def _percentages(parts: list[int]) -> list[str]:
    """Shares of the whole, to a tenth, that add to 100.0: the largest remainders are rounded up."""
    whole = sum(parts)
    if whole <= 0:
        return ["0.0%"] * len(parts)
    tenths = [part * 1000 // whole for part in parts]
    remainders = sorted(range(len(parts)), key=lambda i: -(parts[i] * 1000 % whole))
    for i in remainders[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [f"{tenth / 10:.1f}%" for tenth in tenths]

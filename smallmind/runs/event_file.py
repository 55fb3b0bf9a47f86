"""The metrics of a run as an event file, which TensorBoard reads.

A file is a row of frames (TFRecord): the length of some data, 8 bytes, and its checksum, 4; the
data, and its checksum, 4. All numbers are little-endian; a checksum is a CRC-32C (Castagnoli),
rotated by 15 bits and added to a constant. The data of a frame is an Event in the encoding of
protobuf: each field is a number and a wire type, then its value.
tensorboardX would be two more packages, takes 25 times as long for each record that reaches the
file, and after a write that failed TensorBoard read nothing that it wrote later (bench/LOG.md).
Formats: tensorflow/core/lib/io/record_writer.h; tensorflow/core/util/event.proto; summary.proto.
"""

import math
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smallmind.checks import number
from smallmind.files import durable

PATTERN = "events.out.tfevents.*"
NAME = "events.out.tfevents.{seconds:010d}.smallmind"
VERSION = b"brain.Event:2"
MASK = 0xA282EAD8
POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
MAX_FLOAT32 = 3.4028234e38  # float that fits into 32 bits
VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types
START = 1  # of a session: TensorBoard drops what earlier ones wrote from this step on


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


TABLE = list(range(256))  # the checksum of each byte
for _ in range(8):
    TABLE = [(crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0) for crc in TABLE]


def frame(data: bytes) -> bytes:
    """-> data with its length and its checksums."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + MASK) & 0xFFFFFFFF)


def scalars_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a record of the metrics, each with its tag, such as training/loss."""
    ratios = record.get("update_ratios")
    if isinstance(ratios, Mapping):
        yield from ((f"update_ratio/{name}", number(ratio)) for name, ratio in ratios.items())
        return
    # The kind of the record, by a field that only it has.
    kinds = {
        "spike_step": "rollback",
        "final_loss": "final",
        "val_loss": "evaluation",
        "used_gflops": "usage",
        "loss_scale": "training",
    }
    group = next((group for field, group in kinds.items() if field in record), None)
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if group and is_number and name != "step":
            yield f"{group}/{name.removeprefix('final_')}", float(value)


def summary_event(step: int, scalars: Iterable[tuple[str, float]]) -> bytes:
    values = b""
    for tag, scalar in scalars:
        fits = math.copysign(math.inf, scalar) if abs(scalar) > MAX_FLOAT32 else scalar
        value = _field(1, BYTES, tag.encode()) + _field(2, FLOAT, struct.pack("<f", fits))
        values += _field(1, BYTES, value)
    return _event(step, _field(5, BYTES, values))


def start_event(step: int) -> bytes:
    return _event(step, _field(7, BYTES, _field(1, VARINT, _varint(START))))


def _event(step: int, content: bytes) -> bytes:
    seconds = struct.pack("<d", time.time())
    return _field(1, DOUBLE, seconds) + _field(2, VARINT, _varint(step)) + content


def _field(number: int, wire_type: int, value: bytes) -> bytes:
    """Returns a field of a protobuf message: those of bytes have their length in front."""
    length = _varint(len(value)) if wire_type == BYTES else b""
    return _varint(number << 3 | wire_type) + length + value


def _varint(number: int) -> bytes:
    """Encodes seven bits per byte, the lowest first; the top bit says that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


class EventFile:
    """The event file of one session of a run, made when the first record is added.

    `step` is the one after which the session starts: what earlier sessions wrote about later ones
    no longer counts.
    """

    def __init__(self, directory: Path, step: int) -> None:
        seconds = max(0, int(time.time()))
        while any(directory.glob(NAME.format(seconds=seconds) + "*")):
            seconds += 1  # sorted by name, the files of a run are in order
        self.path = directory / NAME.format(seconds=seconds)
        self._begin = frame(_event(0, _field(3, BYTES, VERSION))) + frame(start_event(step + 1))
        self._unwritten = b""
        self._size = 0  # of the whole frames on disk

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends the numbers of a record. OSError if that fails: the next call tries again."""
        scalars = list(scalars_of(record))
        if "spike_step" in record:  # the run is back at an earlier step
            self._unwritten += frame(start_event(record["step"] + 1))
        if scalars:
            self._unwritten += frame(summary_event(record["step"], scalars))
        if self._unwritten:
            self._flush()

    def _flush(self) -> None:
        with durable.naming(self.path):
            file = durable.open_to_append(self.path)
            try:
                if os.fstat(file).st_size < self._size:  # someone has removed it
                    self._size = 0
                # A disk that was full may have left part of a frame, at which readers would stop.
                os.ftruncate(file, self._size)
                rest = memoryview(self._begin * (not self._size) + self._unwritten)
                written = len(rest)
                while rest:
                    rest = rest[durable.files.write(file, rest) :]
            finally:
                os.close(file)
        self._size += written
        self._unwritten = b""

"""Event files: decoded here by the formats' definitions, and by TensorBoard if it is installed."""

import errno
import math
import struct
from dataclasses import asdict

import pytest

from smallmind.files import durable
from smallmind.runs.event_file import EventFile, crc32c, frame, scalars_of
from smallmind.training.records import EarlyStopRecord, FinalRecord, HealthRecord, OverflowRecord
from tests.cli.test_cli import SMALL
from tests.runs.small import create, left
from tests.views.written import evaluation, rollback, step


def masked_crc(data):
    """Bit by bit, as RFC 3720 defines CRC-32C, and as TFRecord masks it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frames(content):
    """The data of the frames of a file, whose checksums are right."""
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert struct.unpack("<I", content[8:12])[0] == masked_crc(content[:8])
        data, content = content[12 : 12 + length], content[12 + length :]
        assert len(data) == length
        assert struct.unpack("<I", content[:4])[0] == masked_crc(data)
        yield data
        content = content[4:]


def varint(data):
    number = shift = 0
    for place, byte in enumerate(data):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, data[place + 1 :]
    raise AssertionError("a number does not end")


def fields(message):
    """Pairs of a field's number and its value, of a protobuf message."""
    while message:
        key, message = varint(message)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, message = varint(message)
        elif wire_type == 1:
            value, message = struct.unpack("<d", message[:8])[0], message[8:]
        elif wire_type == 5:
            value, message = struct.unpack("<f", message[:4])[0], message[4:]
        else:
            assert wire_type == 2
            length, message = varint(message)
            value, message = message[:length], message[length:]
        yield number, value


def events(path):
    """The events of a file: a version, the step that a session starts at, or scalars of a step."""
    for data in frames(path.read_bytes()):
        event = dict(fields(data))
        assert event[1] > 1e9  # seconds since 1970
        if 3 in event:
            yield "version", event[3]
        elif 7 in event:
            assert dict(fields(event[7])) == {1: 1}
            yield "start", event[2]
        else:
            values = [dict(fields(value)) for number, value in fields(event[5]) if number == 1]
            yield event[2], {value[1].decode(): value[2] for value in values}


def event_files(run):
    return sorted(run.glob("events.out.tfevents.*"))


def standing(run):
    """Tag -> step -> value, as a reader has them after all sessions of a run."""
    scalars: dict[str, dict] = {}
    for path in event_files(run):
        for key, content in events(path):
            if key == "start":
                for tag, points in scalars.items():
                    scalars[tag] = {n: x for n, x in points.items() if n < content}
            elif key != "version":
                for tag, value in content.items():
                    scalars.setdefault(tag, {})[key] = value
    return {tag: points for tag, points in scalars.items() if points}


TAGS = {
    "loss": "training/loss",
    "lr": "training/lr",
    "val_loss": "evaluation/val_loss",
    "final_loss": "final/loss",
}


def in_metrics(run):
    """The scalars from the metrics, for some of their columns."""
    scalars: dict[str, dict] = {}
    for row in run.metrics().rows:
        for name in TAGS.keys() & row.keys():
            scalars.setdefault(TAGS[name], {})[row["step"]] = row[name]
    return scalars


def assert_has_the_metrics(scalars, run):
    for tag, points in in_metrics(run).items():
        assert scalars[tag] == {n: pytest.approx(x, rel=1e-6) for n, x in points.items()}


def test_the_checksum_is_that_of_the_standard():
    # RFC 3720, B.4, and the check value of the catalogue of CRCs.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 3])
def test_a_frame_is_read_back(data):
    assert list(frames(frame(data) * 2)) == [data, data]


def test_a_run_writes_what_its_metrics_have(tmp_path):
    run = create(tmp_path / "run", tensorboard=True)
    run.train()
    (path,) = event_files(run.path)
    found = list(events(path))
    assert found[:2] == [("version", b"brain.Event:2"), ("start", 1)]
    first = dict(found[2:])[1]
    assert {tag.partition("/")[0] for tag in first} == {"training"}
    assert {"training/grad_norm", "training/tokens_per_second", "training/memory"} <= set(first)
    scalars = standing(run.path)
    assert_has_the_metrics(scalars, run)
    assert set(scalars["evaluation/bits_per_byte"]) == {3, 6}


def test_a_run_without_the_setting_writes_none(tmp_path):
    run = create(tmp_path / "run")
    run.train()
    assert event_files(run.path) == []


def test_a_resumed_run_continues_in_a_new_file(tmp_path):
    run = left(create(tmp_path / "run", tensorboard=True), step=5)  # the last save was at step 3
    (run.path / "checkpoints" / "step-00000005.safetensors").unlink(missing_ok=True)
    run.resume()
    first, second = event_files(run.path)
    assert first.name < second.name
    assert list(events(second))[1] == ("start", 4)
    assert_has_the_metrics(standing(run.path), run)


def test_a_run_that_gets_the_setting_later_writes_its_earlier_records_too(tmp_path):
    run = left(create(tmp_path / "run"), step=2)
    run.change(tensorboard=True)
    run.resume()
    assert len(event_files(run.path)) == 1
    assert_has_the_metrics(standing(run.path), run)


def test_what_a_rollback_undid_is_dropped_by_readers(tmp_path):
    file = EventFile(tmp_path, 0)
    for record in (step(1), step(2), step(3, loss=1e39), rollback(1, 4), step(2, loss=0.5)):
        file.add(record)
    scalars = standing(tmp_path)
    assert list(scalars["training/loss"]) == [1, 2] and scalars["training/loss"][2] == 0.5
    assert scalars["rollback/spike_step"] == {1: 4.0}


def test_the_numbers_of_every_kind_of_record_have_tags():
    health = HealthRecord(7, (), {"head.weight": 0.5, "head.bias": math.nan})
    assert next(scalars_of(asdict(health))) == ("update_ratio/head.weight", 0.5)
    assert list(scalars_of(asdict(OverflowRecord(1, 2.0)))) == [("training/loss_scale", 2.0)]
    tags = [tag for tag, _ in scalars_of(asdict(FinalRecord(1, 1.0, 2.0, 3.0, 4.0, 5.0)))]
    names = ("loss", "perplexity", "bits_per_character", "bits_per_byte", "accuracy")
    assert tags == [f"final/{name}" for name in names]
    assert list(scalars_of(asdict(EarlyStopRecord(1, 2, 3.0)))) == []


def test_numbers_too_large_for_32_bits_are_infinite(tmp_path):
    file = EventFile(tmp_path, 0)
    file.add({"step": 1, "val_loss": 1e300, "perplexity": -1e300, "accuracy": math.nan})
    values = standing(tmp_path)
    assert values["evaluation/val_loss"] == {1: math.inf}
    assert values["evaluation/perplexity"] == {1: -math.inf}
    assert math.isnan(values["evaluation/accuracy"][1])


@pytest.mark.parametrize("written", [0, 1, 37])
def test_a_full_disk_costs_nothing_once_there_is_room(tmp_path, monkeypatch, written):
    file = EventFile(tmp_path, 0)
    file.add(step(1))
    write = durable.files.write

    def fail(descriptor, data):
        if written:
            write(descriptor, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.files, "write", fail)
        for number in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                file.add(step(number))
    file.add(step(4))
    assert list(standing(tmp_path)["training/loss"]) == [1, 2, 3, 4]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    run = create(tmp_path / "run", tensorboard=True)
    monkeypatch.setattr(EventFile, "_flush", lambda _: (_ for _ in ()).throw(OSError(5, "broken")))
    warnings = [record.warning for record in run.steps() if hasattr(record, "warning")]
    (warning,) = warnings
    assert "tfevents" in warning and warning.endswith("the next record tries again: broken")
    assert run.is_finished


def test_a_file_that_someone_removed_is_written_again(tmp_path):
    file = EventFile(tmp_path, 0)
    file.add(step(1))
    file.path.unlink()
    file.add(step(2))
    assert [key for key, _ in events(file.path)] == ["version", "start", 2]


def test_a_run_that_could_not_start_leaves_no_event_file(tmp_path):
    run = create(tmp_path / "run", tensorboard=True, steps=0, val_every=0)
    list(run.steps())
    run.discard_untrained()
    run = create(tmp_path / "other", tensorboard=True)
    run.directory.begin_events(0)
    run.directory._events.add(evaluation(0, 1.0))
    run.discard_untrained()
    assert not (tmp_path / "other").exists()


def test_the_flag_can_be_given_when_a_run_resumes(text, tmp_path, cli):
    out = tmp_path / "runs" / "run"
    printed = cli("train", text, SMALL, "--steps 3 --tensorboard --out", out).flat
    assert f"Watch it with: tensorboard --logdir {tmp_path / 'runs'}" in printed.replace("\\ ", "")
    cli("train --resume", out, "--steps 6")
    assert len(event_files(out)) == 2
    cli("train --resume", out, "--steps 9 --no-tensorboard")
    assert len(event_files(out)) == 2
    assert set(standing(out)["training/loss"]) >= {1, 6}


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_tensorboard_reads_the_same(tmp_path):
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name)
    run = left(create(tmp_path / "run", tensorboard=True), step=2)
    run.resume()
    reader = accumulator.EventAccumulator(str(run.path), size_guidance={"scalars": 0})
    reader.Reload()
    scalars = {
        tag: {event.step: event.value for event in reader.Scalars(tag)}
        for tag in reader.Tags()["scalars"]
    }
    assert len(event_files(run.path)) == 2 and scalars == standing(run.path)
    assert_has_the_metrics(scalars, run)

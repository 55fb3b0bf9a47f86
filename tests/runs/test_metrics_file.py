"""Reads metrics.jsonl piece by piece, while a run writes it, cuts it and replaces it."""

import json
import os

import pytest

from smallmind.runs.metrics_file import MetricsFile


def step(number, loss=1.0):
    return json.dumps({"step": number, "loss": loss, "lr": 0.1, "elapsed_seconds": number / 10})


def steps(records):
    return [record["step"] for record in records]


def with_kind(line):
    """The line as this version writes it; earlier ones had no kind."""
    record = json.loads(line)
    kind = "step" if "lr" in record else "other"
    return json.dumps({"step": record["step"], "kind": kind} | record)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, text):
    with open(path, "a", encoding="utf-8", newline="") as file:
        file.write(text)


@pytest.mark.parametrize("piece", [1, 7, 50, 1000])
def test_every_record_is_read_once_however_it_is_written(path, piece):
    path.touch()
    text = "".join(f"{step(number)}\n" for number in range(20))
    file, seen = MetricsFile(path), []
    for start in range(0, len(text), piece):
        append(path, text[start : start + piece])
        seen += file.read()
    assert steps(seen) == list(range(20)) and list(file.read()) == []
    assert file.restarts == 0 and file.unreadable == [] and file.partial == b""


def test_a_partial_line_is_read_once_it_has_ended(path):
    append(path, f"{step(1)}\n{step(2)[:9]}")
    file = MetricsFile(path)
    assert steps(file.read()) == [1] and file.partial == step(2)[:9].encode()
    append(path, f"{step(2)[9:]}\n")
    assert steps(file.read()) == [2] and file.partial == b""


def test_a_file_that_was_replaced_is_read_from_its_start(path):
    append(path, "".join(f"{step(number)}\n" for number in (1, 2, 3)))
    file = MetricsFile(path)
    list(file.read())
    for kept, restarts in (("1", 1), ("12", 2)):
        other = path.with_name("other")
        append(other, "".join(f"{step(int(number), 1.0 + restarts)}\n" for number in kept))
        os.replace(other, path)
        assert steps(file.read()) == list(map(int, kept)) and file.restarts == restarts


def test_a_file_that_was_replaced_and_has_grown_since_is_read_from_its_start(path):
    append(path, "".join(f"{step(number)}\n" for number in (1, 2, 3)))
    file = MetricsFile(path)
    list(file.read())
    path.write_text("".join(f"{step(number, 9.25)}\n" for number in range(9)), encoding="utf-8")
    assert steps(file.read()) == list(range(9)) and file.restarts == 1


def test_a_file_that_only_grew_is_read_on(path):
    append(path, f"{step(1)}\n")
    file = MetricsFile(path)
    list(file.read())
    os.utime(path, (0, 0))
    path.write_bytes(path.read_bytes() + f"{step(2)}\n".encode())  # the same lines, and one more
    assert steps(file.read()) == [2] and file.restarts == 0


EVALUATION = '{"step": 3, "train_loss": 1.0, "val_loss": 2.0}'
TARGET = '{"step": 3, "loss": 2.0, "target": 2.5}'


@pytest.mark.parametrize("version", [str, with_kind])
def test_sparse_reading_keeps_the_last_of_the_steps_in_a_row_and_all_else(path, version):
    lines = [*map(version, [step(1), step(2), step(3), EVALUATION, TARGET, step(4)]), "{damaged"]
    lines += [version(step(5)), version(step(6))]
    append(path, "".join(f"{line}\n" for line in [*lines, step(7)[:-5]]) + step(8)[:9])
    sparse, full = MetricsFile(path, sparse=True), MetricsFile(path)
    assert steps(sparse.read()) == [3, 3, 3, 4, 6]
    assert steps(full.read()) == [1, 2, 3, 3, 3, 4, 5, 6]
    assert full.unreadable == [7, 10] and sparse.unreadable == [7]
    assert full.partial == sparse.partial == step(8)[:9].encode()


def test_a_file_that_is_missing_or_no_file_is_refused(path):
    with pytest.raises(FileNotFoundError):
        MetricsFile(path).read()
    path.mkdir()
    with pytest.raises((OSError, ValueError)):
        MetricsFile(path).read()

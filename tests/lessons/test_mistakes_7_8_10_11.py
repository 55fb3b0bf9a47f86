"""Exercises of lessons 7, 8, 10 and 11: usual mistakes are explained."""

import json
import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest

import smallmind
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.lessons import judge
from smallmind.lessons.solutions.lesson08_half_the_bits import round_at_random, to_bfloat16
from tests.lessons.judging import assert_judged, lesson, refused


@pytest.fixture(scope="module", autouse=True)
def as_many_threads_as_before():
    before = threads()
    yield
    set_threads(before)


# 7. How fast is fast


def test_its_products_are_right():
    shape = SimpleNamespace(M=8, K=50, N=4 * lesson(7).LANES)
    random = np.random.default_rng(0)
    a = random.standard_normal((shape.M, shape.K)).astype(np.float32)
    b = random.standard_normal((shape.K, shape.N)).astype(np.float32)
    for function, arguments in (
        (lesson(7).three_loops, ()),
        (lesson(7).rows_first, ()),
        (lesson(7).blocks, (7,)),
        (lesson(7).tiles, (7,)),
        (lesson(7).with_smallmind, ()),
    ):
        out = np.full((shape.M, shape.N), np.nan, np.float32)
        function(out, a, b, *arguments)
        np.testing.assert_allclose(out, a @ b, rtol=0, atol=1e-4)


def test_its_cache_counts_what_the_text_says():
    n, lines = lesson(7).SIZE, lesson(7).SIZE // 8
    assert lesson(7).misses(lesson(7).by_columns(n)) >= n**3
    assert lesson(7).misses(lesson(7).by_rows(n)) == n * n * lines + 2 * n * lines
    assert lesson(7).misses(lesson(7).by_blocks(n, 4)) < 10_000


def test_the_roofline():
    def traffic(M, K, N):
        return 4 * (M * K + K * N + M * N)

    def seconds(factor=1, moved=traffic, combine=max):
        return lambda M, K, N, peak, bandwidth: combine(
            (factor * M * K * N / peak, moved(M, K, N) / bandwidth)
        )

    wrong = [
        (seconds(combine=sum), "not the sum"),
        (seconds(moved=lambda *sizes: traffic(*sizes) / 4), "4 bytes"),
        (seconds(moved=lambda _M, K, N: 4 * K * N), "moves 4,008,000 bytes"),
        (seconds(2), "210,000,000 multiply-adds"),
    ]
    assert_judged(lesson(7).check_least_seconds, wrong, seconds())


def test_the_best_tile():
    def best_tile(registers):
        fitting = [
            (rows, vectors)
            for rows in range(1, registers)
            for vectors in range(1, registers)
            if rows * vectors + vectors + 1 <= registers
        ]
        return min(fitting, key=lambda tile: sum(tile) / math.prod(tile))

    wrong = [
        (
            lambda registers: (2, 2) if registers == 8 else (4, 4),
            "4 * 4 + 4 + 1 = 21 registers, more than 16",
        ),
        (lambda registers: (registers - 2, 1), "another tile that fits"),
    ]
    assert_judged(lesson(7).check_best_tile, wrong, best_tile)


def test_few_misses():
    def blocks_of_all_three(n):
        return (
            (i, k, j)
            for i0 in range(0, n, 16)
            for j0 in range(0, n, 16)
            for k in range(n)
            for i in range(i0, i0 + 16)
            for j in range(j0, j0 + 16)
        )

    wrong = [
        (lambda n: lesson(7).by_blocks(n, 4), "it fetches 9,728 lines"),
        (lambda _n: lesson(7).by_rows(16), "yours has 4,096"),
        (lambda n: [(0, 0, 0)] * n**3, "twice"),
        (lambda n: ((i + 1, k, j) for i, k, j in lesson(7).by_rows(n)), "out of range"),
    ]
    assert_judged(lesson(7).check_few_misses, wrong, blocks_of_all_three)


# 8. Half the bits


def test_rounding_to_bfloat16():
    def cut(values):
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def half_up(values):
        return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)

    def without_nan(values):
        bits = values.view(np.uint32)
        return (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1)) >> 16).astype(np.uint16)

    wrong = [
        (cut, "the nearest number is the one above it"),
        (half_up, "a tie, and the number below"),
        (without_nan, "the NaN with the bits 7f800001 became inf"),
        (lambda values: values.view(np.uint32), "return uint16, not uint32"),
        (
            lambda values: to_bfloat16(values) if len(values) == 1 else cut(values),
            "differ from round_to",
        ),
    ]
    assert_judged(lesson(8).check_to_bfloat16, wrong)


def test_a_step_with_loss_scaling():
    def make(unscale_first=True, update=True, skip=True, tell=True):
        def scaled_step(weights, gradient, scaler, learning_rate, max_norm):
            scale = scaler.scale
            if unscale_first:
                gradient = gradient / np.float32(scale)
            norm = float(np.linalg.norm(gradient))
            overflowed = not math.isfinite(norm)
            if norm > max_norm:
                gradient = gradient * np.float32(max_norm / norm)
            if not unscale_first:
                gradient = gradient / np.float32(scale)
            if tell or overflowed:
                scaler.update(overflowed)
            if overflowed and not update:
                scaler.update(overflowed)
            return weights if overflowed and skip else weights - learning_rate * gradient

        return scaled_step

    def clipped_in_place_of_scaling(weights, gradient, scaler, learning_rate, max_norm):
        norm = np.linalg.norm(gradient)
        scaler.update(False)
        return weights - learning_rate * gradient * min(1, max_norm / norm)

    def unclipped(weights, gradient, scaler, learning_rate, max_norm):
        gradient = gradient / scaler.scale
        scaler.update(overflowed=not np.isfinite(gradient).all())
        return weights - learning_rate * gradient

    wrong = [
        (clipped_in_place_of_scaling, "divide it by the scale before you clip it"),
        (make(unscale_first=False), "must lead to [-0.5, 0]"),
        (unclipped, "must be scaled down to norm 10"),
        (make(skip=False), "must leave the weights as they are"),
        (make(update=False), "must be halved, once; it is 64"),
        (make(tell=False), "steps without an overflow too"),
    ]
    assert_judged(lesson(8).check_scaled_step, wrong, make())


def test_random_rounding():
    def rounded(values, random, spread=2**16):
        noise = random.integers(0, spread, values.shape, dtype=np.uint32)
        return (values.view(np.uint32) + noise & np.uint32(0xFFFF0000)).view(np.float32)

    wrong = [
        (lambda v, r: rounded(v, r, 1), "rounded up 0% of the time"),
        (lambda v, r: rounded(v, r, 2**18), "must stay as it is"),
        (lambda values, _random: values, "last 16 bits must be 0"),
        (lambda v, r: round_at_random(v, r).astype(np.float64), "return float32"),
    ]
    assert_judged(lesson(8).check_round_at_random, wrong)


# 10. Runs that survive


def test_an_atomic_write():
    def make(*steps):
        def save(disk, name, data):
            for step in steps:
                {
                    "create": lambda: disk.create("new"),
                    "write": lambda: disk.write("new", data),
                    "sync": lambda: disk.sync("new"),
                    "rename": lambda: disk.rename("new", name),
                    "sync name": lambda: disk.sync(name),
                    "directory": disk.sync_directory,
                }[step]()

        return save

    def in_place(disk, name, data):
        disk.create(name)
        disk.write(name, data)
        disk.sync(name)
        disk.sync_directory()

    def forever(disk, name, data):
        while True:
            disk.sync_directory()

    torn, old = "rename new to state, the file may hold b''", "bring back the old file"
    wrong = [
        (in_place, "after create state, the file may hold b''"),
        (make("create", "write", "rename", "directory"), torn),
        (make("create", "write", "rename", "sync name", "directory"), torn),
        (make("create", "write", "sync", "rename"), old),
        (make("create", "write", "sync", "directory", "rename"), old),
        (forever, "six are enough"),
    ]
    right = make("create", "write", "sync", "rename", "directory")
    assert_judged(lesson(10).check_save, wrong, right)


def test_a_sum_on_any_number_of_threads():
    def of_chunks(x, threads, add):
        chunks = np.array_split(x, 40)
        total = np.float32(0)
        for i, chunk in enumerate(chunks):
            total += add(i % threads, chunk)
        return total

    def of_shares(x, threads, add):
        shares = [add(i, part) for i, part in enumerate(np.array_split(x, threads))]
        return np.sum(shares, dtype=np.float32)

    def by_thread(x, threads, add):
        sums = np.zeros(threads, np.float32)
        for i, chunk in enumerate(np.array_split(x, 40)):
            sums[i % threads] += add(i % threads, chunk)
        return sums.sum()

    wrong = [
        (of_shares, "depend on the number of threads"),
        (by_thread, "depend on the number of threads"),
        (lambda x, _threads, add: add(0, x), "divide them evenly"),
        (lambda x, threads, add: add(threads, x), "there is no thread 1 of 1"),
        (lambda x, _threads, _add: x.sum(), "added up 0 of 20,011 numbers"),
        (lambda x, _threads, add: 2 * add(0, x), "the sum is"),
    ]
    assert_judged(lesson(10).check_parallel_sum, wrong, of_chunks)


ARRAYS = "weights", "velocity", "order"
NUMBERS = "steps", "place"


def saving(*left_out):
    def save_state(trainer):
        state = {name: getattr(trainer, name).tolist() for name in ARRAYS}
        state |= {name: getattr(trainer, name) for name in NUMBERS}
        state["random"] = trainer.random.bit_generator.state
        return json.dumps({name: state[name] for name in state if name not in left_out})

    return save_state


def loading(as_array=np.array):
    def load_state(text):
        trainer, state = lesson(10).Trainer(), json.loads(text)
        if "random" in state:
            trainer.random.bit_generator.state = state.pop("random")
        for name, value in state.items():
            setattr(trainer, name, as_array(value) if name in ARRAYS else value)
        return trainer

    return load_state


def test_a_checkpoint():
    check, load_state = lesson(10).check_state, loading()
    assert judge(lambda: check(saving(), load_state)) == "solved"
    for name in (*ARRAYS, *NUMBERS):
        message = refused(check, saving(name), load_state)
        assert f"it has another {name}" in message
        assert "resumed after step" in message
    assert "will draw other orders" in refused(check, saving("random"), load_state)
    assert "must return a JSON text, not dict" in refused(check, vars, load_state)
    assert "must return a Trainer" in refused(check, saving(), json.loads)
    assert "is a <class 'list'>" in refused(check, saving(), loading(list))


# 11. Export and import


def test_writing_safetensors():
    def make(start=0, in_memory=False, endian="little", upper=True):
        def write_safetensors(path, tensors):
            header, begin = {}, start
            for name, tensor in tensors.items():
                end = begin + tensor.nbytes
                header[name] = {
                    "dtype": "F32" if upper else "f32",
                    "shape": list(tensor.shape),
                    "data_offsets": [begin, end],
                }
                begin = end
            encoded = json.dumps(header).encode()
            order = "A" if in_memory else "C"
            with open(path, "wb") as file:
                file.write(len(encoded).to_bytes(8, endian) + encoded)
                for tensor in tensors.values():
                    file.write(tensor.tobytes(order))

        return write_safetensors

    def without_tensors(path, tensors):
        make()(path, tensors)
        content = path.read_bytes()
        path.write_bytes(content[: -tensors["ü"].nbytes])

    def without_length(path, tensors):
        make()(path, tensors)
        path.write_bytes(path.read_bytes()[:8] + b" no JSON" + path.read_bytes()[8:])

    wrong = [
        (make(start=8), "they count from the end of the header"),
        (make(in_memory=True), "'a.T' is read with other values"),
        (make(endian="big"), "are they little-endian?"),
        (make(upper=False), "the dtype of 'a' is 'f32'"),
        (without_tensors, "the tensors have 220"),
        (without_length, "are not JSON"),
        (
            lambda path, tensors: make()(path, {n: t for n, t in tensors.items() if n != "ü"}),
            "the header has no 'ü'",
        ),
    ]
    assert_judged(
        lesson(11).check_write_safetensors,
        wrong,
        make(),
        lambda path, tensors: smallmind.files.safetensors.write(path, tensors, {}),
    )


def test_neighbours():
    def as_neighbours(rows, H):
        halves = rows.reshape(H, 2, -1, rows.shape[-1])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    def backwards(rows, H):
        pairs = rows.reshape(H, -1, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    wrong = [
        (backwards, "belong together, so they come first"),
        (lambda rows, _H: as_neighbours(rows, 1), "a row has left its head"),
        (lambda rows, _H: rows, "in which they came"),
        (lambda rows, _H: np.concatenate([rows[: len(rows) // 2]] * 2), "missing or doubled"),
        (lambda rows, _H: rows.T, "the shape must stay (12, 3)"),
    ]
    assert_judged(lesson(11).check_as_neighbours, wrong, as_neighbours)


def test_reading_q8_0():
    def read_q8_0(data, scale="<f2", integer=np.int8):
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        d = np.ascontiguousarray(blocks[:, :2]).view(scale).astype(np.float32)
        return d * np.ascontiguousarray(blocks[:, 2:]).view(integer).astype(np.float32)

    def one_scale(data):
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        (d,) = struct.unpack("<e", data[:2])
        return np.float32(d) * blocks[:, 2:].view(np.int8).astype(np.float32)

    wrong = [
        (lambda data: read_q8_0(data, integer=np.uint8), "they are signed"),
        (lambda data: read_q8_0(data, scale=">f2"), "make 0.5, not"),
        (one_scale, "a scale of its own"),
        (lambda data: read_q8_0(data).astype(np.float64), "return float32, not float64"),
        (lambda d: read_q8_0(d).ravel(), "the shape is (32,), not (1, 32)"),
    ]
    assert_judged(lesson(11).check_read_q8_0, wrong, read_q8_0)

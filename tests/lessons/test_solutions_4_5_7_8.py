"""Exercises of lessons 4, 5, 7 and 8: solutions are accepted, usual mistakes are explained."""

import json
import math
import runpy
import struct
from types import SimpleNamespace

import numpy as np
import pytest

import smallmind
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.lessons import judge, lessons


@pytest.fixture(scope="module", autouse=True)
def as_many_threads_as_before():
    before = threads()
    yield
    set_threads(before)


def load(folder, number, leave_out=None, **quicker):
    """Runs a lesson -> its names. Leaves out the text between two headings, changes constants."""
    (path,) = (path for path in lessons() if path.stem.startswith(f"lesson{number}_"))
    text = path.read_text(encoding="utf-8")
    for before, after in quicker.values():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    if leave_out:
        first, last = (text.index(f"# ## {heading}") for heading in leave_out)
        text = text[:first] + text[last:]
    copy = folder / path.name
    copy.write_text(text, encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(copy)))


def refused(check, *candidates):
    """Why the check refuses a solution."""
    verdict = judge(lambda: check(*candidates))
    assert verdict.startswith("not right yet: "), verdict
    return verdict


def accepts(check, *candidates):
    return judge(lambda: check(*candidates)) == "solved"


# 4. How fast is fast


@pytest.fixture(scope="module")
def lesson4(tmp_path_factory):
    return load(
        tmp_path_factory.mktemp("lesson4"),
        4,
        patience=("PATIENCE = 0.05", "PATIENCE = 0.0001"),
        rounds=("ROUNDS = 1_000_000", "ROUNDS = 1000"),
        shape=("M, K, N = 96, 1536, 1536", "M, K, N = 12, 128, 128"),
        levels=("4 * MIB, 16 * MIB, 128 * MIB):", "1 * MIB):"),
        far=("FAR = bytes_per_second(128 * MIB)", "FAR = bytes_per_second(1 * MIB)"),
        norm=("random.standard_normal((4096, 1024)", "random.standard_normal((64, 1024)"),
        weights=("B.nbytes // (32 * KIB) * 32 * KIB", "32 * KIB"),
    )


def test_its_products_are_right(lesson4):
    shape = SimpleNamespace(M=8, K=50, N=4 * lesson4.LANES)
    random = np.random.default_rng(0)
    a = random.standard_normal((shape.M, shape.K)).astype(np.float32)
    b = random.standard_normal((shape.K, shape.N)).astype(np.float32)
    for function, arguments in (
        (lesson4.three_loops, ()),
        (lesson4.rows_first, ()),
        (lesson4.blocks, (7,)),
        (lesson4.tiles, (7,)),
        (lesson4.with_smallmind, ()),
    ):
        out = np.full((shape.M, shape.N), np.nan, np.float32)
        function(out, a, b, *arguments)
        np.testing.assert_allclose(out, a @ b, rtol=0, atol=1e-4)


def test_its_cache_counts_what_the_text_says(lesson4):
    n, lines = lesson4.SIZE, lesson4.SIZE // 8
    assert lesson4.misses(lesson4.by_columns(n)) >= n**3
    assert lesson4.misses(lesson4.by_rows(n)) == n * n * lines + 2 * n * lines
    assert lesson4.misses(lesson4.by_blocks(n, 4)) < 10_000


def test_the_roofline(lesson4):
    def traffic(M, K, N):
        return 4 * (M * K + K * N + M * N)

    check = lesson4.check_least_seconds
    assert accepts(
        check, lambda M, K, N, peak, bandwidth: max(M * K * N / peak, traffic(M, K, N) / bandwidth)
    )
    assert "not the sum" in refused(
        check, lambda M, K, N, peak, bandwidth: M * K * N / peak + traffic(M, K, N) / bandwidth
    )
    assert "4 bytes" in refused(
        check,
        lambda M, K, N, peak, bandwidth: max(M * K * N / peak, traffic(M, K, N) / 4 / bandwidth),
    )
    assert "moves 4,008,000 bytes" in refused(
        check, lambda M, K, N, peak, bandwidth: max(M * K * N / peak, 4 * K * N / bandwidth)
    )
    assert "210,000,000 multiply-adds" in refused(
        check,
        lambda M, K, N, peak, bandwidth: max(2 * M * K * N / peak, traffic(M, K, N) / bandwidth),
    )


def test_the_best_tile(lesson4):
    def best_tile(registers):
        fitting = [
            (rows, vectors)
            for rows in range(1, registers)
            for vectors in range(1, registers)
            if rows * vectors + vectors + 1 <= registers
        ]
        return min(fitting, key=lambda tile: sum(tile) / math.prod(tile))

    check = lesson4.check_best_tile
    assert accepts(check, best_tile)
    assert "4 * 4 + 4 + 1 = 21 registers, more than 16" in refused(
        check, lambda registers: (2, 2) if registers == 8 else (4, 4)
    )
    assert "another tile that fits" in refused(check, lambda registers: (registers - 2, 1))


def test_few_misses(lesson4):
    def blocks_of_all_three(n):
        return (
            (i, k, j)
            for i0 in range(0, n, 16)
            for j0 in range(0, n, 16)
            for k in range(n)
            for i in range(i0, i0 + 16)
            for j in range(j0, j0 + 16)
        )

    check = lesson4.check_few_misses
    assert accepts(check, blocks_of_all_three)
    assert "it fetches 9,728 lines" in refused(check, lambda n: lesson4.by_blocks(n, 4))
    assert "yours has 4,096" in refused(check, lambda _n: lesson4.by_rows(16))
    assert "twice" in refused(check, lambda n: [(0, 0, 0)] * n**3)
    assert "out of range" in refused(
        check, lambda n: ((i + 1, k, j) for i, k, j in lesson4.by_rows(n))
    )


# 5. Half the bits


@pytest.fixture(scope="module")
def lesson5(tmp_path_factory):
    return load(tmp_path_factory.mktemp("lesson5"), 5, ("2. Where gradients", "Exercises"))


def bfloat16(values):
    bits = values.view(np.uint32)
    up = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, up).astype(np.uint16)


def test_rounding_to_bfloat16(lesson5):
    def cut(values):
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def half_up(values):
        return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)

    def without_nan(values):
        bits = values.view(np.uint32)
        return (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1)) >> 16).astype(np.uint16)

    check = lesson5.check_to_bfloat16
    assert accepts(check, bfloat16)
    assert "the nearest number is the one above it" in refused(check, cut)
    assert "a tie, and the number below" in refused(check, half_up)
    assert "the NaN with the bits 7f800001 became inf" in refused(check, without_nan)
    assert "return uint16, not uint32" in refused(check, lambda values: values.view(np.uint32))
    assert "differ from round_to" in refused(
        check, lambda values: bfloat16(values) if len(values) == 1 else cut(values)
    )


def test_a_step_with_loss_scaling(lesson5):
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

    check = lesson5.check_scaled_step
    assert accepts(check, make())
    assert "divide it by the scale before you clip it" in refused(
        check, clipped_in_place_of_scaling
    )
    assert "must lead to [-0.5, 0]" in refused(check, make(unscale_first=False))
    assert "must be scaled down to norm 10" in refused(check, unclipped)
    assert "must leave the weights as they are" in refused(check, make(skip=False))
    assert "must be halved, once; it is 64" in refused(check, make(update=False))
    assert "steps without an overflow too" in refused(check, make(tell=False))


def test_random_rounding(lesson5):
    def rounded(values, random, spread=2**16):
        noise = random.integers(0, spread, values.shape, dtype=np.uint32)
        return (values.view(np.uint32) + noise & np.uint32(0xFFFF0000)).view(np.float32)

    check = lesson5.check_round_at_random
    assert accepts(check, rounded)
    assert "rounded up 0% of the time" in refused(check, lambda v, r: rounded(v, r, 1))
    assert "must stay as it is" in refused(check, lambda v, r: rounded(v, r, 2**18))
    assert "last 16 bits must be 0" in refused(check, lambda values, _random: values)
    assert "return float32" in refused(check, lambda v, r: rounded(v, r).astype(np.float64))


# 7. Runs that survive


@pytest.fixture(scope="module")
def lesson7(tmp_path_factory):
    return load(tmp_path_factory.mktemp("lesson7"), 7, ("6. The proof", "Exercises"))


def test_an_atomic_write(lesson7):
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

    check = lesson7.check_save
    assert accepts(check, make("create", "write", "sync", "rename", "directory"))
    assert "after create state, the file may hold b''" in refused(check, in_place)
    assert "rename new to state, the file may hold b''" in refused(
        check, make("create", "write", "rename", "directory")
    )
    assert "rename new to state, the file may hold b''" in refused(
        check, make("create", "write", "rename", "sync name", "directory")
    )
    for order in (
        ("create", "write", "sync", "rename"),
        ("create", "write", "sync", "directory", "rename"),
    ):
        assert "bring back the old file" in refused(check, make(*order))
    assert "six are enough" in refused(check, forever)


def test_a_sum_on_any_number_of_threads(lesson7):
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

    check = lesson7.check_parallel_sum
    assert accepts(check, of_chunks)
    assert "depend on the number of threads" in refused(check, of_shares)
    assert "depend on the number of threads" in refused(check, by_thread)
    assert "divide them evenly" in refused(check, lambda x, _threads, add: add(0, x))
    assert "there is no thread 1 of 1" in refused(check, lambda x, threads, add: add(threads, x))
    assert "added up 0 of 20,011 numbers" in refused(check, lambda x, _threads, _add: x.sum())
    assert "the sum is" in refused(check, lambda x, _threads, add: 2 * add(0, x))


ARRAYS = "weights", "velocity", "order"
NUMBERS = "steps", "place"


def saving(*left_out):
    def save_state(trainer):
        state = {name: getattr(trainer, name).tolist() for name in ARRAYS}
        state |= {name: getattr(trainer, name) for name in NUMBERS}
        state["random"] = trainer.random.bit_generator.state
        return json.dumps({name: state[name] for name in state if name not in left_out})

    return save_state


def loading(lesson7, as_array=np.array):
    def load_state(text):
        trainer, state = lesson7.Trainer(), json.loads(text)
        if "random" in state:
            trainer.random.bit_generator.state = state.pop("random")
        for name, value in state.items():
            setattr(trainer, name, as_array(value) if name in ARRAYS else value)
        return trainer

    return load_state


def test_a_checkpoint(lesson7):
    check, load_state = lesson7.check_state, loading(lesson7)
    assert accepts(check, saving(), load_state)
    for name in (*ARRAYS, *NUMBERS):
        message = refused(check, saving(name), load_state)
        assert f"it has another {name}" in message
        assert "resumed after step" in message
    assert "will draw other orders" in refused(check, saving("random"), load_state)
    assert "must return a JSON text, not dict" in refused(check, vars, load_state)
    assert "must return a Trainer" in refused(check, saving(), json.loads)
    assert "is a <class 'list'>" in refused(check, saving(), loading(lesson7, list))


# 8. Out of here


@pytest.fixture(scope="module")
def lesson8(tmp_path_factory):
    return load(
        tmp_path_factory.mktemp("lesson8"),
        8,
        ("7. Fewer bits", "Exercises"),
        steps=("steps=300", "steps=3"),
    )


def test_writing_safetensors(lesson8):
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

    check = lesson8.check_write_safetensors
    assert accepts(check, make())
    assert accepts(
        check, lambda path, tensors: smallmind.files.safetensors.write(path, tensors, {})
    )
    assert "they count from the end of the header" in refused(check, make(start=8))
    assert "'a.T' is read with other values" in refused(check, make(in_memory=True))
    assert "are they little-endian?" in refused(check, make(endian="big"))
    assert "the dtype of 'a' is 'f32'" in refused(check, make(upper=False))
    assert "the tensors have 220" in refused(check, without_tensors)
    assert "are not JSON" in refused(check, without_length)
    assert "the header has no 'ü'" in refused(
        check, lambda path, tensors: make()(path, {n: t for n, t in tensors.items() if n != "ü"})
    )


def test_neighbours(lesson8):
    def as_neighbours(rows, H):
        halves = rows.reshape(H, 2, -1, rows.shape[-1])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    def backwards(rows, H):
        pairs = rows.reshape(H, -1, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    check = lesson8.check_as_neighbours
    assert accepts(check, as_neighbours)
    assert "belong together, so they come first" in refused(check, backwards)
    assert "a row has left its head" in refused(check, lambda rows, _H: as_neighbours(rows, 1))
    assert "in which they came" in refused(check, lambda rows, _H: rows)
    assert "missing or doubled" in refused(
        check, lambda rows, _H: np.concatenate([rows[: len(rows) // 2]] * 2)
    )
    assert "the shape must stay (12, 3)" in refused(check, lambda rows, _H: rows.T)


def test_reading_q8_0(lesson8):
    def read_q8_0(data, scale="<f2", integer=np.int8):
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        d = np.ascontiguousarray(blocks[:, :2]).view(scale).astype(np.float32)
        return d * np.ascontiguousarray(blocks[:, 2:]).view(integer).astype(np.float32)

    def one_scale(data):
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        (d,) = struct.unpack("<e", data[:2])
        return np.float32(d) * blocks[:, 2:].view(np.int8).astype(np.float32)

    check = lesson8.check_read_q8_0
    assert accepts(check, read_q8_0)
    assert "they are signed" in refused(check, lambda data: read_q8_0(data, integer=np.uint8))
    assert "make 0.5, not" in refused(check, lambda data: read_q8_0(data, scale=">f2"))
    assert "a scale of its own" in refused(check, one_scale)
    assert "return float32, not float64" in refused(
        check, lambda data: read_q8_0(data).astype(np.float64)
    )
    assert "the shape is (32,), not (1, 32)" in refused(check, lambda d: read_q8_0(d).ravel())

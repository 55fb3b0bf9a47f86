"""Same bits on any number of threads, on either threading layer, from any Python thread."""

import pytest

from tests.programs import output_of

# Prints the number of threads, and a digest for each kernel, with the same inputs.
DIGESTS = """
import hashlib, sys
import numpy as np
from smallmind.kernels import compiled, reference
from smallmind.kernels.reference import rotary_frequencies
from smallmind.kernels.reference_optimizers import AdamWCoefficients, MatrixBlocks, MuonCoefficients
from smallmind.kernels.codegen.threads import set_threads
from smallmind.kernels.codecs import parts_of
from smallmind.kernels.number_types import BFLOAT16, DTYPES, FLOAT16, NUMBER_TYPES, round_to

KEY = (0xABCD1234 << 32) + 0x9876FEDC
random = np.random.default_rng(3)


def normal(*shape):
    return random.standard_normal(shape, dtype=np.float32)


def empty(*shape):
    return np.full(shape, np.nan, np.float32)


R, C, V, B, H, T = 321, 72, 65, 3, 4, 107
x, w, dy, y = normal(R, C), normal(C, 2 * C), normal(R, 2 * C), normal(R, C)
long_x, long_dy = normal(1100, 40), normal(1100, 200)
one, wide = normal(1, 600), normal(600, 500)
long_qkv, long_dout = normal(300, 72), normal(300, 24)  # one head for all threads
gain, bias = normal(C), normal(2 * C)
query, tables = normal(1, 500), [normal(V, C), normal(T, C)]
qkv, dout = normal(B * T, 3 * C), normal(B * T, C)
D = 12
grouped = normal(B * T, 10 * D)
ids = random.integers(0, V, (B, T)).astype(np.int32)
long_ids = random.integers(0, 40, (1, 300)).astype(np.int32)
p, g, m, v = normal(40000), normal(40000), normal(40000), np.abs(normal(40000))
coefficients = AdamWCoefficients(1e-2, 0.9, 0.99, 1e-8, 0.1, 2.0, 3.0, 0.5)
sizes = (0, 17000, 34000, 39000), (68, 250, 33, 40), (250, 68, 120, 25), (250, 68, 120, 25)
matrices = MatrixBlocks(*(np.array(x) for x in sizes))
cached = [  # keys and values of G heads, four of which look back from `start` on
    (
        (normal(B, G, -(-S // reference.PANEL), D, reference.PANEL), normal(B, G, S, D)),
        normal(B * T, (4 + 2 * G) * D),
        (start - np.arange(B), np.arange(B)[::-1].copy()),
    )
    for B, T, G, D, S, start in (
        (1, 1, 1, 8, 16, 15), (2, 1, 2, 64, 40, 17), (3, 5, 4, 7, 24, 7), (1, 1, 2, 20, 31, 1000)
    )
]


for count in map(int, sys.argv[1].split(",")):
    set_threads(count)
    shown = []

    def digest(name, outputs, *inputs):
        result = getattr(compiled, name)(*outputs, *inputs)
        data = repr(result).encode() + b"".join(output.tobytes() for output in outputs)
        shown.append(f"{name}={hashlib.sha256(data).hexdigest()[:16]}")
        return outputs

    digest("matmul", [empty(R, 2 * C)], x, w, bias, dy)
    digest("matmul", [empty(1, 500)], one, wide)
    for variant, a, b, shape in (
        ("", x, w, (R, 2 * C)), ("_transpose_a", x, dy, (C, 2 * C)), ("_transpose_b", dy, w, (R, C))
    ):
        a, b = round_to(a, BFLOAT16), round_to(b, BFLOAT16)
        digest("matmul" + variant, [empty(*shape)], a, b)
    digest("matmul_gelu", [empty(R, 2 * C), empty(R, 2 * C)], x, w, bias)
    digest("matmul_transpose_a", [empty(C, 2 * C)], x, dy)
    digest("matmul_transpose_a", [empty(40, 200)], long_x, long_dy)
    digest("matmul_transpose_b", [empty(R, C)], dy, w)
    digest("matmul_transpose_b", [empty(1, 600)], query, wide)
    heads, sums = digest("attention", [empty(B * T, C), empty(B, H, T)], qkv, KEY, 0.2)
    digest("attention_backward", [empty(B * T, 3 * C)], dout, heads, sums, qkv, KEY, 0.2)
    heads, sums = digest("attention", [empty(300, 24), empty(1, 1, 300)], long_qkv)
    digest("attention_backward", [empty(300, 72)], long_dout, heads, sums, long_qkv)
    for tokens, n_head, *arrays in ((ids, H, qkv, dout), (long_ids, 1, long_qkv, long_dout)):
        (firsts,) = digest("document_starts", [tokens.copy()], tokens, 7)
        assert firsts.any()
        digest("window_firsts", [firsts], 30, np.array([0]), firsts.copy())
        masked, sums = (KEY, 0.2, 0, firsts), empty(len(tokens), n_head, tokens.shape[1])
        heads, sums = digest("attention", [empty(*arrays[1].shape), sums], arrays[0], *masked)
        arguments = arrays[1], heads, sums, arrays[0], *masked
        digest("attention_backward", [empty(*arrays[0].shape)], *arguments)
    for n_head, *arrays in ((H, qkv, dout), (1, long_qkv, long_dout)):
        halves = [np.ascontiguousarray(round_to(array, BFLOAT16)) for array in arrays]
        lines = empty(B, H, T) if n_head == H else empty(1, 1, 300)
        heads, sums = digest("attention", [np.zeros_like(halves[1]), lines], halves[0], KEY, 0.2)
        arguments = halves[1], heads, sums, halves[0], KEY, 0.2
        digest("attention_backward", [np.zeros_like(halves[0])], *arguments)
    _, mean, rstd = digest("layernorm", [empty(R, C), empty(R), empty(R)], x, gain)
    digest("layernorm_backward", [empty(R, C), gain.copy(), gain.copy()], y, x, mean, rstd, gain)
    digest("gelu", [empty(R, C)], x)
    digest("gelu_backward", [empty(R, C), empty(R, C)], y, x)
    digest("cross_entropy", [empty(R), empty(R, C), x.copy()], ids.reshape(-1), 1 / R)
    outputs = [empty(R), empty(R, C), empty(R), x.copy()]
    digest("distillation", outputs, y, ids.reshape(-1), 0.4, 2.0, 1 / R)
    digest("top_k_logits", [empty(R, C)], ids.reshape(R, 1), dy[:, :2].copy())
    digest("dropout", [empty(R, C)], x, KEY, 0.3, y)
    digest("embedding", [empty(R, C)], tables[0], ids, tables[1], np.array([0]))
    digest("embedding_backward", [table.copy() for table in tables], x, ids)
    digest("embedding", [empty(R, C)], tables[0], ids, y)
    digest("embedding_backward", [tables[0].copy()], None, x, ids)
    heads, sums = digest("attention", [empty(B * T, 6 * D), empty(B, 6, T)], grouped, KEY, 0.2)
    arguments = heads, heads, sums, grouped, KEY, 0.2
    digest("attention_backward", [empty(B * T, 10 * D)], *arguments)
    _, rstd = digest("rmsnorm", [empty(R, C), empty(R)], x, gain)
    digest("rmsnorm_backward", [empty(R, C), gain.copy()], y, x, rstd, gain)
    turns = rotary_frequencies(1e4, D)
    gains, outputs = (gain[:D], gain[D : 2 * D]), [grouped.copy(), empty(B * T, 8 * D)]
    _, kept, rstd = digest("norm_heads", [*outputs, empty(B * T, 8)], *gains, 6, T, turns)
    outputs = [grouped.copy(), gain[:D].copy(), gain[:D].copy()]
    digest("norm_heads_backward", outputs, kept, rstd, *gains, 6, T, turns)
    digest("rope", [x.copy()], rotary_frequencies(1e4, 20), T, 3, 20)
    for name, source in (("relu2", y), ("gelu_erf", y), ("swiglu", dy), ("geglu", dy)):
        digest(name, [empty(R, C)], source)
        digest(f"{name}_backward", [empty(*source.shape), empty(R, C)], x, source)
    values = dy.reshape(-1)[: dy.size // 32 * 32].reshape(-1, 32)
    for integers in (np.empty((len(values), 32), np.int8), np.empty((len(values), 16), np.uint8)):
        digest("quantise", [empty(len(values)), integers], values)
    blocks = round_to(values, DTYPES["q5_1"])[:, 0]
    parts = parts_of(blocks, NUMBER_TYPES["q5_1"])
    digest("dequantise", [empty(*values.shape)], *parts)
    digest("softcap", [empty(R, C)], x, 2.0)
    digest("scale", [empty(R, C)], x, 2.0)
    digest("softcap_backward", [empty(R, C)], y, x, 2.0)
    digest("copy_columns", [empty(R, C)], dy, 7)
    digest("transpose", [empty(*dy.shape[::-1])], dy)
    digest("mix", [dy.copy()], x, y, gain[:2], 9)
    digest("mix_backward", [dy.copy(), y.copy(), gain[:2].copy()], x, y, gain[:2], 9)
    digest("column_sum", [bias.copy()], dy)
    digest("sum_of_squares", [], p)
    digest("adamw", [a.copy() for a in (p, g, m, v)], 30000, coefficients)
    for dtype in (np.float32, FLOAT16, BFLOAT16):
        terms = [round_to(np.concatenate((a, b)), dtype) for a, b in ((p, g), (m, v))]
        digest("add_vectors", [np.empty(80000, dtype)], *terms)
    for kept, row, places in cached:
        digest("cached_attention", [empty(len(row), kept[1].shape[-1] * 4)], row, *kept, *places)
    momentum = MuonCoefficients(1e-2, 0.9, 0.1, 0.5)
    digest("muon", [a.copy() for a in (p, g, m)], matrices, momentum)
    print(count, *shown)
"""

# Several Python threads that run kernels at once.
CROWD = """
import threading
import numpy as np
from smallmind.kernels.compiled import matmul

a, b = np.ones((300, 200), np.float32), np.ones((200, 300), np.float32)
errors = []


def work():
    out = np.empty((300, 300), np.float32)
    for _ in range(50):
        matmul(out, a, b)
        if (out != 200).any():
            errors.append("wrong")


crowd = [threading.Thread(target=work) for _ in range(4)]
for thread in crowd:
    thread.start()
for thread in crowd:
    thread.join()
print("errors", len(errors))
"""


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_results_do_not_depend_on_the_number_of_threads(layer):
    counts = "1,2,3,5,7,8,13,16"
    output = output_of(DIGESTS, counts, NUMBA_NUM_THREADS="16", NUMBA_THREADING_LAYER=layer)
    lines = dict(line.split(" ", 1) for line in output.splitlines())
    assert list(lines) == counts.split(",")
    for count in lines:
        assert lines[count].split() == lines["1"].split(), f"on {count} threads"
    assert len(lines["1"].split()) >= 40


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_several_python_threads_can_run_kernels_at_once(layer):
    assert output_of(CROWD, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="4") == "errors 0\n"

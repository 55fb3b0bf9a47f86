# %% [markdown]
# # How fast is fast
#
# "My code takes 30 milliseconds" says nothing until you know what the machine could have done in
# that time. After this lesson you can
#
# - say, from the shapes alone, whether a kernel is limited by arithmetic or by memory;
# - measure both limits of your own machine;
# - take a matrix product from three plain loops to most of the machine's peak, and say at each step
#   what became faster and why;
# - explain why a model that writes one token at a time runs at a small fraction of that peak.
#
# All times are taken on one core of your machine while the lesson runs, so close other programs.
#
# **Before:** Python and NumPy; lesson 1, to know what the products are for. **Time:** 70 minutes;
# the code runs for 5 seconds.

# %% [markdown]
# ## 1. Two things take time
#
# A kernel, a function that computes with arrays, moves numbers between memory and the processor,
# and computes with them. If it performs F multiply-adds (`a * b + c` counts as one) and moves S
# bytes, a machine that performs P multiply-adds and moves W bytes per second needs
#
# - at least F / P seconds for the arithmetic, and
# - at least S / W seconds for the memory traffic.
#
# Both happen at the same time, so the longer of the two is a lower bound:
#
#     time >= max(F / P, S / W)
#
# Divide F by that time, and you get an upper bound on the rate:
#
#     rate <= min(P, W * I)        with I = F / S
#
# I is the **arithmetic intensity**: the multiply-adds that a kernel performs per byte that it
# moves. It depends on the algorithm; the machine has the balance P / W to compare it with. A kernel
# whose intensity is below the balance is limited by memory, one whose intensity is above it by
# arithmetic. Plotted over I, the bound rises and then turns flat, like half of a roof, hence its
# name, the **roofline**.

# %%
import time
from collections import OrderedDict

import numpy as np
from numba import njit

import smallmind
from smallmind.charts.figure import lines
from smallmind.kernels.alignment import aligned_empty
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.simd import LANES, broadcast, fma, lane_sum, load, store
from smallmind.kernels.gemm.tile import PANEL, TILE_ROWS
from smallmind.kernels.norms import rmsnorm
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw

smallmind.set_threads(1)


PATIENCE = 0.05  # seconds


def seconds(function, *arguments):
    """Returns the shortest of several times: other work of the machine only ever adds to them."""
    function(*arguments)  # the first call compiles
    times: list[float] = []
    while sum(times) < PATIENCE:
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


# %% [markdown]
# ## 2. The ceilings of this machine
#
# ### Multiply-adds per second
#
# A core computes with vectors: registers that hold several numbers, all of which take part in one
# instruction. `smallmind.kernels.codegen.simd` lets a Numba function use them directly: `load`
# reads LANES consecutive float32 numbers, `fma(a, b, c)` computes `a * b + c` in every lane.
#
# To see the peak, we give the core no loads and no stores, only `fma`. The result of an `fma` is
# ready about four cycles after it has started, but a core can start one or two in every cycle. A
# single running sum would mostly wait for its own last result. Only independent sums keep the core
# busy, so we use twelve.


# %%
@njit
def one_sum(numbers, rounds):
    x, y = load(numbers, 0), load(numbers, LANES)
    a = y
    for _ in range(rounds):
        a = fma(a, x, y)
    return lane_sum(a)


@njit
def twelve_sums(numbers, rounds):
    x, y = load(numbers, 0), load(numbers, LANES)
    # They start from different values: the compiler would merge sums that are equal.
    a, b, c, d, e, f = y, x, y + y, y + x, x + x, x - y
    g, h, i, j, k, m = a, b, c, d, e, f
    for _ in range(rounds):
        a, b, c = fma(a, x, y), fma(b, x, y), fma(c, x, y)
        d, e, f = fma(d, x, y), fma(e, x, y), fma(f, x, y)
        g, h, i = fma(g, y, x), fma(h, y, x), fma(i, y, x)
        j, k, m = fma(j, y, x), fma(k, y, x), fma(m, y, x)
    return lane_sum(a + b + c + d + e + f + g + h + i + j + k + m)


NUMBERS = np.repeat(np.array([0.75, 0.125], np.float32), LANES)
ROUNDS = 1_000_000

alone = LANES * ROUNDS / seconds(one_sum, NUMBERS, ROUNDS)
PEAK = 12 * LANES * ROUNDS / seconds(twelve_sums, NUMBERS, ROUNDS)
print(f"Vectors of {LANES} float32 ({ISA.name})")
print(f"one sum:     {alone / 1e9:6.1f} billion multiply-adds per second")
print(f"twelve sums: {PEAK / 1e9:6.1f} billion multiply-adds per second: the peak P")


# %% [markdown]
# (Data sheets count a multiply-add as two operations. Their GFLOP/s are twice these figures.)
#
# ### Bytes per second
#
# Memory has levels. Each core has two small caches, L1 and L2; a larger one, L3, is usually shared;
# behind it is the main memory. The further away a level is, the larger and slower it is. So we
# measure the rate at which one core reads arrays of different sizes, over and over.


# %%
@njit
def read(x, rounds):
    """Reads x (n,) `rounds` times; n is a multiple of 8 LANES."""
    total = np.float32(0)
    for _ in range(rounds):
        a = broadcast(np.float32(0))
        b = c = d = e = f = g = h = a
        for i in range(0, x.size, 8 * LANES):
            a, b = a + load(x, i), b + load(x, i + LANES)
            c, d = c + load(x, i + 2 * LANES), d + load(x, i + 3 * LANES)
            e, f = e + load(x, i + 4 * LANES), f + load(x, i + 5 * LANES)
            g, h = g + load(x, i + 6 * LANES), h + load(x, i + 7 * LANES)
        total += lane_sum(a + b + c + d + e + f + g + h)
    return total


def bytes_per_second(nbytes):
    """Returns the rate at which one core reads an array of this size."""
    x = aligned_empty(nbytes // 4)  # starts on a cache line: no vector straddles two
    x[:] = 1
    rounds = max(1, 2**24 // nbytes)
    return rounds * nbytes / seconds(read, x, rounds)


KIB, MIB = 2**10, 2**20
for size in (16 * KIB, 128 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 128 * MIB):
    rate = bytes_per_second(size)
    print(f"{size // KIB:7,} KiB: {rate / 1e9:6.1f} GB/s, balance {PEAK / rate:6.2f} per byte")

NEAR = bytes_per_second(16 * KIB)  # from the first-level cache

# %% [markdown]
# The last column is the balance P / W: how many multiply-adds a kernel must perform with every byte
# that it reads from there, or else it waits. A number from main memory must typically be used
# dozens of times before fetching it pays off.
#
# ## 3. Arithmetic intensity, on paper
#
# Take the product of a matrix A with M rows and K columns and a matrix B with K rows and N columns.
# Each of the M N elements of the result is a sum of K products:
#
#     F = M N K
#
# If every matrix crosses the memory bus exactly once, at 4 bytes per number,
#
#     S = 4 (M K + K N + M N)
#
# For three square matrices, M = K = N, that is I = N^3 / (12 N^2) = N / 12. **The intensity grows
# with the size**: large products are limited by arithmetic, if they are written so that each number
# is read about once. This is why neural networks are made of matrix products.
#
# Now the same for two other parts of a transformer.
#
# - **A norm** reads each number of its input, squares and adds it, multiplies it by something and
#   writes the result: about 2 multiply-adds, and 8 bytes. I = 1/4, whatever the size.
# - **A single token** that passes through a layer is a product with M = 1. F = K N, and almost all
#   of the traffic is the weights, S = 4 K N. I = 1/4 again: each weight is read, used once, and
#   thrown away.


# %%
def intensity(M, K, N):
    """Returns multiply-adds per byte of a product in which every float32 matrix is moved once."""
    return M * K * N / (4 * (M * K + K * N + M * N))


for M, K, N in ((1, 1024, 1024), (16, 1024, 1024), (256, 1024, 1024), (1024, 1024, 1024)):
    print(f"({M:4} x {K}) ({K} x {N}): {intensity(M, K, N):7.2f} multiply-adds per byte")

print("\nThe roofline of one core, for data in main memory (the bars are logarithmic):")
FAR = bytes_per_second(128 * MIB)
for exponent in range(-3, 8):
    per_byte = 2.0**exponent
    attainable = min(PEAK, FAR * per_byte)
    bar = "#" * max(1, round(4 * np.log2(attainable / 1e8)))
    limit = "memory" if attainable < PEAK else "arithmetic"
    print(f"  {per_byte:7.3f} per byte: {attainable / 1e9:6.1f} G/s {bar} {limit}")

# %% [markdown]
# ## 4. A product, from three loops to the peak
#
# The example is a layer of a transformer: 96 tokens with 1536 channels each, times a matrix of
# weights, 1536 x 1536. The weights take 9 MiB, more than the L2 cache of most cores holds.
#
# ### Step 1: three loops in Python
#
# The definition, word for word, for a few elements of the result.

# %%
M, K, N = 96, 1536, 1536
random = np.random.default_rng(0)
A, B, OUT = aligned_empty((M, K)), aligned_empty((K, N)), aligned_empty((M, N))
random.standard_normal(out=A, dtype=np.float32)
random.standard_normal(out=B, dtype=np.float32)
EXACT = A.astype(np.float64) @ B.astype(np.float64)

results: list[tuple[str, float, float | None]] = []


def report(name, function, *arguments, rows=M, bound=None):
    """Times a product of the first rows of A and B, checks it, and adds a line to the table.

    `bound` is the rate that the roofline allows, in multiply-adds per second.
    """
    out, a = OUT[:rows], A[:rows]
    taken = seconds(function, out, a, B, *arguments)
    assert np.abs(out - EXACT[:rows]).max() < 1e-2
    results.append((name, rows * K * N / taken, bound))
    allowed = f", at most {bound / 1e9:.1f}" if bound else ""
    print(f"{name}: {rows * K * N / taken / 1e9:.3f} billion multiply-adds per second{allowed}")


def in_python(a, b, columns):
    out = []
    for row in a:
        for j in range(columns):
            total = 0.0
            for k in range(len(b)):
                total += row[k] * b[k][j]
            out.append(total)
    return out


a_list, b_list, columns = A[:1].tolist(), B.tolist(), 64
taken = seconds(in_python, a_list, b_list, columns)
results.append(("three loops in Python", columns * K / taken, None))
print(f"three loops in Python: {columns * K / taken / 1e9:.3f} billion multiply-adds per second")

# %% [markdown]
# ### Step 2: the same loops, compiled
#
# Python looks up what `*` means for every single number. Numba compiles the loops to machine code
# once, for float32.


# %%
@njit
def three_loops(out, a, b):
    M, K = a.shape
    N = b.shape[1]
    for i in range(M):
        for j in range(N):
            total = np.float32(0)
            for k in range(K):
                total += a[i, k] * b[k, j]
            out[i, j] = total


report("three loops, compiled", three_loops, rows=6)

# %% [markdown]
# Compiled, and still far from the peak. Look at how the innermost loop walks through b: from
# `b[k, j]` to `b[k + 1, j]`, a whole row further on, 6 KiB away. Memory is not read number by
# number but in **cache lines**, usually of 64 bytes, which hold 16 float32. The loop uses one
# number of each line. By the time it wants the next one, for column j + 1, the line has often been
# evicted. And since the numbers are not adjacent, they cannot be loaded as a vector.
#
# ### Step 3: another order of the loops
#
# The three loops may be nested in any order: they add up the same products. With j innermost, both
# b and out are walked along their rows. Every number of a line is used, and the compiler can work
# on a whole vector at a time.
#
# What is the bound now? For each multiply-add the loop loads a number of b, loads the running sum
# in `out[i, j]`, and stores it again. Stores have a path of their own, so what counts is the loads,
# 8 bytes, from L1 at best. On top of that, all of b is read again for every row of a: 4 bytes per
# multiply-add, from whichever level holds 9 MiB.

# %%
FAST = {"contract"}  # allows a * b + c to become one instruction


@njit(fastmath=FAST)
def rows_first(out, a, b):
    M, K = a.shape
    N = b.shape[1]
    out[:] = 0
    for i in range(M):
        for k in range(K):
            for j in range(N):
                out[i, j] += a[i, k] * b[k, j]


WEIGHTS = bytes_per_second(B.nbytes // (32 * KIB) * 32 * KIB)  # the rate for an array like B
report("b by rows", rows_first, bound=min(PEAK, NEAR / 8, WEIGHTS / 4))

# %% [markdown]
# ### Interlude: a cache in twenty lines
#
# Times depend on everything at once; cache misses can be counted exactly. A cache is a small table
# of lines; when it is full, the line that was used least recently has to go. Here is one with 64
# lines of 8 numbers. The matrices are 64 x 64: a row takes 8 lines, a matrix 512.


# %%
def misses(order, lines=64, line_size=8):
    """order: the (i, k, j) of all multiply-adds -> how many lines had to be fetched."""
    cache: OrderedDict[tuple[str, int, int], None] = OrderedDict()
    missed = 0
    for i, k, j in order:
        for line in (
            ("a", i, k // line_size),
            ("b", k, j // line_size),
            ("out", i, j // line_size),
        ):
            if line in cache:
                cache.move_to_end(line)
                continue
            missed += 1
            cache[line] = None
            if len(cache) > lines:
                cache.popitem(last=False)
    return missed


SIZE = 64


def by_columns(n):
    return ((i, k, j) for i in range(n) for j in range(n) for k in range(n))


def by_rows(n):
    return ((i, k, j) for i in range(n) for k in range(n) for j in range(n))


def by_blocks(n, depth):
    firsts = range(0, n, depth)
    return (
        (i, k, j)
        for first in firsts
        for i in range(n)
        for k in range(first, first + depth)
        for j in range(n)
    )


print(f"{SIZE**3:,} multiply-adds on three matrices of {SIZE * SIZE // 8} lines each:")
print(f"  b by columns:            {misses(by_columns(SIZE)):8,} lines fetched")
print(f"  b by rows:               {misses(by_rows(SIZE)):8,}")
print(f"  b by blocks of 4 rows:   {misses(by_blocks(SIZE, 4)):8,}")

# %% [markdown]
# By columns, every single multiply-add misses. By rows, one in eight does, as a line has eight
# numbers; but b is still fetched again for each row of a, 64 times in all. Blocks avoid that.
#
# ### Step 4: blocks
#
# Cut b into blocks of rows that are small enough to stay in the cache, and use each block for all
# rows of a before you go on to the next. Then b is fetched from afar only once. The price is that
# out is read and written once per block, which costs little as long as the blocks have many rows.


# %%
@njit(fastmath=FAST)
def blocks(out, a, b, depth):
    M, K = a.shape
    N = b.shape[1]
    out[:] = 0
    for first in range(0, K, depth):
        for i in range(M):
            for k in range(first, min(K, first + depth)):
                for j in range(N):
                    out[i, j] += a[i, k] * b[k, j]


DEPTH = 32  # rows of b, 192 KiB
report("blocks of b", blocks, DEPTH, bound=min(PEAK, NEAR / 8))

# %% [markdown]
# The bound is still far below the peak: the innermost loop loads 8 bytes from L1, the nearest
# cache, for each multiply-add. Only one kind of memory is nearer still.
#
# ### Step 5: a tile in registers
#
# Apply the same idea once more, to the smallest and fastest memory of all, the registers. Keep a
# tile of the result in them: R rows of V vectors of L lanes. For one k, load V vectors of b and R
# numbers of a, and combine each with each:
#
#     multiply-adds   R V L
#     loads           R + V L numbers, 4 (R + V L) bytes
#     stores          none, until the very end
#
# For R = 4, V = 2 and L = 16, that is 128 multiply-adds for 144 bytes instead of 1024. The tile
# also provides what we needed to measure the peak, independent sums: R V = 8 of them. The block of
# b that a column of tiles shares, `depth` rows of 2 L numbers, stays in L1.


# %%
@njit
def tile(out, a, b, i, j, first, last):
    """Adds a (4 rows from i, first..last) times b (first..last, 2 LANES columns from j) to out."""
    N = b.shape[1]
    r0 = i * N + j  # flat indices of the four rows of the tile
    r1, r2, r3 = r0 + N, r0 + 2 * N, r0 + 3 * N
    p0, q0, p1, q1 = load(out, r0), load(out, r0 + LANES), load(out, r1), load(out, r1 + LANES)
    p2, q2, p3, q3 = load(out, r2), load(out, r2 + LANES), load(out, r3), load(out, r3 + LANES)
    for k in range(first, last):
        left, right = load(b, k * N + j), load(b, k * N + j + LANES)
        x = broadcast(a[i, k])
        p0, q0 = fma(x, left, p0), fma(x, right, q0)
        x = broadcast(a[i + 1, k])
        p1, q1 = fma(x, left, p1), fma(x, right, q1)
        x = broadcast(a[i + 2, k])
        p2, q2 = fma(x, left, p2), fma(x, right, q2)
        x = broadcast(a[i + 3, k])
        p3, q3 = fma(x, left, p3), fma(x, right, q3)
    store(out, r0, p0)
    store(out, r0 + LANES, q0)
    store(out, r1, p1)
    store(out, r1 + LANES, q1)
    store(out, r2, p2)
    store(out, r2 + LANES, q2)
    store(out, r3, p3)
    store(out, r3 + LANES, q3)


@njit
def tiles(out, a, b, depth):
    """Computes whole tiles only: M a multiple of 4, N of 2 LANES."""
    M, K = a.shape
    N = b.shape[1]
    out[:] = 0
    for first in range(0, K, depth):
        for j in range(0, N, 2 * LANES):
            for i in range(0, M, 4):
                tile(out, a, b, i, j, first, min(K, first + depth))


moved = 4 * (4 + 2 * LANES) / (4 * 2 * LANES)  # bytes per multiply-add
report("tiles of 4 x 2 vectors", tiles, 128, bound=min(PEAK, NEAR / moved))


# %% [markdown]
# ### Step 6: `smallmind.matmul`
#
# The package's own product (`smallmind/kernels/gemm/`) is the same idea, finished:
#
# - its tile fills the register file, 6 rows of up to 4 vectors, so that even fewer bytes move;
# - the block of b is **packed**, copied to a small array without gaps. Rows that are 6 KiB apart
#   fall on different pages, and often compete for the same places in the cache;
# - the last rows and columns, which do not fill a tile, are handled exactly;
# - it divides the tiles among threads, so that each thread writes its own tiles.


# %%
def with_smallmind(out, a, b):
    smallmind.matmul(a, b, out)


moved = 4 * (TILE_ROWS + PANEL) / (TILE_ROWS * PANEL)
report("smallmind.matmul", with_smallmind, bound=min(PEAK, NEAR / moved))

print(f"\n{'':24} {'billion/s':>10} {'of peak':>8} {'at most':>8}")
for name, rate, bound in results:
    most = f"{bound / PEAK:8.1%}" if bound else ""
    print(f"{name:24} {rate / 1e9:10.3f} {rate / PEAK:8.2%} {most}")

# %% [markdown]
# The last column is what the roofline allows for each step, worked out from counting bytes alone.
# Where a step comes close to it, we know what limits it. (If it is a little above, the machine was
# busier while the ceiling was measured.) Where it stays well below, something takes time that the
# model leaves out. For our tiles, that is the distance between the rows of b, the loads and stores
# before and after each tile, and too few independent sums. Step 6 improves all three.
#
# ## 5. Which limit applies to which kernel
#
# Now predict first and measure second, for three kernels of the package: the product above, a norm
# and the product of a single token.


# %%
def compare(name, work, traffic, bandwidth, function, *arguments):
    """Prints the roofline's time, from multiply-adds and bytes, and the measured one."""
    by_work, by_traffic = work / PEAK, traffic / bandwidth
    limit = "arithmetic" if by_work > by_traffic else "memory"
    taken = seconds(function, *arguments)
    print(
        f"{name:18} arithmetic {1e6 * by_work:7.0f} us, memory {1e6 * by_traffic:7.0f} us: "
        f"limited by {limit}; measured {1e6 * taken:7.0f} us"
    )


traffic = 4 * (M * K + K * N + M * N)
compare("product, 96 tokens", M * K * N, traffic, WEIGHTS, with_smallmind, OUT, A, B)
X = random.standard_normal((4096, 1024), np.float32)
Y, rstd, gain = np.empty_like(X), np.empty(len(X), np.float32), np.ones(1024, np.float32)
far = bytes_per_second(32 * MIB)
compare("norm of 16 MiB", 2 * X.size, 8 * X.size, far, rmsnorm, Y, rstd, X, gain)
compare("product, 1 token", K * N, 4 * K * N, WEIGHTS, with_smallmind, OUT[:1], A[:1], B)

# %% [markdown]
# (If the norm takes half as long again as the bound, your core reads each cache line before it
# overwrites it, as many do. A number that is written then costs 8 bytes instead of 4.)
#
# So a norm is made faster by moving less: by computing it together with the kernel before or after
# it, while the numbers are still in a register or in L1, or by storing them in 16 bits.
#
# A single token needs every weight of the model, whatever you do. Several tokens share the traffic:
# with M of them, I is about M / 4, as long as M is small. The time should hardly grow until M / 4
# reaches the balance P / W, and be proportional to M from there on.

# %%
balance = PEAK / WEIGHTS
print(
    f"The balance is {balance:.2f} for these weights: the bend is expected at M = {4 * balance:.0f}"
)
counts = (1, 2, 4, 8, 16, 32, 64, 96)
measured, bounds = [], []
for tokens in counts:
    taken = seconds(with_smallmind, OUT[:tokens], A[:tokens], B)
    least = max(tokens * K * N / PEAK, 4 * K * N / WEIGHTS)
    per_token = 1e6 * taken / tokens
    print(
        f"  {tokens:3} tokens: {1e3 * taken:6.2f} ms, at least {1e3 * least:6.2f}; "
        f"{per_token:4.0f} us per token"
    )
    measured.append(1e3 * taken)
    bounds.append(1e3 * least)
both = {"measured": measured, "the roofline": bounds}
draw("lesson07_tokens", lines("Milliseconds of a product", both, counts, "tokens"))

# %% [markdown]
# That curve decides how models are served. Training, and reading a prompt, run near the peak;
# generating text goes token by token, at the speed of memory. This is why servers answer many
# people in one batch, and why weights of 8 or 4 bits speed up generation even on processors that
# cannot multiply such numbers.
#
# ## Exercises
#
# Fill in a function and run the file again.
#
# ### Exercise 1: the roofline
#
# Write the lower bound on the time of a product of float32 matrices, (M x K) times (K x N), each of
# which is moved once. `peak` is in multiply-adds per second, `bandwidth` in bytes per second.


# %%
def least_seconds(M, K, N, peak, bandwidth):
    raise NotImplementedError


def check_least_seconds(candidate):
    memory = candidate(1, 1000, 1000, peak=1e12, bandwidth=1e9)
    numbers = 1000 + 1000 * 1000 + 1000
    traffic = 4 * numbers
    assert not np.isclose(memory, numbers / 1e9, rtol=1e-9), "a float32 has 4 bytes"
    assert not np.isclose(memory, traffic / 1e9 + 1e-6, rtol=1e-9), (
        "arithmetic and traffic go on at the same time: take the longer one, not the sum"
    )
    assert np.isclose(memory, traffic / 1e9, rtol=1e-9), (
        f"1 x 1000 times 1000 x 1000 moves {traffic:,} bytes, which takes {traffic / 1e9:.6f} s at "
        f"1e9 bytes per second; got {memory}"
    )
    arithmetic = candidate(500, 600, 700, peak=1e9, bandwidth=1e12)
    assert np.isclose(arithmetic, 0.21, rtol=1e-9), (
        f"500 x 600 times 600 x 700 is 210,000,000 multiply-adds, 0.21 s at 1e9 per second; "
        f"got {arithmetic}"
    )


print("Exercise 1:", judge(lambda: check_least_seconds(least_seconds)))

# %% [markdown]
# ### Exercise 2: the best tile
#
# A tile of R rows and V vectors needs R V registers for its sums, V for b and one for a. Per k it
# executes R + V loads for its R V multiply-adds. Given the number of registers, return the (R, V)
# with the fewest loads per multiply-add that fits.
#
# Then compare yours with the package's: its tiles have 6 rows of 4 vectors for 32 registers (as
# AVX-512 has) and 6 rows of 2 for 16. Why might it prefer them? (Think of how many columns the
# matrices of a model usually have.)


# %%
def best_tile(registers):
    raise NotImplementedError


def check_best_tile(candidate):
    for registers in (8, 16, 32):
        R, V = candidate(registers)
        needed = R * V + V + 1
        assert needed <= registers, (
            f"a tile of {R} x {V} needs {R} * {V} + {V} + 1 = {needed} registers, more than "
            f"{registers}"
        )
        fitting = [
            (r, v)
            for r in range(1, registers)
            for v in range(1, registers)
            if r * v + v + 1 <= registers
        ]
        best = min((r + v) / (r * v) for r, v in fitting)
        assert np.isclose((R + V) / (R * V), best), (
            f"with {registers} registers, {R} x {V} takes {(R + V) / (R * V):.3f} loads per "
            f"multiply-add; another tile that fits takes {best:.3f}"
        )


print("Exercise 2:", judge(lambda: check_best_tile(best_tile)))


# %% [markdown]
# ### Exercise 3: fewer misses
#
# Write a generator of all (i, k, j) for matrices of n x n, n a multiple of 32, for which the small
# cache above (64 lines of 8 numbers) fetches fewer than 7,000 lines when n = 64. Blocks of b alone
# do not get there. Think of step 5: which of the three matrices should stay put, and how large a
# part of it fits in the cache together with what the other two need?


# %%
def few_misses(n):
    raise NotImplementedError


def check_few_misses(candidate):
    order = list(candidate(SIZE))
    assert len(order) == SIZE**3, (
        f"there are {SIZE**3:,} multiply-adds, each of them once; yours has {len(order):,}"
    )
    assert len(set(order)) == SIZE**3, "some (i, k, j) appear twice, so others are missing"
    assert set(np.ravel(order)) == set(range(SIZE)), "an index is out of range"
    missed = misses(order)
    assert missed < 7000, (
        f"it fetches {missed:,} lines; keep a tile of out in the cache while k runs from 0 to n"
    )


print("Exercise 3:", judge(lambda: check_few_misses(few_misses)))

# %% [markdown]
# ## Where to read on
#
# - Williams, Waterman, Patterson (2009), *Roofline: An Insightful Visual Performance Model for
#   Multicore Architectures*, Communications of the ACM 52(4).
# - Goto, van de Geijn (2008), *Anatomy of High-Performance Matrix Multiplication*, ACM Transactions
#   on Mathematical Software 34(3): which block belongs in which level of memory.
# - Van Zee, van de Geijn (2015), *BLIS: A Framework for Rapidly Instantiating BLAS Functionality*,
#   ACM Transactions on Mathematical Software 41(3): the loops around one small kernel.
# - Drepper (2007), *What Every Programmer Should Know About Memory*: section 3 on caches, and
#   section 6.2.1, which speeds up a matrix product.
# - Shazeer (2019), *Fast Transformer Decoding: One Write-Head is All You Need*, arXiv:1911.02150:
#   counts bytes and operations of writing token by token, and draws a conclusion.
# - In this package: `kernels/gemm/tile.py` and `kernels/gemm/blocked.py` (the product),
#   `kernels/codegen/isa.py` (which tile fits which processor), and `bench/` in the repository.
#
# ## What you can do now
#
# You can say how fast a piece of code could be on the machine in front of you, and whether it is
# worth making faster; before, a time was just a time. Next: lesson 8, *Half the bits*, which moves
# half as many bytes.

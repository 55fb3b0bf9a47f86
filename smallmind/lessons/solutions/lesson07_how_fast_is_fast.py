"""Solutions of "How fast is fast"."""


# %% Exercise 1
def least_seconds(M, K, N, peak, bandwidth):
    work, traffic = M * K * N, 4 * (M * K + K * N + M * N)
    return max(work / peak, traffic / bandwidth)


# %% Exercise 2
def best_tile(registers):
    fitting = [
        (R, V) for R in range(1, registers) for V in range(1, registers) if registers > R * V + V
    ]
    # That is 5 x 5 and 4 x 3, and the package's 6 x 4 and 6 x 2 load a little more. But the columns
    # of a model are mostly multiples of a power of two, which 5 or 3 vectors do not divide.
    return min(fitting, key=lambda tile: (tile[0] + tile[1]) / (tile[0] * tile[1]))


# %% Exercise 3
def few_misses(n):
    # A tile of out stays: 16 x 16 numbers are 32 lines. For each k it takes 16 numbers of a column
    # of a, in 16 lines that the next k needs again, and 2 lines of b: 50 of 64 lines.
    for i0 in range(0, n, 16):
        for j0 in range(0, n, 16):
            for k in range(n):
                for i in range(i0, i0 + 16):
                    for j in range(j0, j0 + 16):
                        yield i, k, j

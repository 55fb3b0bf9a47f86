"""The sizes that kernels are measured at, by the names of their axes."""

# M tokens, K channels in, N out: of a training step, then such that are no multiples of anything,
# then few rows, as in generation.
STEP = [
    (768, 128, 384),
    (768, 128, 512),
    (768, 512, 128),
    (2048, 128, 512),
    (8192, 128, 512),
    (2048, 256, 1024),
    (4096, 384, 1536),
    (2048, 1024, 256),
]
AWKWARD = [(767, 127, 385), (2047, 129, 511), (8191, 65, 130), (8192, 64, 128)]
FEW_ROWS = [(M, 128, N) for M in (1, 4, 16, 64) for N in (384, 512)]
FEW_ROWS += [(1, 512, 128), (16, 512, 128), (1, 1024, 4096), (16, 1024, 4096), (1, 8192, 8192)]
# R rows, K and N channels: generation by one sequence and by several; a prompt, or fine-tuning.
GENERATED = 8  # rows up to which products are those of generation
_LAYERS = [(768, 768), (768, 3072), (3072, 768), (768, 50257)]
GENERATING = [(R, *layer) for R in (1, 4, GENERATED) for layer in _LAYERS]
FINE_TUNING = [(512, 768, 768), (512, 768, 3072), (2048, 768, 3072), (2048, 3072, 768)]

# The other kernels: sizes of a step, which fit in the cache, and such that do not.
BY_AXES: dict[str, list[tuple[int, ...]]] = {
    "M K N": [(768, 128, 512), (2048, 128, 512), (2048, 256, 1024), (4096, 384, 1536)],
    "B H T D": [(12, 4, 64, 32), (16, 4, 128, 32), (16, 4, 512, 32), (4, 6, 1024, 64)],
    "B H P D": [(1, 4, 16, 32), (1, 9, 64, 64), (8, 9, 64, 64)],  # P panels of 16 positions
    "R C": [(768, 128), (8192, 128), (2048, 384), (262144, 128)],
    "R W": [(768, 512), (8192, 512), (2048, 1536), (65536, 512)],
    "R V": [(768, 65), (8192, 65), (1024, 4096), (4096, 4096)],
    "N K": [(768, 768), (50257, 768)],
    "B T": [(12, 64), (16, 512), (512, 512)],
    "B T C": [(12, 64, 128), (16, 512, 128), (8, 256, 384), (512, 512, 128)],
    "n": [(206_000,), (800_000,), (10_650_000,), (33_000_000,)],
    "L C": [(3, 128), (4, 192), (6, 384)],
}
CACHED, LARGE = 2**18, 2**24  # elements of an array with other axes


def usual_sizes(axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Returns the sizes that a kernel with these axes is measured at, if it names no others."""
    known = BY_AXES.get(" ".join(axes))
    return known or [(round(n ** (1 / len(axes))),) * len(axes) for n in (CACHED, LARGE)]

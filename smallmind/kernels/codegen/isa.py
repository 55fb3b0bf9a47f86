"""The kind of CPU that kernels are compiled for, and the facts about it that they depend on."""

import ctypes
import platform
from dataclasses import dataclass

import llvmlite.binding as llvm
from numba.core import config

INCOMPLETE_MODELS = ("ampere1b", "oryon-1")  # AmpereOne M, Snapdragon X; in LLVM 22


NEVER = 1 << 62


@dataclass(frozen=True)
class InstructionSet:
    """Facts about a kind of CPU that kernels depend on.

    The register tile of products has tile_rows x (tile_vectors * lanes) accumulators. The defaults
    suit CPUs whose first-level cache has 32 KB in 8 ways.
    """

    name: str
    lanes: int
    tile_rows: int
    tile_vectors: int
    fused: bool = True  # multiplies and adds in one instruction
    unrolled: int = 1  # steps along K per iteration: more where loop overhead is measurable
    by_lane: bool = False  # multiplies by one lane of a vector, which need not fill one first
    half: bool = True  # converts float16 in one instruction
    bfloat16: bool = False  # has a dot product of bfloat16 pairs
    pairs: bool = False  # bfloat16 is multiplied in pairs
    quads: bool = False  # has a product of 2 x 4 and 4 x 2 bfloat16: bfmmla
    matrix_unit: bool = False  # multiplies matrices of bfloat16: AMX
    byte_dots: bool = False  # has a dot product of four bytes: VNNI, sdot
    # Faster than float32: Intel's dot product is not, AMD's and that of Arm's own cores are.
    fast_bfloat16: bool = False
    # The level of cache (3: the first, 2: the second) into which the rows of a are prefetched that
    # the next tile reads. With 8 ways, rows that are a power of two apart evict each other from the
    # first: A B, (384,4096,1536), took 0.64 of the ceiling instead of 0.75 on Zen 4 with AVX2. With
    # 12 ways, a from memory is multiplied at 0.67 instead of 0.49 (Zen 5).
    prefetch_level: int = 2
    # In A^T B, panels of b from which on the columns of a are packed: where the third level answers
    # so fast that reading scattered rows four times beats packing them, more than 0.
    packs_a_from: int = 0
    # In A^T B, elements of both operands from which on what is needed next is prefetched during the
    # multiplication: they come from memory, or from a cache that is shared. It pays only if the CPU
    # multiplies so fast that it waits for memory: 0.87 became 0.80 on Zen 3, 0.83 0.86 on Zen 5.
    prefetches_from: int = NEVER
    # Tiles whose sums are finished while they are in the first-level cache. Vector arithmetic is
    # slow right after a product on a matrix unit, where it follows a whole strip.
    finished_tiles: int = 4


def instruction_set(architecture: str, features: dict[str, bool]) -> InstructionSet:
    """CPU architecture and LLVM feature flags -> the facts, among them a tile without spills.

    AVX-512 has 32 registers: 6 x 4 accumulators, 4 of B, 1 of A. AVX2 has 16: 6 x 2, 2, 1.
    NEON has 32 of 4 lanes: 6 x 4, 4, 1. Plain x86-64 has 16 of 4 lanes: 6 x 2, 2, 1.
    """
    half = bool(features.get("f16c"))
    if features.get("avx512f"):
        dots = bool(features.get("avx512bf16"))
        matrix_unit = bool(dots and features.get("amx-tile") and features.get("amx-bf16"))
        is_amd = bool(features.get("sse4a"))  # which no other CPU has
        return InstructionSet(
            "AVX-512",
            lanes=16,
            tile_rows=6,
            tile_vectors=4,
            # Intel's cores share their front end with a second thread: 1.06 times as fast there.
            unrolled=1 if is_amd else 4,
            bfloat16=dots,
            pairs=dots,
            matrix_unit=matrix_unit,
            byte_dots=bool(features.get("avx512vnni")),
            fast_bfloat16=matrix_unit or (dots and is_amd),
            prefetch_level=3,
            packs_a_from=4 if is_amd else 0,
            prefetches_from=2 * 1024 * 1024,
            finished_tiles=12 if matrix_unit else 4,
        )
    if features.get("avx2") and features.get("fma"):
        return InstructionSet(
            "AVX2",
            lanes=8,
            tile_rows=6,
            tile_vectors=2,
            unrolled=4,
            half=half,
            byte_dots=bool(features.get("avxvnni")),
        )
    if is_arm(architecture):
        dots = bool(features.get("bf16"))
        # Arm's own cores that have SVE multiply as many pairs as single numbers per cycle. Apple
        # says nothing about its own.
        is_neoverse = features.get("sve")
        return InstructionSet(
            "NEON",
            lanes=4,
            tile_rows=6,
            tile_vectors=4,
            by_lane=True,
            bfloat16=dots,
            pairs=dots,
            quads=dots,
            byte_dots=bool(features.get("dotprod")),
            fast_bfloat16=bool(dots and is_neoverse),
            prefetch_level=3,
        )
    return InstructionSet(
        architecture, lanes=4, tile_rows=6, tile_vectors=2, fused=False, half=half
    )


def is_arm(architecture: str) -> bool:
    """Returns True if this is a name of 64-bit ARM; operating systems disagree on it."""
    return architecture.lower().startswith(("aarch64", "arm64"))


# LLVM may be given such a product for an ARM CPU only if it compiles these to its instruction: it
# would end the process otherwise. It knows the instructions by the CPU's name alone: the features
# that it reads from the system may lack them.
_NARROWING = """
    define <4 x bfloat> @narrow(<4 x float> %x) {
      %y = fptrunc <4 x float> %x to <4 x bfloat>
      ret <4 x bfloat> %y
    }
"""
_DOT_OF_BYTES = """
    declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
    define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
      %x = sext <16 x i8> %a to <16 x i32>
      %y = sext <16 x i8> %b to <16 x i32>
      %products = mul <16 x i32> %x, %y
      %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
      ret i32 %sum
    }
"""


def compiles_bfloat16(triple: str, cpu: str, features: str) -> bool:
    """Returns True if LLVM uses the bfloat16 instructions of an ARM CPU with these features."""
    return "bfcvtn" in _assembly(_NARROWING, triple, cpu, features)


def compiles_byte_dots(triple: str, cpu: str, features: str) -> bool:
    """Returns True if LLVM uses the dot product of bytes of an ARM CPU with these features."""
    return "sdot" in _assembly(_DOT_OF_BYTES, triple, cpu, features)


def _assembly(code: str, triple: str, cpu: str, features: str) -> str:
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu, features, opt=1)
    return str(machine.emit_assembly(llvm.parse_assembly(code)))


def _may_use_matrix_unit() -> bool:
    """Asks Linux for the tile registers of AMX, which a process may use only after that."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    except (OSError, AttributeError):  # a static Python
        return False


def _avoid_incomplete_models() -> None:
    """Has Numba compile as for any ARM CPU if LLVM would fail on this one.

    Its descriptions of these lack instructions that tiles consist of, and it ends the process.
    """
    if config.CPU_NAME in (None, "host") and llvm.get_host_cpu_name() in INCOMPLETE_MODELS:
        config.CPU_NAME = "generic"


def _compiled_features() -> dict[str, bool]:
    """Returns the features that Numba compiles for: the host's, unless its settings name others."""
    features = _llvm_features()
    if features.get("amx-bf16") and not _may_use_matrix_unit():
        features["amx-bf16"] = False
    if is_arm(ARCHITECTURE):
        _avoid_incomplete_models()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        is_host = config.CPU_NAME in (None, "host")
        cpu = llvm.get_host_cpu_name() if is_host else config.CPU_NAME
        flags = config.CPU_FEATURES
        flags = llvm.get_host_cpu_features().flatten() if flags is None else flags
        target = llvm.get_process_triple(), cpu, flags
        features["bf16"] = compiles_bfloat16(*target)
        features["dotprod"] = compiles_byte_dots(*target)
    return features


def _llvm_features() -> dict[str, bool]:
    if config.CPU_FEATURES:
        return {word[1:]: word[0] == "+" for word in config.CPU_FEATURES.split(",") if word}
    if config.CPU_NAME is None or config.CPU_NAME == "host":
        features = dict(llvm.get_host_cpu_features())
        is_used = {name: config.ENABLE_AVX or not name.startswith("avx") for name in features}
        return {name: has and is_used[name] for name, has in features.items()}
    # LLVM knows the features of a named CPU, but llvmlite does not expose them.
    avx512 = ("skylake-avx512", "icelake", "sapphirerapids", "znver4", "znver5", "cascadelake")
    avx2 = ("haswell", "broadwell", "skylake", "alderlake", "znver1", "znver2", "znver3")
    bfloat16 = ("sapphirerapids", "znver4", "znver5")
    avx512_dots = (*bfloat16, "icelake", "cascadelake")
    name = config.CPU_NAME
    return {
        "avx512f": name.startswith(avx512),
        "avx512bf16": name.startswith(bfloat16),
        "avx512vnni": name.startswith(avx512_dots),
        "avxvnni": name.startswith("alderlake"),
        "sse4a": name.startswith("znver"),
        "avx2": name.startswith(avx2),
        "fma": name.startswith(avx2),
        "f16c": name.startswith((*avx512, *avx2)),
    }


ARCHITECTURE = llvm.get_process_triple().split("-")[0]
ISA = instruction_set(ARCHITECTURE, _compiled_features())

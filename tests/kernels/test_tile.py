"""The register tile on CPUs other than this one: it must fit, and nothing may spill."""

import os
import platform
import re
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from smallmind.kernels.codegen.isa import instruction_set
from smallmind.kernels.gemm.amx_tile import tiles_function
from smallmind.kernels.gemm.tile import tile_function


@pytest.mark.parametrize(
    ("architecture", "features", "name"),
    [
        ("x86_64", {"avx512f": True, "avx2": True, "fma": True}, "AVX-512"),
        ("x86_64", {"avx512f": False, "avx2": True, "fma": True}, "AVX2"),
        ("x86_64", {"avx2": True, "fma": False}, "x86_64"),
        ("x86_64", {}, "x86_64"),
        ("aarch64", {}, "NEON"),
        ("arm64", {}, "NEON"),
        ("ARM64", {}, "NEON"),
    ],
)
def test_the_tile_fills_the_registers_and_no_more(architecture, features, name):
    isa = instruction_set(architecture, features)
    registers = {"AVX-512": 32, "AVX2": 16, "NEON": 32, "x86_64": 16}[name]
    accumulators = isa.tile_rows * isa.tile_vectors
    assert isa.name == name
    assert accumulators + isa.tile_vectors + 1 <= registers
    assert accumulators >= registers // 2


AMX = {"amx-tile": True, "amx-bf16": True}


@pytest.mark.parametrize(
    ("features", "is_fast"),
    [
        ({"avx512bf16": True}, False),  # Intel multiplies bfloat16 no faster than float32,
        ({"avx512bf16": True, **AMX}, True),  # except on the matrix unit;
        ({"avx512bf16": True, "amx-tile": True, "amx-bf16": False}, False),
        ({"avx512bf16": True, "sse4a": True}, True),  # AMD does, twice as fast
        ({"sse4a": True}, False),
    ],
)
def test_bfloat16_is_chosen_where_it_is_faster(features, is_fast):
    isa = instruction_set("x86_64", {"avx512f": True, **features})
    assert isa.fast_bfloat16 == is_fast
    assert isa.matrix_unit == (features.get("amx-bf16", False) and is_fast)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names of x86")
@pytest.mark.parametrize(
    ("settings", "lanes"),
    [
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}, 8),
        ({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}, 4),
        ({"NUMBA_CPU_FEATURES": "+avx2,+fma"}, 8),
        ({"NUMBA_ENABLE_AVX": "0"}, 4),
    ],
    ids=str,
)
def test_the_tile_suits_the_cpu_that_numba_compiles_for(settings, lanes):
    code = "from smallmind.kernels.codegen.isa import ISA; print(ISA.lanes)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU")}
    command = [sys.executable, "-c", code]
    shown = subprocess.check_output(command, env={**environment, **settings}, text=True)
    assert int(shown) == lanes


CPUS = [
    ("haswell", "x86_64-unknown-linux-gnu", {"avx2": True, "fma": True}),
    ("skylake-avx512", "x86_64-unknown-linux-gnu", {"avx512f": True}),
    ("znver5", "x86_64-unknown-linux-gnu", {"avx512f": True, "avx512bf16": True}),
    ("x86-64", "x86_64-unknown-linux-gnu", {}),
    ("neoverse-n1", "aarch64-unknown-linux-gnu", {}),
    ("apple-m1", "arm64-apple-darwin", {}),
]


MULTIPLICATION = r"\s(vfmadd\w+|vdpbf16ps|tdpbf16ps|(?:fmla|bfdot|bfmmla)(?:\.4s)?|mulps)\s"


def inner_loop(cpu, triple, isa, transposed, packs=False, pairs=False):
    """The assembly of the widest tile's loop along K, as LLVM generates it for that CPU."""
    module = ir.Module()
    function = tile_function(module, isa, isa.tile_rows, isa.tile_vectors, transposed, packs, pairs)
    return hottest_block(module, function, cpu, triple)


def hottest_block(module, function, cpu, triple):
    """The block of its assembly that multiplies most."""
    blocks = re.split(r"\n(?=\S)", assembly(module, function, cpu, triple))
    return max(blocks, key=lambda block: len(re.findall(MULTIPLICATION, block)))


def assembly(module, function, cpu, triple):
    """The assembly that LLVM generates for that CPU."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module.triple = triple
    function.linkage = "external"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("cpu", "triple", "features"), CPUS, ids=[cpu[0] for cpu in CPUS])
def test_the_inner_loop_multiplies_and_spills_no_vector(cpu, triple, features, transposed, packs):
    isa = instruction_set(triple.split("-")[0], features)
    loop = inner_loop(cpu, triple, isa, transposed, packs)
    accumulators = isa.tile_rows * isa.tile_vectors
    multiplications = len(re.findall(MULTIPLICATION, loop))
    assert multiplications % accumulators == 0 and multiplications > 0
    if isa.lanes == 16:
        assert "zmm" in loop and "ymm" not in loop
    assert not vectors_on_the_stack(loop)


def vectors_on_the_stack(assembly):
    on_stack = [line for line in assembly.split("\n") if re.search(r"rsp|\[sp", line)]
    return [line for line in on_stack if re.search(r"[xyz]mm|\bq\d", line)]


def test_a_matrix_unit_multiplies_four_tiles_for_four_that_it_loads():
    module = ir.Module()
    function = tiles_function(module, 2, 2)
    loop = hottest_block(module, function, "sapphirerapids", "x86_64-unknown-linux-gnu")
    assert len(re.findall(r"\stdpbf16ps\s", loop)) == len(re.findall(r"\stileloadd\s", loop)) == 4


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cpu", ["znver4", "znver5", "sapphirerapids"])
def test_pairs_of_bfloat16_are_multiplied_in_one_instruction(cpu, transposed):
    isa = instruction_set("x86_64", {"avx512f": True, "avx512bf16": True})
    loop = inner_loop(cpu, "x86_64-unknown-linux-gnu", isa, transposed, pairs=True)
    instructions = re.findall(MULTIPLICATION, loop)
    assert set(instructions) == {"vdpbf16ps"}
    assert len(instructions) % (isa.tile_rows * isa.tile_vectors) == 0
    assert not vectors_on_the_stack(loop)

"""LLVM compiles the kernels' operations for ARM CPUs that need not be here."""

import re
from collections import Counter

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from smallmind.kernels.codegen import isa as isa_module
from smallmind.kernels.codegen.isa import compiles_bfloat16, compiles_byte_dots, instruction_set
from smallmind.kernels.codegen.vector_ir import F32, I8, I64, Storage, VectorIR
from smallmind.kernels.gemm.tile import tile_function
from tests.kernels.test_tile import assembly, hottest_block, inner_loop, vectors_on_the_stack

LINUX, MACOS, WINDOWS = "aarch64-unknown-linux-gnu", "arm64-apple-darwin", "aarch64-pc-windows-msvc"
PLAIN = [("neoverse-n1", LINUX), ("apple-m1", MACOS), ("cortex-a72", LINUX), ("generic", WINDOWS)]
WITH_BFLOAT16 = [("neoverse-v1", LINUX), ("neoverse-n2", LINUX), ("apple-m2", MACOS)]
NEON = instruction_set("aarch64", {})
DOTS = instruction_set("aarch64", {"bf16": True})
BYTES = instruction_set("aarch64", {"dotprod": True})


def multiplications(loop):
    """-> the instructions that multiply and add, and the registers that they add to."""
    found = re.findall(r"\s(fmla|bfdot)(?:\.4s\s+|\s+)v(\d+)", loop)
    return {name for name, _ in found}, [int(register) for _, register in found]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("cpu", "triple", "pairs"),
    [(*cpu, False) for cpu in PLAIN] + [(*cpu, True) for cpu in WITH_BFLOAT16],
)
def test_every_sum_of_a_tile_stays_in_a_register_of_its_own(cpu, triple, pairs, transposed):
    loop = inner_loop(cpu, triple, DOTS if pairs else NEON, transposed, pairs=pairs)
    names, registers = multiplications(loop)
    assert names == {"bfdot" if pairs else "fmla"}
    assert len(registers) == len(set(registers)) == NEON.tile_rows * NEON.tile_vectors == 24
    assert not vectors_on_the_stack(loop)
    assert not re.search(r"\s(bl|blr|mov(\.16b)?\s+v\d+)", loop)


def counts(loop):
    """-> how often each instruction occurs in a loop up to its branch back, loads by register."""
    names = re.findall(r"\n\t([a-z]\w*)(?:\.\S+)?\s+(\S)", loop[: re.search(BACK, loop).end()])
    kinds = ((name, f" {first}" if name.startswith("ld") else "") for name, first in names)
    return Counter(name.replace("ldur", "ldr") + kind for name, kind in kinds)


BACK = r"\n\tb\.\w+\s"  # a loop has one branch


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("cpu", "triple"), PLAIN + WITH_BFLOAT16)
def test_units_that_multiply_do_nothing_else_in_the_loop(cpu, triple, transposed, packs):
    found = counts(inner_loop(cpu, triple, NEON, transposed, packs))
    assert found.pop("fmla") == 24
    assert found.pop("ldp q") == 2  # 4 vectors of b
    # The 6 elements of a, 4 and 2 of them at a time if they are contiguous.
    loads = {"ldr q": 1, "ldr d": 1} if transposed else {"ldr s": 6}
    assert {name: found.pop(name) for name in loads} == loads
    if packs:
        assert found.pop("stp") == found.pop("prfm") + found.pop("prfum") == 2
    assert set(found) <= {"add", "cmp", "b"}
    assert sum(found.values()) <= 10


@pytest.mark.parametrize("rows", [5, 6])
@pytest.mark.parametrize(("cpu", "triple"), WITH_BFLOAT16)
def test_matrices_of_2_x_4_are_multiplied_in_one_instruction(cpu, triple, rows):
    module = ir.Module()
    function = tile_function(module, DOTS, rows, DOTS.tile_vectors, transposed=True, quads=True)
    found = counts(hottest_block(module, function, cpu, triple))
    assert found.pop("bfmmla") == 24
    assert (found.pop("ldp q"), found.pop("ldr q")) == (5, 1)  # 3 vectors of a, 8 of b
    assert set(found) <= {"add", "cmp", "b"}


def compiled(operation, cpu, triple, isa=NEON):
    """The assembly of a function of three pointers, which is given a builder, VectorIR and them."""
    module, ops = ir.Module(), VectorIR(isa)
    kind = ir.FunctionType(ir.VoidType(), [F32.as_pointer()] * 3)
    function = ir.Function(module, kind, "operation")
    builder = ir.IRBuilder(function.append_basic_block())
    operation(builder, ops, *function.args)
    builder.ret_void()
    return assembly(module, function, cpu, triple)


def fma(builder, ops, a, b, c):
    ops.store(builder, ops.fma(builder, *(ops.load(builder, x) for x in (a, b, c))), a)


def widening(storage):
    return lambda builder, ops, a, b, _: ops.store(builder, ops.load(builder, b, storage), a)


def narrowing(storage):
    return lambda builder, ops, a, b, _: ops.store(builder, ops.load(builder, b), a, storage)


def dot_pairs(builder, ops, a, b, c):
    values = (ops.load(builder, x) for x in (a, b, c))
    ops.store(builder, ops.dot_pairs(builder, *values), a)


def dot_bytes(builder, ops, a, b, c):
    kinds = ops.integers, *[ir.VectorType(I8, 4 * ops.lanes)] * 2
    places = (
        builder.bitcast(place, kind.as_pointer())
        for place, kind in zip((a, b, c), kinds, strict=True)
    )
    total, *operands = (builder.load(place, align=1) for place in places)
    result = ops.dot_bytes(builder, total, *operands)
    builder.store(result, builder.bitcast(a, result.type.as_pointer()), align=1)


def prefetch(builder, ops, a, b, c):
    ops.prefetch(builder, a)
    ops.prefetch(builder, b, locality=2)
    ops.prefetch(builder, c, write=True)


def calling(name):
    def call(builder, ops, a, b, _):
        ops.store(builder, ops.call(builder, name, ops.vector, ops.load(builder, b)), a)

    return call


def scale_by_power(builder, ops, a, b, c):
    ops.store(builder, ops.scale_by_power(builder, ops.load(builder, b), ops.load(builder, c)), a)


def lane_sum(builder, ops, a, b, _):
    builder.store(ops.fold(builder, ops.load(builder, b), builder.fadd), a)


def partial(builder, ops, a, b, _):
    ops.store_first(builder, ops.load_first(builder, b, I64(3)), a, I64(3))


@pytest.mark.parametrize(("cpu", "triple"), PLAIN)
@pytest.mark.parametrize(
    ("operation", "instructions"),
    [
        (fma, ["fmla"]),
        (widening(Storage.FLOAT16), ["fcvtl"]),
        (narrowing(Storage.FLOAT16), ["fcvtn"]),
        (widening(Storage.BFLOAT16), ["shll"]),
        (narrowing(Storage.BFLOAT16), ["bsl|bif|bit", "xtn|shrn|uzp2"]),
        (prefetch, ["pldl1keep", "pldl2keep", "pstl1keep"]),
        (calling("llvm.sqrt.v4f32"), ["fsqrt"]),
        (calling("llvm.nearbyint.v4f32"), ["frinti"]),
        (scale_by_power, ["fmul", "shl"]),
        (lane_sum, ["fadd|faddp"]),
        (partial, ["ldr|ldp|ld1|mov", "str|stp|st1"]),
    ],
)
def test_an_operation_is_a_few_instructions(operation, instructions, cpu, triple):
    shown = compiled(operation, cpu, triple)
    for instruction in instructions:
        assert re.search(rf"\b({instruction})\b", shown), shown
    assert not re.search(r"\sblr?\s", shown), "it calls a function"
    assert len(re.findall(r"\n\t[a-z]", shown)) < 40


@pytest.mark.parametrize(("cpu", "triple"), WITH_BFLOAT16)
def test_a_cpu_with_bfloat16_narrows_and_multiplies_pairs_in_one_instruction(cpu, triple):
    assert "bfcvtn" in compiled(narrowing(Storage.BFLOAT16), cpu, triple, DOTS)
    assert len(re.findall(r"\sbfdot", compiled(dot_pairs, cpu, triple, DOTS))) == 1


def test_without_such_an_instruction_pairs_take_two_multiplications():
    assert len(re.findall(r"\sfmla", compiled(dot_pairs, "neoverse-n1", LINUX))) == 2


@pytest.mark.parametrize("cpu", ["neoverse-n1", "apple-m1"])
def test_a_cpu_that_has_it_multiplies_four_bytes_in_one_instruction(cpu):
    assert len(re.findall(r"\ssdot", compiled(dot_bytes, cpu, LINUX, BYTES))) == 1


def test_without_such_an_instruction_bytes_take_two_multiplications():
    shown = compiled(dot_bytes, "cortex-a72", LINUX)
    assert len(re.findall(r"\s(?:smull|smull2|mul)\s", shown)) == 2


@pytest.mark.parametrize(
    ("cpu", "features", "expected"),
    [
        ("neoverse-n1", "", True),
        ("apple-m1", "", True),
        ("cortex-a72", "", False),
        ("neoverse-n1", "-dotprod", False),
        ("generic", "+dotprod", True),
    ],
)
def test_llvm_tells_which_cpus_multiply_bytes(cpu, features, expected):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    assert compiles_byte_dots(LINUX, cpu, features) == expected


@pytest.mark.parametrize(
    ("cpu", "features", "expected"),
    [
        ("apple-m1", "", False),
        ("apple-m2", "", True),
        ("neoverse-n1", "+neon,+lse", False),
        ("neoverse-v1", "+neon,+sve", True),
        ("neoverse-v1", "-bf16", False),
        ("generic", "", False),
        ("generic", "+bf16", True),
    ],
)
def test_llvm_tells_which_cpus_have_bfloat16(cpu, features, expected):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    assert compiles_bfloat16(LINUX, cpu, features) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),  # the host, which is a neoverse-n1
        ({"CPU_NAME": "neoverse-v1"}, True),
        ({"CPU_NAME": "neoverse-v1", "CPU_FEATURES": "-bf16"}, False),
        ({"CPU_FEATURES": "+bf16"}, True),
    ],
    ids=str,
)
def test_the_settings_of_numba_decide_on_arm_too(settings, expected, monkeypatch):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    features = llvm.FeatureMap({"neon": True})
    monkeypatch.setattr(isa_module, "ARCHITECTURE", "aarch64")
    monkeypatch.setattr(llvm, "get_process_triple", lambda: LINUX)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "neoverse-n1")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    for name in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(isa_module.config, name, settings.get(name))
    isa = instruction_set("aarch64", isa_module._compiled_features())
    assert (isa.name, isa.pairs) == ("NEON", expected)


@pytest.mark.parametrize(
    ("chosen", "host", "expected"),
    [
        (None, "oryon-1", "generic"),
        ("host", "ampere1b", "generic"),
        (None, "neoverse-n1", None),
        ("neoverse-n1", "oryon-1", "neoverse-n1"),
    ],
)
def test_a_cpu_that_llvm_fails_on_is_compiled_for_as_any_other(chosen, host, expected, monkeypatch):
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: host)
    monkeypatch.setattr(isa_module.config, "CPU_NAME", chosen)
    isa_module._avoid_incomplete_models()
    name = isa_module.config.CPU_NAME
    assert name == expected


@pytest.mark.parametrize(
    ("features", "pairs", "is_fast"),
    [
        ({}, False, False),
        ({"sve": True}, False, False),  # such as A64FX
        ({"bf16": True}, True, False),  # Apple's, which nobody has measured
        ({"bf16": True, "sve": True}, True, True),  # Neoverse V1 and later
    ],
)
def test_bfloat16_is_chosen_on_arm_where_it_is_known_to_be_faster(features, pairs, is_fast):
    isa = instruction_set("aarch64", features)
    assert (isa.pairs, isa.bfloat16, isa.quads) == (pairs, pairs, pairs)
    assert isa.fast_bfloat16 == is_fast

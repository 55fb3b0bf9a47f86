"""LLVM IR of single operations on vectors of float32, for any instruction set."""

from llvmlite import ir
from numba.core import cgutils

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


class VectorIR:
    """Writes operations on vectors as wide as the registers of an instruction set."""

    def __init__(self, isa):
        lanes = isa.lanes
        self.isa = isa
        self.lanes = lanes
        self.vector = ir.VectorType(F32, lanes)
        self.integers = ir.VectorType(I32, lanes)
        self.mask = ir.VectorType(ir.IntType(1), lanes)

    def splat(self, builder, scalar):
        undefined = ir.Constant(ir.VectorType(scalar.type, self.lanes), ir.Undefined)
        first = builder.insert_element(undefined, scalar, I32(0))
        return builder.shuffle_vector(
            first, undefined, ir.Constant(self.integers, [0] * self.lanes)
        )

    def constant(self, value):
        return ir.Constant(self.vector, [value] * self.lanes)

    def integer(self, value):
        return ir.Constant(self.integers, [value] * self.lanes)

    def load(self, builder, pointer):
        return builder.load(builder.bitcast(pointer, self.vector.as_pointer()), align=4)

    def store(self, builder, value, pointer):
        builder.store(value, builder.bitcast(pointer, self.vector.as_pointer()), align=4)

    def prefetch(self, builder, pointer, write=False, locality=3):
        """Asks for the cache line at pointer, which need not be one's own.

        locality 3 brings it into every cache, 2 into those from the second level on.
        """
        place = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, I32(int(write)), I32(locality), I32(1)])

    def call(self, builder, name, result, *arguments):
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    def fma(self, builder, a, b, c):
        """a * b + c, rounded once where the CPU can; elsewhere LLVM would call a slow function."""
        if not self.isa.fused:
            return builder.fadd(builder.fmul(a, b), c)
        return self.call(builder, f"llvm.fma.v{self.lanes}f32", self.vector, a, b, c)

    def scale_by_power(self, builder, a, n):
        """a * 2**n for integral lanes of n from -160 to 160."""
        if self.lanes == 16:
            unmasked, current_rounding = ir.Constant(ir.IntType(16), -1), I32(4)
            name = "llvm.x86.avx512.mask.scalef.ps.512"
            return self.call(
                builder, name, self.vector, a, n, self.constant(0.0), unmasked, current_rounding
            )
        # In two factors, since 2**128 and 2**-150 are no float32 though their product with a may
        # be. The second is exact unless the result is denormal.
        half = self.call(
            builder,
            f"llvm.nearbyint.v{self.lanes}f32",
            self.vector,
            builder.fmul(n, self.constant(0.5)),
        )
        rest = builder.fsub(n, half)
        first = builder.fmul(a, self._power_of_two(builder, half))
        return builder.fmul(first, self._power_of_two(builder, rest))

    def _power_of_two(self, builder, n):
        """2**n for integral lanes from -126 to 127, by writing the exponent's bits."""
        # Adding 1.5 * 2**23 leaves the integer in the low bits: no conversion that is undefined
        # for NaN.
        shifted = builder.fadd(n, self.constant(12582912.0))
        bits = builder.add(builder.bitcast(shifted, self.integers), self.integer(127))
        return builder.bitcast(builder.shl(bits, self.integer(23)), self.vector)

    def first_lanes(self, builder, count):
        """count (i64) -> mask of the lanes below it."""
        lane = ir.Constant(self.integers, list(range(self.lanes)))
        return builder.icmp_signed("<", lane, self.splat(builder, builder.trunc(count, I32)))

    def load_first(self, builder, pointer, count):
        place = builder.bitcast(pointer, self.vector.as_pointer())
        name = f"llvm.masked.load.v{self.lanes}f32.p0"
        mask = self.first_lanes(builder, count)
        kind = ir.FunctionType(self.vector, [place.type, I32, self.mask, self.vector])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [place, I32(4), mask, self.constant(0.0)])

    def store_first(self, builder, value, pointer, count):
        place = builder.bitcast(pointer, self.vector.as_pointer())
        name = f"llvm.masked.store.v{self.lanes}f32.p0"
        mask = self.first_lanes(builder, count)
        kind = ir.FunctionType(ir.VoidType(), [self.vector, place.type, I32, self.mask])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [value, place, I32(4), mask])

    def fold(self, builder, value, combine):
        width = self.lanes
        while width > 1:
            width //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            halves = [
                builder.shuffle_vector(
                    value,
                    undefined,
                    ir.Constant(ir.VectorType(I32, width), list(range(start, start + width))),
                )
                for start in (0, width)
            ]
            value = combine(*halves)
        return builder.extract_element(value, I32(0))

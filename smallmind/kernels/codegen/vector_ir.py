"""LLVM IR of single operations on vectors of float32, for any instruction set.

In memory a vector may also be float16 or bfloat16: it is converted as it is loaded and stored.
"""

import enum

from llvmlite import ir
from numba.core import cgutils

F32 = ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


class Storage(enum.Enum):
    """The way a number is stored in memory."""

    FLOAT32 = F32
    FLOAT16 = ir.HalfType()
    BFLOAT16 = I16  # the upper half of a float32


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite does not have."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self):
        return "bfloat"


_BFloat._create_instance()


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

    def splats(self, builder, pointer, count):
        """Returns the `count` elements from pointer on, each in all lanes."""
        places = [builder.gep(pointer, [I64(i)]) for i in range(count)]
        return [self.splat(builder, builder.load(place)) for place in places]

    def splats_by_lane(self, builder, pointer, count):
        """-> `splats` for a CPU that multiplies by one lane of a vector. count is at most LANES."""
        if count == 1:
            # LLVM knows nothing about what comes out of inline assembly. It would load the element
            # into all lanes, which takes a turn of a unit that multiplies.
            values = ir.Constant(self.vector, ir.Undefined)
            values = builder.insert_element(values, builder.load(pointer), I32(0))
            kind = ir.FunctionType(self.vector, [self.vector])
            values = builder.asm(kind, "", "=w,0", [values], side_effect=False)
        else:
            kind = ir.VectorType(F32, count)
            values = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)
        undefined = ir.Constant(values.type, ir.Undefined)
        lanes = (ir.Constant(self.integers, [lane] * self.lanes) for lane in range(count))
        return [builder.shuffle_vector(values, undefined, lane) for lane in lanes]

    def constant(self, value):
        return ir.Constant(self.vector, [value] * self.lanes)

    def integer(self, value):
        return ir.Constant(self.integers, [value] * self.lanes)

    def load(self, builder, pointer, storage=Storage.FLOAT32):
        place, align = self._place(builder, pointer, storage)
        return self._widen(builder, builder.load(place, align=align), storage)

    def store(self, builder, value, pointer, storage=Storage.FLOAT32):
        place, align = self._place(builder, pointer, storage)
        builder.store(self._narrow(builder, value, storage), place, align=align)

    def load_first(self, builder, pointer, count, storage=Storage.FLOAT32):
        place, align = self._place(builder, pointer, storage)
        kind = place.type.pointee
        mask, zeros = self.first_lanes(builder, count), ir.Constant(kind, None)
        value = self._masked(builder, "load", kind, place, I32(align), mask, zeros)
        return self._widen(builder, value, storage)

    def store_first(self, builder, value, pointer, count, storage=Storage.FLOAT32):
        place, align = self._place(builder, pointer, storage)
        value = self._narrow(builder, value, storage)
        mask = self.first_lanes(builder, count)
        self._masked(builder, "store", ir.VoidType(), value, place, I32(align), mask)

    def load_scale(self, builder, block):
        """Returns the scale of a block of small integers (`kernels.codecs`), in all lanes."""
        kind = ir.HalfType() if self.isa.half else I16
        scale = builder.load(builder.bitcast(block, kind.as_pointer()), align=1)
        return self._widen(builder, self.splat(builder, scale), Storage.FLOAT16)

    def load_signed(self, builder, pointer):
        """As many bytes as lanes -> float32."""
        kind = ir.VectorType(I8, self.lanes)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)
        return builder.sitofp(builder.sext(value, self.integers), self.vector)

    def load_nibbles(self, builder, pointer, shift):
        """As many bytes as lanes -> four bits of each, from bit `shift` on, less 8, as float32."""
        kind = ir.VectorType(I8, self.lanes)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)
        value = builder.lshr(builder.zext(value, self.integers), self.splat(builder, shift))
        value = builder.sub(builder.and_(value, self.integer(15)), self.integer(8))
        return builder.sitofp(value, self.vector)

    def _masked(self, builder, name, result, *arguments):
        """Returns the intrinsic that loads or stores the lanes of a mask."""
        vector = result if name == "load" else arguments[0].type
        suffix = f"v{self.lanes}{vector.element.intrinsic_name}.p0"
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        name = f"llvm.masked.{name}.{suffix}"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    def _place(self, builder, pointer, storage):
        """pointer -> pointer to a vector of the stored type, and its guaranteed alignment."""
        kind = I16 if storage is Storage.FLOAT16 and not self.isa.half else storage.value
        vector = ir.VectorType(kind, self.lanes)
        return builder.bitcast(pointer, vector.as_pointer()), 4 if kind is F32 else 2

    def _widen(self, builder, value, storage):
        """A vector as stored in memory -> float32."""
        if storage is Storage.FLOAT32:
            return value
        if storage is Storage.BFLOAT16:
            bits = builder.shl(builder.zext(value, self.integers), self.integer(16))
            return builder.bitcast(bits, self.vector)
        if self.isa.half:
            return builder.fpext(value, self.vector)
        bits = builder.zext(value, self.integers)
        magnitude = builder.and_(bits, self.integer(0x7FFF))
        # The exponent's bias grows by 112; multiplying also normalises denormal numbers.
        shifted = builder.bitcast(builder.shl(magnitude, self.integer(13)), self.vector)
        finite = builder.bitcast(builder.fmul(shifted, self.constant(2.0**112)), self.integers)
        is_finite = builder.icmp_unsigned("<", magnitude, self.integer(0x7C00))
        infinite = builder.or_(finite, self.integer(0x7F800000))
        sign = builder.shl(builder.and_(bits, self.integer(0x8000)), self.integer(16))
        result = builder.or_(builder.select(is_finite, finite, infinite), sign)
        return builder.bitcast(result, self.vector)

    def _narrow(self, builder, value, storage):
        """float32 -> a vector as stored in memory, rounded to nearest, ties to even."""
        if storage is Storage.FLOAT32:
            return value
        if storage is Storage.FLOAT16 and self.isa.half:
            return builder.fptrunc(value, ir.VectorType(ir.HalfType(), self.lanes))
        if storage is Storage.BFLOAT16 and self.isa.bfloat16:
            kind = ir.VectorType(_BFloat(), self.lanes)
            if self.lanes == 16:
                # Flushes numbers below 2**-126 to zero, as the dot product does.
                narrow = self.call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, value)
            else:
                narrow = builder.fptrunc(self._flush_denormals(builder, value), kind)
            return builder.bitcast(narrow, ir.VectorType(I16, self.lanes))
        bits = builder.bitcast(value, self.integers)
        narrow = self._narrow_bfloat16 if storage is Storage.BFLOAT16 else self._narrow_float16
        return builder.trunc(narrow(builder, bits), ir.VectorType(I16, self.lanes))

    def _flush_denormals(self, builder, value):
        """Puts zero of the same sign in place of numbers below 2**-126."""
        bits = builder.bitcast(value, self.integers)
        magnitude = builder.and_(bits, self.integer(0x7FFFFFFF))
        is_denormal = builder.icmp_unsigned("<", magnitude, self.integer(0x00800000))
        sign = builder.and_(bits, self.integer(0x80000000))
        return builder.bitcast(builder.select(is_denormal, sign, bits), self.vector)

    def _narrow_bfloat16(self, builder, bits):
        upper = builder.lshr(bits, self.integer(16))
        odd = builder.and_(upper, self.integer(1))
        up = builder.add(builder.add(bits, self.integer(0x7FFF)), odd)
        magnitude = builder.and_(bits, self.integer(0x7FFFFFFF))
        is_number = builder.icmp_unsigned("<=", magnitude, self.integer(0x7F800000))
        quiet = builder.or_(upper, self.integer(0x40))
        rounded = builder.select(is_number, builder.lshr(up, self.integer(16)), quiet)
        # Flushes numbers below 2**-126 to zero, as the instruction does.
        is_denormal = builder.icmp_unsigned("<", magnitude, self.integer(0x00800000))
        sign = builder.and_(upper, self.integer(0x8000))
        return builder.select(is_denormal, sign, rounded)

    def _narrow_float16(self, builder, bits):
        sign = builder.and_(builder.lshr(bits, self.integer(16)), self.integer(0x8000))
        magnitude = builder.and_(bits, self.integer(0x7FFFFFFF))
        # The exponent's bias shrinks by 112; overflow becomes infinity by itself.
        odd = builder.and_(builder.lshr(magnitude, self.integer(13)), self.integer(1))
        rounded = builder.add(magnitude, builder.add(odd, self.integer(0xFFF - (112 << 23))))
        normal = builder.lshr(rounded, self.integer(13))
        # Adding 0.5 leaves a denormal's bits, rounded, in the low end.
        half = self.constant(0.5)
        denormal = builder.sub(
            builder.bitcast(
                builder.fadd(builder.bitcast(magnitude, self.vector), half), self.integers
            ),
            builder.bitcast(half, self.integers),
        )
        is_denormal = builder.icmp_unsigned("<", magnitude, self.integer(113 << 23))
        is_number = builder.icmp_unsigned("<=", magnitude, self.integer(0x7F800000))
        special = builder.select(is_number, self.integer(0x7C00), self.integer(0x7E00))
        is_small = builder.icmp_unsigned("<", magnitude, self.integer(143 << 23))
        finite = builder.select(is_denormal, denormal, normal)
        return builder.or_(builder.select(is_small, finite, special), sign)

    def prefetch(self, builder, pointer, write=False, locality=3):
        """Prefetches the cache line at pointer, which may be any address.

        locality 3 brings it into every cache, 2 into the second level and above.
        """
        place = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, I32(int(write)), I32(locality), I32(1)])

    def call(self, builder, name, result, *arguments):
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    def fma(self, builder, a, b, c):
        """-> a * b + c, rounded once if the CPU can; LLVM would emulate that by a slow function."""
        if not self.isa.fused:
            return builder.fadd(builder.fmul(a, b), c)
        return self.call(builder, f"llvm.fma.v{self.lanes}f32", self.vector, a, b, c)

    def add_product(self, builder, total, a, b):
        """-> total + a * b."""
        return self.fma(builder, a, b, total)

    def dot_pairs(self, builder, total, a, b):
        """Adds the products of two bfloat16 per lane to total, in one instruction if possible."""
        if not self.isa.bfloat16:
            a, b = builder.bitcast(a, self.integers), builder.bitcast(b, self.integers)
            for halves in (self._lower_half, self._upper_half):
                total = self.fma(builder, halves(builder, a), halves(builder, b), total)
            return total
        pairs = ir.VectorType(_BFloat(), 2 * self.lanes)
        a, b = builder.bitcast(a, pairs), builder.bitcast(b, pairs)
        # Both flush denormal numbers to zero.
        avx512, neon = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
        name = avx512 if self.lanes == 16 else neon
        return self.call(builder, name, self.vector, total, a, b)

    @property
    def unsigned_dots(self):
        """True if `dot_bytes` takes bytes without a sign on its left."""
        return self.isa.byte_dots and self.lanes > 4

    def dot_bytes(self, builder, total, a, b):
        """Adds the products of four bytes per lane to total, as integers.

        The bytes of b have a sign, and none is -128. Those of a have one unless there is an
        instruction, and that takes them without (`unsigned_dots`).
        """
        if self.unsigned_dots:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            words = (builder.bitcast(x, self.integers) for x in (a, b))
            return self.call(builder, name, self.integers, total, *words)
        if self.isa.byte_dots:
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return self.call(builder, name, self.integers, total, a, b)
        if self.lanes == 4:
            return builder.add(total, self._dot_few_bytes(builder, a, b))
        # In parts as wide as registers of AVX2.
        parts = []
        for start in range(0, 4 * self.lanes, 32):
            order = ir.Constant(ir.VectorType(I32, 32), list(range(start, start + 32)))
            part = (builder.shuffle_vector(x, x, order) for x in (a, b))
            parts.append(self._dot_32_bytes(builder, *part))
        order = ir.Constant(self.integers, list(range(self.lanes)))
        return builder.add(total, builder.shuffle_vector(parts[0], parts[-1], order))

    def _dot_32_bytes(self, builder, a, b):
        """Magnitudes by numbers that take the signs: sums of two do not exceed 16 bits."""
        bits = ir.VectorType(I16, 16)
        magnitude = self.call(builder, "llvm.abs.v32i8", a.type, a, ir.IntType(1)(0))
        signed = self.call(builder, "llvm.x86.avx2.psign.b", a.type, b, a)
        twos = self.call(builder, "llvm.x86.avx2.pmadd.ub.sw", bits, magnitude, signed)
        ones = ir.Constant(bits, [1] * 16)
        return self.call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), twos, ones)

    def _dot_few_bytes(self, builder, a, b):
        """Returns the dot products of 16 bytes, by addition of what is next to each other."""
        total = builder.mul(*(builder.sext(x, ir.VectorType(I16, 16)) for x in (a, b)))
        for count in (8, 4):
            halves = (
                ir.Constant(ir.VectorType(I32, count), list(range(first, 2 * count, 2)))
                for first in (0, 1)
            )
            total = builder.add(*(builder.shuffle_vector(total, total, x) for x in halves))
            total = builder.sext(total, ir.VectorType(I32, count)) if count == 8 else total
        return total

    def add_quads(self, builder, total, a, b):
        """-> total + a b^T, of matrices of bfloat16 in NEON: a and b 2 x 4, total 2 x 2 float32.

        Adds and rounds as `dot_pairs` does, for two pairs one after the other.
        """
        if not self.isa.bfloat16:
            bits = ir.VectorType(I16, 8)

            def numbers(x, rows):
                mask = ir.Constant(self.integers, rows)
                x = builder.bitcast(x, bits)
                chosen = builder.shuffle_vector(x, ir.Constant(bits, ir.Undefined), mask)
                return self._widen(builder, chosen, Storage.BFLOAT16)

            for k in range(4):
                a_k, b_k = numbers(a, [k, k, 4 + k, 4 + k]), numbers(b, [k, 4 + k, k, 4 + k])
                total = self.fma(builder, a_k, b_k, total)
            return total
        kind = ir.VectorType(_BFloat(), 8)
        a, b = builder.bitcast(a, kind), builder.bitcast(b, kind)
        return self.call(builder, "llvm.aarch64.neon.bfmmla", self.vector, total, a, b)

    def _lower_half(self, builder, bits):
        return builder.bitcast(builder.shl(bits, self.integer(16)), self.vector)

    def _upper_half(self, builder, bits):
        return builder.bitcast(builder.and_(bits, self.integer(0xFFFF0000)), self.vector)

    def nearest(self, builder, a):
        """Returns each lane rounded to the nearest integer, ties to even."""
        return self.call(builder, f"llvm.nearbyint.v{self.lanes}f32", self.vector, a)

    def square_root(self, builder, a):
        """Returns the square root of each lane."""
        return self.call(builder, f"llvm.sqrt.v{self.lanes}f32", self.vector, a)

    def scale_by_power(self, builder, a, n):
        """-> a * 2**n for integral lanes of n from -160 to 160, rounded once; NaN if either is."""
        if self.lanes == 16:
            unmasked, current_rounding = ir.Constant(ir.IntType(16), -1), I32(4)
            name = "llvm.x86.avx512.mask.scalef.ps.512"
            return self.call(
                builder, name, self.vector, a, n, self.constant(0.0), unmasked, current_rounding
            )
        # In two factors: 2**128 and 2**-150 are not float32, although their product with a may be.
        # The second multiplication is exact unless the result is denormal.
        half = self.nearest(builder, builder.fmul(n, self.constant(0.5)))
        rest = builder.fsub(n, half)
        first = self.scale_by_normal_power(builder, a, half)
        return self.scale_by_normal_power(builder, first, rest)

    def scale_by_normal_power(self, builder, a, n):
        """-> `scale_by_power` for n from -126 to 127 only: fewer instructions on some CPUs."""
        if self.lanes == 16:
            return self.scale_by_power(builder, a, n)
        return builder.fmul(a, self._power_of_two(builder, n))

    def fraction(self, builder, a):
        """-> a - floor(a), for `scale_by_floor`, as which it clamps a; NaN for NaN."""
        if self.lanes == 16:
            unmasked, current_rounding = ir.Constant(ir.IntType(16), -1), I32(4)
            down_silently = I32(9)
            name = "llvm.x86.avx512.mask.reduce.ps.512"
            zeros = self.constant(0.0)
            return self.call(
                builder, name, self.vector, a, down_silently, zeros, unmasked, current_rounding
            )
        a = self._clamped_power(builder, a)
        return builder.fsub(a, self._floor(builder, a))

    def scale_by_floor(self, builder, a, n):
        """-> a * 2**floor(n), rounded once; n may be any number. NaN where either is."""
        if self.lanes == 16:
            return self.scale_by_power(builder, a, n)  # the instruction takes the floor itself
        return self.scale_by_power(
            builder, a, self._floor(builder, self._clamped_power(builder, n))
        )

    def clamp_to_normal(self, builder, a):
        """-> the larger of a and -126, unless powers of two of any size cost the same. NaN for
        NaN.
        """
        if self.lanes == 16:
            return a
        low = self.constant(-126.0)
        return builder.select(builder.fcmp_ordered(">", low, a), low, a)

    def normal_fraction(self, builder, a):
        """-> the `fraction` of what `clamp_to_normal` returned."""
        if self.lanes == 16:
            return self.fraction(builder, a)
        return builder.fsub(a, self._floor(builder, a))

    def scale_by_normal_floor(self, builder, a, n):
        """-> `scale_by_floor` for n from -126 to 127."""
        if self.lanes == 16:
            return self.scale_by_power(builder, a, n)
        return self.scale_by_normal_power(builder, a, self._floor(builder, n))

    def estimate_log2(self, builder, a):
        """Returns the exponent of a and, in place of the logarithm of its significand, that less 1.

        Within 0.09 of the logarithm.
        """
        bits = builder.sitofp(builder.bitcast(a, self.integers), self.vector)
        scaled = builder.fmul(bits, self.constant(2.0**-23))
        return builder.fsub(scaled, self.constant(127.0))

    def _floor(self, builder, a):
        return self.call(builder, f"llvm.floor.v{self.lanes}f32", self.vector, a)

    def _clamped_power(self, builder, n):
        """Clamps n to -152..130: powers of two beyond are zero and infinity. NaN stays NaN."""
        for predicate, end in ((">", -152.0), ("<", 130.0)):
            is_inside = builder.fcmp_unordered(predicate, n, self.constant(end))
            n = builder.select(is_inside, n, self.constant(end))
        return n

    def round_two(self, builder, first, second):
        """Two vectors -> as many words: all of the first in bfloat16, then all of the second."""
        if self.isa.bfloat16:
            kind = ir.VectorType(_BFloat(), 2 * self.lanes)
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return builder.bitcast(self.call(builder, name, kind, second, first), self.vector)
        halves = [self._narrow(builder, half, Storage.BFLOAT16) for half in (first, second)]
        order = ir.Constant(ir.VectorType(I32, 2 * self.lanes), list(range(2 * self.lanes)))
        return builder.bitcast(builder.shuffle_vector(*halves, order), self.vector)

    def zip_halves(self, builder, both):
        """The result of `round_two` -> words of one element of the first and one of the second."""
        kind = ir.VectorType(I16, 2 * self.lanes)
        halves = builder.bitcast(both, kind)
        order = [lane + half for lane in range(self.lanes) for half in (0, self.lanes)]
        mask = ir.Constant(ir.VectorType(I32, 2 * self.lanes), order)
        zipped = builder.shuffle_vector(halves, ir.Constant(kind, ir.Undefined), mask)
        return builder.bitcast(zipped, self.vector)

    def half_of(self, builder, both, second):
        """Returns the first or the second LANES numbers of what `round_two` returns, as bits."""
        kind = ir.VectorType(I16, 2 * self.lanes)
        halves = builder.bitcast(both, kind)
        start = self.lanes if second else 0
        mask = ir.Constant(self.integers, list(range(start, start + self.lanes)))
        return builder.shuffle_vector(halves, ir.Constant(kind, ir.Undefined), mask)

    def _power_of_two(self, builder, n):
        """-> 2**n for integral lanes from -126 to 127, by writing the exponent's bits."""
        # Adding 1.5 * 2**23 leaves the integer in the low bits: no conversion that is undefined
        # for NaN.
        shifted = builder.fadd(n, self.constant(12582912.0))
        bits = builder.add(builder.bitcast(shifted, self.integers), self.integer(127))
        return builder.bitcast(builder.shl(bits, self.integer(23)), self.vector)

    def reciprocal(self, builder, a):
        """-> 1 / a within 2e-7 relative, for normal lanes of a whose reciprocal is normal too."""
        one = self.constant(1.0)
        if self.lanes != 16:
            return builder.fdiv(one, a)
        # Dividing 16 lanes takes 16 cycles on Intel's CPUs. 14 bits, and one step by Newton:
        unmasked = ir.Constant(ir.IntType(16), -1)
        name = "llvm.x86.avx512.rcp14.ps.512"
        estimate = self.call(builder, name, self.vector, a, self.constant(0.0), unmasked)
        error = self.fma(builder, builder.fneg(a), estimate, one)
        return self.fma(builder, estimate, error, estimate)

    def first_lanes(self, builder, count):
        """count (i64) -> mask of the lanes below it."""
        lane = ir.Constant(self.integers, list(range(self.lanes)))
        return builder.icmp_signed("<", lane, self.splat(builder, builder.trunc(count, I32)))

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

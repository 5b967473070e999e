"""The CPU kernels behind :mod:`atom.wire.mx`: one MX block is 32 SIMD lanes.

LLVM's loop vectorizer turns the scalar form of these loops into code that is several times slower than a copy, so
the body of a block is written as LLVM vector instructions, through numba's ``intrinsic``. They are target-independent:
LLVM splits 32 lanes into whatever registers the machine has. The loops around them are ordinary numba.

Kernels take addresses and byte strides as plain integers, which keeps a call at a few microseconds. They trust their
arguments: :mod:`atom.wire.mx` has checked them. The rules are those of :mod:`atom.wire.mx_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from atom.wire.format import BLOCK, Wire
from atom.wire.mx_reference import MAX_POS, POISON_CODE

I8, I16, I32, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()

F32_NAN, F32_INF, F32_MAGNITUDE = 0x7FC00000, 0x7F800000, 0x7FFFFFFF


@dataclass(frozen=True)
class Element:
    """An MX element format, by its fields: sign, exponent, ``mantissa_bits``; the code is ``bits`` wide."""

    bits: int
    mantissa_bits: int
    bias: int
    max_pos: float
    poison: int
    has_nan: bool

    @property
    def shift(self) -> int:
        """Distance of the code's lowest mantissa bit from float32's."""
        return 23 - self.mantissa_bits

    @property
    def max_bits(self) -> int:
        """``max_pos`` as float32 bits."""
        return int(np.float32(self.max_pos).view(np.int32))

    @property
    def min_normal(self) -> float:
        """Smallest magnitude with a full mantissa."""
        return 2.0 ** (1 - self.bias)


E4M3 = Element(8, 3, 7, MAX_POS[Wire.FP8], POISON_CODE[Wire.FP8], has_nan=True)
E2M1 = Element(4, 1, 1, MAX_POS[Wire.FP4], POISON_CODE[Wire.FP4], has_nan=False)

# The selector that kernels take: a pair of the type outside (what is read or written) and the element format.
BF16_FP8, BF16_FP4, F32_FP8, F32_FP4 = range(4)
_SELECT = {
    BF16_FP8: (I16, E4M3),
    BF16_FP4: (I16, E2M1),
    F32_FP8: (I32, E4M3),
    F32_FP4: (I32, E2M1),
}


class Lanes:
    """An LLVM vector (or scalar) value with Python operators; integers are unsigned, constants are broadcast."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value):
        self.builder = builder
        self.value = value

    @property
    def type(self) -> ir.Type:
        return self.value.type

    def _element(self) -> ir.Type:
        return self.type.element if isinstance(self.type, ir.VectorType) else self.type

    def _retyped(self, element: ir.Type, count: int | None = None) -> ir.Type:
        if not isinstance(self.type, ir.VectorType):
            return element
        return ir.VectorType(element, count or self.type.count)

    def _operand(self, other: Lanes | int | float) -> ir.Value:
        if isinstance(other, Lanes):
            return other.value
        if isinstance(self.type, ir.VectorType):
            return ir.Constant(self.type, [other] * self.type.count)
        return ir.Constant(self.type, other)

    def _binary(self, name: str, other: Lanes | int | float) -> Lanes:
        if name in ("add", "sub", "mul") and self._element() == F32:
            name = "f" + name
        return Lanes(self.builder, getattr(self.builder, name)(self.value, self._operand(other)))

    def __add__(self, other):
        return self._binary("add", other)

    def __sub__(self, other):
        return self._binary("sub", other)

    def __mul__(self, other):
        return self._binary("mul", other)

    def __and__(self, other):
        return self._binary("and_", other)

    def __or__(self, other):
        return self._binary("or_", other)

    def __lshift__(self, other):
        return self._binary("shl", other)

    def __rshift__(self, other):
        return self._binary("lshr", other)

    def compare(self, op: str, other: Lanes | int) -> Lanes:
        """Unsigned comparison, one bit a lane."""
        return Lanes(self.builder, self.builder.icmp_unsigned(op, self.value, self._operand(other)))

    def choose(self, yes: Lanes, no: Lanes | int) -> Lanes:
        """``yes`` where this bit is set, ``no`` elsewhere; a scalar bit decides for all lanes."""
        return Lanes(self.builder, self.builder.select(self.value, yes.value, yes._operand(no)))

    def widen(self, element: ir.Type) -> Lanes:
        return Lanes(self.builder, self.builder.zext(self.value, self._retyped(element)))

    def narrow(self, element: ir.Type) -> Lanes:
        return Lanes(self.builder, self.builder.trunc(self.value, self._retyped(element)))

    def reinterpret(self, element: ir.Type, count: int | None = None) -> Lanes:
        return Lanes(self.builder, self.builder.bitcast(self.value, self._retyped(element, count)))

    def maximum(self) -> Lanes:
        """The largest lane, as a scalar."""
        element = self._element()
        name = f"llvm.vector.reduce.umax.v{self.type.count}i{element.width}"
        reduce = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(element, [self.type]), name
        )
        return Lanes(self.builder, self.builder.call(reduce, [self.value]))

    def broadcast(self, count: int = BLOCK) -> Lanes:
        """This scalar in every lane."""
        vector = ir.VectorType(self.type, count)
        undefined = ir.Constant(vector, ir.Undefined)
        zero = ir.Constant(I32, 0)
        first = self.builder.insert_element(undefined, self.value, zero)
        mask = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return Lanes(self.builder, self.builder.shuffle_vector(first, undefined, mask))

    def constant(self, value: int | float) -> Lanes:
        """``value`` in the type of this one."""
        return Lanes(self.builder, self._operand(value))


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> Lanes:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return Lanes(builder, value)


def _store(address: ir.Value, lanes: Lanes) -> None:
    pointer = lanes.builder.inttoptr(address, lanes.type.as_pointer())
    lanes.builder.store(lanes.value, pointer).align = 1


def _load_f32_bits(builder: ir.IRBuilder, address: ir.Value, outside: ir.Type) -> Lanes:
    """32 lanes of float32 bits from bf16 (I16) or float32 (I32) in memory."""
    lanes = _load(builder, address, ir.VectorType(outside, BLOCK))
    return lanes.widen(I32) << 16 if outside == I16 else lanes


def _encode(bits: Lanes, fmt: Element) -> tuple[Lanes, Lanes]:
    """Float32 bits (I32 x 32) to element codes (I32 x 32) and the scale byte (I32 scalar)."""
    magnitude = bits & F32_MAGNITUDE
    amax = magnitude.maximum()
    # With max_pos = m * 2^e, amax / max_pos has amax's exponent less e, and its power of two from above is one more
    # where amax's mantissa exceeds m. Adding up to the next exponent does both; `floor` is where the sum reaches 1.
    carry = 0x7FFFFF - (fmt.max_bits & 0x7FFFFF)
    drop = ((fmt.max_bits >> 23) - 127) << 23
    floor = (1 << 23) + drop
    raised = amax + carry
    raised = raised.compare("<", floor).choose(raised.constant(floor), raised)
    exponent = (raised - drop) >> 23
    reciprocal = (exponent.constant(254) - exponent) << 23
    poisoned = amax.compare(">=", F32_INF)
    scale = amax.compare("==", 0).choose(exponent.constant(0), exponent)
    scale = poisoned.choose(exponent.constant(0xFF), scale)

    scaled = magnitude.reinterpret(F32) * reciprocal.reinterpret(F32).broadcast()
    y = scaled.reinterpret(I32)
    # Normal codes: round the mantissa to nearest even in place, the carry running into the exponent.
    half = (1 << (fmt.shift - 1)) - 1
    rebias = (127 - fmt.bias) << 23
    normal = (y + (half - rebias) + ((y >> fmt.shift) & 1)) >> fmt.shift
    # Subnormal codes: next to this number float32 steps by one code, so the addition rounds to nearest even.
    step = fmt.min_normal * 2.0 ** (23 - fmt.mantissa_bits)
    subnormal = (scaled + step).reinterpret(I32) & ((2 << fmt.mantissa_bits) - 1)
    smallest = int(np.float32(fmt.min_normal).view(np.int32))
    code = y.compare(">=", smallest).choose(normal, subnormal)
    code = code | ((bits >> (32 - fmt.bits)) & (1 << (fmt.bits - 1)))
    return poisoned.choose(code.constant(fmt.poison), code), scale


def _decode(code: Lanes, scale: Lanes, fmt: Element) -> Lanes:
    """Element codes (I32 x 32) times the scale byte (I32 scalar), as float32 bits (I32 x 32)."""
    sign = fmt.bits - 1
    magnitude = code & ((1 << sign) - 1)
    shifted = magnitude << fmt.shift
    normal = shifted + ((127 - fmt.bias) << 23)
    # A subnormal code read as if it had the hidden bit is too large by exactly that bit.
    lifted = shifted + ((128 - fmt.bias) << 23)
    subnormal = (lifted.reinterpret(F32) - fmt.min_normal).reinterpret(I32)
    value = magnitude.compare(">=", 1 << fmt.mantissa_bits).choose(normal, subnormal)
    if fmt.has_nan:
        value = magnitude.compare("==", (1 << sign) - 1).choose(value.constant(F32_NAN), value)
    value = value | ((code >> sign) << 31)
    factor = scale << 23
    factor = scale.compare("==", 0).choose(factor.constant(0x00400000), factor)
    product = (value.reinterpret(F32) * factor.reinterpret(F32).broadcast()).reinterpret(I32)
    return scale.compare("==", 0xFF).choose(product.constant(F32_NAN), product)


def _store_f32_bits(address: ir.Value, bits: Lanes, outside: ir.Type) -> None:
    """Store float32 bits as float32 (I32) or rounded to nearest even to bf16 (I16)."""
    if outside == I16:
        # A NaN here has no low mantissa bits, so it cannot round up to an infinity.
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).narrow(I16)
    _store(address, bits)


def _store_codes(address: ir.Value, code: Lanes, fmt: Element) -> None:
    if fmt.bits == 4:
        pairs = code.narrow(I16).reinterpret(I32, BLOCK // 2)
        code = pairs | (pairs >> 12)
    _store(address, code.narrow(I8))


def _load_codes(builder: ir.IRBuilder, address: ir.Value, fmt: Element) -> Lanes:
    if fmt.bits == 8:
        return _load(builder, address, ir.VectorType(I8, BLOCK)).widen(I32)
    packed = _load(builder, address, ir.VectorType(I8, BLOCK // 2)).widen(I32)
    pairs = (packed & 0xF) | ((packed >> 4) << 16)
    return pairs.reinterpret(I16, BLOCK).widen(I32)


def _block_intrinsic(body: Callable[..., None], arguments: int):
    """An intrinsic ``f(selector, *addresses)`` that runs ``body(builder, addresses, outside, fmt)`` for the selector."""

    def codegen(context, builder, signature, args):
        selector, *addresses = args
        done = builder.append_basic_block("done")
        switch = builder.switch(selector, done)
        for value, (outside, fmt) in _SELECT.items():
            case = builder.append_basic_block(f"select{value}")
            switch.add_case(ir.Constant(selector.type, value), case)
            builder.position_at_end(case)
            body(builder, addresses, outside, fmt)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.intp] * (arguments + 1)), codegen


@intrinsic
def quantize_block(typingctx, selector, src, codes, scale):
    """Quantize the 32 elements at ``src``: codes to ``codes``, one byte to ``scale``."""

    def body(builder, addresses, outside, fmt):
        src, codes, scale = addresses
        code, scale_byte = _encode(_load_f32_bits(builder, src, outside), fmt)
        _store_codes(codes, code, fmt)
        _store(scale, scale_byte.narrow(I8))

    return _block_intrinsic(body, 3)


@intrinsic
def dequantize_block(typingctx, selector, codes, scale, dst):
    """Dequantize the block at ``codes`` with the byte at ``scale`` to 32 elements at ``dst``."""

    def body(builder, addresses, outside, fmt):
        codes, scale, dst = addresses
        scale_byte = _load(builder, scale, I8).widen(I32)
        _store_f32_bits(dst, _decode(_load_codes(builder, codes, fmt), scale_byte, fmt), outside)

    return _block_intrinsic(body, 3)


@intrinsic
def fake_quantize_block(typingctx, selector, src, dst):
    """Quantize the 32 elements at ``src`` and store what dequantizing gives, as bf16, at ``dst``."""

    def body(builder, addresses, outside, fmt):
        src, dst = addresses
        code, scale_byte = _encode(_load_f32_bits(builder, src, outside), fmt)
        _store_f32_bits(dst, _decode(code, scale_byte, fmt), I16)

    return _block_intrinsic(body, 2)


@intrinsic
def copy_bytes(typingctx, dst, src, count):
    """memcpy of ``count`` bytes between two addresses."""

    def codegen(context, builder, signature, args):
        dst, src, count = args
        pointer = I8.as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(dst, pointer), builder.inttoptr(src, pointer), count, 1
        )
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def clear_bytes(typingctx, dst, count):
    """Zero ``count`` bytes at an address."""

    def codegen(context, builder, signature, args):
        dst, count = args
        cgutils.memset(builder, builder.inttoptr(dst, I8.as_pointer()), count, 0)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def _kernel(function: Callable) -> Callable:
    """Compile at the first call and keep the machine code on disk where some directory takes it.

    numba looks at NUMBA_CACHE_DIR, this package's ``__pycache__`` and the user's cache directory, in that order, and
    raises when none is writable; then each process compiles anew (about a second).
    """
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:
        return njit(function, nogil=True)


@_kernel
def quantize_rows(
    selector,
    src,
    src_stride,
    src_bytes,
    count,
    blocks,
    codes,
    codes_stride,
    code_bytes,
    scales,
    scales_stride,
    scale_bytes,
):
    """Quantize ``count`` rows; ``*_bytes`` of src and codes are a block's, ``scale_bytes`` is the scale row's width."""
    for i in range(count):
        for b in range(blocks):
            quantize_block(
                selector,
                src + i * src_stride + b * src_bytes,
                codes + i * codes_stride + b * code_bytes,
                scales + i * scales_stride + b,
            )
        clear_bytes(scales + i * scales_stride + blocks, scale_bytes - blocks)


@_kernel
def quantize_gathered_rows(
    selector,
    src,
    src_stride,
    src_bytes,
    rows,
    sources,
    blocks,
    codes,
    codes_stride,
    code_bytes,
    scales,
    scales_stride,
    scale_bytes,
):
    """Out row ``i`` becomes source row ``rows[i]`` (int64 array) of ``sources`` rows, each quantized once.

    Returns the first position whose row does not exist, before anything is written, or -1.
    """
    for i in range(rows.size):
        if rows[i] < 0 or rows[i] >= sources:
            return i
    written = np.full(sources, -1, np.int64)
    for i in range(rows.size):
        row = rows[i]
        first = written[row]
        if first >= 0:
            copy_bytes(codes + i * codes_stride, codes + first * codes_stride, blocks * code_bytes)
            copy_bytes(scales + i * scales_stride, scales + first * scales_stride, scale_bytes)
            continue
        written[row] = i
        for b in range(blocks):
            quantize_block(
                selector,
                src + row * src_stride + b * src_bytes,
                codes + i * codes_stride + b * code_bytes,
                scales + i * scales_stride + b,
            )
        clear_bytes(scales + i * scales_stride + blocks, scale_bytes - blocks)
    return -1


@_kernel
def dequantize_rows(
    selector,
    codes,
    codes_stride,
    code_bytes,
    scales,
    scales_stride,
    count,
    blocks,
    dst,
    dst_stride,
    dst_bytes,
):
    """Dequantize ``count`` rows; ``code_bytes`` and ``dst_bytes`` are a block's."""
    for i in range(count):
        for b in range(blocks):
            dequantize_block(
                selector,
                codes + i * codes_stride + b * code_bytes,
                scales + i * scales_stride + b,
                dst + i * dst_stride + b * dst_bytes,
            )


@_kernel
def fake_quantize_rows(selector, src, src_stride, src_bytes, count, blocks, dst, dst_stride):
    """Quantize and dequantize ``count`` rows to bf16; ``src_bytes`` is a block's."""
    for i in range(count):
        for b in range(blocks):
            fake_quantize_block(
                selector,
                src + i * src_stride + b * src_bytes,
                dst + i * dst_stride + b * (2 * BLOCK),
            )

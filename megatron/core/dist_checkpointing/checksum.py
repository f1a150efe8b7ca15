"""CRC-32 checksums: of bytes, and of a whole whose parts different ranks read.

A CRC is linear: the register of a whole, started at zero, is the exclusive or of those of its parts, each with zeros in
the places of the others. So ranks that read different parts of a stored tensor compare its one checksum together.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF
_ONE = 1 << 31
"""The polynomial 1: the highest bit of a register is the coefficient of x**0."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def partial_checksum(runs: Iterable[tuple[int, memoryview]], num_bytes: int) -> int:
    """Return what runs of bytes, each with where it starts, add to the CRC-32 of the ``num_bytes`` that they lie in.

    Runs come in order and do not overlap. Many equal gaps between them, as between columns of a matrix, are cheap.
    """
    register, position = 0, 0
    for start, data in runs:
        if register and start != position:
            first, second, third, fourth = _zeros_tables(start - position)
            register = (
                first[register & 0xFF]
                ^ second[register >> 8 & 0xFF]
                ^ third[register >> 16 & 0xFF]
                ^ fourth[register >> 24]
            )
        register = zlib.crc32(data, register ^ _ONES) ^ _ONES
        position = start + len(data)
    return _multiply(register, _power(num_bytes - position))


def join_checksums(parts: Iterable[int], num_bytes: int) -> str:
    """Return the CRC-32 of a whole, as eight hex digits, from what all of its parts add to it."""
    register = _multiply(_ONES, _power(num_bytes)) ^ _ONES
    for part in parts:
        register ^= part
    return f"{register:08x}"


@functools.lru_cache(maxsize=256)
def _zeros_tables(count: int) -> tuple[tuple[int, ...], ...]:
    """Return what ``count`` zero bytes make of a register, one table for each of its four bytes."""
    factor = _power(count)
    bits = [_multiply(1 << bit, factor) for bit in range(32)]
    tables = []
    for first_bit in range(0, 32, 8):
        table = [0]
        for bit in range(first_bit, first_bit + 8):
            table += [entry ^ bits[bit] for entry in table]
        tables.append(tuple(table))
    return tuple(tables)


def _power(num_bytes: int) -> int:
    """Return x to the number of bits in ``num_bytes``, modulo the polynomial."""
    result = _ONE
    for exponent in range(num_bytes.bit_length()):
        if num_bytes >> exponent & 1:
            result = _multiply(result, _square(exponent))
    return result


@functools.cache
def _square(exponent: int) -> int:
    """Return what appending ``2**exponent`` zero bytes multiplies a register by."""
    if exponent == 0:
        return _ONE >> 8
    half = _square(exponent - 1)
    return _multiply(half, half)


def _multiply(left: int, right: int) -> int:
    """Return the product of two registers as polynomials, modulo the polynomial."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & _ONES
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product

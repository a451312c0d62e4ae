"""Products of a tile of rows with all query heads, and sums of rows by weight: rows by number, where they lie.

A row is read once for all query heads of its KV head, and asked for some rows before its turn.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from sfi_kernels.loops.vectors import F32, FLOAT32, I16, I64, LINE, MATH, Code, by_kind, vector

TILE = 64  # rows of a tile: their logits and weights stay in the cache
AHEAD = 8  # rows that are fetched before their turn
GROUP = 4  # query heads whose sums stay in registers, for two rows


def _fetch_row(code: Code, pointer: Any, first: Any, width: Any, size: int) -> None:
    b, numbers = code.builder, LINE // size
    with code.loop(b.udiv(b.add(width, code.count(numbers - 1)), code.count(numbers))) as line:
        code.fetch(pointer, b.add(first, b.mul(line.index, code.count(numbers))), 0)


def _least(code: Code, x: Any, y: Any) -> Any:
    return code.builder.select(code.builder.icmp_signed("<", x, y), x, y)


def _sums_of_eight(code: Code, parts: list[Any]) -> Any:
    # the sums of eight vectors of eight, as one vector: neighbors are added within halves, then the halves
    def added(low: Any, high: Any, places: list[int], step: int) -> Any:
        picked = (code.pick(low, [place + more for place in places], high) for more in (0, step))
        return code.builder.fadd(*picked, flags=MATH)

    while len(parts) > 2:  # noqa: PLR2004 - two are left for the last addition
        parts = [
            added(low, high, [0, 2, 8, 10, 4, 6, 12, 14], 1) for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
    return added(parts[0], parts[1], [0, 1, 2, 3, 8, 9, 10, 11], 4)


def _row_pointer(code: Code, kind: int) -> tuple[Any, int]:
    # to the rows of a kind, and the bytes of a number
    return (code.pointer(1, F32), 4) if kind == FLOAT32 else (code.pointer(2, I16), 2)


def _write_products(code: Code, kind: int) -> None:
    b, (start, n) = code.builder, code.args[4:6]
    (row_p, size), place_p = _row_pointer(code, kind), code.pointer(3, I64)
    query_p, room_p = code.pointer(6, F32), code.pointer(7, F32)
    queries, width = code.size(6, 0), code.size(6, 1)
    last = b.sub(code.size(3, 0), code.count(1))

    def row_at(t: Any) -> Any:
        return b.mul(code.load(place_p, _least(code, b.add(start, t), last), I64, 8), width)

    def group(first: Any, count: int, t: Any, firsts: list[Any]) -> None:
        sums = code.sums(2 * count, 8)

        with code.loop(b.udiv(width, code.count(8))) as eight:
            at = b.mul(eight.index, code.count(8))
            keys = [code.wide(row_p, b.add(row, at), kind, 8) for row in firsts]
            for q in range(count):
                here = b.add(b.mul(b.add(first, code.count(q)), width), at)
                query = code.wide(query_p, here, FLOAT32, 8)
                for place, key in enumerate(keys):
                    code.add(sums[2 * q + place], (query, key))
        parts = [b.load(place) for place in sums]
        total = _sums_of_eight(code, parts + parts[:1] * (8 - len(parts)))
        for q in range(count):
            at = b.add(b.mul(b.add(first, code.count(q)), code.count(TILE)), t)
            place = b.bitcast(b.gep(room_p, [at]), vector(F32, 2).as_pointer())
            b.store(code.pick(total, [2 * q, 2 * q + 1]), place, align=4)

    with code.loop(b.udiv(b.add(n, code.count(1)), code.count(2))) as pair:
        t = b.mul(pair.index, code.count(2))
        for later in (t, b.add(t, code.count(1))):
            _fetch_row(code, row_p, row_at(b.add(later, code.count(AHEAD))), width, size)
        firsts = [row_at(t), row_at(b.add(t, code.count(1)))]
        with code.loop(b.udiv(queries, code.count(GROUP))) as four:
            group(b.mul(four.index, code.count(GROUP)), GROUP, t, firsts)
        done = b.and_(queries, code.count(-GROUP))
        for count in range(1, GROUP):
            with b.if_then(b.icmp_signed("==", b.sub(queries, done), code.count(count))):
                group(done, count, t, firsts)


def _write_sums(code: Code, kind: int) -> None:
    b, (start, n) = code.builder, code.args[4:6]
    (row_p, size), place_p = _row_pointer(code, kind), code.pointer(3, I64)
    weight_p, out_p = code.pointer(6, F32), code.pointer(7, F32)
    queries, width = code.size(7, 0), code.size(7, 1)
    last = b.sub(b.add(start, n), code.count(1))
    whole = b.and_(width, code.count(-16))

    def columns(at: Any, numbers: int, t: Any, firsts: list[Any]) -> None:
        values = [code.wide(row_p, b.add(row, at), kind, numbers) for row in firsts]
        with code.loop(queries) as q:
            place = b.gep(out_p, [b.add(b.mul(q.index, width), at)])
            place = b.bitcast(place, vector(F32, numbers).as_pointer())
            out = b.load(place, align=4)
            for each, value in enumerate(values):
                here = b.add(b.add(b.mul(q.index, code.count(TILE)), t), code.count(each))
                weight = code.spread(code.load(weight_p, here, F32, 4), numbers)
                out = b.fadd(out, b.fmul(weight, value, flags=MATH), flags=["fast"])
            b.store(out, place, align=4)

    with code.loop(b.udiv(b.add(n, code.count(3)), code.count(4))) as four:
        t = b.mul(four.index, code.count(4))
        for each in range(4):
            later = b.add(b.add(start, t), code.count(AHEAD + each))
            place = _least(code, later, b.sub(code.size(3, 0), code.count(1)))
            _fetch_row(code, row_p, b.mul(code.load(place_p, place, I64, 8), width), width, size)
        places = [_least(code, b.add(b.add(start, t), code.count(each)), last) for each in range(4)]
        firsts = [b.mul(code.load(place_p, place, I64, 8), width) for place in places]
        with code.loop(b.udiv(width, code.count(16))) as chunk:
            columns(b.mul(chunk.index, code.count(16)), 16, t, firsts)
        with b.if_then(b.icmp_signed("<", whole, width)):
            columns(whole, 8, t, firsts)


@intrinsic
def products(
    context: Any, kind: Any, rows: Any, half_rows: Any, row_T: Any, start: Any, n: Any, query_QD: Any, room_QT: Any
) -> Any:
    """Multiply all queries by rows `row[start]` to `row[start + n - 1]`; writes one product more for an odd `n`."""
    signature = types.void(types.int64, rows, half_rows, row_T, types.int64, types.int64, query_QD, room_QT)
    return signature, by_kind(range(3), _write_products)


@intrinsic
def add_values(
    context: Any, kind: Any, rows: Any, half_rows: Any, row_T: Any, start: Any, n: Any, room_QT: Any, out_QE: Any
) -> Any:
    """Add rows `row[start]` to `row[start + n - 1]` by weight; weights past `n`, to a multiple of 4, are zeros."""
    signature = types.void(types.int64, rows, half_rows, row_T, types.int64, types.int64, room_QT, out_QE)
    return signature, by_kind(range(3), _write_sums)

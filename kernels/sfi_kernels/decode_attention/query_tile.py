"""The launches of the split kernel in a pass, and their tiles.

With one query a request, a pass is one launch: `EACH`. Otherwise it is two, since one query has too few rows
for a large tile: `LAST` for requests with one query, the last of W; `SEVERAL` for requests that verify a
draft. A program whose request belongs to the other launch returns at once.
"""

from dataclasses import dataclass

from sfi_kernels.attention_tile.shape import LARGE_SHARED, SMALLEST, TileShape, padded
from sfi_kernels.launch import Target

# of a thread, without spills; left alone, the compiler spills for more programs. Two split programs of 128 threads fit
# a processor with either, as many as shared memory allows. Half precision leaves 12,288 registers beside them, enough
# for a program of the Selector, of top-k's counts or of pack; float32 has twice the threads.
REGISTERS, HALF_REGISTERS = 255, 208
FLOAT32_NUMBERS = 4096  # of a tile of queries in float32, whose products run in registers
EACH, LAST, SEVERAL = range(3)
HOPPER = 90  # compute capability times ten
FEW, MANY, MOST = 32, 64, 128  # rows of a tile
NARROW, WIDE = 64, 128  # padded width of a head


@dataclass(frozen=True, slots=True)
class QueryTile:
    """What a program of an attention kernel holds and reads at once.

    `rows` are queries times query heads, 16 to 128; each of the `warps` takes 16 rows or columns of its own.
    The keys of a tile, `tokens`, lie in one page. `stages` is the depth of the software pipeline, `registers`
    the most of a thread.
    """

    rows: int
    warps: int
    tokens: int
    stages: int
    registers: int = REGISTERS


@dataclass(frozen=True, slots=True)
class PartOfPass:
    """A launch of the split kernel: EACH, LAST or SEVERAL, with its tile.

    `tiles` counts the tiles that a request's queries need; each tile reads the keys and values.
    """

    kind: int
    tile: QueryTile
    tiles: int = 1


def parts_of_pass(group: int, queries: int, tile: TileShape, target: Target, *, full: bool) -> list[PartOfPass]:
    """Choose the launches of a pass with W = `queries`, for `group` query heads per KV head.

    `tile` is the largest that the pages allow; `full` says whether numbers have 32 bits.
    """
    # float32 products run in registers, which need more threads
    registers, warps = (REGISTERS, 8) if full else (HALF_REGISTERS, 4)
    one = QueryTile(padded(group), warps, tile.tokens, tile.stages, registers)
    if queries == 1:
        return [PartOfPass(EACH, one)]
    rows = group * queries
    several = several_queries_tile(rows, tile, target, full=full)
    return [PartOfPass(LAST, one), PartOfPass(SEVERAL, several, -(-rows // several.rows))]


def several_queries_tile(queries: int, tile: TileShape, target: Target, *, full: bool) -> QueryTile:
    """Choose the tile for requests that verify a draft; `queries` counts each query head.

    A processor fits two programs of 4 warps, or one of 8. Half the keys in a tile free registers for twice
    the queries; one more stage keeps as many bytes in flight.
    """
    if full:
        rows = min(padded(queries), FEW, FLOAT32_NUMBERS // tile.key_width)
        return QueryTile(rows, 8, tile.tokens, tile.stages)
    width, large = max(tile.key_width, tile.value_width), target.capability in LARGE_SHARED
    most = MOST if width <= (WIDE if large else NARROW) else MANY
    if tile.key_width > tile.value_width:  # keys of MLA, 192 numbers in 256, spill with more rows
        most = SMALLEST
    rows = min(padded(queries), most)
    warps = 8 if rows == MOST or (width > WIDE and rows >= FEW) else 4
    # Hopper's tensor cores read queries from shared memory, the others' from registers
    whole = rows <= FEW or (rows == MOST and target.capability == HOPPER)
    tokens = tile.tokens if whole else min(FEW, tile.tokens)
    deeper = tokens < tile.tokens and (rows == MANY or large)
    return QueryTile(rows, warps, tokens, tile.stages + deeper)

"""Which queries the rows of a tile are, by the kind of the launch (`query_tile`).

Every function has one `return`: Triton compiles what follows a `return` in a branch too, and wants one type.
"""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import rows
from sfi_kernels.decode_attention import query_tile as kinds

EACH, LAST, SEVERAL = (tl.constexpr(kind) for kind in (kinds.EACH, kinds.LAST, kinds.SEVERAL))
QUERIES = tl.constexpr(words.QUERIES)


@triton.jit
def work_item(W, G: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Return the program's work item, its tile of a request's queries, and how many tiles these have."""
    item, row_tile, tiles = tl.program_id(0), 0, 1
    if KIND == SEVERAL:  # the tiles of an item run side by side, so that they share what they read
        tiles = tl.cdiv(G * W, BLOCK_M)
        item, row_tile = item // tiles, item % tiles
    return item.to(tl.int64), row_tile, tiles


@triton.jit
def queries_of(row, KIND: tl.constexpr):
    """Return the number of queries of a request, given its row of the table."""
    queries = 1
    if KIND != EACH:
        queries = tl.load(row + QUERIES)
    return queries


@triton.jit
def is_idle(queries, row_tile, W, G: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Say whether the other launch attends for this request, or the tile has none of its queries."""
    idle = queries > 1
    if KIND == SEVERAL:
        idle = (queries <= 1) | ((row_tile + 1) * BLOCK_M <= (W - queries) * G)
    return idle


@triton.jit
def query_rows(row_tile, W, queries, G: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Return the rows' query heads, places in [G, W], whether they are queries, and places in W.

    The G query heads of a query are adjacent, so that a tile holds neighboring queries.
    """
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    g, w, place, own = row, row, row, row < G
    if KIND == SEVERAL:
        g, w = row % G, row // G
        place, own = g * W + w, (w < W) & (w >= W - queries)
    elif KIND == LAST:
        place = row * W + W - 1
    return g, place, own, w


@triton.jit
def places(W, G: tl.constexpr, KIND: tl.constexpr):
    """Return the size of [G, W]."""
    return G if KIND == EACH else G * W


@triton.jit
def evidence_rows(
    query_ptr, g, place_GW, own, query, row_tile, tiles, W,
    G: tl.constexpr, D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return query heads, places in [G, W], marks and queries of the evidence.

    With one query a request these are the tile's own rows, with several they are rows of the last tile.
    """
    if KIND == SEVERAL:
        g = tl.arange(0, BLOCK_J)
        place_GW, own = g * W + W - 1, g < tl.where(row_tile == tiles - 1, G, 0)
        query = rows(query_ptr, place_GW, D, own, D, BLOCK_D)
    return g, place_GW, own, query

"""The tiles of the kernels for many queries, by head dimension, dtype and architecture."""

import torch

from sfi_kernels.attention_tile.shape import LARGE_SHARED, SMALL_SHARED, WIDEST, TileShape, padded
from sfi_kernels.decode_attention.query_tile import FLOAT32_NUMBERS, NARROW, QueryTile
from sfi_kernels.launch import Target


def prompt_tile(query_BHGWD: torch.Tensor, tile: TileShape, target: Target) -> QueryTile:
    """Choose the tile for a piece of a prompt; `tile` is the largest that the pages allow."""
    _, _, G, W, D = query_BHGWD.shape
    width, stages = max(tile.key_width, tile.value_width), _stages(target)
    if query_BHGWD.dtype == torch.float32:
        most = min(32, FLOAT32_NUMBERS // padded(D))
        return QueryTile(min(most, padded(G * W)), 8, tile.tokens, stages)
    if width <= NARROW:
        most, tokens = 64, tile.tokens
    elif target.capability in LARGE_SHARED:  # the tensor cores read queries from shared memory
        most, tokens = 128, tile.tokens
    else:  # registers hold them
        most, tokens = 32 if width == WIDEST else 128, min(32, tile.tokens)
    rows = min(most, padded(G * W))
    return QueryTile(rows, 8 if rows == 128 else 4, tokens, stages)  # noqa: PLR2004


def window_tile(query_BHGWD: torch.Tensor, tile: TileShape, target: Target) -> QueryTile:
    """Choose the tile for the logits of a window's queries."""
    _, _, G, W, D = query_BHGWD.shape
    float32 = query_BHGWD.dtype == torch.float32
    most = min(32, FLOAT32_NUMBERS // padded(D)) if float32 else 64
    rows = min(most, padded(G * W))
    return QueryTile(rows, 8 if float32 else 4, tile.tokens, _stages(target))


def _stages(target: Target) -> int:
    # page numbers are fetched ahead of the keys: 5 stages hold three tiles of keys, 3 hold two, of which the
    # one in use is in registers on sm_80
    return 3 if target.capability in SMALL_SHARED else 5

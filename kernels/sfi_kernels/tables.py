"""What compiled loops are handed: weight matrices, and the tables of a decoding step, as rows of int64.

A row has addresses, sizes and settings at places that have names here; who fills it keeps the tensors. A step has one
row, and one for each layer (`loops.step`).
"""

from enum import IntEnum, auto
from typing import Any

import numpy as np
import torch

# places of a matrix' row; an address of 0 is none
NUMBERS, SCALES, FINE_SCALES, MINIMA, FINE_MINIMA, OUT, IN, KIND, BIAS = range(9)
SIZE = 9
FEW = 8  # rows up to which a matrix is read as it lies, in compiled loops
FEW_OF_BLOCKS = 32  # the same of a matrix of blocks, which would have to become floats first
PIECE = 512  # rows of the matrix that are widened at once for more: they stay in cache
BLOCK = 32  # numbers of a block; as a kind, blocks of 8-bit numbers
FOUR, FIVE, FOUR_K, FIVE_K, SIX_K = range(33, 38)  # kinds of blocks; those below 3 are of `compiled.KINDS`
LAYOUTS = {  # numbers in a word, scales of a block, and whether those are int8 times one of eight blocks
    BLOCK: (1, 1, False), FOUR: (4, 1, False), FIVE: (3, 1, False),
    FOUR_K: (4, 1, True), FIVE_K: (3, 1, True), SIX_K: (1, 2, True),
}  # fmt: skip
MIDDLES = {BLOCK: 0, FOUR: 8, FIVE: 16, FOUR_K: 0, FIVE_K: 0, SIX_K: 0}  # taken off numbers that have no minimum
TILE = 8  # rows of a matrix whose numbers lie together
QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN = range(7)  # a layer's matrices


def row_of(kind: int, shape: tuple[int, ...], *parts: torch.Tensor | None) -> Any:
    """Return the row of a contiguous matrix [O, I] on the CPU, without bias; `parts` come in the places' order."""
    row = np.zeros(SIZE, np.int64)
    row[OUT], row[IN], row[KIND] = *shape, kind
    for place, part in enumerate(parts):
        row[place] = 0 if part is None else part.data_ptr()
    return row


class _Places(IntEnum):
    @staticmethod
    def _generate_next_value_(_name: str, _start: int, count: int, _last: list[int]) -> int:
        return count


class Stage(_Places):
    """A layer's stages; a last one after those of all layers is the output matrix."""

    PROJECT = auto()
    STORE = auto()
    ATTEND = auto()
    OUTPUT = auto()
    GATE = auto()
    DOWN = auto()


STAGES = len(Stage)


class Step(_Places):
    """Words of the step's row. Addresses of float32 numbers, if not said otherwise."""

    TOKENS = auto()  # sizes: X, all requests' new tokens
    REQUESTS = auto()
    HIDDEN = auto()
    HEADS = auto()  # of keys
    GROUP = auto()  # query heads of a KV head
    WIDTH = auto()  # of a head
    INNER = auto()
    PAGE = auto()  # tokens of a page
    TABLE = auto()  # pages of a request
    KIND = auto()  # of the pages' numbers, as `compiled.KINDS` has them
    LONGEST = auto()  # the most tokens of a request
    QUERIES = auto()  # the most new tokens of a request
    LAYERS = auto()
    PART = auto()  # tokens of a part of dense attention, at least
    GELU = auto()  # 1 if the gate is the tanh form of GELU, 0 if it is SiLU
    CHOOSES = auto()  # 1 if the policy chooses by codes
    IN_PLACE = auto()  # 1 if fast requests read selected rows in their pages
    BUDGET = auto()
    WORDS = auto()  # of a key's code
    DIAGNOSES = auto()  # 1 to write what a choice tells observers
    PRODUCT = auto()  # addresses of `loops.views`: a product, attention to rows, a choice by codes
    READ = auto()
    CHOOSE = auto()
    SYNC = auto()  # addresses: int64, arrivals at barriers, from `TICKETS` on tickets
    HIDDEN_XI = auto()  # hidden states, which a call takes up and leaves
    COS = auto()  # [rotations, X, D]
    SIN = auto()
    STEP_BX = auto()  # int32, the descriptor's table
    BLOCK_BP = auto()  # int32, the block table
    MADE_XO = auto()  # queries, keys and values
    OUT_XO = auto()  # the attention's output, but of heads in parts
    BACK_XI = auto()  # the output projection's, then the MLP's result
    GATE_XM = auto()
    UP_XM = auto()
    ROUND_XM = auto()  # int16, the gated row rounded for the last projection
    SCALE_XB = auto()
    TOTAL_XB = auto()
    PART_IQD = auto()  # parts of dense attention, with their largest logits and sums
    MOST_IQ = auto()
    SUM_IQ = auto()
    LAST_BHGD = auto()  # each request's last queries
    LOGIT_BHG = auto()  # the pseudo token of a choice
    MEAN_BHE = auto()
    LAST_NORM = auto()
    LOGITS_XV = auto()
    HEAD = auto()  # the output matrix, as a matrix' row


STEP_WORDS = Step.HEAD + SIZE
TICKETS = 16  # in SYNC: far enough from the arrivals


class Layer(_Places):
    """Words of a layer's row. Addresses of float32 numbers, if not said otherwise; 0 for none."""

    NORM = auto()  # before attention
    AFTER = auto()  # after attention
    MLP_NORM = auto()
    MLP_AFTER = auto()
    QUERY_NORM = auto()
    KEY_NORM = auto()
    ROTATION = auto()  # which of the rotations
    LEFT_DENSE = auto()
    KEYS = auto()  # pages, of the kind of the step
    VALUES = auto()
    NORMS = auto()
    WINDOW = auto()  # tokens of a sliding window, whose rows lie in a buffer instead of pages; 0 for none
    WINDOW_ROOM = auto()  # rows of the buffer for a head
    WINDOW_START = auto()  # position of its first row
    PACKED_KEYS = auto()  # the packed segment, of the kind of the step
    PACKED_VALUES = auto()
    POSITIONS = auto()  # int32
    LENGTHS = auto()  # int32
    ROWS = auto()  # of the segment
    CODE_MEAN = auto()  # the fields of `BatchCodes`
    CODE_ENCODE = auto()
    CODE_QUERY = auto()
    CODE_WORD = auto()  # int32
    CODE_SUM = auto()
    CODE_SUMMED = auto()  # int32
    CODE_RECENT = auto()
    CODED = auto()  # tokens that the codes have room for
    CHOICE = auto()  # int32, positions chosen, [B, H, K]
    UNREAD = auto()  # diagnostics of a choice, [B, H, 2]
    EVIDENCE = auto()  # logits of the slow requests' last queries, [R, H, G, LONGEST]
    QUERIES = auto()  # where to leave each request's last queries, for the audit
    MATRICES = auto()  # rows of matrices


LAYER_WORDS = Layer.MATRICES + 7 * SIZE


class Real(_Places):
    """Settings in float32."""

    EPS = auto()
    HEAD_EPS = auto()
    SCALE = auto()  # of logits
    CAP = auto()  # their soft cap, 0 for none
    REST = auto()  # `codescan.rest`

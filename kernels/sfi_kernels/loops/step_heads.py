"""The second stage of a layer in a compiled step: its heads, before attention."""

import numpy as np
from numba import carray

from sfi_kernels.code_scan.codes import KEPT, SLOTS
from sfi_kernels.compiled import by_address
from sfi_kernels.loops.codes import code_scan
from sfi_kernels.loops.products import at_float32, at_int32, at_int64, at_uint16
from sfi_kernels.loops.step_views import blocks, copy, floats, pages, put, requests, rms_norm, row_of, vector
from sfi_kernels.loops.vectors import F, dot, inner
from sfi_kernels.step_descriptor import FAST, LENGTH, MODE, QUERIES
from sfi_kernels.step_tables import LAYER_WORDS, STEP_WORDS, Layer, Real, Step

REALS = len(Real)


@inner
def _rotate(x, cos, sin):
    half = len(x) // 2
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i + half] + a * sin[i + half]


@inner
def store(step, layer, real, h):
    # norm and rotate a KV head's queries and keys, append its keys and values, and choose
    H, G, D, X = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], step[Step.TOKENS]
    kind, step_BX = step[Step.KIND], requests(step)
    key_YD, value_YD, half_key_YD, half_value_YD = pages(step, layer, Layer.KEYS, Layer.VALUES)
    turns = 4 * layer[Layer.ROTATION] * X * D
    cos_XD, sin_XD = floats(step[Step.COS] + turns, X, D), floats(step[Step.SIN] + turns, X, D)
    made_XO = floats(step[Step.MADE_XO], X, (H * G + 2 * H) * D)
    last_BHGD = carray(at_float32(step[Step.LAST_BHGD]), (len(step_BX), H, G, D))
    norm_Y, x = vector(layer[Layer.NORMS], 1 << 40), 0
    for b in range(len(step_BX)):
        for w in range(step_BX[b, QUERIES]):
            for j in range(G + 1):
                at = (h * G + j if j < G else H * G + h) * D
                head = made_XO[x, at : at + D]
                norm = layer[Layer.QUERY_NORM if j < G else Layer.KEY_NORM]
                if norm != 0:
                    rms_norm(head, vector(norm, D), real[Real.HEAD_EPS], head)
                _rotate(head, cos_XD[x], sin_XD[x])
                if j < G:
                    copy(head, last_BHGD[b, h, j])  # the last token's stays
            key = made_XO[x, (H * G + h) * D : (H * G + h + 1) * D]
            value = made_XO[x, (H * G + H + h) * D : (H * G + H + h + 1) * D]
            to = row_of(step, layer, b, h, step_BX[b, LENGTH] - step_BX[b, QUERIES] + w)
            norm_Y[to] = np.sqrt(dot(key, key))
            put(kind, key, key_YD, half_key_YD, to)
            put(kind, value, value_YD, half_value_YD, to)
            x += 1
        if layer[Layer.QUERIES] != 0:
            for g in range(G):
                copy(last_BHGD[b, h, g], vector(layer[Layer.QUERIES] + 4 * ((b * H + h) * G + g) * D, D))


@by_address
def choose(arguments):
    """Keep the fast requests' queries, code the new keys of a KV head, and choose."""
    a = carray(at_int64(arguments), (4,))
    step, layer = carray(at_int64(a[0]), (STEP_WORDS,)), carray(at_int64(a[1]), (LAYER_WORDS,))
    real, h = carray(at_float32(a[2]), (REALS,)), a[3]
    H, G, D, N = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], step[Step.PAGE]
    step_BX, B, W, T, S = requests(step), step[Step.REQUESTS], step[Step.WORDS], layer[Layer.CODED], layer[Layer.ROWS]
    K, kind = step[Step.BUDGET], step[Step.KIND]
    key_YD, value_YD, half_key_YD, half_value_YD = pages(step, layer, Layer.KEYS, Layer.VALUES)
    last_BHGD = carray(at_float32(step[Step.LAST_BHGD]), (B, H, G, D))
    float_ring, half_ring = (
        floats(layer[Layer.CODE_RECENT], 1 << 40, D),
        carray(at_uint16(layer[Layer.CODE_RECENT]), (1 << 40, D)),
    )
    logit_BHG = carray(at_float32(step[Step.LOGIT_BHG]), (B, H, G))
    mean_BHE = carray(at_float32(step[Step.MEAN_BHE]), (B, H, D))
    index_BHK = carray(at_int32(layer[Layer.CHOICE]), (B, H, K))
    unread_BHC = carray(at_float32(layer[Layer.UNREAD]), (B, H, 2 if step[Step.DIAGNOSES] else 0))
    for b in range(B):
        logit_BHG[b, h], mean_BHE[b, h], index_BHK[b, h] = F(-np.inf), F(0), -1
        if step[Step.DIAGNOSES]:
            unread_BHC[b, h, 0], unread_BHC[b, h, 1] = F(0), F(np.nan)
        if step_BX[b, MODE] == FAST:
            place = ((b * H + h) * KEPT + (step_BX[b, LENGTH] - 1) % KEPT) * G
            for g in range(G):
                put(kind, last_BHGD[b, h, g], float_ring, half_ring, place + g)
    code_scan(
        h, h + 1, last_BHGD, key_YD, value_YD, half_key_YD, half_value_YD, kind, N, blocks(step), step_BX,
        carray(at_float32(layer[Layer.CODE_MEAN]), (B, H, D)),
        carray(at_float32(layer[Layer.CODE_ENCODE]), (B, H, W, D, SLOTS)),
        carray(at_float32(layer[Layer.CODE_QUERY]), (B, H, W, SLOTS, D)),
        carray(at_int32(layer[Layer.CODE_WORD]), (B, H, W, T)),
        carray(at_float32(layer[Layer.CODE_SUM]), (B, H, D)), carray(at_int32(layer[Layer.CODE_SUMMED]), (B, H)),
        carray(at_int32(layer[Layer.POSITIONS]), (B, H, S)), carray(at_int32(layer[Layer.LENGTHS]), (B, H)),
        index_BHK, logit_BHG, mean_BHE, unread_BHC,
        real[Real.SCALE], real[Real.REST],
    )  # fmt: skip

"""Variants of attention: of a step and of a prompt's pieces, beside PyTorch's SDPA, and of a step of CodeScan."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.machine.private import Operators
from sfi_core.measure.kernel_bench import gates
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.gates import KernelVariant, reason
from sfi_core.measure.kernel_bench.settings import FLOAT32, INT32, PIECES
from sfi_kernels.code_scan import SLOTS, BatchCodes, CodeBasis, bits_of, code_scan, encode_keys, words
from sfi_kernels.code_scan.reference import scanned
from sfi_kernels.compiled import fastest
from sfi_kernels.decode_attention import sparse_attention
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.step_descriptor import FAST, SLOW, NewRows

Call = Callable[[], torch.Tensor]
SDPA, SOFTMAX = "_scaled_dot_product_", {"_softmax", "_safe_softmax"}
PAPER_TILE = 16  # tokens of a tile of `dense.paper_like`
DENSE_EVERY = 8  # of mixed heads, every eighth KV head reads all tokens
VERIFIED = (1, 5, 9, 16, 17)  # queries of a verification: one more than its draft has tokens
CHECKED = 16  # queries of a prompt's piece that the check computes
# of a step of CodeScan
TIED = 1 + 2**-3  # what a key may exceed another by with the same score
ROUNDED = 1e-3  # of a probability
CODED = 0.9  # of the new keys' words; at a level's edge rounding decides
COVERED = 2.5  # a channel's levels cover so many standard deviations on either side of the mean


def dense(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield attention to every token, and PyTorch's SDPA if it or `fast` was asked for."""
    settings, expected = layer.settings, layer.textbook()
    moved = settings.attention_bytes(settings.context)

    def variant(name: str, call: Callable[[], Any], form: str | None = None, *, rival: bool = False) -> KernelVariant:
        return KernelVariant(name, 1.0, call, moved, lambda: expected.error(call(), rival=rival), form)

    if layer.backend == "torch":
        operands = layer.query_BHGD[:, :, :, None], *layer.paged, layer.length_B
        yield variant("dense", lambda: dense_attention.reference(*operands, scale=settings.scale)[:, :, :, 0])
    else:
        yield variant("dense", layer.attended(layer.plan(mode=SLOW, packed=0)))
        yield variant("dense.host", layer.attended(layer.plan(mode=SLOW, packed=0), hosted=True))
        yield _slow_step(layer, "dense.evidence", layer.query_BHGD[:, :, :, None])
        one_split = layer.plan(mode=SLOW, packed=0, programs=settings.kv_heads)
        yield variant("dense.paper_like", layer.attended(one_split, block_n=PAPER_TILE))
    if {"fast", "dense"} & set(settings.ops):
        for form, call in _sdpa(layer).items():
            yield variant("dense.sdpa", call, form, rival=True)
            layer.notes.append(f"dense.sdpa ({form}) ran as {sdpa_backend(call) or 'an unknown backend'}")


def _sdpa(layer: LayerData) -> dict[str, Call]:
    # on contiguous keys and values, with `enable_gqa` and with the group's query heads as rows; the faster one counts
    query, heads = layer.query_BHGD, layer.query_BHGD.flatten(1, 2)[:, :, None]
    rows, scale = (layer.key_BHTD, layer.value_BHTD), layer.settings.scale
    return {
        "enable_gqa": lambda: scaled_dot_product_attention(heads, *rows, scale=scale, enable_gqa=True).view_as(query),
        "group as rows": lambda: scaled_dot_product_attention(query, *rows, scale=scale),
    }


def sdpa_backend(call: Call) -> str | None:
    """Run a call, and return the backend of its `scaled_dot_product_attention`; None if unknown."""
    try:
        with Operators() as seen:
            call()
    except RuntimeError:
        return None  # the check of the variant reports the error
    took = {name.removeprefix(SDPA) for name in seen.names if name.startswith(SDPA)}
    if not took and SOFTMAX & set(seen.names):  # the math backend is not one operator
        return "attention_math"
    return ", ".join(sorted(took)) or None


def fast(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield a fast step; with the kernels also one that reads the selected rows in their pages."""
    settings, selected = layer.settings, layer.selected[retention]
    expected, tokens = layer.textbook(layer.packed_index(selected, recent=True)), settings.attended(retention)

    def variant(name: str, call: Callable[[], Any], gathered: int = 0) -> KernelVariant:
        moved = settings.attention_bytes(tokens, gathered=gathered)
        return KernelVariant(name, retention, call, moved, lambda: expected.error(call()))

    if layer.backend == "torch":
        operands = *selected.packed, *layer.paged, layer.recent_start_B, layer.length_B
        yield variant("fast", lambda: sparse_attention.reference(layer.query_BHGD, *operands, scale=settings.scale))
        return
    rows = settings.sink + settings.budget(retention)
    planned = layer.plan(mode=FAST, packed=rows), *selected.packed
    yield variant("fast", layer.attended(*planned))
    yield variant("fast.gather", layer.attended(*planned, position_BHS=selected.position_BHS), rows)


def mixed_heads(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield a step in which some KV heads read every token, the others like a fast step."""
    settings, selected = layer.settings, layer.selected[retention]
    head = torch.arange(settings.kv_heads, device=layer.device)
    dense_BH = (head % DENSE_EVERY == 0).int().expand(settings.batch, -1).contiguous()
    plan = layer.plan(mode=FAST, packed=selected.key_BHSD.shape[2], mixed=True)
    call = layer.attended(plan, *selected.packed, dense_BH=dense_BH)
    sparse = layer.textbook(layer.packed_index(selected, recent=True))
    expected = layer.textbook().where(dense_BH[..., None, None] != 0, sparse)
    moved = settings.attention_bytes(settings.attended(retention), dense=int(dense_BH[0].sum()))
    yield KernelVariant("mixed_heads", retention, call, moved, lambda: expected.error(call()))


def verify(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield a verification for each number of queries in `VERIFIED`; with one query it is a slow step."""
    settings = layer.settings
    for count in VERIFIED:
        if count <= settings.context:
            form = f"{count} {'query' if count == 1 else 'queries'}"
            yield _slow_step(layer, "verify", layer.draw_queries(settings.batch, count), form)


def _slow_step(layer: LayerData, name: str, query_BHGWD: torch.Tensor, form: str | None = None) -> KernelVariant:
    # attention of W queries to every token, with the last one's evidence
    settings, W = layer.settings, query_BHGWD.shape[3]
    plan = layer.plan(mode=SLOW, packed=0, count=W)
    call = partial(layer.attend, plan, query_BHGWD=query_BHGWD, evidence=True)

    def error() -> float:
        # of the first, the middle and the last query, and of the last query's evidence
        result, last = call(), query_BHGWD[:, :, :, -1:]
        assert result.logits_BHGWT is not None, "evidence was asked for"
        pair = result.logits_BHGWT, layer.logits(last)
        wrong = gates.logits_error(*pair, last, layer.key_BHTD, settings.scale)
        places = {0, W // 2, W - 1}
        return max(wrong, layer.causal_error(result.out_BHGWE, query_BHGWD, places, settings.context))

    moved = settings.attention_bytes(settings.context, evidence=True, queries=W)
    return KernelVariant(name, 1.0, call, moved, error, form)


def prompt(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the first piece of a prompt and the last piece, which follows a cache, each followed by its rival."""
    settings, (keys, values, table) = layer.settings, layer.paged
    most = PIECES[layer.device.type]
    first, last = min(most, settings.context), min(most, settings.context // 2)
    for name, W, tokens in (("prompt", first, first), ("prompt.piece", last, settings.context)):
        query = layer.draw_queries(1, W)
        operands = query, keys, values, table[:1], torch.full_like(layer.length_B[:1], tokens)
        call: Call = partial(dense_attention.on(layer.backend), *operands, scale=settings.scale)
        yield _piece(layer, name, query, tokens, call)
        call = _rival_piece(layer, query, tokens)
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            layer.notes.append(f"{name}.sdpa does not run here: {reason(error)}")
            continue
        yield _piece(layer, f"{name}.sdpa", query, tokens, call, rival=True)


def _piece(
    layer: LayerData, name: str, query_1HGWD: torch.Tensor, tokens: int, call: Call, *, rival: bool = False
) -> KernelVariant:
    settings, W = layer.settings, query_1HGWD.shape[3]
    # queries that are checked: evenly spread, including the first and the last
    places = sorted({round(at * (W - 1) / (CHECKED - 1)) for at in range(CHECKED)})

    def error() -> float:
        return layer.causal_error(call(), query_1HGWD, places, tokens, rival=rival)

    form, shape = f"{W:,} queries over {tokens:,} tokens", {"context": tokens, "batch": 1}
    moved = tokens * settings.row_bytes // settings.batch + 2 * query_1HGWD.nbytes
    pairs = W * tokens - W * (W - 1) // 2  # masked pairs do not count
    flops = 4 * settings.heads * settings.head_dim * pairs
    return KernelVariant(name, None, call, moved, error, form, flops, shape)


def _rival_piece(layer: LayerData, query_1HGWD: torch.Tensor, tokens: int) -> Call:
    W, settings = query_1HGWD.shape[3], layer.settings
    heads = query_1HGWD.flatten(1, 2)
    key, value = (x[:1, :, :tokens].contiguous() for x in (layer.key_BHTD, layer.value_BHTD))
    # a bias that PyTorch's flash attention does not materialize; a whole prompt needs none
    causal = {"is_causal": True} if tokens == W else {"attn_mask": causal_lower_right(W, tokens)}
    options: dict[str, Any] = {"scale": settings.scale, "enable_gqa": settings.group > 1, **causal}
    return lambda: scaled_dot_product_attention(heads, key, value, **options).view_as(query_1HGWD)


def codescan(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield all launches of a layer's step, for a batch of equal requests; it appends the last token again.

    The pseudo token has no weight, so that the textbook's attention to the chosen rows is the right one.
    """
    settings, backend, device, query = layer.settings, layer.backend, layer.device, layer.query_BHGD
    budget, selected = settings.budget(retention), layer.selected[retention]
    implementation = fastest(backend, device, *layer.paged[:2])
    last_key, last_value = (x[:, :, -1:].clone() for x in (layer.key_BHTD, layer.value_BHTD))
    new = NewRows(last_key, last_value, layer.pages.value_PHNE, layer.pages.norm_PHN)
    plan = replace(layer.plan(mode=FAST, packed=settings.sink + budget), new=new)
    codes = BatchCodes.empty(settings.batch, settings.group, *layer.paged[:2], settings.context)
    basis = _draw_basis(layer)
    for row, key_HTD in enumerate(layer.key_BHTD):
        codes.learn(row, basis)
        codes.word_BHWT[row] = encode_keys.reference(key_HTD, basis)
    position, length = selected.position_BHS.clone(), selected.length_BH.clone()
    nothing = [pages.new_empty(*length.shape, 0, settings.head_dim) for pages in layer.paged[:2]]

    def call() -> torch.Tensor:
        options: dict[str, Any] = {"scale": settings.scale}
        choice = code_scan.on(implementation)(
            query, *layer.paged, plan, codes, position, length, **options, budget=budget, rest=0.0
        )
        options["pseudo"] = choice.pseudo
        if backend == "torch":
            where = *nothing, length, *layer.paged, layer.recent_start_B, layer.length_B
            return sparse_attention.on(implementation)(query, *where, **options, position_BHS=position)
        return layer.attended(plan, *nothing, length, pseudo=choice.pseudo, position_BHS=position)()

    known = codes.word_BHWT[..., -1].clone()

    def error() -> float:
        codes.word_BHWT[..., -1] = 0
        out_BHGD, index = call(), position[:, :, settings.sink :]
        coded = float((codes.word_BHWT[..., -1] == known).float().mean())
        whole = (length == settings.sink + budget).all()
        rows = range(settings.batch)
        if coded < CODED or not whole or not all(_best_chosen(layer, codes, row, index[row]) for row in rows):
            return gates.WRONG
        read = layer.packed_index(selected._replace(index_BHK=index), recent=True)
        return layer.textbook(read).error(out_BHGD)

    # words of code, and two bases of each request, of keys and of queries: a mean, and a projection
    numbers = words(settings.head_dim)
    bases = 2 * settings.head_dim * (SLOTS * numbers + 1) * FLOAT32
    moved = settings.pairs * (settings.context * numbers * INT32 + bases)
    moved += settings.append_bytes() + settings.attention_bytes(settings.attended(retention))
    yield KernelVariant("codescan", retention, call, moved, error)


def _best_chosen(layer: LayerData, codes: BatchCodes, row: int, index_HK: torch.Tensor) -> bool:
    # whether no candidate of a request that was left out has a larger weight by its code than a chosen one
    settings = layer.settings
    first, stop = settings.sink, settings.context - settings.recent
    logits_HGT = scanned(layer.query_BHGD[row], codes, row, settings.scale)[..., first:stop]
    weight_HT = logits_HGT.softmax(-1).mean(1).clamp_min(2.0**-32)
    chosen_HT = torch.zeros_like(weight_HT, dtype=torch.bool)
    chosen_HT.scatter_(1, (index_HK - first).long(), True)
    least = weight_HT.masked_fill(~chosen_HT, torch.inf).amin(1)
    most = weight_HT.masked_fill(chosen_HT, 2.0**-32).amax(1)
    right = (chosen_HT.sum(1) == index_HK.shape[1]) & (least * TIED * (1 + ROUNDED) >= most)
    return bool(right.all())


def _draw_basis(layer: LayerData) -> CodeBasis:
    """Draw random directions; each channel's levels cover `COVERED` standard deviations of its keys."""
    H, D = layer.settings.kv_heads, layer.settings.head_dim
    direction = layer.draw(H, D, len(bits_of(D)), dtype=torch.float32)
    direction /= direction.norm(dim=1, keepdim=True)
    step_C = torch.tensor([2 * COVERED / 2**bits for bits in bits_of(D)], device=layer.device)
    mean = layer.draw(H, D, dtype=torch.float32) / 4
    return CodeBasis(mean, direction / step_C, direction * step_C)

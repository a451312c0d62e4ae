"""Attention of a layer with Triton kernels; the decoding requests of a batch share each launch."""

from functools import partial

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.engine.layer import Layer
from sfi_core.engine.packing import apply
from sfi_core.engine.refresh import choose_and_note, end_prompt, layer_context, refresh, select_next
from sfi_core.engine.run import Run
from sfi_kernels.decode_attention import DecodeAttention, decode_attention
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.step_descriptor import StepDescriptor, sent


def attend(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    """See `backends.torch.attend`; a decoding request's tokens are the last of T."""
    run, batch_pass = layer.run, layer.batch_pass
    with run.launches(layer.index):
        if not batch_pass.prompts:
            out = _decode(layer, query_BHGTD)
        elif not batch_pass.decodes:
            out = _prefill(layer, batch_pass.prompts, slice(None), query_BHGTD)
        else:
            out = _mixed(layer, query_BHGTD)
        end_prompt(layer, query_BHGTD)
        layer.finish(query_BHGTD, out)
        return out


def evidence_room(layer: Layer, step: StepDescriptor, query_BHGTD: torch.Tensor) -> torch.Tensor | None:
    """Return the buffer for the slow requests' evidence; None if the layer selects nothing."""
    if layer.left_dense or not (layer.run.policy.refreshes() and step.slow_rows):
        return None
    _, H, G, _, _ = query_BHGTD.shape
    numbers = step.slow_rows * H * G * layer.run.store.capacity
    return layer.run.maintenance.room(numbers, query_BHGTD.device)


def decode(
    layer: Layer, step: StepDescriptor, query_BHGTD: torch.Tensor, into: torch.Tensor | None,
    dense_BH: torch.Tensor | None = None, pseudo: PseudoToken | None = None, *, in_place: bool = False,
) -> DecodeAttention:  # fmt: skip
    """Attend with the decoding requests, and write the evidence of slow ones `into` a buffer.

    A request's tokens are the last of T: several if it verifies, and the last one's logits are the evidence.
    `dense_BH`, int32, marks the KV heads that read everything, if the policy mixes heads. With `in_place`,
    selected rows are read in their pages.
    """
    segment = layer.run.segment(layer.index)
    return decode_attention.triton(
        query_BHGTD, segment.key_BHSD, segment.value_BHSE, segment.length_BH, layer.pages.key_PHND,
        layer.pages.value_PHNE, layer.run.store.block_table_BP, step, **layer.options,
        evidence=into is not None, into=into, dense_BH=dense_BH, pseudo=pseudo,
        position_BHS=segment.position_BHS if in_place else None,
    )  # fmt: skip


def descriptor_of(layer: Layer) -> StepDescriptor:
    """Return the pass's descriptor for this layer; `dense_layers` have their own."""
    batch_pass = layer.batch_pass
    step = batch_pass.dense_descriptor if layer.left_dense else batch_pass.descriptor
    assert step is not None, "the pass has been described"
    return step


def count_attention(run: Run, step: StepDescriptor) -> None:
    """Count a layer's attention calls."""
    run.meter.count("triton.dense_attention", len(step.slow))
    run.meter.count("triton.sparse_attention", len(step.fast))


def _decode(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    run, policy, step = layer.run, layer.run.policy, descriptor_of(layer)
    last_BHG1D = query_BHGTD[:, :, :, -1:]  # a fast request has no other
    if policy.mixes_heads and not layer.left_dense:
        return _mixed_heads(layer, step, last_BHG1D)
    pseudo, in_place = None, layer.chooses
    if in_place:
        pseudo = choose_and_note(layer, step, last_BHG1D)
    elif policy.selects_before and step.fast:
        with run.observer.span("select_before", layer.index):
            context = layer_context(layer, step.fast, _of(layer, step.fast, last_BHG1D))
            chosen = policy.select_before(context)
            apply(layer, step.fast, chosen, "correction" if policy.selects_next else "")
            pseudo = _spread(layer, step.fast, last_BHG1D, chosen.pseudo if chosen else None)
    into = evidence_room(layer, step, query_BHGTD)
    kind = "mixed" if step.fast and step.slow else "fast" if step.fast else "dense"
    moved = layer.moved_bytes(step.slow, dense=True) + layer.moved_bytes(step.fast, dense=False)
    with run.observer.span(f"attention.{kind}", layer.index, moved):
        result = decode(layer, step, query_BHGTD, into, pseudo=pseudo, in_place=in_place)
    count_attention(run, step)
    if result.logits_BHGWT is not None:
        query = _of(layer, step.slow, last_BHG1D)
        run.maintenance.submit(partial(_maintain, layer, step.slow, query, result))
    if policy.selects_next and step.fast:
        query = _of(layer, step.fast, last_BHG1D)
        layer.later.append(partial(select_next, layer, step.fast, query))
    return result.out_BHGWE


def _spread(
    layer: Layer, rows: tuple[int, ...], query_BHG1D: torch.Tensor, pseudo: PseudoToken | None
) -> PseudoToken | None:
    # pseudo tokens of some rows, spread to the whole batch
    B, H, G, _, _ = query_BHG1D.shape
    if pseudo is None or len(rows) == B:
        return pseudo
    logit_BHG = pseudo.logit_BHG.new_full((B, H, G), -torch.inf)
    value_BHE = pseudo.value_BHE.new_zeros(B, *pseudo.value_BHE.shape[1:])
    row_R = layer.run.rows(rows).request_R.long()
    logit_BHG[row_R], value_BHE[row_R] = pseudo
    return PseudoToken(logit_BHG, value_BHE)


def _mixed_heads(layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor) -> torch.Tensor:
    # some KV heads read everything, the others the packed memory and the recent tokens
    run, batch_pass = layer.run, layer.batch_pass
    B, H = query_BHG1D.shape[:2]
    rows = (*batch_pass.slow, *batch_pass.fast)
    for row in rows:
        layer.dense_heads[row] = run.policy.dense_heads(run.requests[row], layer.index, H)
    dense = [[int(h in layer.dense_heads.get(row, ())) for h in range(H)] for row in range(B)]
    dense_BH = sent(torch.tensor(dense, dtype=torch.int32), query_BHG1D.device)
    into = evidence_room(layer, step, query_BHG1D)
    with run.observer.span("attention.heads", layer.index):
        result = decode(layer, step, query_BHG1D, into, dense_BH)
    run.meter.count("triton.mixed_attention", len(rows))
    if result.logits_BHGWT is not None:
        query = _of(layer, step.slow, query_BHG1D)
        layer.later.append(partial(_maintain, layer, step.slow, query, result))
    return result.out_BHGWE


def _maintain(layer: Layer, rows: tuple[int, ...], query_RHG1D: torch.Tensor, result: DecodeAttention) -> None:
    logits = result.logits_BHGWT
    assert logits is not None, "evidence was asked for"
    with layer.run.launches(layer.index):
        refresh(layer, rows, query_RHG1D, lambda: logits, result.log_sum_BHGW)


def _prefill(layer: Layer, prompts: tuple[int, ...], rows: slice, query_BHGTD: torch.Tensor) -> torch.Tensor:
    run, first = layer.run, is_first_piece(layer, prompts, query_BHGTD)
    run.meter.count("sdpa.prompt" if first else "triton.prefill_attention", len(prompts))
    with run.observer.span("attention.dense", layer.index, layer.moved_bytes(prompts, dense=True)):
        if first:
            return attend_to_itself(layer, prompts, query_BHGTD)[rows]
        return dense_attention.triton(
            query_BHGTD[rows], layer.pages.key_PHND, layer.pages.value_PHNE, run.store.block_table_BP[rows],
            layer.batch_pass.descriptor.length_B[rows], **layer.options,
        )  # fmt: skip


def _mixed(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    # prompts and decoding in one pass, as vLLM mixes them: a launch for each prompt, one for all that decode
    own = descriptor_of(layer).queries
    B, H, G, T, _ = query_BHGTD.shape
    out = query_BHGTD.new_zeros(B, H, G, T, layer.pages.value_PHNE.shape[3])
    out[:, :, :, -own:] = _decode(layer, query_BHGTD[:, :, :, -own:])
    for row in layer.batch_pass.prompts:
        one = slice(row, row + 1)
        out[one] = _prefill(layer, (row,), one, query_BHGTD)
    return out


def _of(layer: Layer, rows: tuple[int, ...], query_BHGTD: torch.Tensor) -> torch.Tensor:
    if len(rows) == query_BHGTD.shape[0]:
        return query_BHGTD
    return query_BHGTD[layer.run.rows(rows).request_R.long()]


def is_first_piece(layer: Layer, prompts: tuple[int, ...], query_BHGTD: torch.Tensor) -> bool:
    """Say whether these rows read first pieces that PyTorch can attend: no soft cap, no learned sinks."""
    begin = not any(layer.batch_pass.start[row] for row in prompts)
    plain = layer.options["soft_cap"] is None and layer.options["sink_HG"] is None
    return begin and plain and layer.new is not None and has_fused(query_BHGTD, *layer.new)


def has_fused(query_BHGTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> bool:
    """Say whether flash attention takes these tensors; PyTorch's others hold all T x T logits."""
    if query_BHGTD.device.type != "cuda":
        return False
    operands = query_BHGTD.flatten(1, 2), key_BHTD, value_BHTE
    return can_use_flash_attention(SDPAParams(*operands, None, 0.0, True, query_BHGTD.shape[2] > 1))


def attend_to_itself(layer: Layer, prompts: tuple[int, ...], query_BHGTD: torch.Tensor) -> torch.Tensor:
    """Attend causally with the first pieces in some rows; a request's tokens are the last `count` of T.

    Return the outputs, [B, H, G, T, E]; zeros where a request has no token.
    """
    assert layer.new is not None, "the host has handed over the piece's keys"
    key, value = layer.new
    B, T, count = len(query_BHGTD), query_BHGTD.shape[3], layer.batch_pass.count
    if len(prompts) == B and all(own == T for own in count):
        return _causal(query_BHGTD, key, value, layer)
    out = query_BHGTD.new_zeros(*query_BHGTD.shape[:4], value.shape[3])
    for row in prompts:
        one, own = slice(row, row + 1), slice(T - count[row], T)
        parts = query_BHGTD[one, :, :, own], key[one, :, own], value[one, :, own]
        out[one, :, :, own] = _causal(*parts, layer)
    return out


def _causal(query_BHGTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, layer: Layer) -> torch.Tensor:
    out = scaled_dot_product_attention(
        query_BHGTD.flatten(1, 2), key_BHTD, value_BHTE, is_causal=True,
        scale=layer.logit_options["scale"], enable_gqa=query_BHGTD.shape[2] > 1,
    )  # fmt: skip
    return out.view(*query_BHGTD.shape[:4], -1)

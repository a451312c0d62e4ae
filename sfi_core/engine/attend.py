"""Attention of a layer, and the selections before and after it.

On Triton the decoding requests of a batch share each launch: `read` is the device half, which CUDA graphs capture too.
The PyTorch backend goes request by request (`by_request`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.engine import by_request, select
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError, unknown
from sfi_core.settings.engine import BACKENDS, DEFAULTS, EngineOptions
from sfi_core.state.request import RequestState
from sfi_kernels.decode_attention import DecodeAttention, decode_attention
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.launch import KernelLimitError, check_chained, check_device
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import MODE, StepDescriptor


def attend(run: Run, index: int, query_BHGTD: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend in a layer whose new keys and values the store holds, on the run's backend or by `Run.attend`.

    Queries are grouped by KV head; a request's own are the last `count` of T. `options` are `scale`, `soft_cap`,
    `sink_HG` and `new` of `Layer`. Return the outputs, [B, H, G, T, E]; zeros where a request has no token.
    """
    dtype = run.store.pages(index).key_PHND.dtype
    if dtype != query_BHGTD.dtype:  # under `kv_dtype`
        return attend(run, index, query_BHGTD.to(dtype), **options).to(query_BHGTD.dtype)
    layer = Layer(run, index, **options)
    if run.attend is not None:
        return run.attend(layer, query_BHGTD)
    prepare(layer, query_BHGTD.shape[2], layer.batch_pass.fast, run.requests)
    with run.launches():
        out = (_attend if layer.backend == "triton" else by_request.attend)(layer, query_BHGTD)
        select.end_prompt(layer, query_BHGTD)
        layer.finish(query_BHGTD, out)
    return out


def end_prompts(run: Run, index: int, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor, **options: Any) -> None:
    """Do what `attend` does once it has attended, in a pass that only reads prompts, for a host that has done that."""
    layer = Layer(run, index, **options)
    run.meter.count("host.prefill_attention", len(layer.batch_pass.prompts))
    with run.launches():
        select.end_prompt(layer, query_BHGTD)
        layer.finish(query_BHGTD, out_BHGTE)


def prepare(layer: Layer, group: int, rows: Sequence[int], states: Sequence[RequestState]) -> None:
    """Let the policy learn what some requests lack for the step that `states` have entered, without waiting.

    From what was there before the step, so that a CUDA graph can hold the step. `group` are the query heads of a KV
    head; where no queries were kept, the last keys stand for them.
    """
    run, policy = layer.run, layer.run.policy
    if not policy.chooses or layer.left_dense:
        return
    for row in rows:
        before = replace(states[row], length=states[row].length - 1)  # as it was before the step
        if policy.companion.lacks(before, run.notes[before.request, layer.index]):
            first = max(0, before.length - policy.config.window_prefill)
            key_1HWD = run.store.keys(layer.index, row, first, before.length)
            query_1HGWD = key_1HWD[:, :, None].expand(-1, -1, group, -1, -1)
            context = select.layer_context(layer, (row,), query_1HGWD)
            with run.launches():
                policy.select_after(replace(context, states=(before,)))


def choose_early(run: Run, index: int, query: Callable[[], torch.Tensor]) -> None:
    """Begin to choose for a layer before it attends, if its policy chooses in this pass.

    The `query` that the choice is made by is a prediction, [B, H, G, 1, D], computed beside what the layer before has
    left to do.
    """
    batch_pass, dense = run.batch_pass, run.policy.config.dense_layers
    if not batch_pass.fast or index not in run.layers or index in dense:
        return
    layer = Layer(run, index, **run.options[index])
    if run.attend is None:
        prepare(layer, run.groups[index], batch_pass.fast, run.requests)
    rows = None if layer.in_place else run.descriptors.chosen or run.rows(batch_pass.fast)
    select.choose_early(layer, batch_pass.descriptor, rows, query)


def prepare_layers(run: Run, rows: Sequence[int], states: Sequence[RequestState]) -> None:
    """Do as `prepare` in layers that keep something, unless the first lacks nothing: all lack it at the same step."""
    layers = sorted(run.kept)
    before = (replace(states[row], length=states[row].length - 1) for row in rows)
    lacks = run.policy.companion.lacks
    if layers and any(lacks(state, run.notes[state.request, layers[0]]) for state in before):
        for index in layers:
            prepare(Layer(run, index, **run.options[index]), run.groups[index], rows, states)


def read(
    layer: Layer, step: StepDescriptor, query_BHGTD: torch.Tensor, *, pseudo: PseudoToken | None = None
) -> DecodeAttention:
    """Attend with the decoding requests, and write the evidence of slow ones to a buffer: the device half.

    A request that verifies has several tokens, of which the last one's logits are the evidence. If the policy mixes
    heads, some KV heads read everything, the others the packed memory and the recent tokens.
    """
    run, segment, into, dense_BH = layer.run, layer.run.segment(layer.index), None, None
    if run.policy.mixes_heads and not layer.left_dense:
        dense_XH = run.dense_heads_of(layer.index, query_BHGTD.shape[1])
        dense_BH = dense_XH.index_select(0, step.table_BX[:, MODE])
    if step.slow_rows and run.policy.refreshes() and not layer.left_dense:
        numbers = step.slow_rows * query_BHGTD.shape[1:3].numel() * (run.store.capacity + 1)
        into = run.maintenance.room(numbers, query_BHGTD.device)
    run.store.ready(layer.index)
    return decode_attention.triton(
        query_BHGTD, segment.key_BHSD, segment.value_BHSE, segment.length_BH, layer.pages.key_PHND,
        layer.pages.value_PHNE, run.store.block_table_BP, step, **layer.options,
        evidence=into is not None, into=into, dense_BH=dense_BH, pseudo=pseudo,
        position_BHS=segment.position_BHS if layer.chooses and layer.in_place else None, ring=layer.ring,
    )  # fmt: skip


def count_attention(run: Run, step: StepDescriptor, layer: int) -> None:
    """Count a layer's attention calls, and what dense ones read over the link."""
    if run.policy.mixes_heads and layer not in run.policy.config.dense_layers:
        run.meter.count("triton.mixed_attention", len(step.slow) + len(step.fast))
        for row in (*step.slow, *step.fast):
            run.count_heads(layer, row)
        return
    run.store.count_read(layer, sum(run.requests[row].length for row in step.slow))
    run.meter.count("triton.dense_attention", len(step.slow))
    run.meter.count("triton.sparse_attention", len(step.fast))


def _attend(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    return (_prefill if layer.batch_pass.prompts else _decode)(layer, query_BHGTD)


def _decode(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    run, policy, step, pseudo = layer.run, layer.run.policy, layer.step, None
    last_BHG1D = query_BHGTD[:, :, :, -1:]  # a fast request has no other
    mixes = policy.mixes_heads and not layer.left_dense
    if layer.chooses:
        pseudo = select.choose_and_note(layer, step, last_BHG1D)
    if mixes:
        for row in (*layer.batch_pass.slow, *layer.batch_pass.fast):
            slow = run.requests[row].slow
            layer.dense_heads[row] = policy.companion.dense_heads(layer.index, query_BHGTD.shape[1], slow=slow)
        with run.observer.span("attention.heads", layer.index):
            result = read(layer, step, query_BHGTD)
    else:
        kind = "mixed" if step.fast and step.slow else "fast" if step.fast else "dense"
        moved = layer.moved_bytes(step.slow, dense=True) + layer.moved_bytes(step.fast, dense=False)
        with run.observer.span(f"attention.{kind}", layer.index, moved):
            result = read(layer, step, query_BHGTD, pseudo=pseudo)
    count_attention(run, step, layer.index)
    if result.logits_BHGWT is not None:
        handed = select.Handed(layer, result.logits_BHGWT, result.log_sum_BHGW)
        select.hand_over(layer, step.slow, _of(layer, step.slow, last_BHG1D), handed)
    return result.out_BHGWE


def _of(layer: Layer, rows: tuple[int, ...], query_BHGTD: torch.Tensor) -> torch.Tensor:
    if len(rows) == query_BHGTD.shape[0]:
        return query_BHGTD
    return query_BHGTD[layer.run.rows(rows).request_R.long()]


def _prefill(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    # first pieces that PyTorch can attend: no soft cap, no learned sinks
    run, prompts = layer.run, layer.batch_pass.prompts
    begin = not any(layer.batch_pass.start[row] for row in prompts)
    plain = layer.options["soft_cap"] is None and layer.options["sink_HG"] is None
    first = begin and plain and layer.new is not None and has_fused(query_BHGTD, *layer.new)
    run.meter.count("sdpa.prompt" if first else "triton.prefill_attention", len(prompts))
    with run.observer.span("attention.dense", layer.index, layer.moved_bytes(prompts, dense=True)):
        if first:
            return attend_to_itself(layer, query_BHGTD)
        if layer.ring is not None:
            return _attend_staged(layer, query_BHGTD)
        return dense_attention.triton(
            query_BHGTD, layer.pages.key_PHND, layer.pages.value_PHNE, run.store.block_table_BP,
            layer.batch_pass.descriptor.length_B, **layer.options,
        )  # fmt: skip


def _attend_staged(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    # prompt by prompt, whose pages are brought to the device first
    out = query_BHGTD.new_zeros(*query_BHGTD.shape[:4], layer.pages.value_PHNE.shape[3])
    for row in layer.batch_pass.prompts:
        only, staged = slice(row, row + 1), layer.run.store.staged(layer.index, row, layer.run.requests[row].length)
        length_1 = layer.batch_pass.descriptor.length_B[only]
        out[only] = dense_attention.triton(query_BHGTD[only], *staged, length_1, **layer.options)
    return out


def has_fused(query_BHGTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> bool:
    """Say whether flash attention takes these tensors; PyTorch's others hold all T x T logits."""
    if query_BHGTD.device.type != "cuda":
        return False
    operands = query_BHGTD.flatten(1, 2), key_BHTD, value_BHTE
    return can_use_flash_attention(SDPAParams(*operands, None, 0.0, True, query_BHGTD.shape[2] > 1))


def attend_to_itself(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    """Attend causally with prompts' first pieces; tokens and outputs as in `attend`."""
    assert layer.new is not None, "the host has handed over the piece's keys"
    (key, value), T, count = layer.new, query_BHGTD.shape[3], layer.batch_pass.count
    if all(tokens == T for tokens in count):
        return _causal(query_BHGTD, key, value, layer)
    out = query_BHGTD.new_zeros(*query_BHGTD.shape[:4], value.shape[3])
    for row in layer.batch_pass.prompts:
        only, new = slice(row, row + 1), slice(T - count[row], T)
        parts = query_BHGTD[only, :, :, new], key[only, :, new], value[only, :, new]
        out[only, :, :, new] = _causal(*parts, layer)
    return out


def _causal(query_BHGTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, layer: Layer) -> torch.Tensor:
    out = scaled_dot_product_attention(
        query_BHGTD.flatten(1, 2), key_BHTD, value_BHTE, is_causal=True,
        scale=layer.logit_options["scale"], enable_gqa=query_BHGTD.shape[2] > 1,
    )  # fmt: skip
    return out.view(*query_BHGTD.shape[:4], -1)


def check_backend(backend: str, device: torch.device, engine: EngineOptions = DEFAULTS) -> None:
    """Refuse a backend that is unknown (`ConfigError`), or cannot run on a device (`BackendError`).

    So is what `engine` asks of it beyond its defaults.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    for name in ("chained", "products"):
        if getattr(engine, name) and backend == "torch":
            raise BackendError(f"engine.{name} must be false on the torch backend, got true")
    if backend == "triton":
        try:
            check_device(device)
            if engine.chained:
                check_chained(device)
        except KernelLimitError as error:
            raise BackendError(str(error)) from error

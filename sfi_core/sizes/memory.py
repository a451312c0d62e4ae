"""Forecast the memory of a run, before the run allocates."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sfi_core import distributed as torchrun
from sfi_core.distributed.ranks import ranks_of
from sfi_core.errors import MemoryForecastError
from sfi_core.machine.memory import free_bytes, resident_bytes
from sfi_core.models.linear import crawls
from sfi_core.policies.base import Policy
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.window_ring import ring_rows

FLOAT32 = INT32 = 4
# bytes of a logit that is being picked from, at most: its float32 copy and score, with a sorted copy and its
# indices, softmax and sums of top_p; or score, random bits twice and noise, the last three of 8 bytes each
PICKING = 32
COMPARING = 6 * FLOAT32  # both distributions, their logarithms, and the terms of the divergence
CPU_SLACK = 2  # the C library keeps about as much freed memory as the largest transients took
# Paper gap: both are the libraries' own. What CUDA keeps of a graph of 2,000 kernels with their arguments:
# assumed. What cuBLAS keeps for the stream that steps are recorded on: 32 MiB on Hopper, 8 MiB before it.
GRAPH_BYTES = 16 << 20
LIBRARY_BYTES = 32 << 20
HELD = 2  # states: the one after the last verified token, and the drafts' own


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How a lossless run drafts: a request brings `tested` tokens to a pass, `together` logits are picked from at once.

    `compares`: an observer wants the divergence of drafts. `explicit`: attention holds all its logits, as torch's does.
    """

    tested: int
    together: int
    compares: bool
    explicit: bool

    def pass_bytes(self, *, batch: int, vocabulary: int, itemsize: int, grouped: int, capacity: int) -> int:
        """Add up what a verification of all requests holds, without activations; `grouped`: a KV head's query heads."""
        numbers = batch * self.tested * vocabulary
        picking = min(numbers, max(self.together, vocabulary)) * PICKING
        comparing = self.tested * vocabulary * COMPARING if self.compares else 0
        # logits, weights, and these once more
        attention = 3 * FLOAT32 * grouped * self.tested * capacity if self.explicit else 0
        return max(numbers * itemsize + max(picking, comparing), attention)

    def kept_bytes(self, *, batch: int, vocabulary: int, itemsize: int) -> int:
        """Return the bytes of the drafted tokens' logits, kept until they are compared."""
        return batch * (self.tested - 1) * vocabulary * itemsize if self.compares else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Bytes that a run needs."""

    resident_bytes: int  # bytes in use before the run, weights included
    kv_bytes: int  # pages of the KV cache
    norm_bytes: int
    packed_bytes: int  # packed segments
    summary_bytes: int  # the policy's summaries of keys, such as page summaries or codes
    sliding_bytes: int  # beside the KV cache: rings of sliding windows, and states
    # the largest transient: the prompt's activations, or the Selector's tensors and the evidence that waits for it
    workspace_bytes: int
    graph_bytes: int = 0  # held by CUDA graphs, a step's transients included, also while prompts are read

    @property
    def needed_bytes(self) -> int:
        """Bytes beyond those in use."""
        return self.total_bytes - self.resident_bytes

    @property
    def total_bytes(self) -> int:
        """Peak of the run."""
        return sum(asdict(self).values())


def forecast(
    model: Any,
    layers: Sequence[LayerShape],
    policy: Policy,
    *,
    batch: int,
    prompt_tokens: int,
    capacity: int,
    shared: int = 0,
    prefill_chunk: int = 0,
    backend: str = "triton",
    tiers: bool = False,
    refreshed_together: int = 1,
    evidence_buffers: int = 1,
    graphs: bool = False,
    drafting: Drafting | None = None,
) -> Forecast:
    """Add up the bytes of a run; for a model that is split over ranks, the bytes of this rank.

    `model` gives the sizes of its activations and the device, `layers` the shapes of all its layers. Of a prompt
    `prompt_tokens` are read; the first `shared` tokens of all requests are stored once. A forward pass
    reads `prefill_chunk` tokens of a prompt (0 for all). A slow step refreshes `refreshed_together` requests at once
    and holds the evidence of `evidence_buffers` layers. The torch backend packs nothing in layers left dense; over
    `tiers` all is packed.
    """
    config = policy.config
    managed = [layer for layer in layers if layer.window is None]
    unpacked = () if backend == "triton" else config.dense_layers
    chosen = [layer for index, layer in enumerate(layers) if index not in unpacked and layer.window is None]
    packs = tiers or not policy.chooses
    chunk = min(prefill_chunk or prompt_tokens, prompt_tokens)
    first, later = 0, 0
    if policy.selects:
        first = _first_bytes(model, managed, policy) * capacity
        later = _selection_bytes(model, managed, evidence_buffers) * refreshed_together * capacity
    verifying, logits, copies, tested = 0, 0, 1, 1
    if drafting is not None:
        verifying, logits = _drafting_bytes(model, managed, drafting, batch, capacity)
        copies, tested = HELD, drafting.tested
    reading = _activation_bytes(model, managed, batch, chunk)
    if windows := [layer.window for layer in layers if layer.window]:
        # sliding windows of ragged prompts have a bool for each pair of tokens; full attention has no mask
        reading += batch * chunk * min(max(windows) + chunk, prompt_tokens)
    slack = CPU_SLACK if model.device.type == "cpu" else 1
    rings = sum(
        (layer.kept_bytes + layer.heads * FLOAT32) * ring_rows(layer.window, tested, capacity)  # with norms
        for layer in layers
        if layer.window and layer.owner is None
    )
    states = sum(layer.state_bytes for layer in layers) * copies
    step = later + _activation_bytes(model, managed, batch, tested)
    stored = batch * (capacity - shared) + shared
    return Forecast(
        resident_bytes=resident_bytes(model.device),
        kv_bytes=sum(layer.kept_bytes for layer in managed) * stored,
        norm_bytes=sum(layer.heads for layer in managed if layer.owner is None) * FLOAT32 * stored,
        packed_bytes=sum(layer.row_bytes for layer in chosen) * batch * packed_rows(policy, capacity) * packs,
        summary_bytes=batch * sum(policy.summary_bytes(layer, capacity) for layer in managed),
        sliding_bytes=(rings + states) * batch,
        workspace_bytes=max(reading, first, later, verifying) * slack + logits,
        graph_bytes=step + _graph_bytes(model, chosen, policy, batch, capacity, tested) if graphs else 0,
    )


def packed_rows(policy: Policy, capacity: int) -> int:
    """Return the rows of a packed segment, sink and selected tokens, of a request of at most `capacity` tokens."""
    return policy.config.sink + (min(policy.config.budget, capacity) if policy.selects else 0)


def _first_bytes(model: Any, layers: Sequence[LayerShape], policy: Policy) -> int:
    # what a prompt's first selection holds at once, by position: the policy's own number, else the logits of
    # `window_prefill` queries, their probabilities and powers
    sizes = [policy.companion.first_bytes(layer) for layer in layers]
    stated = [size for size in sizes if size is not None]
    return max(stated) if stated else _selection_bytes(model, layers, 4 * policy.config.window_prefill)


def _activation_bytes(model: Any, layers: Sequence[LayerShape], batch: int, chunk: int) -> int:
    config, split = model.config.get_text_config(decoder=True), ranks_of(model).size
    hidden, itemsize = config.hidden_size, layers[0].itemsize
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = (max(inner) if isinstance(inner, list) else inner) // split
    heads = config.num_attention_heads // split
    widest = max(layer.key_width for layer in layers), max(layer.value_width for layer in layers)
    # residual and normed stream beside the gate, up, activated and multiplied rows of the MLP
    mlp = (3 * hidden + 4 * inner) * itemsize
    # residual, normed, q with its rotated copy, the output twice, and the segments in float32
    attention = (2 * hidden + heads * (3 * widest[0] + 2 * widest[1])) * itemsize
    attention += 2 * heads * widest[1] * FLOAT32
    logits = 2 * config.vocab_size * FLOAT32 * batch
    wide = hidden * inner * FLOAT32 if model.device.type == "cpu" and crawls(model.dtype) else 0
    return int(max(mlp, attention) * batch * chunk + logits + wide)


def _drafting_bytes(
    model: Any, layers: Sequence[LayerShape], drafting: Drafting, batch: int, capacity: int
) -> tuple[int, int]:
    # the largest transient of a verification, and the logits that observers wait for
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    logits = {"batch": batch, "vocabulary": vocabulary, "itemsize": model.dtype.itemsize}
    grouped = _query_heads(model) // min(layer.heads for layer in layers)
    passing = drafting.pass_bytes(**logits, grouped=grouped, capacity=capacity)
    activations = _activation_bytes(model, layers, batch, drafting.tested)
    return activations + passing, drafting.kept_bytes(**logits)


def _selection_bytes(model: Any, layers: Sequence[LayerShape], queries: int) -> int:
    # by position: numbers of each query, and about a dozen tensors of one number per KV head
    heads = max(layer.heads for layer in layers)
    return (queries * _query_heads(model) + 12 * heads) * FLOAT32


def _query_heads(model: Any) -> int:
    heads: int = model.config.get_text_config(decoder=True).num_attention_heads
    return heads // ranks_of(model).size


def largest_batch(needed: Callable[[int], int], most: int, free: float) -> int:
    """Return the largest batch of at most `most` whose `needed` bytes, which grow with it, fit `free`; 0 for none."""
    return bisect_right(range(1, most + 1), free, key=needed)


def check_fits(expected: Forecast, device: torch.device, way: str | None = None, *, two_tier: bool = False) -> None:
    """Raise `MemoryForecastError` for a run that does not fit: bytes needed, bytes free, and the setting to lower.

    That is `way`, None for what needs the most; a device budget is not suggested to a run that has two tiers.
    """
    free = free_bytes(device)
    if free and device.type == "cpu":
        free //= torchrun.neighbors()  # the other processes of this machine use the same memory
    if free is not None and expected.needed_bytes > free:
        cache = expected.kv_bytes + expected.norm_bytes
        most = "the batch or max_new_tokens"
        way = way or (most if cache > expected.workspace_bytes else "prefill_chunk")
        if device.type == "cuda" and not two_tier and cache > expected.workspace_bytes:
            way += ", or keep most of the cache in host memory with kv_device_budget"
        held = expected.graph_bytes
        graphs = f", {held / 1e9:.2f} GB CUDA graphs" if held else ""
        raise MemoryForecastError(
            f"the run must fit {free / 1e9:.2f} GB of free memory, got a forecast of "
            f"{expected.needed_bytes / 1e9:.2f} GB ({cache / 1e9:.2f} GB KV cache, "
            f"{expected.packed_bytes / 1e9:.2f} GB packed, {expected.workspace_bytes / 1e9:.2f} GB "
            f"workspace{graphs}); lower {way}"
        )


def step_sizes(batch: int, *, selects: bool) -> list[int]:
    """Return the numbers of slow requests, padding included, that a run has graphs for."""
    if not selects:
        return [0]
    return [0, *sorted({min(batch, 1 << power) for power in range(batch.bit_length() + 1)})]


def _graph_bytes(
    model: Any, layers: Sequence[LayerShape], policy: Policy, batch: int, capacity: int, tested: int
) -> int:
    # what graphs hold beside the largest transient of a step: logits, chosen positions, and each graph's own;
    # `layers` are those that select, `tested` the most tokens that a request brings
    sizes = step_sizes(batch, selects=policy.selects)
    lengths = len(step_sizes(tested - 1, selects=tested > 1))
    # all graphs leave their logits in one place
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    logits = (2 * tested - 1) * batch * vocabulary * layers[0].itemsize
    chosen = sum(sizes) * sum(layer.heads for layer in layers) * min(policy.config.budget, capacity) * INT32
    return logits + lengths * (chosen + len(sizes) * GRAPH_BYTES) + LIBRARY_BYTES

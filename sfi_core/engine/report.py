"""The report of a run: counts, ratios, times and bytes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from sfi_core.engine.ledger import steady_seconds
from sfi_core.engine.report_text import run_lines
from sfi_core.engine.run import Run
from sfi_core.settings.config import changed_settings
from sfi_core.settings.engine import DeviceBudget
from sfi_core.state.request import RequestState
from sfi_core.state.two_tier import TwoTierStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessReport:
    """The drafts of one request of a lossless run.

    Each of the `verifications`, dense passes after the prompt's, gave the `accepted` drafts and one token more. All
    predecessors of the `tested` drafts were accepted. `passes_per_token` counts fast steps and verifications.
    """

    verifications: int
    drafted: int
    tested: int
    accepted: int
    passes_per_token: float

    @classmethod
    def of(cls, state: RequestState) -> Self | None:
        """Sum a request up; None if it verified nothing."""
        tally = state.tally
        if not tally.verifications:
            return None
        passes = (tally.drafted + tally.verifications) / max(1, len(state.tokens) - 1)
        return cls(
            verifications=tally.verifications, drafted=tally.drafted, tested=tally.tested, accepted=tally.accepted,
            passes_per_token=passes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """One request.

    Attributes:
        token_ids: Generated tokens, a stop token included.
        finish_reason: "stop", "length", "interrupted" or "error".
        slow_steps: Steps with g_t = 1, those `slow_at`, step 0 included; in a lossless run the verifications likewise.
        fast_steps: All others; in a lossless run the accepted drafts.
        mean_attended_tokens: Tokens that attention read per decoding step, KV head and full-attention layer, without
            step 0; 0 if nothing was decoded.
        mean_selection_tokens: What choosing read, likewise, in tokens' worth: a page bound counts as a token, a key as
            half of one. The selection of a slow step adds no read.
        read_ratio: Share of the cached tokens that attention read, over the same steps; 1 if nothing was decoded.
        selection_ratio: What choosing read likewise; `cache_read_ratio`, told as `cache read`, is the sum of both.
        stored_ratio: Share of the tokens that the method needs to keep: `read_ratio` if it evicts the rest, else 1.
        cached_prompt_tokens: Tokens of the prompt that came from a `PromptCache`.
        queued_seconds: Wall time from the run's beginning until the prompt began to be read; `prefill_seconds` from
            then to the first token, `decode_seconds` to the last, prompts of other requests read meanwhile included.
    """

    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    slow_steps: int
    fast_steps: int
    slow_at: list[int]
    reasons: dict[str, int]
    mean_attended_tokens: float
    read_ratio: float
    selection_ratio: float
    stored_ratio: float
    mean_selection_tokens: float = 0.0  # so in reports that older versions have kept
    cache_read_ratio: float = field(init=False)
    lossless: LosslessReport | None = None
    cached_prompt_tokens: int = 0
    # times do not count when two reports are compared
    queued_seconds: float = field(default=0.0, compare=False)
    prefill_seconds: float = field(default=0.0, compare=False)
    decode_seconds: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        """Add both parts of what was read."""
        object.__setattr__(self, "cache_read_ratio", self.read_ratio + self.selection_ratio)

    @classmethod
    def of(cls, state: RequestState, stop_ids: frozenset[int], *, evicts: bool) -> Self:
        """Sum a request up; `evicts` is its policy's."""
        tally, decoded = state.tally, max(1, len(state.tokens) - 1)
        read = tally.attended / tally.context if tally.context else 1.0
        chosen = tally.selecting / tally.context if tally.context else 0.0
        return cls(
            prompt_tokens=state.prompt_tokens, token_ids=list(state.tokens),
            finish_reason="stop" if stop_ids.intersection(state.tokens[-1:]) else "length",
            slow_steps=len(tally.slow_at), fast_steps=len(state.tokens) - len(tally.slow_at),
            slow_at=list(tally.slow_at), reasons=dict(tally.reasons), lossless=LosslessReport.of(state),
            mean_attended_tokens=tally.attended / decoded, mean_selection_tokens=tally.selecting / decoded,
            read_ratio=read, selection_ratio=chosen, stored_ratio=read if evicts else 1.0,
            cached_prompt_tokens=tally.known, queued_seconds=tally.queued_seconds,
            prefill_seconds=tally.prefill_seconds, decode_seconds=tally.decode_seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The launches of one Triton kernel."""

    name: str
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """The bytes of a run under a device budget of `allowed_bytes`, and the `recall_seconds` that steps waited for rows.

    `device_bytes` are recent pages, norms, resident layers and heads, buffers, packed segments and summaries;
    `host_bytes` keys and values in host memory. `offloaded_bytes` were written there; the device read there
    `streamed_bytes` for dense attention and for the policy, and `recalled_bytes`, selected rows in decoding steps.
    Recalls on a CUDA stream of their own let no step wait.
    """

    device_bytes: int
    allowed_bytes: int
    host_bytes: int
    offloaded_bytes: int
    recalled_bytes: int
    recalled_bytes_per_step: float
    streamed_bytes: int
    recall_seconds: float

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """Sum a run up; None without a device budget."""
        store, meter, budget = run.store, run.meter, run.engine.kv_device_budget
        if not isinstance(store, TwoTierStore) or budget is None:
            return None
        store.join()  # recalls for a next step may be under way
        segments = sum(segment.nbytes for segment in run.segments.values())
        notes = sum(map(_nbytes, run.notes.values()))
        kept = sum(kept.nbytes for kept in run.kept.values())
        recalled, hosted = meter.recalled_bytes, [layer for layer in store.layers if store.ring(layer) is not None]
        written = sum(state.length for state in run.states) * sum(store.pages(layer).row_bytes for layer in hosted)
        return cls(
            device_bytes=store.device_bytes + segments + notes + kept,
            allowed_bytes=DeviceBudget.parse(budget).bytes_of(store.cache_bytes), host_bytes=store.host_bytes,
            offloaded_bytes=written, streamed_bytes=store.traffic["streamed"],
            recalled_bytes=recalled, recalled_bytes_per_step=recalled / max(1, run.step),
            recall_seconds=meter.recall_seconds,
        )  # fmt: skip


def _nbytes(notes: Mapping[str, Any]) -> int:
    groups = (value if isinstance(value, tuple) else (value,) for value in notes.values())
    return sum(tensor.nbytes for group in groups for tensor in group if isinstance(tensor, torch.Tensor))


METER = ("prefill_seconds", "decode_seconds", "recording_seconds", "compiling_seconds", "not_replayed", "not_compiled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run.

    Attributes:
        prefill_seconds: Wall time of reading prompts, up to their first tokens.
        decode_seconds: Wall time of the steps from 1 on, without prompts. No time here includes `compiling_seconds`.
        decode_tokens_per_second: Tokens of all requests in those steps, over that time.
        steady_tokens_per_second: The same if every step took the median of those with as many slow and fast requests.
        recording_seconds: The part of `decode_seconds` that recorded CUDA graphs and compiled their kernels, once.
        compiling_seconds: Time that numba compiled for this processor, once a machine.
        paths: Attention and maintenance calls by code path, counted per request, layer and step.
        kernels: The Triton kernels launched; empty on the torch backend.
        not_replayed: Why a device with CUDA graphs ran steps without them, unless the user asked for that; else empty.
        not_compiled: Why a CPU with numba ran decoding steps module by module, unless the user asked for that.
        not_blocks: Why matrices of a GGUF file are unpacked, by name, and under "" why all are.
        fused: Number of the model's modules that ran as our fused kernels, by class; `left_alone` of the others.
        settings: Those of the policy that differ from the defaults.
    """

    backend: str
    requests: list[RequestReport]
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_second: float
    paths: dict[str, int]
    kernels: list[KernelReport]
    kv_tiers: TierReport | None = None
    not_replayed: str = ""
    not_compiled: str = ""
    not_blocks: dict[str, str] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    left_alone: dict[str, int] = field(default_factory=dict)
    recording_seconds: float = 0.0
    compiling_seconds: float = 0.0
    steady_tokens_per_second: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, run: Run) -> Self:
        """Sum a run up."""
        meter, stop_ids, evicts = run.meter, run.stop_ids, run.policy.evicts
        requests = [RequestReport.of(state, stop_ids, evicts=evicts) for state in run.states]
        decoded = sum(max(0, len(request.token_ids) - 1) for request in requests)
        steady = steady_seconds(meter.laps)
        return cls(
            backend=run.store.backend,
            requests=requests,
            decode_tokens_per_second=decoded / meter.decode_seconds if meter.decode_seconds else 0.0,
            paths={name: count for name, count in meter.paths.items() if count},
            kernels=[KernelReport(name, count) for name, count in sorted(meter.kernels.items())],
            kv_tiers=TierReport.of(run),
            steady_tokens_per_second=decoded / steady if steady else 0.0,
            settings=changed_settings(run.policy.config.to_dict()),
            **{name: getattr(meter, name) for name in METER},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Sum the run up, in the lines that close `sfi generate`."""
        return "\n".join(run_lines(self.to_dict()))

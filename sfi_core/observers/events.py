"""What happens in a run, as observers are told of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A run begins.

    Attributes:
        batch: Requests that are decoded together.
        requests: Requests in all, those included that wait until another one has ended.
        policy: The policy's name.
        backend: "torch" or "triton".
        device: Where the model is.
        config: The policy's settings, plain values.
        trigger_token_ids: T_trig, ascending.
        model: What the model is, plain values: see `sfi_core.models.describe.describe_model`.
        audit: The audit's settings, plain values; None without an audit.
        lossless: Whether sparse steps draft only, and full attention verifies what they drafted.
        rank: Which of the processes that share the model this is; it has the KV heads from rank * H on.
        ranks: How many there are.
        run_id: 32 hexadecimal digits, the same on every rank, of no other run.
        began_unix_ns: When the run began, in nanoseconds since 1970; the first rank's, on every rank.
    """

    batch: int
    requests: int
    policy: str
    backend: str
    device: str
    config: Mapping[str, Any]
    trigger_token_ids: tuple[int, ...]
    model: Mapping[str, Any]
    audit: Mapping[str, Any] | None
    lossless: bool = False
    rank: int = 0
    ranks: int = 1
    run_id: str = field(default_factory=lambda: uuid4().hex)
    began_unix_ns: int = field(default_factory=time.time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEvent:
    """A piece of the prompts is about to be read.

    Attributes:
        requests: Which requests these are.
        ids_BT: Token ids, padded on the left; on the model's device.
        count: How many of T, the last ones, are each request's own.
        settings: Those of `RunEvent.config` that are others for these requests, plain values.
    """

    requests: tuple[int, ...]
    ids_BT: torch.Tensor
    count: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStepEvent:
    """The batch enters a step, or a piece of the prompt.

    Attributes:
        step: Step of the batch; 0 is the prompts' last piece, -1 an earlier one. A request that begins later,
            in the place of one that has ended, has its prompt read in a step of the batch of its own.
        slow: Requests with g_t = 1.
        fast: The other unfinished requests.
        reads_prompt: Whether prompts are read.
        cached_tokens: Tokens in the cache of these requests, the step's own included.
        moved_bytes: Bytes of K and V that attention is going to read, as far as is known; see `StepEvent`.
        not_replayed: Why the step runs one kernel after the other on a device that has CUDA graphs, where
            nobody asked for that; empty for none.
    """

    step: int
    slow: tuple[int, ...]
    fast: tuple[int, ...]
    reads_prompt: bool = False
    cached_tokens: int = 0
    moved_bytes: int = 0
    not_replayed: str = ""

    @property
    def kind(self) -> str:
        """Say "prefill", "slow", "fast" or "mixed"."""
        if self.reads_prompt or self.step <= 0:
            return "prefill"
        return "mixed" if self.slow and self.fast else "slow" if self.slow else "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One finished decoding step of one request.

    Attributes:
        request: Index of the request.
        step: Decoding step t of the request; 0 is the prefill's last position.
        batch_step: The step of the batch that it was part of.
        position: Position of the query token.
        token_id: The token this step generated, x_t.
        slow: Whether the step ran dense attention, g_t.
        reason: Why it was slow: "first", "trigger", "t_max", ...; empty for a fast step.
        steps_since_slow: Fast steps since the last slow step.
        attended_tokens: Tokens read per KV head, the mean over the full-attention layers.
        context_tokens: Tokens that full attention reads.
        elapsed_us: Wall time of the batch's step, in microseconds; an audited step's includes the audit.
        audited: Whether the audit looked at the step.
        drafted: Of a lossless run: whether the token was drafted, and kept. Its step is the fast one that
            drafted it; the others are those of verifications.
        draft_token_id: Of a lossless run: the token that was drafted here, kept or not; None without one.
        graphs: Whether the step was replayed as a CUDA graph; None where that is not known.
        slow_requests: Requests of the batch's step that read everything, those whose prompt is read included.
        fast_requests: The other ones.
        cached_tokens: Tokens in the cache of all of them, the step's own included.
        moved_bytes: Bytes of K and V that attention read for all of them in the full-attention layers, each
            request's once. Of tensor-parallel ranks with models of their own, those of the rank's heads.
    """

    request: int
    step: int
    batch_step: int
    position: int
    token_id: int
    slow: bool
    reason: str
    steps_since_slow: int
    attended_tokens: float
    context_tokens: int
    elapsed_us: float
    audited: bool = False
    drafted: bool = False
    draft_token_id: int | None = None
    graphs: bool | None = None
    slow_requests: int | None = None
    fast_requests: int | None = None
    cached_tokens: int | None = None
    moved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationEvent:
    """One forward pass of a lossless run has verified what a request drafted; it precedes its steps' events.

    Attributes:
        request: Index of the request.
        step: Decoding step of the last token that it gave: the step whose row is slow.
        batch_step: The step of the batch that it was part of.
        base: Tokens in the cache that were verified before it, the prompt's included.
        drafted: Tokens that it tested.
        accepted: Those it kept; the token after them is full attention's own.
        reason: Why the draft ended: "first", "trigger", "t_max" and the like as `StepEvent.reason`, "limit"
            (`draft.max_tokens`, or fewer where `draft.adaptive`), "stop" (a drafted stop token), "room"
            (no more tokens may be generated), "rejected" (the step after a rejection).
        evidence_position: Position of the query whose logits selected; None where nothing was selected, or
            what was selected fell with a rejected token.
        attended_tokens: Tokens read per KV head by the steps that drafted and by the verification.
        elapsed_us: Wall time of its pass, in microseconds.
    """

    request: int
    step: int
    batch_step: int
    base: int
    drafted: int
    accepted: int
    reason: str
    evidence_position: int | None
    attended_tokens: float
    elapsed_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionEvent:
    """The selected memory of one request and layer was refreshed.

    Attributes:
        request: Index of the request.
        step: Decoding step t.
        layer: Index of the transformer layer.
        index_HK: Selected positions by KV head, int32, padded with -1; on the device.
        diagnostics: The policy's tensors, such as `lambda_star`; on the device.
        reason: "" for a refresh at a slow step; "correction" where a KV head's query moved (FreeKV,
            fine-grained correction); "speculative" for a selection that serves the next step (FreeKV,
            speculative retrieval).
        heads_H: Which KV heads selected, bool [H], on the device; None for all. The rows of `index_HK` and
            of the diagnostics count for these heads only.
    """

    request: int
    step: int
    layer: int
    index_HK: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor]
    reason: str = ""
    heads_H: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallEvent:
    """One layer of one request fetched rows of keys and values from the host.

    Attributes:
        request: Index of the request.
        step: Decoding step t.
        layer: Index of the transformer layer.
        rows_H: Rows of K and V fetched by KV head, int32 [H]; on the device.
        row_bytes: Bytes of one row of one head, its key and its value.
        waited_us: Microseconds that the step stood still for the rows.
    """

    request: int
    step: int
    layer: int
    rows_H: torch.Tensor
    row_bytes: int
    waited_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """What dense attention would have read in one layer of an audited step, beside what the step read.

    Probabilities are the softmax over all cached tokens, averaged over a KV head's query heads; a learned
    sink logit takes no share. All tensors are on the device, for the audited KV heads only.

    Attributes:
        request: Index of the request.
        step: Decoding step t.
        layer: Index of the transformer layer.
        slow: Whether the step was slow, g_t.
        heads: The audited KV heads.
        index_HK: Positions of the K highest probabilities, int32, ascending, padded with -1.
        mass_HK: Their probabilities, float32; 0 where padded.
        retained_H: Probability of what the step attended; 1 for a slow step.
        query_cosine_H: Cosine of the query with the previous step's, averaged over the query heads
            (FreeKV, C_i); NaN where there is none.
        output_error_H: Norm of the difference between the step's attention output and dense attention's,
            over the norm of the latter.
        read_HK: Whether the step attended to each of `index_HK`, bool; all true where it read everything.
        top_1_read_H: Share of the KV head's query heads whose most probable position the step attended,
            float32.
        retained_min_H: As `retained_H`, of the query head that retained least. The last three are None from
            who does not look at them.
    """

    request: int
    step: int
    layer: int
    slow: bool
    heads: tuple[int, ...]
    index_HK: torch.Tensor
    mass_HK: torch.Tensor
    retained_H: torch.Tensor
    query_cosine_H: torch.Tensor
    output_error_H: torch.Tensor
    read_HK: torch.Tensor | None = None
    top_1_read_H: torch.Tensor | None = None
    retained_min_H: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEvent:
    """Next-token distributions of fast steps against dense attention's.

    Of an audited step that had fast requests, or of the drafted tokens that a lossless run has tested.

    Attributes:
        requests: The fast requests; of a verification, the request of each tested token.
        steps: Their decoding steps t.
        kl_R: Kullback-Leibler divergence of the step's distribution from dense attention's, in nats; on the
            device.
        agrees_R: Whether both have the same most probable token; on the device.
    """

    requests: tuple[int, ...]
    steps: tuple[int, ...]
    kl_R: torch.Tensor
    agrees_R: torch.Tensor


Event = (
    RunEvent
    | PromptEvent
    | BeginStepEvent
    | StepEvent
    | VerificationEvent
    | SelectionEvent
    | RecallEvent
    | AuditEvent
    | LogitsEvent
)

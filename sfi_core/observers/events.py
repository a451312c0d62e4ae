"""The events of a run, which observers receive.

In every event `request` is a request's index, `step` its decoding step t, `batch_step` the batch's and `layer` a
transformer layer's index. Tensors are on the model's device.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A run begins; mappings hold plain values.

    `batch` of all `requests` are decoded together. `config` are the policy's settings, `audit` those of the audit, if
    there is one; `trigger_token_ids` is T_trig, ascending. `model` is what
    `sfi_core.models.describe.describe_model` returns; docs/your_host.md makes the least that readers need. This process
    is `rank` of the `ranks` that share the model; its KV heads, those of `model`, begin at rank * H. `run_id`, 32
    hexadecimal digits, and `began_unix_ns`, since 1970, are the same on every rank.
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
    """A forward pass is about to read a piece of the prompts: of `ids_BT` the last `count` of each request.

    `settings` are those of these requests that differ from `RunEvent.config`, plain values.
    """

    requests: tuple[int, ...]
    ids_BT: torch.Tensor
    count: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStepEvent:
    """The batch enters a step, or a piece of the prompt.

    `step` is the batch's: 0 is the prompts' last piece, -1 an earlier one; a request that takes the row of a finished
    one has its prompt read in a batch step of its own. The unfinished requests are `slow` (g_t = 1) or `fast`; they
    have `cached_tokens`, the step's own included, and attention will read `moved_bytes`, as in `StepEvent`.
    `not_replayed` says why a device with CUDA graphs does not replay the step, unless the user turned graphs off.
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
        """What the step is: "prefill", "slow", "fast" or "mixed"."""
        if self.reads_prompt or self.step <= 0:
            return "prefill"
        return "mixed" if self.slow and self.fast else "slow" if self.slow else "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One finished decoding step of one request.

    Attributes:
        step: 0 is the prefill's last position.
        position: That of the query token.
        token_id: The token this step generated, x_t.
        slow: Whether the step ran dense attention, g_t.
        reason: Why it was slow: "first", "trigger", "t_max", ...; empty for a fast step.
        steps_since_slow: Fast steps since the last slow step.
        attended_tokens: Tokens that attention read per KV head, the mean over the full-attention layers.
        selection_tokens: What choosing read, in tokens' worth, the same mean; `cache read` is the sum of both.
        context_tokens: Tokens that full attention reads.
        elapsed_us: Wall time of the batch's step; an audited step's includes the audit.
        drafted: Lossless runs: whether a fast step, `step`, drafted the token and verification kept it. Other tokens
            have the step of their verification.
        draft_token_id: Lossless runs: the token drafted here, kept or not; None without a draft.
        graphs: Whether the step was replayed as a CUDA graph; None for unknown.
        slow_requests: Requests of the batch's step that read everything, prompts included.
        fast_requests: The other requests of the batch's step.
        cached_tokens: Cached tokens of all of them, the step's own included.
        moved_bytes: Bytes of K and V that attention read for all of them in the full-attention layers, once a
            request. With tensor parallelism, those of the rank's heads.
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
    selection_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationEvent:
    """A forward pass of a lossless run has verified a request's draft; its steps' events follow.

    Attributes:
        step: That of the last token of the pass: the step whose row is slow.
        base: Verified tokens in the cache before the pass, the prompt's included.
        drafted: Drafted tokens that were tested.
        accepted: Drafted tokens that were kept; the token after them is full attention's own.
        reason: Why the draft ended: a `StepEvent.reason`, "limit" (`draft.max_tokens`, or fewer where
            `draft.adaptive`), "stop" (a drafted stop token), "room" (no more tokens may be
            generated) or "rejected" (the step after a rejection).
        evidence_position: Position of the query whose logits selected; None without a selection, or where a
            rejected token took it along.
        attended_tokens: Tokens that attention read per KV head in the drafting steps and the verification;
            `selection_tokens` is what choosing read in them, in tokens' worth.
        elapsed_us: Wall time of the pass.
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
    selection_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionEvent:
    """The selected memory of one request and layer was refreshed.

    Attributes:
        index_HK: Selected positions by KV head, int32, padded with -1.
        diagnostics: The policy's tensors, such as `lambda_star`.
        reason: "" for a refresh at a slow step; "correction" where a KV head's query moved (FreeKV, fine-grained
            correction); "speculative" for a selection that serves the next step (FreeKV, speculative retrieval).
        heads_H: KV heads that selected, bool [H]; None for all. Other rows of `index_HK` and of the diagnostics do not
            count.
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
    """One layer of one request fetched `rows_H` rows of keys and values from the host, by KV head, int32.

    One head's row, key and value, has `row_bytes`. The step waited `waited_us` microseconds for the rows.
    """

    request: int
    step: int
    layer: int
    rows_H: torch.Tensor
    row_bytes: int
    waited_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One layer of an audited step, compared with dense attention.

    Probabilities are the softmax over all cached tokens, averaged over a KV head's query heads; a learned
    sink logit takes no share. Tensors have the audited KV `heads` only.

    Attributes:
        index_HK: Positions of the K highest probabilities, int32, ascending, padded with -1.
        mass_HK: Their probabilities, float32; 0 where padded.
        retained_H: Probability of the positions that the step attended; 1 for a slow step.
        query_cosine_H: Cosine of the query with the previous step's, averaged over the query heads (FreeKV, C_i); NaN
            without a previous step.
        output_error_H: Norm of the difference between the step's attention output and dense attention's, over the norm
            of the latter.
        read_HK: Whether the step attended to each of `index_HK`, bool.
        top_1_read_H: Share of the query heads whose most probable position the step attended, float32.
        retained_min_H: `retained_H` of the query head that retained least. Observers that skip the last three get None.
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
    """Next-token distributions of fast steps, compared with dense attention's.

    From an audited step with fast requests, or from the tested drafts of a lossless run: `requests` and `steps` are
    those of each row. `kl_R` is the Kullback-Leibler divergence of the step's distribution from dense attention's, in
    nats, `agrees_R` whether both have the same most probable token, `dense_token_R` that of dense attention with its
    `dense_probability_R`.
    """

    requests: tuple[int, ...]
    steps: tuple[int, ...]
    kl_R: torch.Tensor
    agrees_R: torch.Tensor
    dense_token_R: torch.Tensor
    dense_probability_R: torch.Tensor


Event = (
    RunEvent | PromptEvent | BeginStepEvent | StepEvent | VerificationEvent | SelectionEvent
    | RecallEvent | AuditEvent | LogitsEvent
)  # fmt: skip

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
    one has its prompt read in a batch step of its own. The unfinished requests are `slow` (g_t = 1) or `fast`.
    `not_replayed` says why a device with CUDA graphs does not replay the step, unless the user turned graphs off.
    """

    step: int
    slow: tuple[int, ...]
    fast: tuple[int, ...]
    reads_prompt: bool = False
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

    Step 0 is the prefill's last position. The step generated `token_id`, x_t, from a query at `position`. It was `slow`
    (g_t: dense attention) for a `reason`: "first", "trigger", "t_max", ..., "" for none; `steps_since_slow` counts the
    fast steps since. Per KV head, the mean over the full-attention layers, attention read `attended_tokens` of the
    `context_tokens` that full attention reads, and choosing `selection_tokens`' worth; `cache read` is the sum of both.
    An audited step's time has the audit in it.

    In a lossless run `drafted` says whether a fast step, `step`, drafted the token and verification kept it; other
    tokens have the step of their verification. `draft_token_id` is the token drafted here, kept or not, if any.

    Of the batch's step: its wall time `elapsed_us`; whether it was replayed as a CUDA graph (`graphs`); its requests,
    those that read everything, prompts included, and the others; their `cached_tokens`, the step's own included; and
    the bytes of K and V that attention read for them in the rank's full-attention layers, once a request.
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

    `step` is that of the pass's last token, whose row is slow. The cache held `base` verified tokens. Of the `drafted`
    tokens `accepted` were kept; the token after them is full attention's own. The draft's end has a `reason`: that of a
    `StepEvent`, "limit" (`draft.max_tokens`, or fewer if `draft.adaptive`), "stop" (a drafted stop token), "room" (no
    more tokens may be generated) or "rejected" (the step after a rejection). The query at `evidence_position` selected;
    None without a selection, or where a rejected token took it along. Tokens read are those of the drafting steps and
    the verification, `elapsed_us` is the pass's.
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

    `index_HK` are selected positions by KV head, int32, padded with -1, `diagnostics` the policy's tensors, such as
    `lambda_star`. The `reason` is "" at a slow step, "correction" where a KV head's query moved (FreeKV, fine-grained
    correction), "speculative" for the next step's selection (FreeKV, speculative retrieval) and "predicted" for a
    choice by a query that was foretold (`codescan.ahead`). Only `heads_H`, bool, selected and count; None for all.
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
    """A layer of a request fetched `rows_H` rows of `row_bytes` from the host, by KV head, int32; the step waited."""

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
        query_cosine_H: Cosine of the query with the last step's, the query heads' mean (FreeKV, C_i); NaN for none.
        output_error_H: Norm of the attention output minus dense attention's, over the latter's norm.
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

"""The interface of decoding policies, and the input of a policy in a layer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch.nn.functional import pad

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.settings.config import SfiConfig
from sfi_core.state.kv_store import Recall
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.choice import Choice
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.pack.reference import packed_positions
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import FAST, MODE, SLOT, StepDescriptor
from sfi_kernels.top_k import top_k

Notes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a policy keeps of a layer's keys, or of its last step, for all rows of a batch: tensors [B, ...] that stay.

    `BatchCodes` has these methods, too.
    """

    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.nbytes for part in self.parts)

    def of(self, rows: slice) -> Self:
        """Return some rows, over the same memory."""
        return replace(self, parts=tuple(part[rows] for part in self.parts))

    def grown(self, capacity: int) -> Self:
        """Return room for `capacity` tokens of a request: this one, if it has that, or a copy."""
        return self

    def rewind(self, row: int, length: int) -> None:
        """Prepare a row whose positions from `length` on are gone, and come anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of one layer, for some requests of the batch: the Selector's input.

    Attributes:
        layer: Index of the transformer layer.
        backend: The backend of ops: `op.on(backend)`.
        allowed_BT: The candidate set J, True where a position may be selected (Eq. 2).
        key_norm_BHT: L2 norms of the cached keys, float32.
        logits: Computes the window's attention logits, [B, H, G, W, T] (Eq. 4). In `choose` the window is the
            current query. Clone what is to be kept: the next step overwrites them.
        log_sum_BHGW: Their log-sum-exp over J, if the attention has computed it.
        interval: J's first position and one past its last, for one request of the torch backend, without masks.
        length_B: Each request's tokens, int32, where logits behind them are undefined; None otherwise.
        request_B: The requests' rows in the whole batch, int32, -1 for padding.
        all_kept: What the policy keeps of all rows in this layer (`Companion.keeps`).
        span: Opens a span of the selection, for observers.
        wants_diagnostics: Whether an observer wants the selection's diagnostics.
        ranks: The processes among which the layer's KV heads are split.
    """

    layer: int
    backend: str
    allowed_BT: torch.Tensor
    key_norm_BHT: torch.Tensor
    logits: Callable[[], torch.Tensor]
    log_sum_BHGW: torch.Tensor | None = None
    interval: tuple[int, int] | None = None
    length_B: torch.Tensor | None = None
    request_B: torch.Tensor | None = None
    all_kept: Any = None
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext
    wants_diagnostics: bool = True
    ranks: Ranks = ALONE

    def probability(self, heads: Sequence[int] | None = None) -> torch.Tensor:
        """Return the softmax of the logits over a request's tokens, of all KV heads or of some."""
        logits_BHGWT = self.logits()
        if heads is not None:  # one by one: a list as an index would wait for the device
            logits_BHGWT = torch.stack([logits_BHGWT[:, head] for head in heads], 1)
        if self.length_B is not None:
            behind_BT = torch.arange(logits_BHGWT.shape[-1], device=self.length_B.device) >= self.length_B[:, None]
            logits_BHGWT = logits_BHGWT.masked_fill(behind_BT[:, None, None, None], -torch.inf)
        return logits_BHGWT.softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext(Evidence):
    """The evidence, and all else that a policy may use in one layer.

    Attributes:
        states: The requests' states; the torch backend passes one request at a time.
        query_BHGWD: The window's queries.
        scale: Factor on the logits.
        keys: Returns cached keys, [1, H, T, D], given a request's place here, a start and a stop position.
        values: The same for cached values.
        notes: The policy's own data on each request in this layer, kept from step to step.
        kept: What the policy keeps of each request in this layer, as a batch of one.
        whole_on_device: Whether the pages of a `BatchContext` hold all tokens; else the recent ones only.
    """

    states: tuple[RequestState, ...]
    query_BHGWD: torch.Tensor
    scale: float
    keys: Callable[[int, int, int], torch.Tensor]
    values: Callable[[int, int, int], torch.Tensor]
    notes: tuple[Notes, ...]
    kept: tuple[Any, ...] = ()
    whole_on_device: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """One layer of a decoding pass: all rows of the batch, no number of the host's; the operands of `code_scan`.

    `backend` and `wants_diagnostics` as in `Evidence`; `fast` says whether any request decodes fast. `kept` is what
    the policy keeps of the rows. `evidence` computes this step's, of all rows, which reads every key. Of an `early`
    choice the query is a prediction, and the new keys are not there yet.
    """

    backend: str
    fast: bool
    wants_diagnostics: bool
    query_BHGD: torch.Tensor
    key_PHND: torch.Tensor
    value_PHNE: torch.Tensor
    block_table_BP: torch.Tensor
    descriptor: StepDescriptor
    position_BHS: torch.Tensor
    length_BH: torch.Tensor
    scale: float
    evidence: Callable[[], Evidence]
    kept: Any = None
    early: bool = False

    def budget(self, asked: int) -> int:
        """Return a budget of at most as many positions as a request may have."""
        return min(asked, self.block_table_BP.shape[1] * self.key_PHND.shape[2])

    def read(self, selection: "Selection") -> Choice:
        """Let the fast requests read a selection, made for all rows, by their slots."""
        words, chosen_BHS = self.descriptor.table_BX, self.position_BHS
        slot_Z1 = torch.arange(len(chosen_BHS), device=words.device)[:, None]
        is_of_ZB = (words[:, SLOT] == slot_Z1) & (words[:, MODE] == FAST)
        row_Z, fast_Z1 = is_of_ZB.int().argmax(1), is_of_ZB.any(1)[:, None]
        made_BHS = packed_positions(selection.index_BHK, self.descriptor.sink_B, chosen_BHS.shape[2])[row_Z]
        chosen_BHS.copy_(torch.where(fast_Z1[..., None], made_BHS, chosen_BHS))
        count_BH = (made_BHS >= 0).sum(2, dtype=torch.int32)
        self.length_BH.copy_(torch.where(fast_Z1, count_BH, self.length_BH))
        return Choice(selection.index_BHK, diagnostics=selection.diagnostics)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected memory of one layer, for some requests.

    `index_BHK` are positions in J by KV head, int32, ascending, padded with -1. `diagnostics` are tensors for traces,
    such as the Selector's `lambda_star`. `heads_BH` are the KV heads that are selected anew, bool; the others keep
    their memory, None is all. `by` is the backend that chose, None the run's; `reason` that of `SelectionEvent`. Where
    it has been packed already, `recall` is what that brought from the host.
    """

    index_BHK: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    heads_BH: torch.Tensor | None = None
    by: str | None = None
    reason: str = ""
    recall: Recall | None = None

    def copy(self) -> "Selection":
        """Return a selection whose tensors no later step overwrites."""
        return self._each(torch.clone)

    def of(self, rows: slice | list[int]) -> "Selection":
        """Return the selection of some requests."""
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Selection":
        diagnostics = {name: change(value) for name, value in self.diagnostics.items()}
        heads = None if self.heads_BH is None else change(self.heads_BH)
        return replace(self, index_BHK=change(self.index_BHK), diagnostics=diagnostics, heads_BH=heads)


class Companion:
    """What some policies tell the engine besides; `Policy.companion` is the policy itself if it inherits this too.

    CodeScan, Quest, FreeKV and the oracle choose at every step, SyncKV mixes heads.
    """

    def choose(self, batch: BatchContext) -> Choice | None:
        """Choose in a decoding pass what all fast requests read, if any is fast, before they attend.

        For the whole batch, without a number of the host's or a wait, so that a CUDA graph can hold the launches. Fills
        `position_BHS` and `length_BH` of the fast rows, as `BatchContext.read` does.
        """
        return None

    def follow(self, batch: BatchContext, pseudo: PseudoToken | None) -> None:
        """Take in the step's new keys and true queries, once they are there, after an early `choose`.

        That gave the pseudo token, which may be mended in place.
        """

    def keeps(self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int) -> Any:
        """Allocate what the policy keeps of a layer for `rows` requests of `capacity` tokens at most: `Kept`, or None.

        The pages give heads, widths, dtype and device; a KV head has `group` query heads.
        """
        return None

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """Say whether a fast request needs another `select_after` before `choose`."""
        return False

    def dense_heads(self, layer: int, heads: int, *, slow: bool) -> Sequence[int]:
        """Return the KV heads of a layer that attend densely in a slow or fast decoding step."""
        return ()

    def first_bytes(self, layer: LayerShape) -> int | None:
        """Return the bytes a position that a prompt's first selection needs at its peak; None for the logits' alone."""
        return None


NO_COMPANION = Companion()


class Policy:
    """Base of the policies. By default every step is fast and nothing is selected.

    Sink and recent tokens are always attended; a policy does not see them (Eq. 1). A hook returns the new
    selected memory, or None to keep the old one (Eq. 3).

    Attributes:
        config: The run's settings; budgets are tokens per KV head.
        trigger: Decides when a slow step is due.
        prompt_only: Call `select_after` at the end of the prompt only.
        fills: Every selection has `budget` positions, or all of J if those are fewer, so that none need be counted.
        fixed: Settings that the method always runs with, whatever the user's are, or functions of the user's.
        evicts: The method drops unselected tokens for good, so that it needs less memory.
        coded: `choose` is `code_scan`, which appends the new keys as well, and which compiled steps know.
        ahead: A step's choice is for the next one.
        drafts: Fast steps can be taken back, as a lossless run does with rejected tokens.
        offloads: Runs over a store with most keys and values in host memory.
        most_fast_steps: The most fast steps in a row, while an anchored recent segment grows; None for no limit.
        key_width: Numbers of a key of a head, where the host or a step has told it; 0 before.
        chooses: Whether the class has a `choose`; so `selects_after`, `has_kept` (`keeps`), `mixes_heads`
            (`dense_heads`), `triggered` (`plan`), and `selects` for any selection.
    """

    prompt_only = fills = evicts = coded = ahead = drafts = offloads = False
    fixed: ClassVar[Mapping[str, Any]] = {}
    most_fast_steps: int | None = None
    key_width = 0
    selects_after = selects = chooses = has_kept = mixes_heads = triggered = False

    def __init_subclass__(cls) -> None:
        """Note which hooks the class has: those of its own and of its bases."""
        super().__init_subclass__()
        cls.chooses, cls.has_kept, cls.mixes_heads = (
            getattr(cls, hook.__name__, hook) is not hook
            for hook in (Companion.choose, Companion.keeps, Companion.dense_heads)
        )
        cls.selects_after = cls.select_after is not Policy.select_after
        cls.selects = cls.chooses or cls.selects_after
        cls.triggered = cls.plan is not Policy.plan
        cls.fills = vars(cls).get("fills", False)  # not a base's: its hooks may be others

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """Take the settings; `layers` are the model's full-attention layers."""
        self.config = self.adapt(config)
        self.trigger = trigger

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Return the settings that the method runs with: those that it has `fixed`, and the others of `config`."""
        changes = {name: value(config) if callable(value) else value for name, value in cls.fixed.items()}
        return config.replace(**changes)

    @classmethod
    def refreshes(cls) -> bool:
        """Say whether slow decoding steps call `select_after`, in layers outside `dense_layers`."""
        return cls.selects_after and not cls.prompt_only

    @property
    def predicts(self) -> bool:
        """Whether `choose` is called early, with a query predicted half a layer before the layer attends."""
        return False

    @property
    def companion(self) -> Companion:
        """What the policy tells the engine besides its hooks."""
        return self if isinstance(self, Companion) else NO_COMPANION

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Return why each request is slow in the next step, t >= 1, or "" if it is fast."""
        return [""] * len(requests)

    def select_after(self, context: LayerContext) -> Selection | None:
        """Select once a layer has attended (SFI, SnapKV, SyncKV), or learn from the prompt what `choose` needs."""
        return None

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Return the bytes of a policy's key summaries, for a layer and a request of `capacity` tokens."""
        return 0

    @property
    def least_recent(self) -> int:
        """The least last tokens that `choose` finds on the device, of a store with host memory."""
        return 0

    def resident(self, layer: int, heads: int) -> Sequence[int]:
        """Return the KV heads of a layer, of `heads`, to keep on the device if there is room: all of a dense layer."""
        return range(heads) if layer in self.config.dense_layers else ()

    def selection_tokens(self, state: RequestState) -> float:
        """Return the reads of the selection in a fast step, in tokens (key and value) per KV head."""
        return 0.0


class EvidencePolicy(Policy):
    """A policy whose `select_after` needs only `Evidence`: it can run beside the next layers, and in a CUDA graph."""

    def select_after(self, context: Evidence) -> Selection | None:
        """See `Policy`."""
        return None


def best(context: Evidence, score_BHT: torch.Tensor, budget: int) -> Selection:
    """Select the `budget` highest scores within J."""
    score_BHT = score_BHT.masked_fill(~context.allowed_BT[:, None], MASKED_SCORE)
    return Selection(top_k.on(context.backend)(score_BHT, budget))


class Triggered(Policy):
    """Base of the policies whose slow steps the trigger decides."""

    drafts = offloads = True

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`."""
        super().__init__(config, trigger, layers)
        longest = {"stride": self.config.stride, "never": None, "always": 0}
        self.most_fast_steps = longest.get(self.config.trigger_policy, self.config.t_max)

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Ask the trigger about every request."""
        return [self.trigger.reason(state) for state in requests]


def stacked(index: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the positions of requests, [H, K] each, padded with -1 to one width: [B, H, K] int32."""
    widest = max(index_HK.shape[1] for index_HK in index)
    padded = [pad(index_HK, (0, widest - index_HK.shape[1]), value=-1) for index_HK in index]
    return torch.stack(padded).int()

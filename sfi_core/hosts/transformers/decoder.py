"""A transformers model under a session, as `engine.loop` drives it: one batch of prompts, and its lossless passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from sfi_core.engine.audit import dense_twin
from sfi_core.engine.batch_pass import SeenLayer, Watcher
from sfi_core.engine.graphs.buffers import bucket
from sfi_core.engine.lossless import Block, Cost, Costs, DraftRule, Drafts
from sfi_core.engine.picking import PAD
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.run import Run
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.hosts.transformers.cache import RaggedRow, SfiCache
from sfi_core.hosts.transformers.known_prompt import KnownPrompt, begin_shared
from sfi_core.hosts.transformers.own_layers import states
from sfi_core.hosts.transformers.replays import Replays
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.describe import describe_model
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.step import ByteModel
from sfi_kernels.step_descriptor import sent


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A transformers model under a session, as `engine.loop` drives it.

    The prompts are `ids_BT`, padded on the left, with 1 in `mask_BT` where a token counts; `shared` are
    prompts that were read already, or made up. A request may reach `capacity` tokens, generates at most
    `generated` (None for what `capacity` leaves), and ends with one of `stop_ids`. A forward pass reads
    `chunk` prompt tokens, 0 for all; `on_prefill` is then told of those read so far and in all. `requests`
    counts those that wait for a row too; None for those of the batch. The `watchers` look at every layer. Prompts go
    on behind what they share with the prompt of `known`; the run's one prompt is then left there. All begin with its
    first `beginning` tokens. `patient` is as in `Replays`.
    """

    session: Session
    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    capacity: int
    stop_ids: frozenset[int] = frozenset()
    chunk: int = 0
    requests: int | None = None
    generated: int | None = None
    shared: SharedPrompt | None = None
    watchers: tuple[Watcher, ...] = ()
    known: PromptCache | None = None
    beginning: int = 0
    on_prefill: Callable[[int, int], None] | None = None
    patient: bool = True
    cache: SfiCache = field(init=False)
    replays: Replays = field(init=False)

    def __post_init__(self) -> None:
        """Check whether steps can be recorded, and what the model's forward pass takes."""
        self.cache = self.session.cache(self.capacity, self.ids_BT.shape[1], self.stop_ids)
        self.cache.requests, self.cache.generated, self.cache.known = self.requests, self.generated, self.known
        self.cache.beginning = self.beginning
        self.replays = Replays(self.session, self.cache, len(self.ids_BT), patient=self.patient)

    @property
    def run(self) -> Run:
        """The run, once the prompt is being read."""
        return self.session.run

    def prefill(self) -> torch.Tensor:
        """Read the prompt in pieces of `chunk` tokens; return the next token's logits, [B, V]."""
        if self.shared is not None:
            begin_shared(self.shared, self.session, self.cache, self.watchers)
            return self.shared.logits_BV
        B, T = self.ids_BT.shape
        if self.cache.run is None:
            self.session.start(self.cache, B, T, watchers=self.watchers)
        ragged, logits, start = bool((self.mask_BT == 0).any()), torch.empty(0), 0
        positions_BT, size = (self.mask_BT.cumsum(1) - 1).clamp_min(0), self.chunk or T
        known: KnownPrompt | None = None
        if self.known is not None:
            prompts = [ids[mask != 0].tolist() for ids, mask in zip(self.ids_BT, self.mask_BT, strict=True)]
            known = KnownPrompt(self.known, self.session, self.cache, prompts, leaves=self.requests == 1)
            start = known.begin(self.ids_BT)
        stops = [*range(start + size, T, size), T]
        for stop in stops if known is None else known.stops(stops):
            ids_BT, mask = self.ids_BT[:, start:stop], self.mask_BT[:, :stop] if ragged else None
            logits = self.replays.model(ids_BT, positions_BT[:, start:stop], mask, last=True)[:, -1]
            start = stop
            if known is not None:
                known.see(stop)
            if self.on_prefill is not None:
                self.on_prefill(stop, T)
        if known is not None:
            known.leave()
        return logits

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request."""
        run, device = self.session.run, self.ids_BT.device
        with self.replays.next_step(run, sum(not state.finished for state in run.requests)) as replayed:
            if replayed:
                run.begin_decode()
                return self.replays.replay(run, [[token] for token in token_B])
            length_B = [state.length for state in run.requests]
            ids_B1, position_B1 = sent(torch.tensor([token_B, length_B]), device)[..., None]
            return self.replays.model(ids_B1, position_B1, last=True)[:, -1]

    def draft_rule(self) -> DraftRule:
        """Return what ends a draft in a lossless run."""
        session, policy = self.session, self.session.policy
        description = describe_model(session.model, session.shapes())
        model = ByteModel.of(description, dense_layers=policy.config.dense_layers, batch=self.run.store.batch)
        group = description["query_heads"] // max(layer["heads"] or 1 for layer in description["layers"])
        cost = draft_cost(model, policy.config, group, refreshes=policy.refreshes(), gpu=self.run.device.type != "cpu")
        return DraftRule(
            config=policy.config.draft, stop_ids=self.run.stop_ids, cost=cost, selecting=policy.selection_tokens
        )

    def drafting(self) -> "BlockPass":
        """Return the passes of a lossless run."""
        return BlockPass(self.run, self.cache, self.replays)

    def alone(self, ids_1T: torch.Tensor, mask_1T: torch.Tensor, run: Run) -> Self:
        """Return a decoder that reads one more prompt into a row with a run of its own."""
        alone = type(self)(
            session=self.session, ids_BT=ids_1T, mask_BT=mask_1T, capacity=self.capacity,
            stop_ids=self.stop_ids, chunk=self.chunk, requests=self.requests, known=self.known,
        )  # fmt: skip
        alone.cache.attach(run)
        return alone

    def seat(self, row: int, other: Self) -> None:
        """Give a row to a prompt that was read alone."""
        lengths = [state.length for state in self.run.requests]
        self.session.state_checks.positions(lengths)
        self.cache.seat(row, other.cache, max(lengths))


class BlockPass(Watcher):
    """Runs the passes of a run over a cache, from the end of the prefill.

    Where requests bring different numbers of tokens, the model sees one row of all, [1, X]. Our layers tell
    the requests apart; layers with states cannot, and run one request at a time.

    Our layers overwrite rejected tokens by their positions. A state has no positions: after a rejection the state of
    the last verification comes back, and the model reads the accepted tokens again. In that pass full attention returns
    the outputs of the verification, so that the pass reads weights, states and windows, and no cache.
    """

    def __init__(self, run: Run, cache: SfiCache, replays: Replays) -> None:
        self._run, self._cache, self._replays = run, cache, replays
        self._stated = any(any(states(layer)) for layer in cache.layers)
        self._out_BHGTE: dict[int, torch.Tensor] = {}  # by layer, of the last decoding pass
        if self._stated:
            run.watchers = (*run.watchers, self)
        self._verified, self._request = self._marked(), -1

    @property
    def chains(self) -> bool:
        """See `Drafting`: where steps are replayed as CUDA graphs."""
        return self._replays.on_device

    def __call__(self, drafts: Drafts) -> torch.Tensor:
        """Run a pass; return the logits of all tokens of all blocks, [X, V]."""
        blocks = drafts.plan()
        brought = [() if block is None else block.tokens for block in blocks]
        logits_XV: torch.Tensor
        with self._replays.next_step(self._run, sum(map(len, brought))) as replayed:
            drafts.begin()
            start = self._run.batch_pass.start
            if replayed:
                self._cache.see(max(start))
                rows = [tokens or (PAD,) for tokens in brought]
                logits_XV = self._replays.replay(self._run, rows, drafts.unread_N)
            else:
                assert drafts.unread_N is None, "an audit, which lossless runs refuse, decides this alone"
                self._go_back(blocks[0])
                logits_XV = self._read(start, brought)
        if len(logits_XV) == sum(map(len, brought)):
            return logits_XV
        W = len(logits_XV) // len(brought)  # with padding before a request's own
        places = [row * W + place for row, tokens in enumerate(brought) for place in range(W - len(tokens), W)]
        return logits_XV.index_select(0, sent(torch.tensor(places), logits_XV.device))

    def _read(self, start: Sequence[int], brought: Sequence[tuple[int, ...]]) -> torch.Tensor:
        # the logits of all tokens, and of the pad token where requests that bring one go beside resting ones
        cache, alone = self._cache, max(map(len, brought)) == 1
        cache.ragged = None
        if len(brought) > 1 and not alone:
            cache.ragged = RaggedRow.of([len(tokens) for tokens in brought], self._run.device)
        rows = [tokens or ((PAD,) if alone else ()) for tokens in brought]
        ids = [token for tokens in rows for token in tokens]
        positions = [first + place for first, tokens in zip(start, rows, strict=True) for place in range(len(tokens))]
        cache.see(max(start))
        logits_XV = self.planned_pass(self._run, ids, positions, len(rows) if alone else 1)
        cache.ragged = None
        return logits_XV

    def planned_pass(self, run: Run, ids: Sequence[int], positions: Sequence[int], rows: int = 1) -> torch.Tensor:
        """Run a pass that the engine has begun for a run or its twin; return the logits of all tokens, [X, V]."""
        pair = sent(torch.tensor([list(ids), list(positions)]), run.device).view(2, rows, -1)
        self._cache.attach(run)
        with run.observer.span("forward"), run.launches():
            logits_BTV = self._replays.model(pair[0], pair[1], last=False, planned=True)
        run.maintenance.join()
        return logits_BTV.flatten(0, 1)

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Keep a decoding pass's outputs."""
        if not layer.batch_pass.prompts:
            self._out_BHGTE[layer.index] = out_BHGTE

    def keep(self, blocks: Sequence[Block | None], given: Sequence[Sequence[int]]) -> None:
        """Remove the rejected tokens from states; layers with positions overwrite theirs."""
        if self._verified is None or blocks[0] is None or not blocks[0].reason:
            return
        if len(given[0]) < len(blocks[0].tokens):
            self._read_again(blocks[0].tokens[: len(given[0])])
        self._verified = self._marked()

    def _read_again(self, tokens: Sequence[int]) -> None:
        twin = dense_twin(self._run, len(tokens))
        twin.attend = lambda layer, _: self._out_BHGTE[layer.index][:, :, :, : len(tokens)]
        assert self._verified is not None, "it was marked"
        self._cache.put_back(self._verified)
        (start,) = self._run.batch_pass.start
        self._cache.see(start)
        self.planned_pass(twin, tokens, range(start, start + len(tokens)))

    def _go_back(self, block: Block | None) -> None:
        # to where the verified tokens end, before they are followed by the block again
        request = self._run.requests[0].request
        if request != self._request:
            self._verified, self._request = self._marked(), request
        if self._verified is not None and block is not None and block.reason:
            self._cache.put_back(self._verified)

    def _marked(self) -> list[dict[str, Any]] | None:
        return self._cache.taken() if self._stated else None


def draft_cost(model: ByteModel, config: SfiConfig, group: int, *, refreshes: bool, gpu: bool) -> Cost:
    """Return what drafting and verifying cost: the bytes they read, and on a `gpu` launches and tiles of queries too.

    A KV head has `group` query heads; a verification `refreshes` the selection, or not.
    """
    most = config.draft.max_tokens

    def cost(length: float, attended: float) -> Costs:
        whole = float(model.slow(length, min(length, attended)) if refreshes else model.dense(length))
        fast = min(whole, float(model.fast(length, attended)))
        if not gpu:
            return Costs(fast, lambda _: whole)

        def verification(drafted: int) -> float:  # a replayed pass has as many queries as its bucket
            return whole + model.launches() + float(model.verified(length, (1 + bucket(drafted, most)) * group))

        return Costs(fast + model.launches(), verification)

    return cost

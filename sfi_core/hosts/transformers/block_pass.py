"""The forward passes of a lossless run: a request brings one token, or several to verify."""

from collections.abc import Sequence
from typing import Any

import torch

from sfi_core.engine.derived_runs import dense_twin
from sfi_core.engine.lossless import Block, Drafts
from sfi_core.engine.picking import PAD
from sfi_core.engine.prompt_queries import SeenLayer, Watcher
from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.cache import RaggedRow, SfiCache
from sfi_core.hosts.transformers.own_layers import states
from sfi_core.hosts.transformers.replays import Replays
from sfi_kernels.step_descriptor import sent


class BlockPass(Watcher):
    """Runs the passes of a run over a cache, from the end of the prefill.

    Where requests bring different numbers of tokens, the model sees one row of all, [1, X]. Our layers tell
    the requests apart; layers with a sliding window or with states cannot, and run one request at a time.

    A sliding window drops rejected tokens by their positions. A state has no positions: after a rejection the state of
    the last verification comes back, and the model reads the accepted tokens again. In that pass attention returns the
    outputs of the verification, so that the pass reads weights and states, and no cache.
    """

    def __init__(self, run: Run, cache: SfiCache, replays: Replays) -> None:
        self._run, self._cache, self._replays = run, cache, replays
        self._windows = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
        self._stated = any(any(states(layer)) for layer in cache.layers)
        self._out_BHGTE: dict[int, torch.Tensor] = {}  # by layer, of the last decoding pass
        if self._stated:
            run.watchers = (*run.watchers, self)
        self._verified, self._request = self._marked(), -1

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
                logits_XV = self._replays.replay(self._run, [tokens or (PAD,) for tokens in brought])
            else:
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
        """Remove the rejected tokens from windows and states; our own layers overwrite theirs."""
        if self._verified is None or blocks[0] is None or not blocks[0].reason:
            return
        brought, accepted = len(blocks[0].tokens), len(given[0])
        if accepted < brought and self._stated:
            self._read_again(blocks[0].tokens[:accepted])
        elif accepted < brought:
            new = [(window.keys[:, :, -brought:], window.values[:, :, -brought:]) for window in self._windows]
            self._cache.put_back(self._verified)
            for layer, (key, value) in zip(self._windows, new, strict=True):
                layer.update(key[:, :, :accepted], value[:, :, :accepted])
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
        return self._cache.taken() if self._windows or self._stated else None

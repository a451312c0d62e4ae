"""The forward passes of a lossless run: a request brings one token, or several to verify."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.engine.derived_runs import dense_twin
from sfi_core.engine.lossless.drafts import Block, Drafts
from sfi_core.engine.picking.picker import PAD
from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.cache import RaggedRow
from sfi_core.hosts.transformers.own_layers import states
from sfi_kernels.step_descriptor import sent


@dataclass(slots=True)
class LastOutputs:
    """A watcher that keeps what each layer's attention gave in the last decoding pass, [B, H, G, T, E]."""

    layers: dict[int, torch.Tensor] = field(default_factory=dict)

    def see(self, layer: Any, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Keep a pass's outputs."""
        if not layer.batch_pass.prompts:
            self.layers[layer.index] = out_BHGTE

    def forget(self, request: int) -> None:
        """Do nothing: the next pass overwrites all."""

    def attend(self, layer: Any, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """Give a layer's first tokens what they got before."""
        return self.layers[layer.index][:, :, :, : query_BHGTD.shape[3]]


class BlockPass:
    """Runs the passes of a `Decoder`'s run, from the end of the prefill.

    Where requests bring different numbers of tokens, the model sees one row of all, [1, X]. Our layers tell
    the requests apart; layers with a sliding window or with states cannot, and run one request at a time.

    Rejected tokens leave a window by their place. A state forgets nothing by place: after a rejection it is what
    it was at the last verification, and reads the kept tokens again, in a pass whose attention gives what it gave
    when they were verified. That pass reads the weights and states, and no cache.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        layers = decoder.cache.layers
        self._windows = [layer for layer in layers if getattr(layer, "is_sliding", False)]
        self._stated, self._outputs = any(any(states(layer)) for layer in layers), LastOutputs()
        if self._stated:
            decoder.run.watchers = (*decoder.run.watchers, self._outputs)
        self._verified, self._request = self._marked(), -1

    def __call__(self, drafts: Drafts) -> torch.Tensor:
        """Run a pass; return the logits of all tokens of all blocks, [X, V]."""
        blocks = drafts.plan()
        brought = [() if block is None else block.tokens for block in blocks]
        logits_XV: torch.Tensor
        with self._decoder.replaying() as replays:
            drafts.begin()
            if replays:
                self._decoder.cache.see(max(drafts.run.batch_pass.start))
                logits_XV = self._decoder.replay([tokens or (PAD,) for tokens in brought])
            else:
                self._go_back(drafts.run, blocks[0])
                logits_XV = self._forward(drafts.run.batch_pass.start, brought)
        if len(logits_XV) == sum(map(len, brought)):
            return logits_XV
        W = len(logits_XV) // len(brought)  # with padding before a request's own
        kept = [row * W + place for row, tokens in enumerate(brought) for place in range(W - len(tokens), W)]
        return logits_XV.index_select(0, sent(torch.tensor(kept), logits_XV.device))

    def _forward(self, start: Sequence[int], brought: Sequence[tuple[int, ...]]) -> torch.Tensor:
        # the logits of all tokens, and of the pad token where requests that bring one go beside resting ones
        cache, device = self._decoder.cache, self._decoder.ids_BT.device
        alone = max(map(len, brought)) == 1
        cache.ragged = None
        if len(brought) > 1 and not alone:
            cache.ragged = RaggedRow.of([len(tokens) for tokens in brought], device)
        rows = [tokens or ((PAD,) if alone else ()) for tokens in brought]
        ids = [token for tokens in rows for token in tokens]
        positions = [first + place for first, tokens in zip(start, rows, strict=True) for place in range(len(tokens))]
        pair = sent(torch.tensor([ids, positions]), device)
        shape = (len(rows), 1) if alone else (1, len(ids))
        cache.see(max(start))
        logits: torch.Tensor = self._decoder.planned_pass(pair[0].view(shape), pair[1].view(shape))
        cache.ragged = None
        return logits.flatten(0, 1)

    def keep(self, blocks: Sequence[Block | None], given: Sequence[Sequence[int]]) -> None:
        """Remove the rejected tokens from windows and states; our own layers overwrite theirs."""
        if self._verified is None or blocks[0] is None or not blocks[0].reason:
            return
        brought, kept = len(blocks[0].tokens), len(given[0])
        if kept < brought and self._stated:
            self._read_again(blocks[0].tokens[:kept])
        elif kept < brought:
            new = [(one.keys[:, :, -brought:], one.values[:, :, -brought:]) for one in self._windows]
            self._decoder.cache.put_back(self._verified)
            for layer, (key, value) in zip(self._windows, new, strict=True):
                layer.update(key[:, :, :kept], value[:, :, :kept])
        self._verified = self._marked()

    def _read_again(self, tokens: Sequence[int]) -> None:
        decoder, run = self._decoder, self._decoder.run
        twin = dense_twin(run, len(tokens))
        twin.attend = self._outputs.attend
        decoder.cache.put_back(self._verified)
        (start,) = run.batch_pass.start
        decoder.cache.see(start)
        pair = sent(torch.tensor([list(tokens), [start + place for place in range(len(tokens))]]), run.device)
        decoder.planned_pass(pair[0][None], pair[1][None], twin)

    def _go_back(self, run: Run, block: Block | None) -> None:
        # to where the verified tokens end, before they are followed by the block again
        request = run.requests[0].request
        if request != self._request:
            self._verified, self._request = self._marked(), request
        if self._verified is not None and block is not None and block.reason:
            self._decoder.cache.put_back(self._verified)

    def _marked(self) -> list[dict[str, Any]] | None:
        held: list[dict[str, Any]] = self._decoder.cache.taken()
        return held if self._windows or self._stated else None

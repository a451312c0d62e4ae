"""The forward passes of a lossless run: a request brings one token, or several to verify."""

from collections.abc import Sequence
from typing import Any

import torch

from sfi_core.engine.lossless.drafts import Block, Drafts
from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.cache import RaggedRow
from sfi_kernels.step_descriptor import sent


class BlockPass:
    """Runs the passes of a `Decoder`'s run, from the end of the prefill.

    Where requests bring different numbers of tokens, the model sees one row of all, [1, X]. Our layers tell
    the requests apart; layers with a sliding window cannot, and run one request at a time. `pad_id` stands
    for a request that rests.
    """

    def __init__(self, decoder: Any, pad_id: int) -> None:
        self._decoder, self._pad_id = decoder, pad_id
        self._sliding = [layer for layer in decoder.cache.layers if layer.is_sliding]
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
                logits_XV = self._decoder.replay([tokens or (self._pad_id,) for tokens in brought])
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
        rows = [tokens or ((self._pad_id,) if alone else ()) for tokens in brought]
        ids = [token for tokens in rows for token in tokens]
        positions = [first + place for first, tokens in zip(start, rows, strict=True) for place in range(len(tokens))]
        pair = sent(torch.tensor([ids, positions]), device)
        shape = (len(rows), 1) if alone else (1, len(ids))
        cache.see(max(start))
        logits: torch.Tensor = self._decoder.planned_pass(pair[0].view(shape), pair[1].view(shape))
        cache.ragged = None
        return logits.flatten(0, 1)

    def keep(self, blocks: Sequence[Block | None], given: Sequence[Sequence[int]]) -> None:
        """Remove the rejected tokens from the sliding windows; our own layers overwrite theirs."""
        if not self._sliding or blocks[0] is None or not blocks[0].reason:
            return
        brought, kept = len(blocks[0].tokens), len(given[0])
        if kept < brought:
            new = [(one.keys[:, :, -brought:], one.values[:, :, -brought:]) for one in self._sliding]
            self._restore()
            for layer, (key, value) in zip(self._sliding, new, strict=True):
                layer.update(key[:, :, :kept], value[:, :, :kept])
        self._verified = self._marked()

    def _go_back(self, run: Run, block: Block | None) -> None:
        # to where the verified tokens end, before they are followed by the block again
        request = run.requests[0].request
        if request != self._request:
            self._verified, self._request = self._marked(), request
        if self._sliding and block is not None and block.reason:
            self._restore()

    def _marked(self) -> list[dict[str, Any]]:
        # a layer never writes into the tensors that it holds: it makes new ones
        return [dict(layer.__dict__) for layer in self._sliding]

    def _restore(self) -> None:
        for layer, values in zip(self._sliding, self._verified, strict=True):
            layer.__dict__.update(values)

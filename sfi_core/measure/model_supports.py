"""Top-k sets of a model's KV heads for the last queries of a text (SyncKV, B.1)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sfi_core.engine.prompt_queries import PromptLayer
from sfi_core.errors import InputError
from sfi_core.generation.generate import read_prompt
from sfi_core.generation.prompts import encode
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.state.kv_store import KVStore
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.top_k import top_k

QUERIES = 128  # last queries of a text
PIECE = 16  # queries computed at once


def cut_texts(tokenizer: Any, texts: Sequence[str], length: int, top: int) -> list[list[int]]:
    """Cut texts into pieces of `length` tokens; drop a text's shorter rest, keep a shorter text.

    Paper gap: B.1 takes the first 1,000 tokens of each article; a long file of ours makes several texts. Raise
    `InputError` if a piece has at most `top` tokens, which would give every head the same set.
    """
    pieces = []
    for row in encode(tokenizer, texts):
        whole = max(1, len(row) // length)
        pieces += [row[i * length : (i + 1) * length] for i in range(whole)]
    for number, piece in enumerate(pieces):
        if len(piece) <= top:
            raise InputError(f"texts must have more than {top} tokens, the top-k, got {len(piece)} in text {number}")
    return pieces


@torch.no_grad()
def text_supports(
    model: Any, ids: Sequence[int], top: int, engine: EngineOptions = DEFAULTS
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a text densely, and yield the positions that its last queries attend to most.

    Each query stands for a decoding step that writes the text. Paper gap: "within a local window" (B.1,
    step 2) is read as the last 128 queries, each of which sees every token before it.

    Yields:
        Each full-attention layer, with [N, H, K] int32: for each query and KV head the k positions of largest
        weight, ascending. A KV head's weight is the largest of its query heads' (B.1, GQA).

    Raises:
        InputError: The text is longer than the model's positions.
        UnsupportedModelError: SFI cannot act on the model.
        MemoryForecastError: The text would not fit.
    """
    queries = min(QUERIES, len(ids) - top)
    read = read_prompt(model, None, [ids], capacity=len(ids), window=queries, engine=engine)
    for layer, prompt in read.layers.items():
        yield layer, _layer_supports(read.store, layer, prompt, len(ids), top)


def _layer_supports(store: KVStore, layer: int, prompt: PromptLayer, length: int, top: int) -> torch.Tensor:
    supports = []
    query_BHGTD = prompt.query_BHGTD
    W = query_BHGTD.shape[3]
    for first in range(0, W, PIECE):
        last = min(first + PIECE, W)
        seen = length - (W - last)
        logits_1HGWT = window_logits.on(store.backend)(
            query_BHGTD[:, :, :, first:last].contiguous(), store.pages(layer).key_PHND, store.block_table_BP,
            torch.tensor([seen], dtype=torch.int32, device=query_BHGTD.device), scale=prompt.options["scale"],
            soft_cap=prompt.options["soft_cap"], longest=seen,
        )  # fmt: skip
        weight_WHT = pooled_weight(logits_1HGWT[0], prompt.options["sink_HG"])
        supports.append(top_k.on(store.backend)(weight_WHT, top))
    return torch.cat(supports)


def pooled_weight(logits_HGWT: torch.Tensor, sink_HG: torch.Tensor | None = None) -> torch.Tensor:
    """Pool the attention weights of a KV head's query heads by their maximum (SyncKV, B.1, GQA).

    Args:
        logits_HGWT: Logits of W queries, float32; -inf at masked positions.
        sink_HG: Learned sink logits, which take their share of the softmax; None without.

    Returns:
        Log weights, [W, H, T] float32; -inf at masked positions, which `top_k` never picks.
    """
    log_sum_HGW = logits_HGWT.logsumexp(-1)
    if sink_HG is not None:
        log_sum_HGW = torch.logaddexp(log_sum_HGW, sink_HG.float()[:, :, None])
    # the logarithm keeps the order of the weights, and small weights do not become 0
    return (logits_HGWT - log_sum_HGW[..., None]).amax(1).transpose(0, 1).contiguous()

"""What every layer of a run saw and read, to check the rules of papers with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sfi_core import SfiConfig, slow_fast
from sfi_core.engine.loop import left_pad
from sfi_core.hosts.transformers.decoder import Decoder
from tests.core.conftest import TINY
from tests.fakes import RecordingObserver

VOCAB, H, G, LAYERS = 96, 4, 2, (0, 1)


@cache
def four_heads():
    """Make a random model of 4 KV heads, so that clusters can be of different sizes."""
    torch.manual_seed(3)
    sizes = {**TINY, "hidden_size": 64, "num_attention_heads": H * G, "num_key_value_heads": H}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, initializer_range=0.3, **sizes)).eval()


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@dataclass(frozen=True)
class Seen:
    """A layer of one request at one step, when it has attended.

    Attributes:
        step: Decoding step; 0 is the prompt's last position.
        slow: Whether the step is slow.
        query_HGD: The query.
        key_HTD: Every cached key, the step's own included.
        value_HTE: Every cached value.
        out_HGE: What the layer's attention returned.
        packed: Positions in the packed segment, by KV head.
        logits_HGT: The query's scaled products with every key, float64.
    """

    step: int
    slow: bool
    query_HGD: torch.Tensor
    key_HTD: torch.Tensor
    value_HTE: torch.Tensor
    out_HGE: torch.Tensor
    packed: list[list[int]]
    logits_HGT: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        product = torch.einsum("hgd,htd->hgt", self.query_HGD.double(), self.key_HTD.double())
        object.__setattr__(self, "logits_HGT", product / self.query_HGD.shape[-1] ** 0.5)

    @property
    def tokens(self) -> int:
        return self.key_HTD.shape[1]

    def attention(self, head: int, read: Sequence[int]) -> torch.Tensor:
        """Attend with a KV head's queries to some positions only, [G, E]."""
        weight = self.logits_HGT[head][:, list(read)].softmax(-1)
        return weight @ self.value_HTE[head, list(read)].double()

    def assert_read(self, read: Sequence[Sequence[int]]) -> None:
        """Compare what the layer returned with attention to these positions, by KV head."""
        expected = torch.stack([self.attention(head, positions) for head, positions in enumerate(read)])
        torch.testing.assert_close(self.out_HGE.double(), expected, rtol=1e-4, atol=1e-4)


class Watch:
    """A watcher that keeps what every layer saw, by request and layer, in the order of the steps."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], list[Seen]] = {}

    def see(self, layer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        run = layer.run
        for row, request in enumerate(layer.batch_pass.passes):
            state = run.requests[row]
            if request.generates:
                whole = layer.index, row, 0, state.length
                packed = [] if layer.left_dense else run.segment(layer.index).position_BHS[row]
                seen = Seen(
                    state.step,
                    state.slow,
                    query_BHGTD[row, :, :, -1].clone(),
                    run.store.keys(*whole)[0].clone(),
                    run.store.values(*whole)[0].clone(),
                    out_BHGTE[row, :, :, -1].clone(),
                    [[j for j in head.tolist() if j >= 0] for head in packed],
                )
                self.seen.setdefault((state.request, layer.index), []).append(seen)

    def forget(self, request: int) -> None:
        """Keep all."""


@dataclass(frozen=True)
class Watched:
    """A run: what every layer saw, what the observer was told, and the report."""

    seen: dict[tuple[int, int], list[Seen]]
    observer: RecordingObserver
    report: Any


def watched(prompts: Sequence[Sequence[int]], config: SfiConfig, policy: str, new: int) -> Watched:
    """Decode greedily with the torch backend, and keep what every layer saw."""
    watch, observer = Watch(), RecordingObserver()
    with torch.inference_mode(), slow_fast(four_heads(), None, config, policy=policy, observers=[observer]) as session:
        pair = left_pad([list(prompt) for prompt in prompts], torch.device("cpu"))
        capacity = max(map(len, prompts)) + new
        decoder = Decoder(session=session, ids_BT=pair[0], mask_BT=pair[1], capacity=capacity, watchers=(watch,))
        token_B = decoder.prefill().argmax(-1).tolist()
        decoder.run.record(token_B)
        for _ in range(new - 1):
            token_B = decoder.step(token_B).argmax(-1).tolist()
            decoder.run.record(token_B)
        return Watched(watch.seen, observer, session.report)


def assert_reads_counted(run: Watched, request: int, read: dict[tuple[int, int], Any]) -> None:
    """Compare the run's counts with the positions that the rule says are read, by step and layer."""
    attended, context = 0.0, 0
    for event in run.observer.steps:
        if event.request == request and event.step > 0:
            heads = [len(positions) for layer in LAYERS for positions in read[event.step, layer]]
            mean = sum(heads) / len(heads)
            assert abs(event.attended_tokens - mean) < 1e-4, event.step
            attended, context = attended + mean, context + event.context_tokens
    assert abs(run.report.requests[request].read_ratio - attended / context) < 1e-6


def best_of(score: Sequence[float], candidates: Sequence[int], budget: int) -> list[int]:
    """Take the candidates of the highest scores, the lower position first."""
    return sorted(sorted(candidates, key=lambda j: (-score[j], j))[:budget])

"""Picking the next token; transformers' own logits processors do the work."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sfi_core.errors import ConfigError, NumericsError
from sfi_kernels.step_descriptor import sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are picked; names and meanings are those of transformers' generation config.

    Attributes:
        do_sample: Sample instead of taking the most likely token.
        temperature: Divides the logits. Positive.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this probability; 1 keeps all.
        min_p: Keep tokens at least this share as likely as the best; 0 keeps all.
        repetition_penalty: Above 1 makes repeated tokens less likely; 1 does nothing.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Reject values out of range."""
        for name, ok, rule in (
            ("temperature", self.temperature > 0, "positive"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive"),
        ):
            if not ok:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)}")

    def processors(self) -> LogitsProcessorList:
        """Build transformers' processors, in the order `model.generate` applies them."""
        chosen = LogitsProcessorList()
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.do_sample:
            if self.temperature != 1:
                chosen.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                chosen.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                chosen.append(TopPLogitsWarper(self.top_p))
            if self.min_p:
                chosen.append(MinPLogitsWarper(self.min_p))
        return chosen


class Sampler:
    """Turns a step's logits into tokens.

    Attributes:
        ids_BT: The tokens so far, padded prompts included; grown by every call.
        ahead: Called with the tokens while they are still on the device, and not yet waited for.
    """

    def __init__(self, sampling: Sampling, ids_BT: torch.Tensor) -> None:
        self.ids_BT = ids_BT
        self.ahead: Callable[[torch.Tensor], None] | None = None
        self._sampling = sampling
        self._processors = sampling.processors()
        self.step = 0

    def __call__(self, logits_BV: torch.Tensor, finished_B: list[bool], pad_id: int) -> list[int]:
        """Pick a token for every request; a finished one gets the padding token.

        Raises:
            NumericsError: A running request's logits hold NaN or +inf, or nothing finite.
        """
        logits_BV = logits_BV.float()
        scores_BV = self._processors(self.ids_BT, logits_BV)
        if self._sampling.do_sample:
            safe_BV = scores_BV.nan_to_num(0.0, 0.0, -torch.inf)
            token_B = torch.multinomial(safe_BV.softmax(-1).nan_to_num(1.0), 1)[:, 0]
        else:
            token_B = scores_BV.argmax(-1)
        finite_B = logits_BV.amax(-1).isfinite()
        # the one read of the device per step: the tokens, which have to be streamed, and the check with them
        picked = self._read(torch.stack([token_B, finite_B.long()]))
        broken = [row for row, ok in enumerate(picked[1]) if not ok and not finished_B[row]]
        if broken:
            raise NumericsError(
                f"logits must be finite, got NaN or infinity at step {self.step} in request {broken[0]}"
            )
        tokens = [
            pad_id if done else token for token, done in zip(picked[0], finished_B, strict=True)
        ]
        column = sent(torch.tensor(tokens)[:, None], self.ids_BT.device)
        self.ids_BT = torch.cat([self.ids_BT, column], 1)
        self.step += 1
        return tokens

    def _read(self, picked_2B: torch.Tensor) -> list[list[int]]:
        # what `ahead` asks of the device comes after the copy, so that the wait is not for it
        host, done = picked_2B, None
        if picked_2B.is_cuda:
            host = torch.empty(picked_2B.shape, dtype=picked_2B.dtype, pin_memory=True)
            host.copy_(picked_2B, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(picked_2B.device))
        if self.ahead is not None:
            self.ahead(picked_2B[0])
        if done is not None:
            done.synchronize()
        read: list[list[int]] = host.tolist()
        return read

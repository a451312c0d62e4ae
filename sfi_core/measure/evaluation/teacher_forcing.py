"""Decode given texts under a policy, and pass the logits of each step to a function."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sfi_core.engine.loop import Loop, left_pad
from sfi_core.engine.report import RunReport
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError, NumericsError
from sfi_core.generation.prompts import check_prompts
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.replays import records_steps
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.observers.observer import Observer
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, AuditConfig, EngineOptions, Sampling
from sfi_core.sizes.memory import check_fits

OnLogits = Callable[[int, torch.Tensor], None]


def teacher_force(
    model: Any, tokenizer: Any, texts: Sequence[Sequence[int]], prompt_tokens: int, on_logits: OnLogits,
    config: SfiConfig | None = None, *, policy: str = "sfi", engine: EngineOptions = DEFAULTS,
    shared: SharedPrompt | None = None, observers: Sequence[Observer] = (), audit: AuditConfig | None = None,
) -> RunReport:  # fmt: skip
    """Read the first tokens of texts of one length as prompts, then decode the others, all texts together.

    Step t predicts `text[prompt_tokens + t]` and reads the token before it, as in `generate`. Step 0 is the
    prompt's last position and dense under every policy. Stop tokens in a text do not end the run.

    `on_logits` is called with each step and its logits, `[B, V]` float32. `shared` is the cache of the
    prompts from `read_prompt`; None reads the prompts. The other arguments are those of `slow_fast`.

    Raise `ConfigError` for texts that differ in length, a prompt that leaves no token and a cache of other prompts,
    `InputError` for a text longer than the model's positions, `NumericsError` for NaN or infinity, and as `slow_fast`.
    """
    sizes = sorted({len(ids) for ids in texts})
    if len(sizes) != 1:
        raise ConfigError(f"texts must have one length, got {sizes}")
    if not 0 < prompt_tokens < sizes[0]:
        raise ConfigError(f"prompt_tokens must be positive and below the text's {sizes[0]}, got {prompt_tokens}")
    capacity = sizes[0] - 1  # the last token is only predicted
    check_prompts(model, [ids[:capacity] for ids in texts], 0)
    ids_BT, mask_BT = left_pad([ids[:prompt_tokens] for ids in texts], model.device)
    if shared is not None:
        shared.check(ids_BT, mask_BT, capacity)
        capacity = shared.capacity
    with (
        torch.no_grad(),
        session_on(model, tokenizer, config, policy=policy, observers=observers, audit=audit, engine=engine) as session,
    ):
        expected = session.forecast(
            len(texts), prompt_tokens, capacity, engine.prefill_chunk, graphs=records_steps(session)
        )
        check_fits(expected, model.device, two_tier=session.tiers is not None)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=capacity, chunk=engine.prefill_chunk,
            shared=shared,
        )  # fmt: skip
        prompts, given = ids_BT.tolist(), [ids[prompt_tokens:] for ids in texts]
        limits = [sizes[0] - prompt_tokens] * len(texts)
        for _ in Loop(decoder, prompts, limits, TextTokens(ids_BT, given, on_logits)).decode():
            pass
        report = session.report
    assert report is not None, "a run has begun"
    return report


class TextTokens(Sampler):
    """Picks the texts' own tokens, and passes on the logits of each step."""

    def __init__(self, ids_BT: torch.Tensor, texts: Sequence[Sequence[int]], on_logits: OnLogits) -> None:
        super().__init__(Sampling(), ids_BT)
        self._texts, self._on_logits = texts, on_logits

    def __call__(self, logits_BV: torch.Tensor, finished_B: list[bool]) -> list[int]:
        """Return the next token of every text."""
        step, logits_BV = self.rows[0].step, logits_BV.float()
        if not bool(logits_BV.amax(-1).isfinite().all()):
            raise NumericsError(f"logits must be finite, got NaN or infinity at step {step}")
        self._on_logits(step, logits_BV)
        self.advance([[text[step]] for text in self._texts])
        return [text[step] for text in self._texts]

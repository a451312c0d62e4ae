"""`sfi_core.generate(...)`: our own loop around a transformers model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfi_core.audit_config import AuditConfig
from sfi_core.config import SfiConfig
from sfi_core.decode import decode
from sfi_core.engine_options import DEFAULTS, EngineOptions
from sfi_core.errors import ConfigError, NumericsError, SfiError
from sfi_core.hosted import HostedModel
from sfi_core.maintenance import main_stream
from sfi_core.memory import Forecast, check_fits, peak_bytes, reset_peak
from sfi_core.observer import Observer
from sfi_core.prompt_state import SharedPrompt
from sfi_core.prompts import check_lengths, encode, left_pad, model_stop_ids, padding_id
from sfi_core.report import RunReport
from sfi_core.sampling import Sampler, Sampling
from sfi_core.session import Session, slow_fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run gave.

    Attributes:
        report: Counts, reasons, ratios, times and paths; token ids by request.
        texts: The completions; empty strings without a tokenizer.
        trigger_token_ids: T_trig as used.
        forecast: What the run was expected to need.
        peak_memory_bytes: Peak memory of the process (CPU) or of the allocator (GPU) during the run.
        error: Why the run stopped early; None when it did not.
        interrupted: Whether Ctrl-C stopped it.
    """

    report: RunReport
    texts: list[str]
    trigger_token_ids: tuple[int, ...]
    forecast: Forecast
    peak_memory_bytes: int
    error: SfiError | None = None
    interrupted: bool = False


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: SfiConfig | None = None,
    *,
    policy: str = "sfi",
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    prefill_chunk: int = 0,
    observers: Sequence[Observer] = (),
    backend: str = "auto",
    page_size: int | None = None,
    audit: AuditConfig | None = None,
    shared: SharedPrompt | None = None,
    engine: EngineOptions | None = None,
    on_token: Callable[[list[int]], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Result:
    """Complete prompts with slow-fast decoding.

    Args:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer; may be None when prompts are token ids and triggers are token ids.
        prompts: Texts or token ids; they may differ in length.
        config: The settings; None is the `default` preset.
        policy: A name from `sfi_core.policies.POLICIES`.
        max_new_tokens: Upper bound on the generated tokens.
        sampling: How tokens are picked; None is greedy.
        seed: Seeds torch before the run.
        stop_token_ids: Tokens that end a request; None takes the model's.
        prefill_chunk: Prompt tokens of one forward pass; 0 for all at once.
        observers: Told of every step, refresh and span.
        backend: "auto", "torch" or "triton".
        page_size: Tokens of a cache page; None is one page a request under torch, 64 tokens under triton.
        audit: What to compare with dense attention, for the observers; the tokens stay the same.
        shared: The prompts as `read_prompt` read them, to begin with; they are not read again.
        engine: How steps are run; None is `EngineOptions()`.
        on_token: Called with the tokens of each step, a finished request's being padding.
        on_prefill: Called with the prompt tokens read so far and in all.

    Returns:
        The result; a Ctrl-C or broken logits end it early with what was generated, and say so.

    Raises:
        ConfigError: A setting is out of range, or `shared` is of other prompts or too small.
        InputError: A prompt is empty or longer than the model's positions.
        UnsupportedModelError: The architecture cannot run under SFI.
        MemoryForecastError: The run would not fit.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be positive, got {max_new_tokens}")
    if prefill_chunk < 0:
        raise ConfigError(f"prefill_chunk must be at least 0, got {prefill_chunk}")
    config = config or SfiConfig()
    rows = encode(tokenizer, prompts)
    check_lengths(model, rows, max_new_tokens)
    stop = frozenset(model_stop_ids(model) if stop_token_ids is None else stop_token_ids)
    pad_id = padding_id(model, tokenizer)
    ids_BT, mask_BT = left_pad(rows, model.device)
    capacity = ids_BT.shape[1] + max_new_tokens
    if shared is not None:
        shared.check(ids_BT, mask_BT, capacity)
        capacity = shared.capacity
    reset_peak(model.device)
    with (
        torch.no_grad(),
        main_stream(model.device, overlap=(engine or DEFAULTS).overlap),
        slow_fast(
            model,
            tokenizer,
            config,
            policy=policy,
            observers=observers,
            backend=backend,
            page_size=page_size,
            audit=audit,
            engine=engine,
        ) as session,
    ):
        expected = session.forecast(len(rows), ids_BT.shape[1], capacity, prefill_chunk)
        check_fits(expected, model.device)
        if seed is not None:
            torch.manual_seed(seed)
        hosted = HostedModel(model, session, ids_BT, mask_BT, capacity, stop, prefill_chunk)
        hosted.shared = shared
        hosted.on_prefill = on_prefill or hosted.on_prefill
        sampler = Sampler(sampling or Sampling(), ids_BT)
        sampler.ahead = hosted.ahead

        def sample(logits_BV: torch.Tensor) -> list[int]:
            finished = [state.finished for state in session.run.requests]
            with session.observer.span("sample"):
                return sampler(logits_BV, finished, pad_id)

        error: SfiError | None = None
        interrupted = False
        try:
            for token_B in decode(hosted, sample, max_new_tokens):
                if on_token:
                    on_token(token_B)
        except NumericsError as problem:
            error = problem
        except KeyboardInterrupt:
            interrupted = True
        return _result(session, tokenizer, expected, peak_bytes(model.device), error, interrupted)


def _result(
    session: Session,
    tokenizer: Any,
    expected: Forecast,
    peak: int,
    error: SfiError | None,
    interrupted: bool,
) -> Result:
    report = session.report
    if report is None:
        raise KeyboardInterrupt
    if error or interrupted:
        reason = "interrupted" if interrupted else "error"
        requests = [
            r if r.finish_reason == "stop" else replace(r, finish_reason=reason)
            for r in report.requests
        ]
        report = replace(report, requests=requests)
    texts = [
        tokenizer.decode(r.token_ids, skip_special_tokens=True) if tokenizer else ""
        for r in report.requests
    ]
    return Result(
        report=report,
        texts=texts,
        trigger_token_ids=session.trigger_token_ids,
        forecast=expected,
        peak_memory_bytes=peak,
        error=error,
        interrupted=interrupted,
    )

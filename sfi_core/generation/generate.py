"""`generate(...)` completes prompts with slow-fast decoding; `read_prompt(...)` reads them once, for many runs."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfi_core.engine.batch_pass import PromptQueries
from sfi_core.engine.loop import Loop, NewTokens, left_pad
from sfi_core.engine.maintenance import main_stream
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.report import RequestReport, RunReport
from sfi_core.engine.run import Run
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError, NumericsError, SfiError
from sfi_core.generation.batch_plan import BatchPlan, plan_batch
from sfi_core.generation.byte_limit import ByteLimit
from sfi_core.generation.prompts import Prompts, check_prompts, encode, text_of
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.generate_call import stop_tokens
from sfi_core.hosts.transformers.known_prompt import common_tokens
from sfi_core.hosts.transformers.own_layers import held
from sfi_core.hosts.transformers.replays import records_steps
from sfi_core.hosts.transformers.session import Session
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.machine.memory import peak_bytes, reset_peak
from sfi_core.observers.observer import Observer
from sfi_core.settings.config import SfiConfig, checked_config
from sfi_core.settings.engine import DEFAULTS, AuditConfig, EngineOptions, Sampling
from sfi_core.sizes.memory import Forecast, check_fits
from sfi_core.state.request import RequestState
from sfi_kernels.compiled import clock


@torch.no_grad()
def read_prompt(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    *,
    capacity: int,
    window: int | None = None,
    engine: EngineOptions = DEFAULTS,
    page_size: int | None = None,
) -> SharedPrompt:
    """Read prompts densely, for `generate(..., shared=...)` to decode from under any policy.

    Arguments and errors are those of `generate`; all keys and values stay on the device, and each run copies them. A
    request of a run may reach `capacity` tokens, its prompt included. `window` of each prompt's last queries are kept;
    None keeps all.
    """
    rows = encode(tokenizer, prompts)
    check_prompts(model, rows, capacity - max(map(len, rows), default=0))
    ids_BT, mask_BT = left_pad(rows, model.device)
    B, T = ids_BT.shape
    keeper = PromptQueries(window)
    config = SfiConfig(trigger_policy="never")
    plain, chunk = EngineOptions(backend=engine.backend), engine.prefill_chunk
    with session_on(model, tokenizer, config, policy="full-kv", engine=plain, page_size=page_size) as session:
        check_fits(session.forecast(B, T, capacity, chunk), model.device)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=capacity, chunk=chunk, watchers=(keeper,)
        )
        began = clock()
        logits_BV = decoder.prefill()
        seconds = clock() - began
        return SharedPrompt(
            count=mask_BT.sum(1).tolist(), capacity=capacity, store=session.run.store, layers=keeper.layers,
            others=held(decoder.cache.layers), logits_BV=logits_BV, ids_BT=ids_BT, window=window,
            seconds=seconds,
        )  # fmt: skip


BEGINNING = 512  # tokens that several prompts must share to have them read once


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run.

    `report` has token ids and statistics of each request, in the order of the prompts, `texts` the completions, empty
    without a tokenizer. `slots` requests were decoded together. `forecast` is the memory that the run was expected to
    need, `peak_memory_bytes` the peak of the process (CPU) or of the allocator (GPU), `byte_limit` the bytes read
    compared with full attention, None under it. `error` stopped the run early; Ctrl-C did if `interrupted`. With `seed`
    another run draws the same tokens; None for greedy decoding.
    """

    report: RunReport
    texts: list[str]
    trigger_token_ids: tuple[int, ...]
    forecast: Forecast
    slots: int
    byte_limit: ByteLimit | None
    peak_memory_bytes: int
    error: SfiError | None = None
    interrupted: bool = False
    seed: int | Sequence[int] | None = None


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    config: SfiConfig | None = None,
    *,
    policy: str | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    max_batch: int | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    page_size: int | None = None,
    audit: AuditConfig | None = None,
    shared: SharedPrompt | None = None,
    cache: PromptCache | None = None,
    engine: EngineOptions | None = None,
    on_plan: Callable[[BatchPlan], None] | None = None,
    on_token: Callable[[list[int | None]], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    on_end: Callable[[int, RequestReport, str], None] | None = None,
) -> Result:
    """Complete prompts with slow-fast decoding; after a Ctrl-C or non-finite logits with the tokens so far.

    If memory or `max_batch` does not allow all prompts at once, the rest waits: when a request ends, the next
    prompt is read in its place.

    Args:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer; may be None when prompts are token ids and triggers are token ids.
        prompts: Texts or token ids, which may differ in length; one text, or one list of token ids, is one prompt.
        config: The settings; None is the `default` preset.
        policy: A name from `sfi_core.policies.POLICIES`, or of another package's policy; None is `default_policy`.
        max_new_tokens: The most generated tokens, one number for all prompts or one for each.
        max_batch: The most requests decoded together; None for as many as fit into memory.
        sampling: How tokens are picked, for all prompts or for each; None is greedy.
        seed: Seed of the sampling: a prompt's tokens depend on it and the prompt's index, not on the rest of the batch.
            With a seed for each prompt they depend on it alone. None draws one from torch.
        stop_token_ids: Tokens that end a request; None takes the model's.
        observers: Receive the run's events and spans.
        page_size: Tokens of a cache page; None is one page per request under torch, but 64 tokens under triton and
            where requests share pages.
        audit: What to compare with dense attention, for the observers; the tokens stay the same.
        shared: The same prompts, already read by `read_prompt`.
        cache: A prompt that was read: these prompts go on behind what they share with it. A run of one prompt leaves
            that prompt there.
        engine: How prompts are read and steps are run; None is `EngineOptions()`.
        on_plan: Called before the run with the batch and its memory forecast.
        on_token: Called with the new tokens of each step, by prompt: None for a prompt without one, which has ended,
            waits or, in a lossless run, drafts.
        on_prefill: Called while the first prompts are read, with their tokens read so far and in all.
        on_end: Called when a prompt's completion has ended, with the prompt's index, its report and the text.

    Raises:
        ConfigError: A setting is out of range, `shared` is of other prompts or of less capacity, or `cache` of another
            model.
        InputError: A prompt is empty or longer than the model's positions.
        UnsupportedModelError: The architecture cannot run under SFI.
        MemoryForecastError: The run would not fit into memory.
    """
    config, sampling = checked_config(config), sampling or Sampling()
    engine = engine or DEFAULTS
    rows = encode(tokenizer, prompts)
    _check_one_each(len(rows), max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    limits = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if min(limits) < 1:
        raise ConfigError(f"max_new_tokens must be positive, got {min(limits)}")
    check_prompts(model, rows, limits)
    stop = frozenset(stop_tokens(model.generation_config.eos_token_id if stop_token_ids is None else stop_token_ids))
    if shared is not None:
        if cache is not None:
            raise ConfigError("cache must be None with shared, got both")
        longest = max(len(row) + new for row, new in zip(rows, limits, strict=True))
        shared.check(*left_pad(rows, model.device), longest)
    reset_peak(model.device)
    cache, seconds = _beginning(model, rows, cache, engine, page_size, shared, on_prefill)
    how: dict[str, Any] = {"policy": policy, "observers": observers, "page_size": page_size, "audit": audit}
    with (
        torch.inference_mode(),
        main_stream(model.device, overlap=engine.overlap),
        session_on(model, tokenizer, config, engine=engine, **how) as session,
    ):
        session.ranks.check_same(
            {
                "prompts": rows, "config": config, "policy": policy, "max_new_tokens": limits,
                "sampling": sampling, "seed": seed, "stop_token_ids": sorted(stop),
                "max_batch": max_batch, "backend": session.backend,
                "page_size": page_size, "audit": audit, "engine": engine,
            }
        )  # fmt: skip
        common = 0 if cache is None else common_tokens(cache, session, rows)
        beginning = common if common >= BEGINNING else 0
        plan = plan_batch(
            session, rows, limits, max_batch=session.together(max_batch), prefill_chunk=engine.prefill_chunk,
            shared=shared, graphs=records_steps(session), beginning=beginning,
        )  # fmt: skip
        if on_plan is not None:
            on_plan(plan)
        ids_BT, mask_BT = left_pad(rows[: plan.slots], model.device)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=plan.capacity, stop_ids=stop,
            chunk=engine.prefill_chunk, requests=len(rows), generated=max(limits), shared=shared,
            on_prefill=on_prefill, known=cache, beginning=beginning,
        )  # fmt: skip
        drawn = any(each.do_sample for each in ([sampling] if isinstance(sampling, Sampling) else sampling))
        if seed is None:
            seed = int(torch.randint(2**62, ())) if drawn else 0
        sampler = Sampler(sampling, ids_BT, session.ranks, seed=seed, ahead=decoder.replays.ahead)
        loop = Loop(decoder, rows, limits, sampler)
        error: SfiError | None = None
        interrupted = False
        try:
            with closing(loop.decode_lossless() if engine.lossless else loop.decode()) as passes:
                for given in passes:
                    _tell(given, session.run, len(rows), tokenizer, on_token, on_end)
        except NumericsError as problem:
            error = problem
        except KeyboardInterrupt:
            interrupted = True
        report = _report(session, loop, error, interrupted=interrupted)
        report = replace(report, prefill_seconds=report.prefill_seconds + seconds)
        texts = [text_of(tokenizer, request.token_ids) if tokenizer else "" for request in report.requests]
        return Result(
            report=report, texts=texts, trigger_token_ids=session.trigger_token_ids, forecast=plan.forecast,
            slots=plan.slots, byte_limit=ByteLimit.of(session, report, plan.slots),
            peak_memory_bytes=peak_bytes(model.device), error=error, interrupted=interrupted,
            seed=seed if drawn else None,
        )  # fmt: skip


def _beginning(
    model: Any,
    rows: list[list[int]],
    cache: PromptCache | None,
    engine: EngineOptions,
    page_size: int | None,
    shared: SharedPrompt | None,
    on_prefill: Callable[[int, int], None] | None,
) -> tuple[PromptCache | None, float]:
    # what several prompts begin with is read once, before their run; returned with the seconds that it took
    known, first = cache or PromptCache(), PromptCache(rows[0])
    length = min(map(first.agreed, rows))
    if len(rows) == 1 or shared is not None or length < max(BEGINNING, known.agreed(rows[0]) + BEGINNING):
        return cache, 0.0
    plain = replace(engine, lossless=False, graphs=None, kv_device_budget=None)
    config, began = SfiConfig(trigger_policy="never"), clock()
    ids_1T, mask_1T = left_pad([rows[0][:length]], model.device)
    with (
        torch.inference_mode(),
        session_on(model, None, config, policy="full-kv", engine=plain, page_size=page_size) as session,
    ):
        padded = len(set(map(len, rows))) > 1 and any(shape.hosted for shape in session.shapes())
        if session.ranks.size > 1 or padded:  # `PromptCache.column` serves no padded windows and states
            return cache, 0.0
        check_fits(session.forecast(1, length, length, engine.prefill_chunk), model.device)
        beginning = replace(known, moves=True)
        Decoder(
            session=session, ids_BT=ids_1T, mask_BT=mask_1T, capacity=length, chunk=engine.prefill_chunk, requests=1,
            known=beginning, on_prefill=on_prefill,
        ).prefill()  # fmt: skip
    return beginning, clock() - began


def _check_one_each(prompts: int, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, Sequence) and len(value) != prompts:
            raise ConfigError(f"{name} must be one for all or {prompts}, one a prompt, got {len(value)}")


def _tell(
    given: NewTokens, run: Run, prompts: int, tokenizer: Any, on_token: Callable[[list[int | None]], None] | None,
    on_end: Callable[[int, RequestReport, str], None] | None,
) -> None:  # fmt: skip
    for place in range(max(map(len, given.values()), default=0)):
        new = {request: tokens[place] for request, tokens in given.items() if len(tokens) > place}
        if on_token is not None:
            on_token([new.get(request) for request in range(prompts)])
    for state in run.states:
        if on_end is not None and state.finished and state.request in given:
            report = RequestReport.of(state, run.stop_ids, evicts=run.policy.evicts)
            on_end(state.request, report, text_of(tokenizer, report.token_ids) if tokenizer else "")


def _report(session: Session, loop: Loop, error: SfiError | None, *, interrupted: bool) -> RunReport:
    # after an early end the report also has requests that had not begun, and other finish reasons
    if session.report is None:
        raise KeyboardInterrupt
    session.run.left += [
        RequestState(request=request, prompt_tokens=len(loop.prompts[request])) for request in loop.waiting
    ]
    report = session.report
    if not (error or interrupted):
        return report
    requests = []
    for request, state in zip(report.requests, session.run.states, strict=True):
        reason = "interrupted" if interrupted or state.request in loop.waiting else "error"
        requests.append(request if state.finished else replace(request, finish_reason=reason))
    return replace(report, requests=requests)

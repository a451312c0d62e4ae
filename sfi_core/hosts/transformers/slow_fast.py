"""`slow_fast(...)`: run a transformers model with Slow-Fast Inference, under any loop."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from sfi_core.engine.attend import check_backend
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.errors import BackendError, ConfigError
from sfi_core.hosts.transformers.attention import routed
from sfi_core.hosts.transformers.cache import CACHE_NAME, SfiCache
from sfi_core.hosts.transformers.checks import prompt_tokens, refuse_modes
from sfi_core.hosts.transformers.fusion import fused, wants_fusion
from sfi_core.hosts.transformers.generate_call import (
    decode_losslessly,
    forward_with,
    generate_with,
    going_on,
    next_step,
)
from sfi_core.hosts.transformers.predictions import predicting
from sfi_core.hosts.transformers.product_layers import own_products
from sfi_core.hosts.transformers.session import Session
from sfi_core.hosts.transformers.stores import check_lossless
from sfi_core.models.linear import quick_linears
from sfi_core.models.rotation import check_rotation
from sfi_core.observers.observer import Observer
from sfi_core.settings.config import SfiConfig, checked_config
from sfi_core.settings.engine import DEFAULTS, PAGE_SIZE, AuditConfig, EngineOptions
from sfi_core.settings.policy_names import default_policy
from sfi_kernels.attention_tile import check_limits
from sfi_kernels.launch import KernelLimitError

logger = logging.getLogger(__name__)
PATIENCE = 10  # seconds to wait for another thread without a word


@contextmanager
def slow_fast(
    model: Any,
    tokenizer: Any = None,
    config: SfiConfig | None = None,
    *,
    policy: str | None = None,
    observers: Sequence[Observer] = (),
    page_size: int | None = None,
    audit: AuditConfig | None = None,
    engine: EngineOptions | None = None,
) -> Iterator[Session]:
    """Run a transformers model with SFI: inside, plain `model.generate(...)` is slow-fast, in every thread.

    Calls from several threads run one after the other, and so do several `slow_fast` of one model.

    Args:
        model: A decoder-only model of transformers, in evaluation mode.
        tokenizer: Turns trigger strings into token ids; not needed with `trigger_token_ids`.
        config: The settings; None is the `default` preset.
        policy: A name from `sfi_core.policies.POLICIES`; None is `default_policy`.
        observers: Receive every step, refresh and span.
        page_size: Tokens of a cache page; None is one page a request under torch, 64 tokens under triton.
        audit: What to compare with dense attention, for the observers; the tokens stay the same.
        engine: How steps are run; None is `EngineOptions()`. With `lossless`, greedy decoding gives what
            `model.generate` gives without sfi, and sampling what `sfi_core.generate` gives under full-kv with the same
            processors and seed, a number from torch's generator. A loop of one's own around `model(...)` stays sparse.

    Yields:
        The session; its `report` describes the last run. The model is restored on exit.

    Raises:
        ConfigError: A setting is unknown or out of range, or use in one thread is nested.
        BackendError: The backend cannot run the model here.
        UnsupportedModelError: The architecture cannot run under SFI.
    """
    with session_on(
        model, tokenizer, config, policy=policy, observers=observers, page_size=page_size, audit=audit, engine=engine
    ) as session:
        replaced = {name: model.__dict__.get(name) for name in ("generate", "forward")}
        model.generate = generate_with(session, model.generate)
        model.forward, session.next_step = forward_with(model.forward), next_step
        try:
            yield session
        finally:
            with session.lock:  # a call in another thread ends first
                for name, before in replaced.items():
                    model.__dict__.pop(name)
                    if before is not None:
                        setattr(model, name, before)


def custom_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    trigger_tokenizer: Any = None,
    policy: str | None = None,
    budget: int | None = None,
    config: SfiConfig | None = None,
    engine: EngineOptions | None = None,
    **prepared: Any,
) -> Any:
    """Decode with SFI in a plain call of `model.generate`, which gives what stands before the star.

    `config`, `policy` and `engine` are those of `slow_fast`; `budget` overrides the config's. transformers hands on
    neither `tokenizer` nor `streamer`: `trigger_tokenizer` turns trigger strings into token ids. A cache of sfi in
    `prepared`, the model's other arguments, goes on as in `slow_fast`.

    Raises what `slow_fast` raises, and `ConfigError` for a generation mode that SFI does not run.
    """
    config = checked_config(config)
    config = config if budget is None else config.replace(budget=budget)
    given = prepared.pop(CACHE_NAME, None)
    decoding = logits_processor, stopping_criteria, generation_config
    with slow_fast(model, trigger_tokenizer, config, policy=policy, engine=engine) as session:
        lossless = session.engine.lossless
        refuse_modes(generation_config, {}, lossless=lossless)
        if lossless:
            return decode_losslessly(session, None, PromptCache(), model, input_ids, *decoding, **prepared)
        B, T = input_ids.shape
        cache = given if isinstance(given, SfiCache) else session.cache(generation_config.max_length)
        count = prompt_tokens(prepared.get("attention_mask"), B, T, 0, final=True)
        prepared[CACHE_NAME] = cache
        decode = partial(model._sample, input_ids, *decoding, **prepared)  # noqa: SLF001
        return going_on(session, cache, input_ids, count, generation_config, decode)


@contextmanager
def session_on(
    model: Any,
    tokenizer: Any,
    config: SfiConfig | None,
    *,
    policy: str | None = None,
    observers: Sequence[Observer] = (),
    page_size: int | None = None,
    audit: AuditConfig | None = None,
    engine: EngineOptions | None = None,
) -> Iterator[Session]:
    """Put a model under a session for sfi's own loop; `model.generate` and other threads' calls stay as without sfi."""
    engine = engine or DEFAULTS
    check_backend(engine.backend, model.device)
    policy = policy or default_policy(lossless=engine.lossless)
    with _turn(model), ExitStack() as stack:
        session = Session(model, tokenizer, checked_config(config), policy, observers, page_size, audit, engine)
        stack.enter_context(routed(model))
        for hook in (
            model.register_forward_pre_hook(session.before_forward, with_kwargs=True),
            model.register_forward_hook(session.after_forward),
        ):
            stack.callback(hook.remove)
        stack.callback(session.close)
        if session.engine.lossless:
            check_lossless(session.policy, policy, engine, audited=audit is not None)
            check_rotation(model.config)
            session.state_checks.passes("a lossless run")
        stack.enter_context(session.ranks.guarded())
        stack.enter_context(quick_linears(model))
        session.backend = _resolved(engine.backend, session, page_size)
        check_backend(session.backend, model.device, engine)
        session.observe()
        if wants_fusion(engine.products or engine.fused, session.backend, model.device):
            session.fusion = stack.enter_context(fused(model))
        if engine.products:
            stack.enter_context(own_products(session.fusion))
        if session.policy.predicts:
            stack.enter_context(predicting(session))
        yield session


_turns: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_under_sfi: WeakSet[Any] = WeakSet()


@contextmanager
def _turn(model: Any) -> Iterator[None]:
    # a model has one session at a time: that of another thread waits
    lock = _turns.setdefault(model, RLock())
    if not lock.acquire(timeout=PATIENCE):
        logger.warning("another thread has this model under sfi; waiting until it is done")
        lock.acquire()
    try:
        if model in _under_sfi:
            raise ConfigError("slow_fast must not be nested on one model, got a second one")
        _under_sfi.add(model)
        try:
            yield
        finally:
            _under_sfi.discard(model)
    finally:
        lock.release()


def _resolved(backend: str, session: Session, page_size: int | None) -> str:
    # the backend that runs the model: "auto" takes triton on a CUDA device whose kernels can
    model = session.model
    if backend == "torch" or (backend == "auto" and model.device.type != "cuda"):
        return "torch"
    why, devices = "", sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        why = f"the triton backend needs the model on one device, got {', '.join(devices)}; use the torch backend"
    try:
        for shape in session.shapes():
            if shape.window != 0:
                check_limits(shape.key_width, shape.value_width, page_size or PAGE_SIZE, model.dtype, model.device)
    except KernelLimitError as error:
        why = why or str(error)
    if why and backend != "auto":
        raise BackendError(why)
    return "torch" if why else "triton"

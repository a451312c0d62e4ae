"""`slow_fast(...)`: run a transformers model with Slow-Fast Inference, whoever drives it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sfi_core.engine.backends.registry import check_backend
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.attention import install, uninstall
from sfi_core.hosts.transformers.backend import resolve_backend
from sfi_core.hosts.transformers.checks import check_cache, refuse_modes
from sfi_core.hosts.transformers.fusion.fuse import fused, wants_fusion
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.forecast import check_fits
from sfi_core.models.linear import wide_linears
from sfi_core.observers.observer import Observer
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions


@contextmanager
def slow_fast(
    model: Any,
    tokenizer: Any = None,
    config: SfiConfig | None = None,
    *,
    policy: str = "sfi",
    observers: Sequence[Observer] = (),
    backend: str = "auto",
    page_size: int | None = None,
    audit: AuditConfig | None = None,
    engine: EngineOptions | None = None,
) -> Iterator[Session]:
    """Run a transformers model with SFI: inside, plain `model.generate(...)` is slow-fast.

    Args:
        model: A decoder-only model of transformers, in evaluation mode.
        tokenizer: Turns trigger strings into token ids; not needed with `trigger_token_ids`.
        config: The settings; None is the `default` preset.
        policy: A name from `sfi_core.policies.POLICIES`.
        observers: Told of every step, refresh and span.
        backend: "torch", "triton", or "auto", which takes triton on a CUDA device.
        page_size: Tokens of a cache page; None is one page a request under torch, 64 tokens under triton.
        audit: What to compare with dense attention, for the observers; the tokens stay the same.
        engine: How steps are run; None is `EngineOptions()`.

    Yields:
        The session; its `report` tells what the last run did. The model is restored on exit.

    Raises:
        ConfigError: Unknown policy or backend, trigger strings without a tokenizer, or a nested use.
        BackendError: The backend cannot run the model here.
        UnsupportedModelError: The architecture cannot run under SFI.
    """
    check_backend(backend, model.device)
    session = Session(
        model,
        tokenizer,
        config or SfiConfig(),
        policy,
        observers,
        page_size,
        audit,
        engine or DEFAULTS,
    )
    own = model.__dict__.get("generate")
    if own is not None and getattr(own, "sfi", False):
        raise ConfigError("slow_fast must not be nested on one model, got a second one")
    previous = install(model, session.seam)
    hooks = [
        model.register_forward_pre_hook(session.before_forward, with_kwargs=True),
        model.register_forward_hook(session.after_forward),
    ]
    wrapped = _wrapped(session, model.generate)
    wrapped.sfi = True  # type: ignore[attr-defined]
    model.generate = wrapped
    try:
        with session.ranks.guarded(), wide_linears(model), ExitStack() as stack:
            session.backend = resolve_backend(backend, model, session.shapes, page_size)
            session.observe()
            if wants_fusion(session.engine.fused, session.backend, model.device):
                session.fusion = stack.enter_context(fused(model))
            yield session
    finally:
        session.close()
        for hook in hooks:
            hook.remove()
        model.__dict__.pop("generate")
        if own is not None:
            model.generate = own
        uninstall(model, previous)


def _wrapped(session: Session, generate: Callable[..., Any]) -> Callable[..., Any]:
    # `model.generate` with our cache; everything else stays as it is

    def generate_with_sfi(
        inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        own = session.model.generation_config
        settings = copy.deepcopy(generation_config or own)
        settings.update(**own.to_dict(), defaults_only=True)  # as transformers does
        settings.update(**{k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)})
        refuse_modes(settings, kwargs)
        prompt = (
            inputs if inputs is not None else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        )
        length = 0 if prompt is None else prompt.shape[1]
        capacity = (
            length + settings.max_new_tokens if settings.max_new_tokens else settings.max_length
        )
        eos = settings.eos_token_id
        stop = () if eos is None else (eos,) if isinstance(eos, int) else eos
        cache = kwargs.get("past_key_values")
        check_cache(cache, fresh=True)
        if cache is None:
            cache = session.cache(capacity)
            if prompt is not None and capacity:
                batch = prompt.shape[0] * (settings.num_return_sequences or 1)
                chunk = settings.prefill_chunk_size or 0
                expected = session.forecast(batch, length, capacity, chunk)
                with session.ranks.agreed():
                    check_fits(expected, session.model.device, two_tier=session.tiers is not None)
        if session.ranks.size > 1:
            ids = None if prompt is None else prompt.tolist()
            session.ranks.check_same(
                {"prompts": ids, "config": session.config, "settings": settings}
            )
            session.ranks.share_seed(session.model.device)
        cache.prompt_length, cache.stop_ids = length or None, frozenset(stop)
        kwargs["past_key_values"] = cache
        output = generate(inputs, generation_config=generation_config, **kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        session.run.record(session.ranks.same_tokens(sequences[:, -1]))
        return output

    return generate_with_sfi

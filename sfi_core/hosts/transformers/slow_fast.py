"""`slow_fast(...)`: run a transformers model with Slow-Fast Inference, under any loop."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sfi_core.engine.backends.registry import check_backend, check_shapes
from sfi_core.errors import BackendError, ConfigError
from sfi_core.hosts.transformers.attention import install, uninstall
from sfi_core.hosts.transformers.fusion.fuse import fused, wants_fusion
from sfi_core.hosts.transformers.generate_call import generate_with
from sfi_core.hosts.transformers.lossless import check_lossless
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.linear import quick_linears
from sfi_core.observers.observer import Observer
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.config import SfiConfig, checked_config
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.settings.policy_names import default_policy
from sfi_kernels.launch import KernelLimitError


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
    """Run a transformers model with SFI: inside, plain `model.generate(...)` is slow-fast.

    Args:
        model: A decoder-only model of transformers, in evaluation mode.
        tokenizer: Turns trigger strings into token ids; not needed with `trigger_token_ids`.
        config: The settings; None is the `default` preset.
        policy: A name from `sfi_core.policies.POLICIES`; None is `default_policy`.
        observers: Receive every step, refresh and span.
        page_size: Tokens of a cache page; None is one page a request under torch, 64 tokens under triton.
        audit: What to compare with dense attention, for the observers; the tokens stay the same.
        engine: How steps are run; None is `EngineOptions()`. With `lossless`, greedy decoding gives what
            `model.generate` gives without sfi. Sampling gives the tokens of `sfi_core.generate` under full-kv with the
            same processors and seed, not those of transformers, which draws other random numbers; the seed is one
            number a call from torch's generator. A loop of one's own around `model(...)` stays sparse.

    Yields:
        The session; its `report` describes the last run. The model is restored on exit.

    Raises:
        ConfigError: Unknown policy or backend, trigger strings without a tokenizer, a nested use, or what a lossless
            run cannot have.
        BackendError: The backend cannot run the model here.
        UnsupportedModelError: The architecture cannot run under SFI.
    """
    engine = engine or DEFAULTS
    check_backend(engine.backend, model.device)
    policy = policy or default_policy(lossless=engine.lossless)
    session = Session(model, tokenizer, checked_config(config), policy, observers, page_size, audit, engine)
    own = model.__dict__.get("generate")
    if own is not None and getattr(own, "sfi", False):
        raise ConfigError("slow_fast must not be nested on one model, got a second one")
    previous = install(model, session.seam)
    hooks = [
        model.register_forward_pre_hook(session.before_forward, with_kwargs=True),
        model.register_forward_hook(session.after_forward),
    ]
    wrapped = generate_with(session, model.generate)
    wrapped.sfi = True  # type: ignore[attr-defined]
    model.generate = wrapped
    try:
        if session.engine.lossless:
            check_lossless(session)
        with session.ranks.guarded(), quick_linears(model), ExitStack() as stack:
            session.backend = _resolved(engine.backend, session, page_size)
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


def _resolved(backend: str, session: Session, page_size: int | None) -> str:
    # the backend that runs the model: "auto" takes triton on a CUDA device whose kernels can
    model = session.model
    if backend == "torch" or (backend == "auto" and model.device.type != "cuda"):
        return "torch"
    try:
        _check_one_device(model)
        check_shapes(session.shapes(), page_size, model.dtype, model.device)
    except KernelLimitError as error:
        if backend == "auto":
            return "torch"
        raise BackendError(str(error)) from error
    return "triton"


def _check_one_device(model: Any) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelLimitError(f"the triton backend needs the model on one device, got {names}; use the torch backend")

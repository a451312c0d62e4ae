"""What a lossless run needs of a model, a policy and the engine's options."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sfi_core.engine.lossless.rule import Cost, DraftRule
from sfi_core.engine.picking.picker import CPU_PIECE, PIECE
from sfi_core.errors import ConfigError
from sfi_core.models.describe import describe_model
from sfi_core.models.rotation import check_rotation
from sfi_core.observers.events import LogitsEvent
from sfi_core.observers.observer import wants
from sfi_core.policies import POLICIES
from sfi_core.policies.base import Policy
from sfi_core.settings.engine import EngineOptions
from sfi_core.sizes.memory import Drafting
from sfi_core.sizes.step import ByteModel

LEAST_WINDOW = 3  # a sliding window that still holds a token before a draft of one


# by setting of `model.generate`: what it asks for
REFUSED = {
    "output_scores": "reading scores",
    "output_logits": "reading logits",
    "output_hidden_states": "reading hidden states",
    "stop_strings": "stop_strings",
    "token_healing": "token healing",
    "max_time": "max_time",
    "stopping_criteria": "a stopping criterion of one's own",
    "inputs_embeds": "a prompt of embeddings",
    "position_ids": "position_ids of one's own",
    "cache": "a cache of one's own",
    "past_key_values": "a cache of one's own",
    "remove_invalid_values": "replacing broken logits",
}


def refuse_in_lossless(settings: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for arguments of `model.generate` that run under sfi, but not losslessly."""
    for name, what in REFUSED.items():
        value = kwargs.get(name, getattr(settings, name, None))
        if not (value is None or value is False or value == []):
            raise ConfigError(f"{what} does not run in a lossless run, got {name}")


def check_drafts(policy: Policy | type[Policy], name: str) -> None:
    """Raise `ConfigError` for a policy that cannot draft; the message lists those that can."""
    if not policy.drafts:
        able = ", ".join(sorted(known for known, kind in POLICIES.items() if kind.drafts))
        raise ConfigError(f"policy {name} cannot draft for a lossless run; those that can: {able}")


def check_lossless(session: Any) -> None:
    """Raise `ConfigError` for a session that cannot run losslessly."""
    audited = session.audit is not None
    check_asked(session.policy, session.policy_name, session.engine, audited=audited)
    check_rotation(session.model.config)
    session.state_checks.passes("a lossless run")


def check_asked(policy: Policy, name: str, engine: EngineOptions, *, audited: bool) -> None:
    """Raise `ConfigError` for settings that a lossless run cannot have, whatever the model."""
    check_drafts(policy, name)
    off = "lossless must be off with"
    if engine.kv_device_budget is not None:
        raise ConfigError(f"{off} kv_device_budget, whose host pages cannot be taken back")
    if audited:
        raise ConfigError(f"{off} an audit: a lossless run compares every drafted token itself")


def most_together(session: Any) -> int | None:
    """Return the most requests that a lossless run decodes together; None for no limit.

    transformers' caches of sliding windows and states can only take back tokens from all requests alike.
    """
    return 1 if any(shape.hosted for shape in session.shapes()) else None


def together(session: Any, asked: int | None) -> int | None:
    """Return the most requests to decode together: `asked`, or the model's limit in lossless runs.

    Raise `ConfigError` if `asked` is more than the limit.
    """
    most = most_together(session) if session.engine.lossless else None
    if most is None:
        return asked
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_batch must be at most {most} in a lossless run of a model with sliding windows or states, got {asked}"
        )
    return most


def most_drafted(session: Any, asked: int) -> int:
    """Return the most tokens of a draft: a sliding window must hold them and the token before."""
    windows: list[int] = [one.window for one in session.shapes() if one.window]
    return max(1, min([asked, *(window - LEAST_WINDOW + 1 for window in windows)]))


def draft_rule(session: Any) -> DraftRule:
    """Return what ends a draft in the session's run, which has begun."""
    policy, draft = session.policy, session.policy.config.draft
    return DraftRule(
        config=replace(draft, max_tokens=most_drafted(session, draft.max_tokens)),
        stop_ids=session.run.stop_ids,
        cost=_draft_cost(session),
        selecting=policy.selection_tokens,
    )


def _draft_cost(session: Any) -> Cost:
    # the cost of a fast step relative to a verification, by the bytes that both read
    dense_layers, refreshes = session.policy.config.dense_layers, session.policy.refreshes()
    batch = session.run.store.batch
    description = describe_model(session.model, session.shapes())
    model = ByteModel.of(description, dense_layers=dense_layers, batch=batch)

    def cost(length: float, attended: float) -> float:
        whole = model.slow(length, min(length, attended)) if refreshes else model.dense(length)
        return min(1.0, float(model.fast(length, attended)) / float(whole))

    return cost


def drafting_of(session: Any) -> Drafting | None:
    """Return how a session's lossless runs draft, for the forecast; None for other runs."""
    if not session.engine.lossless:
        return None
    return Drafting(
        tested=most_drafted(session, session.policy.config.draft.max_tokens) + 1,
        together=CPU_PIECE if session.model.device.type == "cpu" else PIECE,
        compares=wants(session.observer, LogitsEvent),
        explicit=session.backend == "torch",
    )

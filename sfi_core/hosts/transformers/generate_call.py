"""`model.generate` inside a session."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.checks import check_cache, refuse_modes
from sfi_core.hosts.transformers.lossless import most_together, refuse_in_lossless
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.memory_need import check_fits


def generate_with(
    session: Session, generate: Callable[..., Any], lossless: Callable[[Session, Any], Any]
) -> Callable[..., Any]:
    """Return `model.generate` with our cache, or our loop in a lossless run.

    `generate` is the model's own. `lossless` returns a lossless run's decoding, by session and streamer, for
    `custom_generate`.
    """

    def generate_with_sfi(
        inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        settings = _settings(session, generation_config, kwargs)
        refuse_modes(settings, kwargs)
        prompt = inputs
        if inputs is None:
            prompt = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        length, new = 0 if prompt is None else prompt.shape[1], settings.max_new_tokens
        capacity = length + new if new else settings.max_length
        cache = kwargs.get("past_key_values")
        if session.engine.lossless:
            refuse_in_lossless(settings, kwargs)
        check_cache(cache, fresh=True)
        if cache is None and prompt is not None and capacity:
            _check_memory(session, prompt.shape[0], length, capacity, settings)
        if session.ranks.size > 1:
            _check_ranks(session, prompt, settings)
        if session.engine.lossless:
            decoding = lossless(session, kwargs.get("streamer"))
            options = {"generation_config": generation_config, "custom_generate": decoding}
            return generate(inputs, **{**kwargs, **options})
        kwargs["past_key_values"] = _prepared(session, cache, capacity, length, settings)
        output = generate(inputs, generation_config=generation_config, **kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        session.run.record(session.ranks.same_tokens(sequences[:, -1]))
        return output

    return generate_with_sfi


def _settings(session: Session, generation_config: Any, kwargs: dict[str, Any]) -> Any:
    own = session.model.generation_config
    settings = copy.deepcopy(generation_config or own)
    settings.update(**own.to_dict(), defaults_only=True)  # as transformers does
    settings.update(**{k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)})
    return settings


def _check_memory(
    session: Session, prompts: int, length: int, capacity: int, settings: Any
) -> None:
    batch = prompts * (settings.num_return_sequences or 1)
    if session.engine.lossless:
        batch = min(batch, most_together(session) or batch)
    expected = session.forecast(batch, length, capacity, settings.prefill_chunk_size or 0)
    with session.ranks.agreed():
        check_fits(expected, session.model.device, two_tier=session.tiers is not None)


def _check_ranks(session: Session, prompt: torch.Tensor | None, settings: Any) -> None:
    ids = None if prompt is None else prompt.tolist()
    session.ranks.check_same({"prompts": ids, "config": session.config, "settings": settings})
    session.ranks.share_seed(session.model.device)


def _prepared(
    session: Session, cache: SfiCache | None, capacity: int | None, length: int, settings: Any
) -> SfiCache:
    cache = session.cache(capacity) if cache is None else cache
    eos = settings.eos_token_id
    stop = () if eos is None else (eos,) if isinstance(eos, int) else eos
    cache.prompt_length, cache.stop_ids = length or None, frozenset(stop)
    return cache

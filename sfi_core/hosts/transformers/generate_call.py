"""`model.generate` inside a session; in a lossless run sfi's loop decodes (`custom_generate`), with its processors."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import GenerateDecoderOnlyOutput, logits_process

from sfi_core.distributed.ranks import Ranks
from sfi_core.engine.loop import Loop, left_pad
from sfi_core.engine.picking import Picker, TokensSoFar
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.errors import ConfigError, InputError
from sfi_core.hosts.transformers.cache import CACHE_NAME, OLD_NAME, SfiCache, cache_in, under_way
from sfi_core.hosts.transformers.checks import check_cache, prompt_tokens, refuse_modes
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.known_prompt import KnownPrompt
from sfi_core.hosts.transformers.lossless import refuse_in_lossless
from sfi_core.hosts.transformers.session import Session
from sfi_core.machine.threads import serving
from sfi_core.sizes.memory import check_fits
from sfi_kernels.step_descriptor import sent

# they know which row of the batch a text is
BY_ROW = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)
# what transformers hands over besides the prompt: sfi has its own cache, positions and choice of logits, and
# no use for the others, which some releases pass on
PREPARED = {
    "attention_mask", "cache_position", "logits_to_keep", "position_ids", "streamer", "synced_gpus",
    "tokenizer", "use_cache", CACHE_NAME,
}  # fmt: skip


class OwnProcessors(Picker):
    """A picker with transformers' processors, which see each position's row as in `model.generate`.

    A row's tokens are the padded prompt and what follows, so that processors that count tokens count right. A
    processor must be a function of tokens and scores: it is called for drafted tokens too. `tokens` has each
    row's so far.
    """

    own_scores = False

    def __init__(
        self, chosen: logits_process.LogitsProcessorList, ids_RT: torch.Tensor, requests: Sequence[int],
        ranks: Ranks, seed: int | None,
    ) -> None:  # fmt: skip
        """Start with the first token of some requests; raise `ConfigError` for a processor with a state.

        `ids_RT` are the padded prompts of all requests, `requests` those with a row; `seed` is that of the
        draws, None for the best token.
        """
        super().__init__(requests, ranks, seed=seed)
        for processor in chosen:
            if isinstance(processor, logits_process.SynthIDTextWatermarkLogitsProcessor):
                raise ConfigError(
                    f"logits_processor must be stateless in a lossless run, got {type(processor).__name__}"
                )
        self._chosen, self._ids_RT = chosen, ids_RT
        self.tokens = TokensSoFar(ids_RT[list(requests)])
        self._by_row = any(_knows_rows(processor) for processor in chosen)

    def alone(self, ids_1T: torch.Tensor, request: int) -> "OwnProcessors":
        """See `Picker`; the request's prompt keeps its padding."""
        del ids_1T
        return OwnProcessors(self._chosen, self._ids_RT, [request], self._ranks, self._seed)

    def seat(self, row: int, other: "OwnProcessors") -> None:
        """See `Picker`."""
        super().seat(row, other)
        self.tokens.seat(row, other.tokens)

    def note(self, tokens: Sequence[Sequence[int]]) -> None:
        """See `Picker`."""
        self.tokens.add(tokens)

    def scores(self, logits_PV: torch.Tensor, row_P: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Picker`."""
        if not self._chosen:
            return logits_PV
        pairs = zip(row_P, tail, strict=True)
        return torch.cat([self._score(logits_PV[p : p + 1], row, after) for p, (row, after) in enumerate(pairs)])

    def _score(self, logits_1V: torch.Tensor, row: int, tail: Sequence[int]) -> torch.Tensor:
        ids_1T = self.tokens.ids_BT[row : row + 1, : self.tokens.length_B[row]]
        if tail:
            ids_1T = torch.cat([ids_1T, sent(torch.tensor([list(tail)]), ids_1T.device)], 1)
        places, place = (len(self._ids_RT), self.rows[row].request) if self._by_row else (1, 0)
        # copies: a processor may write into what it gets
        scores_RV: torch.Tensor = self._chosen(ids_1T.repeat(places, 1), logits_1V.repeat(places, 1))
        return scores_RV[place : place + 1]


def _knows_rows(processor: logits_process.LogitsProcessor) -> bool:
    if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
        # newer transformers leave out each row's own padding
        return isinstance(processor.prompt_ignore_length, torch.Tensor)
    # any that is not transformers' own may
    return isinstance(processor, BY_ROW) or type(processor).__module__ != logits_process.__name__


def generate_with(session: Session, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model.generate` with our cache, or our loop in a lossless run; `generate` is the model's."""
    positional = list(inspect.signature(generate).parameters)[2:]

    def generate_with_sfi(
        inputs: torch.Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.update(zip(positional, args, strict=False))
        with session.lock, serving():
            try:
                return _generate(inputs, generation_config, **kwargs)
            finally:
                under_way.set(None)  # an error within a pass would keep the cache's memory

    def _generate(inputs: torch.Tensor | None, generation_config: Any, **kwargs: Any) -> Any:
        settings = _settings(session, generation_config, kwargs)
        refuse_modes(settings, kwargs)
        prompt, count = _prompt(inputs, kwargs)
        length, new = 0 if prompt is None else prompt.shape[1], settings.max_new_tokens
        capacity = length + new if new else settings.max_length
        cache = cache_in(kwargs)
        if session.engine.lossless:
            refuse_in_lossless(settings, kwargs)
        check_cache(cache)
        if (cache is None or cache.seen) and prompt is not None and capacity:
            _check_memory(session, prompt.shape[0], length, capacity, settings)
        if session.ranks.size > 1:
            ids = None if prompt is None else prompt.tolist()
            session.ranks.check_same({"prompts": ids, "config": session.config, "settings": settings})
            session.ranks.share_seed(session.model.device)
        kwargs.pop(OLD_NAME, None)
        kwargs.pop(CACHE_NAME, None)
        if session.engine.lossless:
            known = PromptCache() if cache is None or cache.known is None else cache.known
            if cache is not None:
                cache.known = known
            decoding = lossless_decoding(session, kwargs.get("streamer"), known)
            options = {"generation_config": generation_config, "custom_generate": decoding}
            return generate(inputs, **{**kwargs, **options})
        kwargs[CACHE_NAME] = cache = prepared_cache(session, cache, capacity, length, settings)
        known = going_on(session, cache, prompt, count, settings)
        output = generate(inputs, generation_config=generation_config, **kwargs)
        if known is not None:
            known.leave()
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        session.run.record(session.ranks.same_tokens(sequences[:, -1]))
        return output

    return generate_with_sfi


def _prompt(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, list[int]]:
    # the token ids or embeddings of the prompts, and the tokens of each; checked now: transformers may work with the
    # mask before the first pass
    prompt = kwargs.get("input_ids", kwargs.get("inputs_embeds")) if inputs is None else inputs
    if prompt is None:
        return None, []
    if 0 in prompt.shape[:2]:
        shape = " x ".join(map(str, prompt.shape[:2]))
        raise InputError(f"prompts must have at least one token each, got a batch of {shape}")
    return prompt, prompt_tokens(kwargs.get("attention_mask"), prompt.shape[0], prompt.shape[1], 0, final=True)


def _settings(session: Session, generation_config: Any, kwargs: dict[str, Any]) -> Any:
    defaults = session.model.generation_config
    settings = copy.deepcopy(generation_config or defaults)
    settings.update(**defaults.to_dict(), defaults_only=True)  # as transformers does
    settings.update(**{name: value for name, value in kwargs.items() if hasattr(settings, name)})
    return settings


def _check_memory(session: Session, prompts: int, length: int, capacity: int, settings: Any) -> None:
    batch = prompts * (settings.num_return_sequences or 1)
    if session.engine.lossless:
        batch = min(batch, session.most_together or batch)
    expected = session.forecast(batch, length, capacity, settings.prefill_chunk_size or 0)
    with session.ranks.agreed():
        check_fits(expected, session.model.device, two_tier=session.tiers is not None)


def prepared_cache(
    session: Session, cache: SfiCache | None, capacity: int | None, length: int, settings: Any
) -> SfiCache:
    """Return a cache, or a new one, for a prompt of `length` padded tokens."""
    cache = session.cache(capacity) if cache is None else cache
    cache.prompt_length, cache.stop_ids = length or None, frozenset(stop_tokens(settings.eos_token_id))
    return cache


def going_on(
    session: Session, cache: SfiCache, prompt: torch.Tensor | None, count: Sequence[int], settings: Any
) -> KnownPrompt | None:
    """Let a used cache begin anew, and one prompt of token ids behind what it shares with the cache's last one."""
    used = cache.seen > 0
    if used:
        cache.renew(session.model, sum(count[:1]) + (settings.max_new_tokens or 0))
    several = len(count) != 1 or (settings.num_return_sequences or 1) > 1 or session.ranks.size > 1
    if prompt is None or several or prompt.is_floating_point():
        return None
    cache.known = cache.known or PromptCache()
    row = prompt[0, prompt.shape[1] - count[0] :].tolist()
    known = KnownPrompt(cache.known, session, cache, [row], leaves=True)
    cache.on_prompt_end = known.see
    if used:
        session.start(cache, 1, prompt.shape[1])
        known.begin(prompt)
    return known


def stop_tokens(eos: Any) -> tuple[int, ...]:
    """Return stop tokens that are given as none, one, several or a tensor."""
    return () if eos is None else tuple(torch.as_tensor(eos).flatten().tolist())


def lossless_decoding(session: Session, streamer: Any, known: PromptCache) -> Callable[..., Any]:
    """Return the function that transformers calls in place of its own decoding loop.

    `streamer` receives the tokens, one by one; transformers has sent the prompt. None for no streamer. One prompt goes
    on behind what it shares with `known`, and is then there.
    """

    def decode(
        model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, **prepared: Any,
    ) -> Any:  # fmt: skip
        del model
        asked = {name for name, value in prepared.items() if value is not None and value is not False}
        if unknown := sorted(asked - PREPARED):
            raise ConfigError(f"arguments of the model must be tokens and a mask in a lossless run, got {unknown[0]}")
        input_ids, (B, T) = input_ids.long(), input_ids.shape
        if streamer is not None and B > 1:
            raise ConfigError(f"prompts must be one with a streamer in a lossless run, got {B}")
        stop_ids, limit = ending(stopping_criteria)
        count = prompt_tokens(prepared.get("attention_mask"), B, T, 0, final=True)
        rows = [row[T - tokens :] for row, tokens in zip(input_ids.tolist(), count, strict=True)]
        slots = min(B, session.together(None) or B)
        ids_BT, mask_BT = left_pad(rows[:slots], input_ids.device)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=limit, stop_ids=stop_ids,
            chunk=generation_config.prefill_chunk_size or 0, requests=B, generated=limit - T,
            known=None if session.ranks.size > 1 else known,
        )  # fmt: skip
        seed = int(torch.randint(2**62, ())) if generation_config.do_sample else None
        picker = OwnProcessors(logits_processor, input_ids, range(slots), session.ranks, seed)
        for given in Loop(decoder, rows, [limit - T] * B, picker).decode_lossless():
            if streamer is not None:  # for one request
                for token in given.get(0, ()):
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        padding = generation_config.pad_token_id
        if padding is None:  # as transformers does
            padding = next(iter(stop_tokens(generation_config.eos_token_id)), 0)
        sequences = torch.cat([input_ids, generated(session, padding, input_ids)], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_NAME: decoder.cache})

    return decode


def ending(criteria: Any) -> tuple[frozenset[int], int]:
    """Return the stop tokens and the most tokens of a text, padding included.

    Raise `ConfigError` for any other criterion, and without a bound on the length.
    """
    stop: set[int] = set()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            stop.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is not MaxLengthCriteria:
            raise ConfigError(
                f"stopping_criteria must be a length and stop tokens in a lossless run, got {type(criterion).__name__}"
            )
    limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    if not limits:
        raise ConfigError("max_new_tokens must be given in a lossless run, got None")
    return frozenset(stop), min(limits)


def generated(session: Session, padding: int, like: torch.Tensor) -> torch.Tensor:
    """Return the new tokens of all requests, padded on the right, [B, T]."""
    tokens = [state.tokens for state in session.run.states]
    width = max(map(len, tokens))
    rows = [row + [padding] * (width - len(row)) for row in tokens]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)

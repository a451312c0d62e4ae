"""`model.generate` and `model.forward` inside a session.

In a lossless run sfi's loop decodes (`custom_generate`), with the processors of `model.generate`. Else transformers'
loop does, or one's own around `model(...)`: their decoding steps are CUDA graphs, and on a CPU compiled.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import GenerateDecoderOnlyOutput, logits_process
from transformers.modeling_outputs import CausalLMOutputWithPast

from sfi_core.distributed.ranks import Ranks
from sfi_core.engine.loop import Loop, left_pad
from sfi_core.engine.picking import Picker, TokensSoFar
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError, InputError
from sfi_core.hosts.transformers.attention import probing
from sfi_core.hosts.transformers.cache import CACHE_NAME, OLD_NAME, SfiCache, cache_in, under_way
from sfi_core.hosts.transformers.checks import check_cache, prompt_tokens, refuse_modes
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.known_prompt import KnownPrompt
from sfi_core.hosts.transformers.replays import Replays, records_steps
from sfi_core.hosts.transformers.session import Session
from sfi_core.machine.threads import serving
from sfi_core.sizes.memory import check_fits
from sfi_kernels.step_descriptor import sent

# what a loop hands to a step that a compiled step has in other ways; anything else goes to the model
HANDLED = {
    "input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict",
    "tokenizer", "assistant_tokenizer", CACHE_NAME,  # transformers hands on what stop strings need
}  # fmt: skip
# what a model's config may ask for at every pass
OUTPUTS = "output_hidden_states", "output_attentions", "output_router_logits"
# what transformers hands over besides the prompt: sfi has its own cache, positions and choice of logits, and
# no use for the others, which some releases pass on
PREPARED = (HANDLED - {"input_ids", "return_dict"}) | {"streamer", "synced_gpus"}
# they know which row of the batch a text is
BY_ROW = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)


def forward_with(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model.forward` that replays a decoding step where `next_step` has said so; `forward` is the model's."""

    @wraps(forward)
    def forward_with_sfi(*args: Any, **kwargs: Any) -> Any:
        cache = under_way.get()
        if probing() or cache is None or cache.planned or cache.shadowed or not cache.replayed:
            return forward(*args, **kwargs)
        assert cache.run is not None, "it has begun a step"
        assert cache.replays is not None, "they have said so"
        with torch.no_grad():
            logits_BV = cache.replays.replay_given(cache.run, kwargs["input_ids"], kwargs.get("position_ids"))
        under_way.set(cache)  # recording a step runs passes, which end
        return CausalLMOutputWithPast(logits=logits_BV[:, None], **{CACHE_NAME: cache})

    return forward_with_sfi


def next_step(
    session: Session, run: Run, cache: SfiCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[bool]:
    """See `Session.next_step`, for `model.generate` and loops of one's own."""
    if not session.state_checks.known:
        # the layers' shapes are known from the memory check of `model.generate`: a pass of ours within a pass is none
        return nullcontext(enter_result=False)
    if cache.replays is None:
        cache.replays = Replays(session, cache, run.store.batch)
    tokens = sum(not state.finished for state in run.requests)
    return cache.replays.next_step(run, tokens, _unusual(session, run, cache.seen, args, kwargs))


def _unusual(session: Session, run: Run, seen: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    # what a call of the model asks for, after `seen` padded tokens, that a replayed step does not have; "" for nothing
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    given |= {name for name in OUTPUTS if getattr(session.model.config, name, False)}
    others, positions = sorted(given - HANDLED), kwargs.get("position_ids")
    if args or "input_ids" not in given:
        return "a call of the model without input_ids by name"
    if others or kwargs.get("return_dict") is False:
        return f"a call of the model with {[*others, 'return_dict=False'][0]}"
    if positions is not None and positions.dim() != 2:  # noqa: PLR2004
        return f"positions of {positions.dim()} dimensions"
    if session.backend == "torch" and session.model.device.type == "cpu":  # elsewhere a look at them waits
        states = run.requests
        asked = [seen] * len(states) if positions is None else positions[:, -1].expand(len(states)).tolist()
        if any(not state.finished and place != state.length for state, place in zip(states, asked, strict=True)):
            return "positions that are not the requests' own"
    return ""


class OwnProcessors(Picker):
    """A picker with transformers' processors, which see each position's row as in `model.generate`.

    `tokens` has each row's so far with the padding of its prompt, so that processors that count tokens count right. A
    processor must be a function of tokens and scores: it is called for drafted tokens too.
    """

    tokens: TokensSoFar
    own_scores = False

    def __init__(
        self, chosen: logits_process.LogitsProcessorList, ids_RT: torch.Tensor, requests: Sequence[int],
        ranks: Ranks, seed: int | None,
    ) -> None:  # fmt: skip
        """Start with the first token of the `requests` with a row; raise `ConfigError` for a processor with a state.

        `ids_RT` are the padded prompts of all requests; `seed` is that of the draws, None for the best token.
        """
        super().__init__(requests, ranks, seed=seed)
        for processor in chosen:
            if isinstance(processor, logits_process.SynthIDTextWatermarkLogitsProcessor):
                raise ConfigError(
                    f"logits_processor must be stateless in a lossless run, got {type(processor).__name__}"
                )
        self._chosen, self._ids_RT, self.looks_back = chosen, ids_RT, bool(chosen)
        self.tokens = TokensSoFar(ids_RT[list(requests)])
        self._by_row = any(_knows_rows(processor) for processor in chosen)

    def alone(self, ids_1T: torch.Tensor, request: int) -> "OwnProcessors":
        """See `Picker`; the request's prompt keeps its padding."""
        del ids_1T
        return OwnProcessors(self._chosen, self._ids_RT, [request], self._ranks, self._seed)

    def scores(self, logits_PV: torch.Tensor, row_P: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Picker`."""
        scores = []
        for logits_V, row, after in zip(logits_PV if self._chosen else (), row_P, tail, strict=False):
            ids_T = self.tokens.ids_BT[row, : self.tokens.length_B[row]]
            if after:
                ids_T = torch.cat([ids_T, sent(torch.tensor(list(after)), ids_T.device)])
            count, place = (len(self._ids_RT), self.rows[row].request) if self._by_row else (1, 0)
            # copies: a processor may write into what it gets
            scores.append(self._chosen(ids_T.repeat(count, 1), logits_V.repeat(count, 1))[place])
        return torch.stack(scores) if scores else logits_PV


def _knows_rows(processor: logits_process.LogitsProcessor) -> bool:
    if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
        # newer transformers leave out each row's own padding
        return isinstance(processor.prompt_ignore_length, torch.Tensor)
    # any that is not transformers' own may
    return isinstance(processor, BY_ROW) or type(processor).__module__ != logits_process.__name__


def generate_with(session: Session, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model.generate` with our cache, or our loop in a lossless run; `generate` is the model's."""
    positional = list(inspect.signature(generate).parameters)

    @wraps(generate)
    def generate_with_sfi(*args: Any, **kwargs: Any) -> Any:
        with session.lock, serving():
            try:
                return _generate(session, generate, dict(zip(positional, args, strict=False)) | kwargs)
            finally:
                under_way.set(None)  # an error within a pass would keep the cache's memory

    return generate_with_sfi


def _generate(session: Session, generate: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    defaults = session.model.generation_config
    settings = copy.deepcopy(kwargs.get("generation_config") or defaults)
    settings.update(**defaults.to_dict(), defaults_only=True)  # as transformers does
    settings.update(**{name: value for name, value in kwargs.items() if hasattr(settings, name)})
    lossless = session.engine.lossless
    refuse_modes(settings, kwargs, lossless=lossless)
    given = (kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    prompt = next((tokens for tokens in given if tokens is not None), None)
    length, new, count = 0, settings.max_new_tokens, list[int]()
    if prompt is not None:
        if 0 in prompt.shape[:2]:
            shape = " x ".join(map(str, prompt.shape[:2]))
            raise InputError(f"prompts must have at least one token each, got a batch of {shape}")
        length = prompt.shape[1]
        # now: transformers may work with the mask before the first pass
        count = prompt_tokens(kwargs.get("attention_mask"), len(prompt), length, 0, final=True)
    capacity, cache = length + new if new else settings.max_length, cache_in(kwargs)
    check_cache(cache)
    if (cache is None or cache.seen) and prompt is not None and capacity:
        batch = len(prompt) * (settings.num_return_sequences or 1)
        batch = min(batch, session.together(None) or batch)
        chunk, graphs = settings.prefill_chunk_size or 0, records_steps(session)
        expected = session.forecast(batch, length, capacity, chunk, graphs=graphs)
        with session.ranks.agreed():
            check_fits(expected, session.model.device, two_tier=session.tiers is not None)
    if session.ranks.size > 1:
        ids = None if prompt is None else prompt.tolist()
        facts = {"prompts": ids, "config": session.config, "settings": settings, "engine": session.engine}
        session.ranks.check_same(facts)
        session.ranks.share_seed(session.model.device)
    for name in (OLD_NAME, CACHE_NAME):
        kwargs.pop(name, None)
    if lossless:
        known = PromptCache() if cache is None or cache.known is None else cache.known
        if cache is not None:
            cache.known = known
        decode = partial(decode_losslessly, session, kwargs.get("streamer"), known)
        return generate(**kwargs | {"custom_generate": decode})
    cache = session.cache(capacity) if cache is None else cache
    return going_on(session, cache, prompt, count, settings, lambda: generate(**kwargs | {CACHE_NAME: cache}))


def going_on(
    session: Session, cache: SfiCache, prompt: torch.Tensor | None, count: Sequence[int], settings: Any,
    decode: Callable[[], Any],
) -> Any:  # fmt: skip
    """Return what transformers' loop makes of prompts; one goes on behind what it shares with the cache's last prompt.

    `count` are the tokens of each prompt; several, and one of embeddings, are read whole. One is then in the cache.
    """
    used, length = cache.seen > 0, 0 if prompt is None else prompt.shape[1]
    if used:
        cache.renew(session.model, length + (settings.max_new_tokens or 0))
    cache.prompt_length, cache.stop_ids = length or None, frozenset(stop_tokens(settings.eos_token_id))
    several = len(count) != 1 or (settings.num_return_sequences or 1) > 1 or session.ranks.size > 1
    known: KnownPrompt | None = None
    cache.on_prompt_end = None
    if prompt is not None and not several and not prompt.is_floating_point():
        cache.known = cache.known or PromptCache()
        known = KnownPrompt(cache.known, session, cache, [prompt[0, length - count[0] :].tolist()], leaves=True)
        cache.on_prompt_end = known.see
        if used:
            session.start(cache, 1, length)
            known.begin(prompt)
    output = decode()
    if known is not None:
        known.leave()
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    session.run.record(session.ranks.same_tokens(sequences[:, -1]))
    return output


def stop_tokens(eos: Any) -> tuple[int, ...]:
    """Return stop tokens that are given as none, one, several or a tensor."""
    return () if eos is None else tuple(torch.as_tensor(eos).flatten().tolist())


def decode_losslessly(
    session: Session, streamer: Any, known: PromptCache, /, model: Any, input_ids: torch.Tensor, logits_processor: Any,
    stopping_criteria: Any, generation_config: Any, **prepared: Any,
) -> Any:  # fmt: skip
    """Decode in place of transformers' own loop, which gives the model and the rest; a `streamer` gets each token.

    One prompt goes on behind what it shares with `known`, and is then there.
    """
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
    tokens = [torch.tensor(state.tokens, dtype=torch.long) for state in session.run.states]
    new_BT = pad_sequence(tokens, batch_first=True, padding_value=padding)
    sequences = torch.cat([input_ids, new_BT.to(input_ids.device)], 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_NAME: decoder.cache})


def ending(criteria: Any) -> tuple[frozenset[int], int]:
    """Return the stop tokens and the most tokens of a text, with padding; raise `ConfigError` for other criteria."""
    stop: set[int] = set()
    limits = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            stop.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            limits.append(criterion.max_length)
        else:
            raise ConfigError(
                f"stopping_criteria must be a length and stop tokens in a lossless run, got {type(criterion).__name__}"
            )
    if not limits:
        raise ConfigError("max_new_tokens must be given in a lossless run, got None")
    return frozenset(stop), min(limits)

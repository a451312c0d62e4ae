"""`model.generate` in a lossless run: transformers prepares, sfi's loop decodes (`custom_generate`)."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from sfi_core.engine.loop import Loop, left_pad
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.checks import prompt_tokens
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.lossless import together
from sfi_core.hosts.transformers.own_processors import OwnProcessors
from sfi_core.hosts.transformers.session import Session

# what transformers hands over besides the prompt: sfi has its own cache, positions and choice of logits, and
# no use for the others, which some releases pass on
PREPARED = {
    "attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "streamer",
    "synced_gpus", "tokenizer", "use_cache",
}  # fmt: skip


def lossless_decoding(session: Session, streamer: Any) -> Callable[..., Any]:
    """Return the function that transformers calls in place of its own decoding loop.

    `streamer` receives the tokens, one by one; transformers has sent the prompt. None for no streamer.
    """

    def decode(
        model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, **prepared: Any,
    ) -> Any:  # fmt: skip
        del model
        if unknown := sorted(set(prepared) - PREPARED):
            raise ConfigError(
                f"arguments of the model must be tokens and a mask in a lossless run, got {unknown[0]}"
            )
        B, T = input_ids.shape
        if streamer is not None and B > 1:
            raise ConfigError(f"prompts must be one with a streamer in a lossless run, got {B}")
        stop_ids, limit = ending(stopping_criteria)
        count = prompt_tokens(prepared.get("attention_mask"), B, T, 0, final=True)
        rows = [row[T - own :] for row, own in zip(input_ids.tolist(), count, strict=True)]
        slots = min(B, together(session, None) or B)
        ids_BT, mask_BT = left_pad(rows[:slots], input_ids.device)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=limit, stop_ids=stop_ids,
            chunk=generation_config.prefill_chunk_size or 0, requests=B, generated=limit - T,
        )  # fmt: skip
        seed = int(torch.randint(2**62, ())) if generation_config.do_sample else None
        picker = OwnProcessors(logits_processor, input_ids, range(slots), session.ranks, seed)
        padding = generation_config.pad_token_id
        for given in Loop(decoder, rows, [limit - T] * B, picker, padding or 0).decode_lossless():
            if streamer is not None:  # for one request
                for token in given.get(0, ()):
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, generated(session, padding or 0, input_ids)], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=decoder.cache)

    return decode


def ending(criteria: Any) -> tuple[frozenset[int], int]:
    """Return the stop tokens and the most tokens of a text, padding included.

    Raise `ConfigError` for any other criterion, and without a bound on the length.
    """
    stop: set[int] = set()
    for one in criteria:
        if type(one) is EosTokenCriteria:
            stop.update(one.eos_token_id.flatten().tolist())
        elif type(one) is not MaxLengthCriteria:
            raise ConfigError(
                "stopping_criteria must be a length and stop tokens in a lossless run, got "
                f"{type(one).__name__}"
            )
    limits = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    if not limits:
        raise ConfigError("max_new_tokens must be given in a lossless run, got None")
    return frozenset(stop), min(limits)


def generated(session: Session, padding: int, like: torch.Tensor) -> torch.Tensor:
    """Return the new tokens of all requests, padded on the right, [B, T]."""
    tokens = [state.tokens for state in session.run.states]
    width = max(map(len, tokens))
    rows = [row + [padding] * (width - len(row)) for row in tokens]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)

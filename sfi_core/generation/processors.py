"""transformers' logits processors for our settings."""

from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sfi_core.settings.sampling import Sampling


def processors(sampling: Sampling) -> LogitsProcessorList:
    """Build the processors in the order of `model.generate`."""
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.do_sample:
        if sampling.temperature != 1:
            chosen.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chosen.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen

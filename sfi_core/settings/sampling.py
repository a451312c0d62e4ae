"""Settings of sampling. No torch: the command line imports this."""

from dataclasses import dataclass

from sfi_core.settings.fields import Table, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Table):
    """How the next token is picked; names and meanings are those of transformers' generation config."""

    do_sample: bool = setting(False, "Sample instead of taking the most likely token.")
    temperature: float = setting(1.0, "Divides the logits.", above=0)
    top_k: int = setting(0, "Keep the k most likely tokens; 0 keeps all.", least=0)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability; 1 keeps all.", above=0, most=1)
    min_p: float = setting(0.0, "Keep tokens at least this share as likely as the best; 0 keeps all.", least=0, most=1)
    repetition_penalty: float = setting(1.0, "Above 1 makes repeated tokens less likely; 1 does nothing.", above=0)

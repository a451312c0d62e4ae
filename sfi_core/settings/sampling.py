"""Settings of sampling. No torch: the command line imports this."""

from dataclasses import dataclass

from sfi_core.settings.fields import Table, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Table):
    """How the next token is picked; names and meanings are those of transformers' generation config."""

    temperature: float | None = setting(
        None, "Divides logits; 0 is greedy. Without it top_k, top_p and min_p draw at 1; else it is 0.", least=0
    )
    top_k: int = setting(0, "Keep the k most likely tokens; 0 keeps all.", least=0)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability; 1 keeps all.", above=0, most=1)
    min_p: float = setting(0.0, "Keep tokens at least this share as likely as the best; 0 keeps all.", least=0, most=1)
    repetition_penalty: float = setting(1.0, "Above 1 makes repeated tokens less likely; 1 does nothing.", above=0)

    @property
    def do_sample(self) -> bool:
        """Whether a token is drawn; otherwise the most likely one is taken."""
        return self.divisor > 0

    @property
    def divisor(self) -> float:
        """The temperature in force, 0 where the most likely token is taken."""
        if self.temperature is None:
            return float(bool(self.top_k or self.top_p < 1 or self.min_p))
        return self.temperature

"""The additional memory of a lossless run: logits of several tokens, and drafts that wait."""

from dataclasses import dataclass

from sfi_kernels.dense_attention.verification import GROUP

FLOAT32 = 4
# bytes of a logit that is being picked from, at most: its float32 copy and score, with a sorted copy and its
# indices, softmax and sums of top_p; or score, random bits twice and noise, the last three of 8 bytes each
PICKING = 32
COMPARING = 6 * FLOAT32  # both distributions, their logarithms, and the terms of the divergence
HELD = 2  # sliding windows: the one after the last verified token, and the drafts' own


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How a lossless run drafts, for the forecast.

    A request brings `tested` tokens to a pass: its draft and the token before. `together` logits are picked
    from at once. `compares` says whether an observer wants the divergence of drafts from full attention,
    `explicit` whether a verification's attention holds all its logits, as the torch backend's does.
    """

    tested: int
    together: int
    compares: bool
    explicit: bool

    def pass_bytes(
        self, *, batch: int, vocabulary: int, itemsize: int, heads: int, grouped: int, capacity: int
    ) -> int:
        """Add up what a verification of all requests holds, the model's activations left out.

        `vocabulary` numbers of `itemsize` bytes are a token's logits; `heads` are all query heads, `grouped`
        those of a KV head; `capacity` are the tokens that a request may reach.
        """
        numbers = batch * self.tested * vocabulary
        picking = min(numbers, max(self.together, vocabulary)) * PICKING
        comparing = self.tested * vocabulary * COMPARING if self.compares else 0
        all_logits = heads * self.tested * capacity
        held = min(all_logits, max(GROUP, grouped * self.tested * capacity))
        # logits, weights, and these once more
        attention = 3 * FLOAT32 * held if self.explicit else 0
        return max(numbers * itemsize + max(picking, comparing), attention)

    def kept_bytes(self, *, batch: int, vocabulary: int, itemsize: int) -> int:
        """Return the bytes of the drafted tokens' logits, kept until they are compared."""
        return batch * (self.tested - 1) * vocabulary * itemsize if self.compares else 0

"""Variants of ops, and their checks before timing, which return the error as a share of what rounding allows."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from sfi_core.settings.config import SelectorConfig
from sfi_kernels.launch import KernelLimitError
from sfi_kernels.selector import selector

EXACT, WRONG = 0.0, float("inf")
ROUNDINGS = 4  # to the dtype: a norm, its weight, a product and a sum


@dataclass(slots=True, eq=False)
class KernelVariant:
    """An op or rival that is checked and timed, and what came of that."""

    name: str  # the op of the row
    retention: float | None  # the share of the context that the op works on; None if it does not depend on one
    call: Callable[[], Any]  # runs the op
    bytes: int  # the bytes that the op must move
    error: Callable[[], float]  # runs the op, and returns its error; above 1 the result is wrong
    form: str | None = None  # the form of the call, if there are several
    flops: int | None = None  # multiplications and additions; None if bytes decide the time
    shape: Mapping[str, int] = field(default_factory=dict)  # values that replace the settings' shape in the row
    error_share: float | None = None  # the error, a share of what rounding allows; None if the variant did not run
    failure: str | None = None  # why the variant is not timed; None if it is
    launches: int | None = None  # kernels that a call launches; None where Triton launches none
    times_us: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name with the retention."""
        at = "" if self.retention is None else f" at retention {self.retention:g}"
        return f"{self.name}{at}"

    @property
    def row(self) -> tuple[str, float | None, str | None]:
        """What its row is of: SDPA's forms share one."""
        return self.name, self.retention, None if self.name == "dense.sdpa" else self.form

    @property
    def median_us(self) -> float | None:
        """The median time; None without times."""
        return statistics.median(self.times_us) if self.times_us else None

    def check(self) -> None:
        """Compare the result; an exception but `KernelLimitError` becomes the failure."""
        with self.failing():
            self.error_share = self.error()
            if not self.error_share <= 1:
                self.failure = f"{self.error_share:.3g} times the error that rounding allows"

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Take an exception as the failure; a `KernelLimitError` is raised, as no variant would run."""
        try:
            yield
        except KernelLimitError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers, drivers and rivals raise anything
            self.failure = reason(error)


def reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def checked(name: str, retention: float | None, variants: Iterable[KernelVariant]) -> Iterator[KernelVariant]:
    """Yield variants after their checks; if making one raises, the last is one of that name that failed."""
    unmade = KernelVariant(name, retention, lambda: None, 0, lambda: 0.0)
    with unmade.failing():
        for variant in variants:
            variant.check()
            yield variant
    if unmade.failure:
        yield unmade


class Expected(NamedTuple):
    """The output of an attention, and bounds of the rounding error."""

    out_BHGD: torch.Tensor  # the output, in a higher precision
    bound_BHGD: torch.Tensor  # the bound for products and softmax in float32, and weights in the inputs' precision
    loose_BHGD: torch.Tensor  # the bound if the logits are rounded to the inputs' precision too, as some rivals do

    def error(self, out_BHGD: torch.Tensor, *, rival: bool = False) -> float:
        """Return the largest error as a share of its bound; NaN counts as infinite."""
        bound = self.loose_BHGD if rival else self.bound_BHGD
        return share((out_BHGD.to(self.out_BHGD) - self.out_BHGD).abs(), bound)

    def where(self, mine: torch.Tensor, other: "Expected") -> "Expected":
        """Return this output where `mine` is true, and another attention's elsewhere."""
        return Expected(*(torch.where(mine, *pair) for pair in zip(self, other, strict=True)))


def share(error: torch.Tensor, bound: torch.Tensor | float) -> float:
    """Return the largest error as a share of its bound; NaN counts as infinite."""
    return float((error / bound).nan_to_num(nan=WRONG).max())


def same(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return `EXACT` for equal tensors, else `WRONG`."""
    return EXACT if torch.equal(got, expected) else WRONG


def textbook(
    query_BHGD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    scale: float,
    index_BHS: torch.Tensor | None = None,
) -> Expected:
    """Attend to the positions `index_BHS`, or to all: softmax of q.k times v; in float64 for float32.

    Bounds: a float32 product of D terms is off by D + 2 roundings of the sum of its terms' sizes; a softmax weight by
    twice the error of its logits, by a few roundings of its own, and by one to the inputs' precision (at least to a
    multiple of the smallest number) before it multiplies its value; a running sum of S weights or products by half a
    rounding a term: at 16K tokens more than all else in float32, and nothing beside a shorter precision.
    """
    rounding, single = torch.finfo(query_BHGD.dtype), torch.finfo(torch.float32).eps
    wide = torch.float64 if query_BHGD.dtype == torch.float32 else torch.float32
    rows = []
    for row in range(query_BHGD.shape[0]):
        query, key, value = (x[row] for x in (query_BHGD, key_BHTD, value_BHTD))
        if index_BHS is not None:
            index = index_BHS[row].long()[..., None].expand(-1, -1, key.shape[-1])
            key, value = key.gather(1, index), value.gather(1, index)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
        weight = (query @ key.mT * scale).softmax(-1)
        out = weight @ value
        # the sizes of a product's terms add up to at most the product of the two norms
        sizes = float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * scale
        logit = sizes * (key.shape[-1] + 2) * single
        relative = 4 * logit + rounding.eps + (32 + key.shape[1]) * single
        value.abs_()
        mass, total = weight @ value, value.sum(1, keepdim=True)
        bound = relative * mass + rounding.eps * out.abs() + rounding.smallest_normal * rounding.eps * total
        rows.append((out, bound, bound + 2 * rounding.eps * sizes * mass))
    return Expected(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def logits_error(
    got: torch.Tensor, expected: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scale: float
) -> float:
    """Compare evidence with float32 logits; both are products of D terms."""
    sizes = query.float().norm(dim=-1).max() * max(row.float().norm(dim=-1).max() for row in key)
    bound = 2 * float(sizes) * scale * (key.shape[-1] + 2) * torch.finfo(torch.float32).eps
    return share((got - expected).abs(), bound)


def top_k_error(score_BHT: torch.Tensor, index_BHK: torch.Tensor) -> float:
    """Compare with a stable sort: at a tie the lower position wins."""
    order = score_BHT.sort(descending=True, stable=True).indices[..., : index_BHK.shape[2]]
    return same(index_BHK.long(), order.sort().values)


def pack_error(segment: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> float:
    """Compare a packed segment with the rows `index`, [B, H, S], of contiguous keys and values."""
    rows = index.long()[..., None].expand(-1, -1, -1, key.shape[-1])
    length = torch.full_like(segment[3], index.shape[2])
    expected = key.gather(2, rows), value.gather(2, rows), index.int(), length
    return max(same(*pair) for pair in zip(segment, expected, strict=True))


def selector_error(
    result: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    norm: torch.Tensor,
    allowed_BT: torch.Tensor,
    options: SelectorConfig,
) -> float:
    """Compare scores and weights with the reference in float64.

    A score is a logarithm after a dozen float32 steps, less two differences of such; each is off by a few roundings.
    """
    worst = EXACT
    for row in range(logits.shape[0]):  # one at a time, to keep temporary tensors small
        request, inside = slice(row, row + 1), allowed_BT[row]
        wide = logits[request].double(), norm[request].double(), allowed_BT[request]
        (expected_HT,), weight_1H = selector.reference(*wide, **asdict(options))
        z = expected_HT[:, inside]
        bound = 64 * torch.finfo(torch.float32).eps * (1 + float(z.abs().max()))
        score_error = share((result[0][row][:, inside].double() - z).abs(), bound)
        outside = result[0][row][:, ~inside]
        if outside.numel() and not float(outside.max()) < float(z.min()):
            return WRONG  # a position outside J could win
        worst = max(worst, score_error, share((result[1][request].double() - weight_1H).abs(), bound))
    return worst


def rounding_error(
    got: torch.Tensor, expected: torch.Tensor, sizes: Callable[[torch.Tensor], torch.Tensor] = torch.abs
) -> float:
    """Compare with a float64 result; `sizes` gives the numbers that were rounded."""
    # an epsilon for each rounding to the dtype, and a few of float32's for the sums of squares
    kind = torch.finfo(got.dtype)
    bound = ROUNDINGS * (kind.eps + 4 * torch.finfo(torch.float32).eps)
    return share((got.double() - expected).abs(), bound * sizes(expected) + kind.tiny)


def pair_sizes(rotated: torch.Tensor) -> torch.Tensor:
    """Return the lengths of the pairs, halves of a head, that a rotation keeps: no product in it is larger."""
    return torch.hypot(*rotated.chunk(2, -1)).tile(2)

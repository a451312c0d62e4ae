"""`verify(...)`: checks by teacher forcing that generated tokens are full attention's."""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from typing import Any, NamedTuple

import torch

from sfi_core.engine.picking import gumbel, noise_key
from sfi_core.errors import ConfigError, NumericsError
from sfi_core.generation.prompts import Prompts, check_prompts, encode
from sfi_core.generation.sampling import Draws, processors
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.models.linear import quick_linears
from sfi_core.models.rotation import pass_rotation
from sfi_core.settings.engine import Sampling

NEAR_ULP = 4.0
PIECE = 2**21  # most logits compared at once, 16 MiB as float64
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A generated token that differs from full attention's over the same prefix.

    `index` is its index among the generated tokens, `expected_id` full attention's token. `behind_ulp` is the
    distance of its score to full attention's best, in units in the last place of the logits; infinite for a
    token that a processor forbids.
    """

    index: int
    token_id: int
    expected_id: int
    behind_ulp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheck:
    """The check of one request with so many generated `tokens`.

    At the indices `near_ties` full attention's two best scores are closer than `VerifyReport.near_ulp`: either token is
    right there, and later tokens depend on the choice. `differing` are the tokens that are not full attention's.
    """

    tokens: int
    near_ties: Sequence[int]
    differing: Sequence[Differing]

    @property
    def first_doubtful(self) -> int | None:
        """The first index that is a near tie or differs, if there is one."""
        return min((*self.near_ties, *(token.index for token in self.differing)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of `verify`, with `requests` in the order of the prompts.

    Two scores closer than `near_ulp` are a near tie, in units in the last place of logits of `dtype`;
    `bound_ulp` is the distance to full attention's best score that rounding alone explains.
    """

    dtype: str
    near_ulp: float
    bound_ulp: float
    requests: Sequence[RequestCheck]

    @property
    def ok(self) -> bool:
        """Whether every token is full attention's, up to rounding."""
        return all(token.behind_ulp <= self.bound_ulp for request in self.requests for token in request.differing)

    @property
    def tokens(self) -> int:
        """Number of tokens checked."""
        return sum(request.tokens for request in self.requests)

    @property
    def near_ties(self) -> int:
        """Number of near ties."""
        return sum(len(request.near_ties) for request in self.requests)

    @property
    def differing(self) -> int:
        """Number of differing tokens."""
        return sum(len(request.differing) for request in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, properties included; an infinite distance becomes None."""
        requests = []
        for request in self.requests:
            row = asdict(request) | {"first_doubtful": request.first_doubtful}
            for token in row["differing"]:
                token["behind_ulp"] = None if token["behind_ulp"] == float("inf") else token["behind_ulp"]
            requests.append(row)
        names = "ok", "tokens", "near_ties", "differing", "dtype", "near_ulp", "bound_ulp"
        return {name: getattr(self, name) for name in names} | {"requests": requests}


@torch.inference_mode()
def verify(
    model: Any,
    prompts: Prompts,
    outputs: Sequence[Sequence[int]],
    *,
    tokenizer: Any = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] | None = None,
    chunk: int = 2048,
) -> VerifyReport:
    """Check that each generated token is full attention's, given the prompt and the tokens before it.

    The plain model reads prompt and output once, request by request, with its own attention and cache. Call
    `verify` outside `slow_fast`. A token must be the arg max of the processed logits; under sampling, of
    their sum with the noise of seed, request and index.

    A token that differs by at most `bound_ulp` units in the last place (ulp) of the logits is rounding.
    Paper gap: the bound is ours. A run multiplies one or few rows of activations at once, this check many, so
    that sums are rounded in another order. bfloat16 and float16 products are summed in float32 and each
    activation is rounded once: 4 ulp for each of the two scores, 8 in all. float32 rounds partial sums, an
    error that grows as the square root of the number of terms: 8 sqrt(hidden size). The distance of
    SmolLM2-135M's two best logits changed by at most 2 ulp in bfloat16, and 16 in float32, between passes of
    1 row and of 48. Temperature and repetition penalty stretch the ulp as they stretch the logits. A token
    dropped by `top_k`, `top_p` or `min_p` counts as kept if its score is within the bound of the lowest kept.

    Args:
        model: A decoder-only model of transformers.
        prompts: Texts or token ids; one text, or one list of token ids, is one prompt.
        outputs: The generated tokens of each prompt, a stop token included; may be empty.
        tokenizer: Its tokenizer; may be None when prompts are token ids.
        sampling: How the tokens were picked, of all prompts or of each; None is greedy.
        seed: The seed, or the seeds, of the run; not needed for greedy decoding.
        chunk: Prompt tokens of one forward pass.

    Raises:
        ConfigError: There is not one output per prompt, sampling lacks its seed, the chunk is below 1, or the
            model's RoPE (`longrope`, `dynamic`) depends on the pieces in which a text is read.
        InputError: A prompt is empty, or longer with its output than the model's positions.
        NumericsError: The model's logits hold NaN or infinity.
    """
    sampling, rows = sampling or Sampling(), encode(tokenizer, prompts)
    if len(outputs) != len(rows):
        raise ConfigError(f"outputs must be {len(rows)}, one a prompt, got {len(outputs)}")
    draws = Draws(sampling, 0 if seed is None else seed)
    if seed is None and any(sampling.do_sample for sampling in draws.samplings):
        raise ConfigError("seed must be the run's where tokens were sampled, got None")
    if chunk < 1:
        raise ConfigError(f"chunk must be at least 1, got {chunk}")
    if kind := pass_rotation(model.config):
        raise ConfigError(f"model must rotate each token by its own position, got RoPE of the kind {kind}")
    check_prompts(model, rows, [len(output) for output in outputs])
    with quick_linears(model):
        requests = [
            Judge(model, draws.of(request), draws.noise(request))(request, prompt, list(output), chunk)
            for request, (prompt, output) in enumerate(zip(rows, outputs, strict=True))
        ]
    return VerifyReport(
        dtype=str(model.dtype).removeprefix("torch."), near_ulp=NEAR_ULP, bound_ulp=bound_ulp(model), requests=requests
    )


class Found(NamedTuple):
    """Full attention's view of one generated token: its own token is `expected`.

    `gap_ulp` is the distance of its two best scores, `behind_ulp` that of the given token's score to the
    best; `fine` is 1 if the logits are finite, else 0.
    """

    expected: float
    gap_ulp: float
    behind_ulp: float
    fine: float


def bound_ulp(model: Any) -> float:
    """Return the bound of `VerifyReport` for a model."""
    width = 1 if model.dtype in HALVES else model.config.get_text_config(decoder=True).hidden_size
    return 2 * NEAR_ULP * math.sqrt(width)


class Judge:
    """Compares a request's generated tokens with full attention's."""

    def __init__(self, model: Any, sampling: Sampling, noise: tuple[int, int] | None) -> None:
        """Take the model, and the request's sampling and the name of its noise, as `Draws` has them."""
        self._bound_ulp = bound_ulp(model)
        self._model, self._noise = model, noise
        self._processors = processors(sampling)
        self._unfiltered = processors(replace(sampling, top_k=0, top_p=1.0, min_p=0.0))
        penalty = sampling.repetition_penalty
        self._stretch = max(penalty, 1 / penalty)
        if sampling.do_sample:
            self._stretch /= sampling.divisor

    def __call__(self, request: int, prompt: list[int], output: list[int], chunk: int) -> RequestCheck:
        """Check one request."""
        ids_1T = torch.tensor([prompt + output], device=self._model.device)
        views: list[Found] = []
        for logits_PV in forced_logits(self._model, ids_1T, len(prompt), chunk):
            views += self._compare(len(views), ids_1T, len(prompt), logits_PV)
        for index, view in enumerate(views):
            if not view.fine:
                raise NumericsError(f"logits must be finite, got NaN or infinity at step {index} in request {request}")
        differing = [
            Differing(index=index, token_id=token, expected_id=int(view.expected), behind_ulp=view.behind_ulp)
            for index, (token, view) in enumerate(zip(output, views, strict=True))
            if token != view.expected
        ]
        near_ties = [index for index, view in enumerate(views) if view.gap_ulp < NEAR_ULP]
        return RequestCheck(tokens=len(output), near_ties=near_ties, differing=differing)

    def _compare(self, index: int, ids_1T: torch.Tensor, prompt: int, logits_PV: torch.Tensor) -> list[Found]:
        # the logits are those of the tokens from `index` on
        P, V = logits_PV.shape
        logits_PV = logits_PV.float()
        ends = range(prompt + index, prompt + index + P)
        scores_PV, all_PV = (
            torch.cat([chosen(ids_1T[:, :end], logits_PV[p : p + 1]) for p, end in enumerate(ends)]).double()
            for chosen in (self._processors, self._unfiltered)
        )
        noise_PV = torch.zeros_like(all_PV)
        if self._noise is not None:
            keys = [noise_key(*self._noise, index + place) for place in range(P)]
            noise_PV = gumbel(torch.tensor(keys, device=logits_PV.device), V)
        noisy_PV = scores_PV + noise_PV
        best_P2, token_P2 = noisy_PV.topk(2, -1)
        size_P2 = logits_PV.gather(1, token_P2).abs().where(best_P2.isfinite(), 0.0)
        ulp_P = self._stretch * ulp(size_P2.amax(-1), self._model.dtype).double()
        given_P1 = ids_1T[0, ends.start : ends.stop, None]
        behind_P = self._behind(scores_PV, all_PV, noise_PV, given_P1, self._bound_ulp * ulp_P)
        columns = (
            noisy_PV.argmax(-1).double(),
            (best_P2[:, 0] - best_P2[:, 1]) / ulp_P,
            behind_P / ulp_P,
            logits_PV.amax(-1).isfinite().double(),
        )
        return list(starmap(Found, zip(*torch.stack(columns).tolist(), strict=True)))

    @staticmethod
    def _behind(
        scores_PV: torch.Tensor, all_PV: torch.Tensor, noise_PV: torch.Tensor, given_P1: torch.Tensor,
        bound_P: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        # the distance to the best token that the filters surely keep, or to being kept itself
        kept_PV = scores_PV > -torch.inf
        edge_P1 = all_PV.masked_fill(~kept_PV, torch.inf).amin(-1, keepdim=True)
        filters_P1 = (~kept_PV & (all_PV > -torch.inf)).any(-1, keepdim=True)
        sure_PV = kept_PV & (~filters_P1 | (all_PV > edge_P1 + bound_P[:, None]))
        rivals_PV = (all_PV + noise_PV).masked_fill(~sure_PV, -torch.inf)
        own_P1 = (all_PV + noise_PV).gather(1, given_P1)
        lost_P = rivals_PV.amax(-1) - own_P1[:, 0]
        dropped_P = (edge_P1 - all_PV.gather(1, given_P1))[:, 0]
        return torch.maximum(lost_P, dropped_P).clamp_min(0.0).nan_to_num(torch.inf, torch.inf)


def forced_logits(model: Any, ids_1T: torch.Tensor, prompt: int, chunk: int) -> Iterator[torch.Tensor]:
    """Read a text with the plain model; yield the logits of its output tokens in pieces, [P, V].

    The text is `prompt` tokens and the output; a pass reads `chunk` tokens of the prompt.
    """
    first, last = prompt - 1, ids_1T.shape[1] - 1
    parameters = inspect.signature(model.forward).parameters
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    size = max(1, PIECE // model.config.get_text_config(decoder=True).vocab_size)
    pieces = [(begin, min(begin + chunk, first)) for begin in range(0, first, chunk)]
    tested = [(begin, min(begin + size, last)) for begin in range(first, last, size)]
    past = None
    for begin, end in (*pieces, *tested) if tested else ():
        options = {} if begin >= first else last_only
        read = model(input_ids=ids_1T[:, begin:end], use_cache=True, **{CACHE_NAME: past}, **options)
        past = getattr(read, CACHE_NAME)
        if begin >= first:
            yield read.logits[0]


def ulp(size_P: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighboring numbers of a dtype at the given sizes."""
    limits = torch.finfo(dtype)
    exponent_P = torch.frexp(size_P.clamp_min(limits.tiny))[1] - 1
    return torch.ldexp(torch.full_like(size_P, limits.eps), exponent_P)

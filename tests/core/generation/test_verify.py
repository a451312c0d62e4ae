"""The check by teacher forcing: right outputs pass, a wrong token is found, and near ties are counted."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import Sampling, SfiConfig
from sfi_core.errors import ConfigError, NumericsError
from sfi_core.generation.verify import forced_logits, ulp, verify
from sfi_core.hosts.transformers.cache import CACHE_NAME
from tests.architectures import VOCABULARY, prompts, tiny

ROWS = prompts(37, 9, 1)
STEPS = 12
NEVER = SfiConfig(trigger_policy="never")
SAMPLED = Sampling(temperature=1.5, top_k=50, top_p=0.95, min_p=0.001, repetition_penalty=1.3)


def full(model: Any, sampling: Sampling | None = None, seed: int = 5) -> list[list[int]]:
    """Full attention's tokens by sfi's own loop."""
    options = {"max_new_tokens": STEPS, "stop_token_ids": (), "sampling": sampling, "seed": seed}
    report = sfi_core.generate(model, None, ROWS, NEVER, policy="full-kv", **options).report
    return [request.token_ids for request in report.requests]


@pytest.mark.parametrize(("label", "chunk"), [("qwen3", 8), ("gemma-2", 8), ("gpt-oss", 2048), ("gpt-2", 2048)])
def test_full_attention_s_output_passes(label: str, chunk: int):
    """The prompt in pieces or whole, windows shorter than the prompts, and caps and sinks."""
    model = tiny(label)
    found = verify(model, ROWS, full(model), chunk=chunk)
    assert found.ok
    assert found.differing == found.near_ties == 0
    assert found.tokens == STEPS * len(ROWS)
    assert [request.first_doubtful for request in found.requests] == [None] * len(ROWS)


@pytest.mark.parametrize("sampling", [Sampling(repetition_penalty=1.5), SAMPLED], ids=str)
def test_output_passes_with_its_settings_and_fails_with_others(sampling: Sampling):
    model = tiny("qwen3")
    output = full(model, sampling)
    assert verify(model, ROWS, output, sampling=sampling, seed=5).ok
    assert not verify(model, ROWS, output, seed=5).ok
    if sampling.do_sample:
        assert not verify(model, ROWS, output, sampling=sampling, seed=6).ok


def test_a_wrong_token_is_found_at_its_index():
    """What follows it continues it, and is right again."""
    model = tiny("qwen3")
    output = full(model)
    wrong = (output[1][4] + 1) % VOCABULARY
    prefix = [*ROWS[1], *output[1][:4]]
    options = {"policy": "full-kv", "max_new_tokens": 5, "stop_token_ids": ()}
    [rest] = sfi_core.generate(model, None, [[*prefix, wrong]], NEVER, **options).report.requests
    expected = output[1][4]
    output[1] = [*output[1][:4], wrong, *rest.token_ids]
    found = verify(model, ROWS, output)
    assert not found.ok
    assert [len(request.differing) for request in found.requests] == [0, 1, 0]
    [one] = found.requests[1].differing
    assert (one.index, one.token_id, one.expected_id) == (4, wrong, expected)
    assert found.requests[1].first_doubtful == 4
    logits_V = model(input_ids=torch.tensor([prefix])).logits[0, -1].detach()
    spacing = 2.0 ** (math.floor(math.log2(logits_V.abs()[logits_V.topk(2)[1]].max())) - 23)
    behind = (logits_V[expected] - logits_V[wrong]).item() / spacing
    assert one.behind_ulp == pytest.approx(behind, rel=1e-3)
    assert found.to_dict()["requests"][1]["first_doubtful"] == 4


def test_long_outputs_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch):
    model = tiny("qwen3")
    output = full(model)
    monkeypatch.setattr("sfi_core.generation.verify.PIECE", 5 * VOCABULARY)
    ids = torch.tensor([ROWS[0] + output[0]])
    pieces = [len(logits_PV) for logits_PV in forced_logits(model, ids, len(ROWS[0]), 8)]
    assert pieces == [5, 5, 2]
    assert verify(model, ROWS, output).ok
    assert not verify(model, ROWS, [[*row[:-1], (row[-1] + 1) % VOCABULARY] for row in output]).ok


class Fixed(torch.nn.Module):
    """A model whose logits are made up: those of the token before."""

    def __init__(self, logits_VV: torch.Tensor) -> None:
        super().__init__()
        self.logits_VV, self.dtype = logits_VV, logits_VV.dtype
        self.device = torch.device("cpu")
        text = SimpleNamespace(vocab_size=len(logits_VV), hidden_size=64)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.logits_VV)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits_VV[input_ids], **{CACHE_NAME: None})


def fixed(dtype: torch.dtype, *best: tuple[float, float]) -> Fixed:
    """Token 0 is followed by two candidates, 1 and 2, and so on; all others are far off."""
    logits_VV = torch.full((8, 8), -50.0, dtype=dtype)
    for token, (one, two) in enumerate(best):
        logits_VV[token, 1], logits_VV[token, 2] = one, two
    return Fixed(logits_VV)


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (3, True), (4, False)])
def test_near_ties_of_bfloat16_are_gaps_below_four_units_of_its_eight_bits(gap: float, near: bool):
    """Between 16 and 32 the spacing is 1/8."""
    model = fixed(torch.bfloat16, (20.0, 20.0 - gap / 8))
    found = verify(model, [[0]], [[1]])
    assert found.requests[0].near_ties == ([0] if near else [])
    assert found.requests[0].first_doubtful == (0 if near else None)
    assert found.dtype == "bfloat16"
    assert found.ok


@pytest.mark.parametrize(("gap", "ok"), [(8, True), (9, False)])
def test_a_token_behind_by_rounding_differs_and_is_allowed(gap: int, ok: bool):
    found = verify(fixed(torch.bfloat16, (20.0, 20.0 - gap / 8)), [[0]], [[2]])
    [one] = found.requests[0].differing
    assert (one.token_id, one.expected_id, one.behind_ulp) == (2, 1, gap)
    assert found.ok == ok


def test_float32_sums_may_be_off_by_the_root_of_their_terms():
    """Hidden size 64: 8 x 8 units of 2^-19."""
    for gap, ok in ((64, True), (65, False)):
        assert verify(fixed(torch.float32, (20.0, 20.0 - gap / 2**19)), [[0]], [[2]]).ok == ok


@pytest.mark.parametrize(("gap", "ok"), [(2, True), (9, False)])
def test_a_filter_s_edge_is_rounding_s_too(gap: int, ok: bool):
    """top_k drops the second, which full attention never draws; a rounded run may."""
    model = fixed(torch.bfloat16, (20.0, 20.0 - gap / 8))
    found = verify(model, [[0]], [[2]], sampling=Sampling(top_k=1), seed=0)
    [one] = found.requests[0].differing
    assert one.expected_id == 1
    assert one.behind_ulp == gap
    assert found.ok == ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype):
    number = torch.tensor([1.0, 1.99, 20.0, 0.3, 1000.0]).to(dtype)
    above = torch.nextafter(number, torch.full_like(number, math.inf))
    assert torch.equal(ulp(number.float(), dtype), (above.double() - number.double()).float())


def test_a_bfloat16_run_is_its_own_full_attention():
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    found = verify(model, ROWS, full(model))
    assert found.ok
    assert found.bound_ulp == 8


def test_what_cannot_be_checked_is_refused():
    model = tiny("qwen3")
    for arguments, message in (
        ({"outputs": [[1]]}, "outputs must be 3, one a prompt, got 1"),
        ({"sampling": SAMPLED}, "seed must be the run's where tokens were sampled, got None"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            verify(model, ROWS, **{"outputs": [[1]] * 3, **arguments})
        assert str(caught.value) == message
    broken = fixed(torch.float32, (1.0, math.nan))
    with pytest.raises(NumericsError, match="NaN or infinity at step 1 in request 0"):
        verify(broken, [[3]], [[0, 1]])


def test_an_output_of_nothing_is_allowed():
    found = verify(tiny("qwen3"), ROWS[:1], [[]])
    assert found.ok
    assert found.tokens == 0

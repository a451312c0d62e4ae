"""The first piece of a prompt through PyTorch's fused attention, forced where no device has one."""

from types import SimpleNamespace

import pytest
import torch

from sfi_core.engine import attend
from tests.architectures import tiny
from tests.core.engine.test_triton_backend import PROMPTS, complete, tokens
from tests.covering import first
from tests.fakes import causal_mask, error_bound, plain_attention

B, H, G, T, D = 3, 2, 2, 20, 16


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "has_fused", lambda *_: True)


def piece(dtype: torch.dtype, count: tuple[int, ...]) -> tuple[SimpleNamespace, torch.Tensor]:
    query, key, value = (torch.randn(B, H, *group, T, D).to(dtype) for group in ((G,), (), ()))
    batch_pass = SimpleNamespace(count=count, prompts=tuple(row for row in range(B) if count[row]))
    return SimpleNamespace(new=(key, value), batch_pass=batch_pass, logit_options={"scale": 0.3}), query


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [(T, T, T), (7, T, 0)])
def test_each_request_attends_causally_to_its_own_tokens(dtype: torch.dtype, count: tuple[int, ...]):
    layer, query = piece(dtype, count)
    out = attend.attend_to_itself(layer, query)
    assert (out.shape, out.dtype) == ((B, H, G, T, D), dtype)
    for row, length in enumerate(count):
        assert (out[row, :, :, : T - length] == 0).all()
        if length:
            rows = slice(row, row + 1)
            part = query[rows, :, :, T - length :], *(x[rows, :, T - length :] for x in layer.new)
            expected, _ = plain_attention(*part, 0.3, visible=causal_mask(length, length))
            atol, _ = error_bound(*part, 0.3)
            eps = torch.finfo(dtype).eps
            ours = out[rows, :, :, T - length :].double()
            torch.testing.assert_close(ours, expected, rtol=2 * eps, atol=2 * atol)


@pytest.mark.parametrize(("chunk", "fused", "kernel"), first([(0, 3, 0), (40, 1, 3)]))
def test_a_ragged_batch_gets_the_references_tokens(forced, chunk: int, fused: int, kernel: int):
    """In pieces of 40 the longest prompt begins alone; the others' first piece is its second."""
    run, wanted = (complete(name, prefill_chunk=chunk, max_new_tokens=2) for name in ("triton", "torch"))
    assert tokens(run) == tokens(wanted)
    assert run.report.paths["sdpa.prompt"] == 2 * fused  # layers
    assert run.report.paths.get("triton.prefill_attention", 0) == 2 * kernel


def test_a_soft_cap_is_the_kernels(forced):
    options = {"model": tiny("gemma-2"), "max_new_tokens": 1}
    assert "sdpa.prompt" not in complete("triton", PROMPTS[2:], **options).report.paths


def test_a_device_without_a_fused_attention_takes_the_kernel():
    layer, query = piece(torch.bfloat16, (T, T, T))
    assert not attend.has_fused(query, *layer.new)

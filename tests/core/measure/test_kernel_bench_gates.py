"""The kernel benchmark's gates: what is wrong by a little is red."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from sfi_core.measure.kernel_bench import attention_cases, cases, data, gates
from sfi_core.measure.kernel_bench.data import SELECTOR, LayerData
from sfi_kernels.code_scan import code_scan
from sfi_kernels.selector import selector
from sfi_kernels.top_k import top_k
from tests.core.measure.conftest import CPU, one_of, tiny


@pytest.mark.parametrize(("dtype", "missing"), [("float32", "last"), ("float16", "sink"), ("bfloat16", "selected")])
def test_attention_that_misses_a_token_is_red(dtype, missing):
    """In bfloat16, where rounding hides one token in a hundred, four of them."""
    n = 4 if dtype == "bfloat16" else 1
    layer = LayerData(tiny(dtype=dtype), "torch", CPU)
    whole = layer.packed_index(layer.select(0.5), recent=True)
    expected = layer.textbook(whole)
    part = {"last": whole[..., :-n], "sink": whole[..., n:]}.get(
        missing, torch.cat([whole[..., :10], whole[..., 10 + n :]], -1)
    )
    wrong = layer.textbook(part)
    right = expected.out_BHGD.to(layer.key_BHTD.dtype)
    assert expected.error(right) <= 1 < expected.error(wrong.out_BHGD)


def test_a_running_sum_of_16k_terms_is_within_the_bound():
    """Eight terms at once onto sums that round toward zero: more than any order of float32 sums loses."""
    tokens, width = 16_384, 16
    query, key = 0.01 * torch.randn(1, 1, 1, width), torch.randn(1, 1, tokens, width)
    value = torch.rand(1, 1, tokens, width) + 0.1
    expected = gates.textbook(query, key, value, 1.0)
    weight_T = (query.double() @ key.double().mT)[0, 0, 0].softmax(0)
    terms = (weight_T[:, None] * value[0, 0].double()).view(-1, 8, width).sum(1).numpy()
    running = np.zeros(width, np.float32)
    for term in terms:
        exact = running + term
        rounded = exact.astype(np.float32)
        running = np.where(rounded > exact, np.nextafter(rounded, np.float32(0)), rounded)
    lost = torch.from_numpy(running).view(1, 1, 1, width)
    roundings = float(((expected.out_BHGD - lost) / expected.out_BHGD).max()) / torch.finfo(torch.float32).eps
    assert roundings > 100
    assert expected.error(lost) <= 1


def test_a_tie_that_the_higher_position_wins_is_red():
    score = torch.tensor([[[1.0, 2.0, 2.0, 0.0]]])
    assert gates.top_k_error(score, top_k(score, 1)) == 0
    assert gates.top_k_error(score, torch.tensor([[[2]]], dtype=torch.int32)) > 1


def test_a_scores_error_of_a_thousandth_is_red():
    layer = LayerData(tiny(), "torch", CPU)
    inputs = layer.evidence_BHGWT, layer.norm_BHT, layer.allowed_BT
    score, weight = selector.reference(*inputs, **asdict(SELECTOR))

    def error(score, weight):
        return gates.selector_error((score, weight), *inputs, SELECTOR)

    assert error(score, weight) <= 1
    off = score.clone()
    off[1, 0, 77] += 1e-3
    assert error(off, weight) > 1
    assert error(score, weight + 1e-2) > 1
    outside = score.clone()
    outside[0, 0, 149] = 0.0
    assert error(outside, weight) > 1
    assert torch.equal(score, layer.score_BHT)


def test_a_packed_row_a_position_or_a_count_that_is_wrong_is_red():
    layer = LayerData(tiny(ops=("pack",)), "torch", CPU)
    packing = one_of(layer, "pack")
    assert packing.error() == 0
    selected = layer.selected[0.5]
    index = layer.packed_index(selected)

    def error() -> float:
        return gates.pack_error(selected.segment, layer.key_BHTD, layer.value_BHTD, index)

    for tensor in selected.segment:
        original = tensor.clone()
        tensor.view(-1)[-1] += 1
        assert error() > 1
        tensor.copy_(original)
    assert error() == 0


def test_mixed_heads_that_read_like_the_others_are_red():
    layer = LayerData(tiny(ops=("mixed_heads",)), "torch", CPU)
    mixed = one_of(layer, "mixed_heads")
    assert mixed.error() <= 1
    for whole in (None, layer.packed_index(layer.selected[0.5], recent=True)):
        assert layer.textbook(whole).error(mixed.call()) > 1


def test_a_recall_from_the_wrong_place_is_red():
    """The count of fetched rows and each row, from the host or the old segment, are compared."""
    recalled = one_of(LayerData(tiny(ops=("recall",)), "torch", CPU), "recall")
    assert recalled.error() == 0
    pages, *_, fetched = recalled.call.args
    assert (fetched == 13).all()  # of 51 selected rows
    pages.fill_(torch.nan)
    assert recalled.error() > 1


@pytest.mark.parametrize("fault", ["a key not coded", "a key not chosen", ""])
def test_a_step_of_codescan_that_misses_a_key_is_red(monkeypatch, fault: str):
    def faulty(query, key, value, table, plan, codes, position, length, **options):
        choice = code_scan.reference(query, key, value, table, plan, codes, position, length, **options)
        if fault == "a key not coded":
            codes.word_BHWT[..., -1] = 0
        if fault == "a key not chosen":
            length -= 1
        return choice

    monkeypatch.setattr(attention_cases.code_scan, "on", lambda _: faulty)
    error = one_of(LayerData(tiny(ops=("codescan",)), "torch", CPU), "codescan").error()
    assert error > 1 if fault else error <= 1


@pytest.mark.parametrize("name", ["prompt", "prompt.piece"])
def test_a_prompt_whose_last_or_next_token_is_missed_is_red(monkeypatch, name: str):
    """The keys that a query sees end with its own."""
    layer = LayerData(tiny(ops=("prompt",)), "torch", CPU)
    assert one_of(layer, name).error() <= 1
    reference = attention_cases.dense_attention.reference

    class Shorter:
        def on(self, backend):
            return lambda query, *pages_and_length, **options: reference(
                query, *pages_and_length[:3], pages_and_length[3] - 1, **options
            )

    monkeypatch.setattr(attention_cases, "dense_attention", Shorter())
    assert one_of(layer, name).error() > 1


@pytest.mark.parametrize("mistake", ["another query's output", "another query's evidence"])
def test_a_verification_that_mixes_up_its_queries_is_red(monkeypatch, mistake: str):
    layer = LayerData(tiny(), "torch", CPU)
    reference = data.decode_attention.reference

    class Mixed:
        def on(self, backend):
            return self.attend

        def attend(self, *operands, **options):
            result = reference(*operands, **options)
            if mistake == "another query's evidence":
                mixed = (operands[0].roll(1, 3), *operands[1:])
                return result._replace(logits_BHGWT=reference(*mixed, **options).logits_BHGWT)
            return result._replace(out_BHGWE=result.out_BHGWE.roll(1, 3))

    ours = [*attention_cases.verify(layer, 1.0)]
    assert [variant.form for variant in ours] == ["1 query", "5 queries", "9 queries", "16 queries", "17 queries"]
    assert max(variant.error() for variant in ours) <= 1
    monkeypatch.setattr(data, "decode_attention", Mixed())
    assert min(variant.error() for variant in ours[1:]) > 1


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "silu_mul", "project"])
def test_a_fused_op_that_is_one_percent_off_is_red(monkeypatch, name: str):
    op = {"rms_norm": "add_rms_norm"}.get(name, name)
    formula = getattr(cases, op).reference

    class Off:
        reference = staticmethod(formula)

        def on(self, backend):
            def off(*args):
                out = formula(*args)
                return tuple(x * 1.01 for x in out) if isinstance(out, tuple) else out * 1.01

            return off

    def error() -> float:
        return one_of(LayerData(tiny(ops=(name,)), "torch", CPU), name).error()

    assert error() <= 1
    monkeypatch.setattr(cases, op, Off())
    assert error() > 1


def test_a_row_that_is_never_appended_is_red(monkeypatch):
    layer = LayerData(tiny(ops=("append",)), "torch", CPU)
    before = layer.key_BHTD.clone()
    assert one_of(layer, "append").error() <= 1
    assert torch.equal(before, layer.key_BHTD)

    class Nothing:
        def on(self, backend):
            return lambda *_: None

    monkeypatch.setattr(cases, "append", Nothing())
    assert one_of(layer, "append").error() > 1

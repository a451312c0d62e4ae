"""The kernel benchmark's gates: what is wrong by a little is red."""

from dataclasses import asdict

import pytest
import torch

from sfi_core.measure.kernel_bench import (
    codescan_variant,
    fused_variants,
    gates,
    prompt_variants,
    step_variants,
    variants,
)
from sfi_core.measure.kernel_bench.data import allowed, evidence_logits, layer_data, norms, scores, select
from sfi_core.measure.kernel_bench.variants import KernelVariants
from sfi_core.settings.parts import SelectorConfig
from sfi_kernels.code_scan import code_scan
from sfi_kernels.selector import selector
from sfi_kernels.top_k import top_k
from tests.core.measure.tiny_kernels import CPU, tiny


@pytest.mark.parametrize(("dtype", "missing"), [("float32", "last"), ("float16", "sink"), ("bfloat16", "selected")])
def test_attention_that_misses_a_token_is_red(dtype, missing):
    """In bfloat16, where rounding hides one token in a hundred, four of them."""
    n = 4 if dtype == "bfloat16" else 1
    settings = tiny(dtype=dtype)
    data = layer_data(settings, CPU, one_page=True)
    index = select(settings, data, 0.5).index_BHK
    whole = gates.attended(index, 4, 130, 150)
    expected = gates.textbook(data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale, whole)
    part = {"last": whole[..., :-n], "sink": whole[..., n:]}.get(
        missing, torch.cat([whole[..., :10], whole[..., 10 + n :]], -1)
    )
    wrong = gates.textbook(data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale, part)
    right = expected.out_BHGD.to(settings.torch_dtype)
    assert expected.error(right) <= 1 < expected.error(wrong.out_BHGD)


def test_a_tie_that_the_higher_position_wins_is_red():
    score = torch.tensor([[[1.0, 2.0, 2.0, 0.0]]])
    assert gates.top_k_error(score, top_k(score, 1)) == 0
    assert gates.top_k_error(score, torch.tensor([[[2]]], dtype=torch.int32)) > 1


def test_a_scores_error_of_a_thousandth_is_red():
    settings = tiny()
    data = layer_data(settings, CPU, one_page=True)
    logits, inside = evidence_logits(settings, data), allowed(settings, data)
    norm, options = norms(settings, data), asdict(SelectorConfig())
    score, weight = selector.reference(logits, norm, inside, **options)

    def error(score, weight):
        return gates.selector_error((score, weight), logits, norm, inside, options)

    assert error(score, weight) <= 1
    off = score.clone()
    off[1, 0, 77] += 1e-3
    assert error(off, weight) > 1
    assert error(score, weight + 1e-2) > 1
    outside = score.clone()
    outside[0, 0, 149] = 0.0
    assert error(outside, weight) > 1
    assert torch.equal(score, scores(settings, data, logits))


def test_a_packed_row_a_position_or_a_count_that_is_wrong_is_red():
    settings = tiny(ops=("pack",))
    made = KernelVariants(settings, "torch", CPU)
    packing = next(one for one in made.build() if one.name == "pack")
    assert packing.error() == 0
    selected = made.selected[0.5]
    index = gates.attended(selected.index_BHK, settings.sink, 0, 0)
    data = made.data
    for tensor in selected.segment:
        kept = tensor.clone()
        tensor.view(-1)[-1] += 1
        assert gates.pack_error(selected.segment, data.key_BHTD, data.value_BHTD, index) > 1
        tensor.copy_(kept)
    assert gates.pack_error(selected.segment, data.key_BHTD, data.value_BHTD, index) == 0


def test_mixed_heads_that_read_like_the_others_are_red():
    """A head that should read everything, or sparsely, and does not."""
    settings = tiny(ops=("mixed_heads",))
    made = KernelVariants(settings, "torch", CPU)
    mixed = next(one for one in made.build() if one.name == "mixed_heads")
    assert mixed.error() <= 1
    for whole in (None, gates.attended(made.selected[0.5].index_BHK, 4, 130, 150)):
        agree = gates.textbook(made.data.query_BHGD, made.data.key_BHTD, made.data.value_BHTD, settings.scale, whole)
        assert agree.error(mixed.call()) > 1


def test_a_recall_from_the_wrong_place_is_red():
    """The count of fetched rows and each row, from the host or the old segment, are compared."""
    made = KernelVariants(tiny(ops=("recall",)), "torch", CPU)
    recalled = next(one for one in made.build() if one.name == "recall")
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

    monkeypatch.setattr(codescan_variant.code_scan, "fastest", lambda *_: faulty)
    made = KernelVariants(tiny(ops=("codescan",)), "torch", CPU).build()
    error = next(one for one in made if one.name == "codescan").error()
    assert error > 1 if fault else error <= 1


@pytest.mark.parametrize("name", ["prompt", "prompt.piece"])
def test_a_prompt_whose_last_or_next_token_is_missed_is_red(monkeypatch, name: str):
    """The keys that a query sees end with its own."""
    settings = tiny(ops=("prompt",))
    made = KernelVariants(settings, "torch", CPU)
    ours = next(one for one in made.build() if one.name == name)
    assert ours.error() <= 1
    reference = prompt_variants.dense_attention.reference

    class Shorter:
        def on(self, backend):
            return lambda query, *pages_and_length, **options: reference(
                query, *pages_and_length[:3], pages_and_length[3] - 1, **options
            )

    monkeypatch.setattr(prompt_variants, "dense_attention", Shorter())
    assert ours.error() > 1


@pytest.mark.parametrize("mistake", ["another query's output", "another query's evidence"])
def test_a_verification_that_mixes_up_its_queries_is_red(monkeypatch, mistake: str):
    settings = tiny(ops=("verify",))
    reference = step_variants.decode_attention.reference

    class Mixed:
        def on(self, backend):
            return self.attend

        def attend(self, *operands, **options):
            result = reference(*operands, **options)
            if mistake == "another query's evidence":
                mixed = (operands[0].roll(1, 3), *operands[1:])
                return result._replace(logits_BHGWT=reference(*mixed, **options).logits_BHGWT)
            return result._replace(out_BHGWE=result.out_BHGWE.roll(1, 3))

    data = layer_data(settings, CPU, one_page=True)
    ours = [*step_variants.verify_variants(settings, data, "torch")]
    assert [one.form for one in ours] == ["1 query", "5 queries", "8 queries", "9 queries", "17 queries"]
    assert max(one.error() for one in ours) <= 1
    monkeypatch.setattr(step_variants, "decode_attention", Mixed())
    wrong = [*step_variants.verify_variants(settings, data, "torch")]
    assert min(one.error() for one in wrong[1:]) > 1


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "silu_mul"])
def test_a_fused_op_that_is_one_percent_off_is_red(monkeypatch, name: str):
    op = {"rms_norm": "add_rms_norm"}.get(name, name)
    own = getattr(fused_variants, op).reference

    class Off:
        def on(self, backend):
            def off(*args):
                out = own(*args)
                return tuple(x * 1.01 for x in out) if isinstance(out, tuple) else out * 1.01

            return off

    def error() -> float:
        made = KernelVariants(tiny(ops=(name,)), "torch", CPU).build()
        return next(one for one in made if one.name == name).error()

    assert error() <= 1
    monkeypatch.setattr(fused_variants, op, Off())
    assert error() > 1


def test_a_row_that_is_never_appended_is_red(monkeypatch):
    made = KernelVariants(tiny(ops=("append",)), "torch", CPU)
    before = made.data.key_BHTD.clone()
    assert next(one for one in made.build() if one.name == "append").error() <= 1
    assert torch.equal(before, made.data.key_BHTD)

    class Nothing:
        def on(self, backend):
            return lambda *_: None

    monkeypatch.setattr(variants, "append", Nothing())
    assert next(one for one in made.build() if one.name == "append").error() > 1

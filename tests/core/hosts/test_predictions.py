"""Choosing half a layer early, by a query that is predicted from the residual before the last MLP."""

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, SfiConfig
from sfi_core.errors import ConfigError
from sfi_core.policies.built_in.codescan import CodeScan
from sfi_core.state.side_stream import SideStream
from sfi_kernels.code_scan import KEPT
from tests.architectures import prompts, tiny
from tests.core.conftest import tiny_qwen3
from tests.core.engine.test_graphs import same, told
from tests.covering import first
from tests.fake_graph import FakeRecorder, LateSide, use_tensors
from tests.fakes import Listener

HALF = {"ahead": "half"}
CONFIG = SfiConfig(sink=2, recent=5, budget=6, trigger_policy="never").replace(
    codescan=HALF, freekv={**HALF, "page": 4}
)
PROMPTS = [list(range(5, 29)), list(range(3, 19))]
NEW = 5


def run(model, policy="codescan", config=CONFIG, rows=PROMPTS, **options):
    observer, new = Listener(), options.pop("new", NEW)
    result = sfi_core.generate(
        model, None, rows, config=config, policy=policy, max_new_tokens=new, stop_token_ids=(), observers=[observer],
        page_size=16, max_batch=options.pop("max_batch", None), engine=EngineOptions(**options),
    )  # fmt: skip
    return result.report, observer


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_the_query_is_the_layer_s_own_of_the_residual_before_the_last_mlp(monkeypatch):
    """By hand from the hidden states of the model; the queries that a basis is learned from stay the true ones."""
    model, residuals, given, true = tiny_qwen3(), [], [], []
    layer, choose, follow = model.model.layers[1], CodeScan.choose, CodeScan.follow
    model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda _, args: residuals.append(args[0].clone())
    )

    def seen(policy, batch):
        given.append((batch.early, batch.query_BHGD.clone()))
        return choose(policy, batch)

    def followed(policy, batch, pseudo):
        follow(policy, batch, pseudo)
        place = (batch.descriptor.length_B[0] - 1) % KEPT
        true.append((batch.query_BHGD[0], batch.kept.recent_BHXGD[0, :, place].clone()))

    monkeypatch.setattr(CodeScan, "choose", seen)
    monkeypatch.setattr(CodeScan, "follow", followed)
    report, observer = run(model, rows=PROMPTS[:1])
    attention, early = layer.self_attn, [query for is_early, query in given if is_early]
    assert [is_early for is_early, _ in given] == [False, True] * (NEW - 1), "the first layer has no layer before it"
    for step, (query_1HGD, residual_1TI) in enumerate(zip(early, residuals[1 - NEW :], strict=True)):
        row_I = normed(residual_1TI[0, -1], layer.input_layernorm.weight)
        query_XD = normed((attention.q_proj.weight @ row_I).view(4, 8), attention.q_norm.weight)
        angle = (len(PROMPTS[0]) + step) * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        left, right = query_XD.chunk(2, -1)
        by_hand = torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)
        torch.testing.assert_close(query_1HGD.view(4, 8), by_hand, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(query_1HGD[0], true[step][0], atol=1e-2), "not the step's own"
        assert torch.equal(*true[step])
    reasons = {(event.layer, event.reason) for event in observer.selections if event.step}
    assert reasons == {(0, ""), (1, "predicted")}
    assert report.paths["choice.early"] == NEW - 1
    assert report.not_compiled.startswith("codescan.ahead=half")


@pytest.mark.parametrize("policy", ["codescan", "freekv"])
def test_what_is_chosen_early_is_close_to_what_the_step_s_query_chooses(policy):
    """Where the residual is the layer's input: the layer before has an MLP that adds nothing."""
    model = tiny_qwen3()
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    config = CONFIG.replace(freekv={"first_layer_dense": False, "tau": 1.0})  # every head corrected
    off = config.replace(codescan={"ahead": "off"}, freekv={"ahead": "off"})
    (report, heard), (expected, _) = (run(model, policy, variant) for variant in (config, off))
    assert {event.reason for event in heard.selections if event.step and event.layer} == {"predicted"}
    assert [r.token_ids for r in report.requests] == [r.token_ids for r in expected.requests]


@pytest.fixture
def recorder(monkeypatch) -> FakeRecorder:
    use_tensors(monkeypatch)
    recorder = FakeRecorder()
    recorder.install(monkeypatch)
    return recorder


TIERS = {"kv_device_budget": "1MB", "kv_page": 16, "config": CONFIG.replace(recent=16, budget=3)}
CASES = {
    "codescan": {},
    "codescan, fused": {"fused": True},
    "freekv": {"policy": "freekv"},
    "windows": {"model": "gemma-3"},
    "joining": {"rows": [*PROMPTS, PROMPTS[1][:14]], "max_batch": 2},
    "lossless": {"lossless": True},
    "codescan, two tiers": TIERS,
    "freekv, two tiers": {"policy": "freekv", **TIERS},
}


@pytest.mark.parametrize("case", first(CASES, 3))
def test_replayed_steps_choose_beside_the_layer_before(recorder, monkeypatch, case):
    """The side branch of the graph comes as late as its order allows."""
    options = dict(CASES[case])
    name = options.pop("model", None)
    model = tiny(name) if name else tiny_qwen3()
    eager = run(model, backend="triton", graphs=False, **options)
    side = LateSide(recorder)
    monkeypatch.setattr("sfi_core.engine.run.side_of", lambda *_, **__: side)
    graphed = run(model, backend="triton", graphs=True, **options)
    if "kv_device_budget" in options:  # whose rows arrive half a layer early too
        settings = {name: options[name] for name in options if name in ("policy", "config")}
        whole = run(model, backend="triton", graphs=False, **settings)
        assert [r.token_ids for r in eager[0].requests] == [r.token_ids for r in whole[0].requests]
        assert eager[0].kv_tiers.recalled_bytes == graphed[0].kv_tiers.recalled_bytes > 0
    assert eager[0].paths["choice.early"] == graphed[0].paths["choice.early"] > 0
    assert side.late
    if "lossless" in options:
        assert [r.token_ids for r in graphed[0].requests] == [r.token_ids for r in eager[0].requests]
        assert told(graphed[1]) == told(eager[1])
    else:
        same(graphed, eager)


def test_a_layer_that_does_not_wait_reads_another_step_s_choice(recorder, monkeypatch):
    model = tiny_qwen3()
    eager = run(model, backend="triton", graphs=False)
    side = LateSide(recorder)
    monkeypatch.setattr("sfi_core.engine.run.side_of", lambda *_, **__: side)
    monkeypatch.setattr(LateSide, "wait", SideStream.wait)
    graphed = run(model, backend="triton", graphs=True)
    assert told(graphed[1])[2] != told(eager[1])[2]


def test_what_cannot_be_predicted_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"^codescan\.ahead must be off with GraniteMoeHybrid\w*, whose .*, got half$"
    ):
        run(tiny("granite-4"), rows=prompts(12))

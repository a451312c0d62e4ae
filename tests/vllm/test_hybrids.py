"""Full attention, which sfi manages, beside states and chunks, which vLLM keeps in KV-cache groups of their own.

Granite 4, Falcon-H1 and Nemotron-H run with vLLM's own kernels for CPUs, and so does Qwen3-Next in bfloat16. In
float32 `plain_delta_rule` stands for the kernel of its linear attention.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, MambaSpec

from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.shapes import layer_shapes as transformers_shapes
from sfi_core.hosts.vllm.backend import SfiCpuBackend
from sfi_core.hosts.vllm.names import check_model, full_group, layer_shapes, settings_of
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from tests.architectures import BY_LABEL
from tests.vllm import engines
from tests.vllm.plain_delta_rule import stand_in
from tests.vllm.test_models import HOLDS_ALL, SELECTS, prompts
from tests.vllm.test_traces import traced

stand_in()
WIDE = {"hidden_size": 128, "head_dim": 32}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128}
MODELS: dict[str, dict[str, Any]] = {
    "granite-4": MAMBA2,
    "falcon-h1": MAMBA2,  # a state beside attention in every layer
    "qwen3-next": {},
    # a layer of an MLP alone; vLLM does not know transformers' limits of a time step
    "nemotron-h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"], "num_hidden_layers": 5,
        "mamba_num_heads": 4, "mamba_head_dim": 32,
    },
    "llama-4": {"attention_chunk_size": 64, "num_experts_per_tok": 1},
}  # fmt: skip
# what vLLM computes like transformers, to the last near tie
SAME = ("granite-4", "falcon-h1", "qwen3-next")
CACHES = ("qwen3-next", "llama-4")  # vLLM's kernel of Mamba 2 for CPUs keeps no state in the middle of a prompt


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """Make a tiny model, and the options of its engine."""
    architecture = BY_LABEL[label := request.param]
    model = replace(architecture, settings={**architecture.settings, **WIDE, **MODELS[label]}).build()
    model.save_pretrained(tmp_path / label)
    return model, {
        "model": str(tmp_path / label), "skip_tokenizer_init": True, "max_model_len": 512, **engines.SMALL_BATCH,
        "max_num_batched_tokens": 200, "enable_prefix_caching": label in CACHES,
    }  # fmt: skip


def settings(chosen: dict[str, Any]) -> dict[str, Any]:
    return chosen | {"trigger_token_ids": tuple(chosen["trigger_token_ids"])}


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("tiny", MODELS, indirect=True)
def test_tokens_are_vllm_s_or_generate_s(tiny: Any, request: pytest.FixtureRequest):
    """Seven prompts of 3 to 300 tokens in pieces of at most 200, four at once: the others join a running batch."""
    (model, options), label = tiny, request.node.callspec.params["tiny"]
    with engines.engine(**options) as llm:
        plain = engines.tokens(llm, prompts(), detokenize=False)
    with engines.engine(HOLDS_ALL, **options) as llm:
        outputs = engines.ask(llm, prompts(), detokenize=False)
        assert ids_of(outputs) == plain
        assert all(engines.told(o)["fast_steps"] > engines.told(o)["slow_steps"] for o in outputs)
        engines.assert_nothing_is_left(llm)
    with engines.engine(SELECTS, **options) as llm:
        outputs = engines.ask(llm, prompts(), detokenize=False)
        assert all(engines.told(o)["read_ratio"] < 0.8 for o in outputs if len(o.prompt_token_ids) >= 64)
        assert ids_of(outputs) != plain
    if label in SAME:
        engines.assert_same(outputs, engines.reference(prompts(), 40, settings(SELECTS), model=model))


def turns(llm: LLM) -> list[RequestOutput]:
    """Ask for a prompt, go on from its answer, and ask for the prompt again."""
    first = engines.ask(llm, [prompts()[4]], detokenize=False)
    second = engines.ask(llm, [prompts()[4] + ids_of(first)[0] + prompts()[1]], detokenize=False)
    return [*first, *second, *engines.ask(llm, [prompts()[4]], detokenize=False)]


@pytest.mark.parametrize("tiny", CACHES, indirect=True)
def test_cached_prefixes_bring_their_states(tiny: Any, request: pytest.FixtureRequest):
    """The second turn and the same prompt find nine blocks of it or more, and the state behind them."""
    (model, options), label = tiny, request.node.callspec.params["tiny"]
    with engines.engine(**options) as llm:
        plain = turns(llm)
    with engines.engine(HOLDS_ALL, **options) as llm:
        outputs = turns(llm)
        assert ids_of(outputs) == ids_of(plain)
        cached = [o.num_cached_tokens for o in outputs]
        assert cached == [o.num_cached_tokens for o in plain]
        assert cached[1] >= cached[2] == 288
        engines.assert_nothing_is_left(llm)
    with engines.engine(SELECTS, **options) as llm:
        first, _, again = turns(llm)
        assert ids_of([first]) == ids_of([again])
        assert engines.told(again)["read_ratio"] < 0.4
        if label in SAME:
            engines.assert_same(
                [first, again], engines.reference([prompts()[4]], 40, settings(SELECTS), model=model) * 2
            )


@pytest.mark.parametrize("tiny", ["granite-4", "qwen3-next"], indirect=True)
def test_preempted_and_dense_requests_keep_their_states(tiny: Any):
    """Two of four requests have a slot; all lose their blocks twice, in their prompts or while they decode."""
    _, options = tiny
    with engines.engine(**options) as llm:
        plain = engines.tokens(llm, prompts(), detokenize=False)
    with engines.engine({**HOLDS_ALL, "slots": 2}, **options) as llm:
        core, done, steps = llm.llm_engine, {}, 0
        for number, prompt in enumerate(prompts()):
            parameters = SamplingParams(**engines.GREEDY, max_tokens=40, detokenize=False)
            core.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
        while core.has_unfinished_requests():
            done |= {int(output.request_id): output for output in core.step() if output.finished}
            steps += 1
            if steps in {5, 30}:
                core.reset_prefix_cache(reset_running_requests=True)
        outputs = [done[number] for number in sorted(done)]
        assert ids_of(outputs) == plain
        assert sum(engines.told(o)["preempted"] for o in outputs) > 4
        dense = [engines.told(o)["dense_steps"] for o in outputs]
        assert 0 in dense
        assert any(dense)
        engines.assert_nothing_is_left(llm)


def errors(model: Any, outputs: list[RequestOutput]) -> torch.Tensor:
    """Return how far each reported log probability is from a model's own, of the same tokens."""
    distances = []
    for output in outputs:
        start, (answer,) = len(output.prompt_token_ids) - 1, ids_of([output])
        with torch.no_grad():
            log_TV = model(torch.tensor([output.prompt_token_ids + answer])).logits[0].log_softmax(-1)
        for place, told_of in enumerate(output.outputs[0].logprobs, start):
            distances += [abs(logprob.logprob - float(log_TV[place, token])) for token, logprob in told_of.items()]
    return torch.tensor(distances)


def test_native_linear_attention_is_as_near_to_float32_as_vllm_s(tmp_path: Path):
    """In bfloat16 another order of sums turns near ties, of tokens and of experts, so each answer is judged alone.

    Every token takes all experts: a turned choice of some would move log probabilities by 1 and more in vLLM alone.
    """
    architecture = BY_LABEL["qwen3-next"]
    native = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # what the kernel takes
    every = {"num_experts": 4, "num_experts_per_tok": 4}
    replace(architecture, settings={**architecture.settings, **WIDE, **native, **every}).build().save_pretrained(
        tmp_path
    )
    options = {
        "model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 4,
        "max_num_batched_tokens": 320, "dtype": "bfloat16",
    }  # fmt: skip
    with engines.engine(**options) as llm:
        plain = engines.ask(llm, prompts(), detokenize=False, logprobs=8)
    with engines.engine(HOLDS_ALL, **options) as llm:
        worker = engines.engine_of_process()
        assert worker.store.page_size > 128  # so large that a state fits into a block
        outputs = engines.ask(llm, prompts(), detokenize=False, logprobs=8)
    assert all(engines.told(o)["fast_steps"] > engines.told(o)["slow_steps"] for o in outputs)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float().eval()
    ours, theirs = errors(exact, outputs), errors(exact, plain)
    assert len(ours) >= 7 * 40 * 8
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.max() < 2 * theirs.max() < 1


def test_pages_may_be_smaller_than_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where a kernel takes no blocks of 96 tokens, vLLM splits them; those of one length are known by their blocks."""
    replace(BY_LABEL["llama"], settings=WIDE).build().save_pretrained(tmp_path)
    options = {
        "model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 512, **engines.SMALL_BATCH,
        "block_size": 96,
    }  # fmt: skip
    alike = [*(prompt[:100] for prompt in prompts()[3:6]), *prompts()]
    with engines.engine(SELECTS, **options) as llm:
        wanted = [(ids, engines.told(o)) for o in engines.ask(llm, alike, detokenize=False) for ids in ids_of([o])]
    monkeypatch.setattr(SfiCpuBackend, "get_supported_kernel_block_sizes", staticmethod(lambda *_: [32]))
    with engines.engine(SELECTS, **options) as llm:
        worker = engines.engine_of_process()
        assert (worker.store.page_size, worker.split) == (32, 3)
        assert [
            (ids, engines.told(o)) for o in engines.ask(llm, alike, detokenize=False) for ids in ids_of([o])
        ] == wanted
        engines.assert_nothing_is_left(llm)


@pytest.mark.parametrize("tiny", ["falcon-h1", "nemotron-h"], indirect=True)
def test_a_trace_knows_the_states(tiny: Any, tmp_path: Path):
    model, options = tiny
    with traced({**SELECTS, "trace": str(tmp_path / "run"), "trace_audit": 4}, **options) as llm:
        core = llm.llm_engine.engine_core.engine_core
        ours = layer_shapes(core.scheduler.kv_cache_config, core.vllm_config)
        assert engines.planner_of(llm).row_bytes == sum(shape.row_bytes for shape in ours if shape.window is None)
        engines.ask(llm, prompts(), detokenize=False)
    theirs = transformers_shapes(model)
    assert [replace(shape, state_bytes=0) for shape in ours] == [replace(shape, state_bytes=0) for shape in theirs]
    assert [shape.state_bytes > 0 for shape in ours] == [shape.state_bytes > 0 for shape in theirs]
    trace = Trace.open(tmp_path / "run")
    assert check(trace)["problems"] == []
    full = {layer for layer, shape in enumerate(ours) if shape.window is None}
    assert {row["layer"] for row in trace.table("supports").to_pylist()} == full


@pytest.mark.parametrize("tiny", ["granite-4"], indirect=True)
def test_prefixes_of_mamba_2_are_refused_on_a_cpu(tiny: Any):
    _, options = tiny
    wanted = r"^enable_prefix_caching must be off for Mamba 2 on a CPU, [^\n]*; add --no-enable-prefix-caching$"
    with pytest.raises(ConfigError, match=wanted), engines.engine(SELECTS, **options | {"enable_prefix_caching": True}):
        pass


@pytest.mark.parametrize(
    ("tiny", "layers"), [("granite-4", 2), ("falcon-h1", 4), ("qwen3-next", 2), ("nemotron-h", 2)], indirect=["tiny"]
)
def test_slots_are_counted_for_full_attention_alone(tiny: Any, layers: int):
    """Before a weight is read: 4 slots of 36 rows, each 2 heads' keys, values and positions."""
    _, options = tiny
    extra = {**SELECTS, "slots_memory": 1e-9}
    transfer = {"kv_connector": "SfiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = EngineArgs(**options, dtype="float32", kv_transfer_config=transfer).create_engine_config()
    need = 4 * layers * (4 + 32) * 2 * (32 + 32 + 1) * 4
    with pytest.raises(ConfigError, match=f"^budget 32 for 4 slots takes {need / 1e9:.6g} GB "):
        check_model(config, settings_of(config))


FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, head_size_v=32, dtype=torch.float32)
STATE = MambaSpec(block_size=32, shapes=((64, 64),), dtypes=(torch.float32,))
CROSS = CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)


@pytest.mark.parametrize(
    ("layers", "told_of"),
    [
        ([STATE, FULL, STATE, STATE, FULL, STATE], None),
        ([FULL, FULL, STATE, FULL, FULL], "got 4: 0 and 1 and 3 and 4$"),
        ([STATE, STATE], "got 0$"),
        ([FULL, CROSS], "with a CrossAttentionSpec, that of 1$"),
    ],
    ids=["one", "several", "none", "unknown"],
)
def test_groups_that_vllm_makes(layers: list[Any], told_of: str | None):
    """Of layers by kind, as vLLM's own code groups them."""
    specs = {str(layer): spec for layer, spec in enumerate(layers)}
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    if told_of is None:
        assert full_group(groups) == (2, ["1", "4"])
        return
    with pytest.raises(ConfigError, match=told_of):
        full_group(groups)

"""A budget that holds every context: the tokens are vLLM's own, whatever a server meets."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm import engines


def eleven(llm: LLM) -> Any:
    prompts, limits = engines.ragged()
    return engines.tokens(llm, prompts, max_tokens=limits)


def short_prompts(llm: LLM) -> Any:
    """Below a block and below the sinks, a block exactly, two blocks; twice, so that all are cached."""
    ids = engines.example_ids()
    prompts = [ids[:1], ids[:3], ids[:32], ids[:64], ids[:65]]
    return engines.tokens(llm, prompts), engines.tokens(llm, prompts)


def same_prompt_at_once(llm: LLM) -> Any:
    ids = engines.example_ids()
    return engines.tokens(llm, [ids[:640], ids[:640], ids[:641], ids[:32], ids[:32]])


def second_turn(llm: LLM) -> Any:
    """Over a cached answer."""
    first = engines.example_ids()[:700]
    answer = engines.tokens(llm, [first], max_tokens=70)[0]
    last = engines.ask(llm, [first + answer + engines.example_ids()[700:740]])[0]
    assert last.num_cached_tokens >= 736  # 24 blocks lie before the new tokens
    return answer, list(last.outputs[0].token_ids)


def several_samples(llm: LLM) -> Any:
    parameters = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=30)
    whole = llm.generate([{"prompt_token_ids": engines.example_ids()[:700]}], parameters, use_tqdm=False)
    return [list(sample.token_ids) for sample in whole[0].outputs]


def stop_string(llm: LLM) -> Any:
    out = engines.ask(llm, [engines.example_ids()[:500]], max_tokens=80, stop=["."])[0].outputs[0]
    assert out.finish_reason == "stop"
    return list(out.token_ids), out.text


def structured_output(llm: LLM) -> Any:
    wanted = StructuredOutputsParams(choice=["the northern wharf", "the snowy temple"])
    options = {"max_tokens": 40, "structured_outputs": wanted, "ignore_eos": False}
    out = engines.ask(llm, [engines.example_ids()[:400]], **options)[0].outputs[0]
    assert out.text in {"the northern wharf", "the snowy temple"}
    return list(out.token_ids)


SCENARIOS: dict[str, Callable[[LLM], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        eleven,
        short_prompts,
        same_prompt_at_once,
        second_turn,
        several_samples,
        stop_string,
        structured_output,
    )
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """vLLM's own tokens, scenario by scenario."""
    with engines.engine(**engines.SMALL_BATCH) as llm:
        return {name: scenario(llm) for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module")
def with_sfi(plain: dict[str, Any]) -> dict[str, Any]:
    """The same with sfi; after each scenario nothing is left of its requests."""
    with engines.engine(engines.HOLDS_ALL, **engines.SMALL_BATCH) as llm:
        results = {}
        for name, scenario in SCENARIOS.items():
            results[name] = scenario(llm)
            engines.assert_nothing_is_left(llm)
        results["report"] = engines.told(engines.ask(llm, [engines.example_ids()[:640]], max_tokens=60)[0])
        return results


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_are_vllm_s_own(with_sfi: dict[str, Any], plain: dict[str, Any], name: str):
    assert with_sfi[name] == plain[name]


def test_most_steps_were_fast(with_sfi: dict[str, Any]):
    report = with_sfi["report"]
    assert report["fast_steps"] > 2 * report["slow_steps"]


def test_preempted_requests_give_vllm_s_own_tokens(plain: dict[str, Any]):
    """Whatever runs loses its blocks three times, in its prompt or while it decodes."""
    prompts, limits = engines.ragged()
    with engines.engine(engines.HOLDS_ALL, **engines.SMALL_BATCH) as llm:
        core, done, steps = llm.llm_engine, {}, 0
        for number, (prompt, most) in enumerate(zip(prompts, limits, strict=True)):
            parameters = SamplingParams(**engines.GREEDY, max_tokens=most)
            core.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
        while core.has_unfinished_requests():
            done |= {int(output.request_id): output for output in core.step() if output.finished}
            steps += 1
            if steps in {9, 30, 60}:
                core.reset_prefix_cache(reset_running_requests=True)
        outputs = [done[number] for number in sorted(done)]
        assert [list(o.outputs[0].token_ids) for o in outputs] == plain["eleven"]
        assert sum(engines.told(o)["preempted"] for o in outputs) > 6
        assert sum(engines.told(o)["reasons"].get("resumed", 0) for o in outputs) > 3
        engines.assert_nothing_is_left(llm)


def test_slots_for_some_requests_leave_the_others_dense(plain: dict[str, Any]):
    prompts, limits = engines.ragged()
    with engines.engine({**engines.HOLDS_ALL, "slots": 2}, **engines.SMALL_BATCH) as llm:
        outputs = engines.ask(llm, prompts, max_tokens=limits)
        assert [list(o.outputs[0].token_ids) for o in outputs] == plain["eleven"]
        dense = [engines.told(o)["dense_steps"] for o in outputs]
        assert 0 in dense
        assert any(dense)
        for output, limit in zip(outputs, limits, strict=True):
            report = engines.told(output)
            assert report["slow_steps"] + report["fast_steps"] == limit
            if report["dense_steps"]:
                assert report["dense_steps"] == limit - 1  # all but the prompt's
                assert report["read_ratio"] == 1
        engines.assert_nothing_is_left(llm)

"""A budget that selects: tokens, slow steps and reads are those of `sfi_core.generate` over transformers.

Also what a request may meet on a server: settings of its own, prefix caches that keep them apart, an abort at any
stage, and preemption within its prompt. Tests with an engine of their own come last: a process has one connector.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from sfi_core.hosts.vllm import cpu
from sfi_kernels import compiled
from tests.vllm import engines

PROMPT = slice(100, 900)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with engines.engine(**engines.SMALL_BATCH) as llm:
        return engines.tokens(llm, [engines.example_ids()[PROMPT]], max_tokens=60)[0]


@pytest.fixture(scope="module")
def llm(plain: list[int]) -> Iterator[LLM]:
    with engines.engine(engines.SELECTS, **engines.SMALL_BATCH) as engine:
        yield engine


def test_eleven_ragged_prompts(llm: LLM):
    prompts, limits = engines.ragged()
    engines.assert_same(
        engines.ask(llm, prompts, max_tokens=limits), engines.reference(prompts, limits, engines.SELECTS)
    )
    engines.assert_nothing_is_left(llm)


def test_short_prompts_and_the_same_ones_at_once(llm: LLM):
    ids = engines.example_ids()
    prompts = [ids[:n] for n in (1, 3, 32, 64, 65, 640, 640, 641)]
    engines.assert_same(engines.ask(llm, prompts), engines.reference(prompts, 40, engines.SELECTS))


def test_a_prompt_that_is_cached_gives_the_same_tokens(llm: LLM):
    """The Selector looks at the last query of the prompt alone here, which is computed anew."""
    prompt = engines.example_ids()[100:800]
    first, second = (engines.ask(llm, [prompt], max_tokens=60)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 672)
    engines.assert_same([first, second], engines.reference([prompt], 60, engines.SELECTS) * 2)


def test_without_numba_the_tokens_are_the_same_and_the_log_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for module in ("sfi_kernels.compiled", "sfi_core.hosts.vllm.cpu"):
        monkeypatch.setattr(f"{module}.why_not", lambda: "not installed")
    cpu.say_by_what.cache_clear()
    prompts = [engines.example_ids()[:640], engines.example_ids()[40:90]]
    engines.assert_same(engines.ask(llm, prompts), engines.reference(prompts, 40, engines.SELECTS))
    assert "loops that numba compiles: not installed" in caplog.text


def cannot(*numbers: Any) -> None:
    open(numbers)  # noqa: PTH123, SIM115 - numba knows no files


def test_where_numba_does_not_compile_the_engine_goes_on_and_the_log_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(compiled.Failure, "why", "")
    for loop in ("attention.attend", "selection.select"):
        monkeypatch.setattr(f"sfi_kernels.loops.{loop}", compiled.entry(cannot))
    prompts = [engines.example_ids()[:640], engines.example_ids()[40:90]]
    outputs = engines.ask(llm, prompts)
    assert caplog.text.count("numba does not compile") == 1
    compiled.Failure.why = "not asked for"
    engines.assert_same(outputs, engines.reference(prompts, 40, engines.SELECTS))


def ask_each(llm: LLM, settings: list[dict[str, Any] | None]) -> list[Any]:
    parameters = [SamplingParams(**engines.GREEDY, max_tokens=60, extra_args=extra_args) for extra_args in settings]
    prompt = {"prompt_token_ids": engines.example_ids()[PROMPT]}
    return llm.generate([prompt] * len(settings), parameters, use_tqdm=False)


def test_requests_of_one_batch_have_settings_of_their_own(llm: LLM, plain: list[int]):
    given = [None, {"sfi.t_max": 3, "sfi.min_gap": 0}, {"sfi.enabled": 0}, {"sfi.budget": 5}]
    outputs = ask_each(llm, given)
    wanted = [engines.SELECTS, engines.SELECTS | {"t_max": 3, "min_gap": 0}]
    engines.assert_same(
        outputs[:2], [engines.reference([engines.example_ids()[PROMPT]], 60, settings)[0] for settings in wanted]
    )
    for output in outputs[2:]:
        assert list(output.outputs[0].token_ids) == plain
        assert engines.told(output)["read_ratio"] == 1
        assert engines.told(output)["dense_steps"] == 59
    assert "error" not in engines.told(outputs[2])
    assert engines.told(outputs[3])["error"].startswith("sfi.budget is no setting of one request")
    assert list(outputs[0].outputs[0].token_ids) != plain
    engines.assert_nothing_is_left(llm)


def test_a_request_that_is_always_slow_reads_everything(llm: LLM, plain: list[int]):
    output = ask_each(llm, [{"sfi.trigger_policy": "always"}])[0]
    assert list(output.outputs[0].token_ids) == plain
    assert engines.told(output)["dense_steps"] == 0
    assert engines.told(output)["reasons"]["always"] == 58
    assert engines.told(output)["read_ratio"] == 1


@pytest.mark.parametrize("policy", ["codescan", "quest", "streaming-llm", "full-kv", "snapkv"])
def test_other_policies_give_the_same_as_generate(policy: str):
    prompts = [engines.example_ids()[i * 40 : i * 40 + n] for i, n in enumerate([700, 33, 300, 64, 450])]
    with engines.engine({**engines.SELECTS, "policy": policy}, **engines.SMALL_BATCH) as llm:
        engines.assert_same(engines.ask(llm, prompts), engines.reference(prompts, 40, engines.SELECTS, policy=policy))
        engines.assert_nothing_is_left(llm)


@pytest.mark.parametrize("salt", [None, "a client's"])
def test_a_dense_request_reads_no_keys_of_fast_steps(salt: str | None):
    """Without a salt of their own, the second turn of a chat would begin with what fast steps had made."""
    with engines.engine(engines.SELECTS, **engines.SMALL_BATCH) as llm:
        first = engines.example_ids()[PROMPT]
        answer = engines.tokens(llm, [first], max_tokens=60, salt=salt)[0]
        turn = [first + answer + engines.example_ids()[900:940]]
        dense = engines.ask(llm, turn, max_tokens=5, extra_args={"sfi.enabled": 0}, salt=salt)[0]
        assert dense.num_cached_tokens == 0
        again = engines.ask(llm, turn, max_tokens=5, salt=salt)[0]
        assert again.num_cached_tokens >= 832


def stage(llm: LLM, name: str) -> str:
    """Say how far a request is; vLLM appends to the name that it was given."""
    tracked = next(request for key, request in engines.planner_of(llm).tracked.items() if key.startswith(name))
    if tracked.begun:
        return "decoding" if tracked.state.step > 3 else "begun"
    return "reading" if tracked.blocks else "waiting"


def test_aborts_at_every_stage_leave_the_others_as_they_were():
    ids = engines.example_ids()
    prompts = {
        "decoding": ids[:40], "first": ids[40:240], "reading": ids[:1800], "second": ids[300:420],
        "waiting": ids[:300], "third": ids[500:1200],
    }  # fmt: skip
    options = {**engines.SMALL_BATCH, "max_num_seqs": 3}
    with engines.engine(engines.SELECTS, **options) as llm:
        core, aborted, done = llm.llm_engine, set(), {}
        for name, prompt in prompts.items():
            parameters = SamplingParams(**engines.GREEDY, max_tokens=40)
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        while core.has_unfinished_requests():
            done |= {output.request_id: output for output in core.step() if output.finished}
            for name in {"decoding", "reading", "waiting"} - aborted:
                if stage(llm, name) == name:
                    core.abort_request([name])
                    aborted.add(name)
        assert aborted == {"decoding", "reading", "waiting"}
        survivors = ["first", "second", "third"]
        wanted = engines.reference([prompts[name] for name in survivors], 40, engines.SELECTS)
        engines.assert_same([done[name] for name in survivors], wanted)
        engines.assert_nothing_is_left(llm)


def test_preempted_requests_go_on_where_they_were():
    """One loses its blocks while it decodes, one while its prompt is read: that one is not sparse yet."""
    prompts = {"decoding": engines.example_ids()[:40], "reading": engines.example_ids()[400:2400]}
    with engines.engine(engines.SELECTS, **engines.SMALL_BATCH) as llm:
        core, done = llm.llm_engine, {}
        for name, prompt in prompts.items():
            parameters = SamplingParams(**engines.GREEDY, max_tokens=40)
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        while stage(llm, "decoding") != "decoding":
            core.step()
        assert stage(llm, "reading") == "reading"
        core.reset_prefix_cache(reset_running_requests=True)
        while core.has_unfinished_requests():
            done |= {output.request_id: output for output in core.step() if output.finished}
        resumed, read = engines.told(done["decoding"]), engines.told(done["reading"])
        assert (resumed["preempted"], read["preempted"]) == (1, 1)
        assert (resumed["reasons"]["resumed"], read["reasons"]["first"]) == (1, 2)
        assert "resumed" not in read["reasons"]
        engines.assert_same([done["reading"]], engines.reference([prompts["reading"]], 40, engines.SELECTS))
        engines.assert_nothing_is_left(llm)

"""What a request may meet on a server: an abort at any stage, and preemption while its prompt is read."""

from vllm import LLM, SamplingParams

from tests.vllm.engines import (
    GREEDY,
    SELECTS,
    SMALL_BATCH,
    assert_nothing_is_left,
    assert_same,
    engine,
    example_ids,
    planner_of,
    reference,
    told,
)


def stage(llm: LLM, name: str) -> str:
    """Say how far a request is; vLLM appends to the name that it was given."""
    tracked = next(one for key, one in planner_of(llm).tracked.items() if key.startswith(name))
    if tracked.begun:
        return "decoding" if tracked.state.step > 3 else "begun"
    return "reading" if tracked.blocks else "waiting"


def test_aborts_at_every_stage_leave_the_others_as_they_were():
    ids = example_ids()
    prompts = {
        "decoding": ids[:40], "first": ids[40:240], "reading": ids[:1800], "second": ids[300:420],
        "waiting": ids[:300], "third": ids[500:1200],
    }  # fmt: skip
    options = {**SMALL_BATCH, "max_num_seqs": 3}
    with engine(SELECTS, **options) as llm:
        core, aborted, done = llm.llm_engine, set(), {}
        for name, prompt in prompts.items():
            parameters = SamplingParams(**GREEDY, max_tokens=40)
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        while core.has_unfinished_requests():
            done |= {one.request_id: one for one in core.step() if one.finished}
            for name in {"decoding", "reading", "waiting"} - aborted:
                if stage(llm, name) == name:
                    core.abort_request([name])
                    aborted.add(name)
        assert aborted == {"decoding", "reading", "waiting"}
        survivors = ["first", "second", "third"]
        wanted = reference([prompts[name] for name in survivors], 40, SELECTS)
        assert_same([done[name] for name in survivors], wanted)
        assert_nothing_is_left(llm)


def test_preempted_requests_go_on_where_they_were():
    """One loses its blocks while it decodes, one while its prompt is read: that one is not sparse yet."""
    prompts = {"decoding": example_ids()[:40], "reading": example_ids()[400:2400]}
    with engine(SELECTS, **SMALL_BATCH) as llm:
        core, done = llm.llm_engine, {}
        for name, prompt in prompts.items():
            parameters = SamplingParams(**GREEDY, max_tokens=40)
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        while stage(llm, "decoding") != "decoding":
            core.step()
        assert stage(llm, "reading") == "reading"
        core.reset_prefix_cache(reset_running_requests=True)
        while core.has_unfinished_requests():
            done |= {one.request_id: one for one in core.step() if one.finished}
        resumed, read = told(done["decoding"]), told(done["reading"])
        assert (resumed["preempted"], read["preempted"]) == (1, 1)
        assert (resumed["reasons"]["resumed"], read["reasons"]["first"]) == (1, 2)
        assert "resumed" not in read["reasons"]
        assert_same([done["reading"]], reference([prompts["reading"]], 40, SELECTS))
        assert_nothing_is_left(llm)

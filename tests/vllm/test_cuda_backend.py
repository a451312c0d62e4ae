"""The CUDA backend's own code in a real engine on a CPU, with plain torch in the place of vLLM's kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from sfi_core.engine.ledger import RequestPass
from sfi_core.errors import ConfigError
from sfi_core.hosts.serving.plan import Entry, RowMatcher
from sfi_core.hosts.vllm import plugin
from sfi_core.hosts.vllm.backend import Batch
from tests.vllm.engines import GREEDY, engine, engine_of_process, tokens

PLAIN = "tests.vllm.plain_attention.SfiPlainBackend"
# pieces of 64 beside decoding rows; two prompts of one length
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 512}
IDS = [[5 + (7 * place + length) % 400 for place in range(length)] for length in (3, 65, 65, 300)]


@contextmanager
def plain_backend() -> Iterator[None]:
    """Let engines take the plain backend with sfi."""
    load_general_plugins()
    register_backend(AttentionBackendEnum.CPU_ATTN, PLAIN)
    selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001
    try:
        yield
    finally:
        selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001
        plugin.register()


def answers(llm: LLM) -> list[Any]:
    """Return each request's tokens and report."""
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in IDS]
    done = llm.generate(prompts, SamplingParams(**GREEDY | {"max_tokens": 24}), use_tqdm=False)
    return [(list(o.outputs[0].token_ids), (o.kv_transfer_params or {}).get("sfi")) for o in done]


def assert_cache_is_a_gpu_s() -> None:
    """Check that the plain backend made the cache: a row of it is a key and a value."""
    worker = engine_of_process()
    key_PHND = worker.store.pages(0).key_PHND
    assert key_PHND.stride(2) == 2 * key_PHND.shape[3]


def test_small_budget_equals_the_cpu_backend() -> None:
    """Tokens, slow steps and reads; the cache is a GPU's, and segments are those given before it."""
    extra = {"budget": 24, "recent": 16, "sink": 4, "window_prefill": 1, "t_max": 6}
    with engine(extra, **OPTIONS) as llm:
        wanted = answers(llm)
    with plain_backend(), engine(extra, **OPTIONS) as llm:
        worker = engine_of_process()
        assert_cache_is_a_gpu_s()
        assert all(s.key_BHSD.shape[:3:2] == (4, 28) for s in worker.run.segments.values())
        assert answers(llm) == wanted
    assert all(report["read_ratio"] < 0.6 for _, report in wanted[3:])


def test_budget_of_all_equals_no_sfi() -> None:
    """Two of the four requests have no slot, so that vLLM's part of a batch does not lie together."""
    with engine(**OPTIONS) as llm:
        plain = tokens(llm, IDS, max_tokens=24)
    extra = {"budget": 8192, "slots": 2, "window_prefill": 1}
    with plain_backend(), engine(extra, **OPTIONS) as llm:
        assert_cache_is_a_gpu_s()
        done = answers(llm)
    assert [ids for ids, _ in done] == plain
    dense = sorted(report["dense_steps"] for _, report in done)
    assert dense[:2] == [0, 0]
    assert dense[2] > 0, "two found no slot when they came"
    assert sum(report["fast_steps"] for _, report in done) > 0


@pytest.mark.parametrize("launched", range(4))
def test_the_rows_behind_the_launched_ones_are_a_batch_of_their_own(launched: int) -> None:
    """A decoding row, two prompts' pieces, and a row of padding."""
    starts, lengths = torch.tensor([0, 1, 4, 9, 9]).int(), torch.tensor([20, 33, 5, 0]).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
        num_reqs=4, num_actual_tokens=9, max_query_len=5, max_seq_len=33,
        block_table_tensor=torch.arange(12).view(4, 3), slot_mapping=torch.arange(100, 109),
    )  # fmt: skip
    pieces = [RequestPass.prompt(count, ends=True) for count in (1, 3, 5)]
    entries = [Entry(row, row, int(lengths[row]) - piece.count, row, piece) for row, piece in enumerate(pieces)]
    batch = Batch(common, SimpleNamespace(matcher=RowMatcher(), build_part=lambda part: part))
    worker: Any = SimpleNamespace(enter=lambda *_: None, launched=launched)
    batch.enter(worker, entries[::-1])
    if launched in {0, 3}:
        assert batch.rest is None
        return
    assert batch.rest is not None
    (part, tokens), first = batch.rest, int(starts[launched])
    assert tokens == slice(first, 9)
    assert part.query_start_loc.tolist() == [start - first for start in starts[launched:4].tolist()]
    assert part.seq_lens.tolist() == lengths[launched:3].tolist()
    assert part.block_table_tensor.tolist() == common.block_table_tensor[launched:3].tolist()
    assert part.slot_mapping.tolist() == [*range(100 + first, 109)]
    assert (part.num_reqs, part.num_actual_tokens, part.max_query_len) == (3 - launched, 9 - first, 5)


def test_slots_that_need_too_much_are_refused_before_the_cache() -> None:
    """One line with the numbers that fit."""
    message = r"^budget 2048 for 4 slots takes 0\.0\d+ GB .* allows .* GB; set .*slots_memory higher$"
    with pytest.raises(ConfigError, match=message), engine({"slots_memory": 1e-7}, **OPTIONS):
        pass

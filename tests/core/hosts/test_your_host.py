"""The host that docs/your_host.md shows; and how many threads a decoding step takes."""

import re
from pathlib import Path

import pytest
import torch

from sfi_core import generate, load
from sfi_core.machine import threads
from sfi_core.settings.config import SfiConfig
from sfi_traces import ParquetObserver, Trace
from sfi_traces.model.check import check
from sfi_traces.summary import summarize

PAGE = Path(__file__).parents[3] / "docs" / "your_host.md"
SMALL = SfiConfig(sink=2, recent=6, budget=8, t_max=4, span=0, trigger_token_ids=(1, 2, 3))
NEW = 12


def test_the_page_on_hosts_shows_one_that_decodes_with_any_policy(capsys, tmp_path):
    """With a budget of everything sfi gives full attention's tokens; with a small one it reads less."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shown = {}
    exec(compile(code, str(PAGE), "exec"), shown)  # noqa: S102 - our own page
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(50, (length,), generator=draw).tolist() for length in (40, 27)]
    full = shown["complete"](prompts, NEW, SMALL, "full-kv").requests
    lines = capsys.readouterr().out.splitlines()
    columns = zip(*(request.token_ids for request in full), strict=True)
    assert lines == [str(dict(enumerate([t] for t in step))) for step in columns]
    every = shown["complete"](prompts, NEW, SMALL.replace(budget=100)).requests
    assert [request.token_ids for request in every] == [request.token_ids for request in full]
    with ParquetObserver(tmp_path / "run") as observer:
        requests = shown["complete"](prompts, NEW, SMALL, observer=observer).requests
    assert all(0 < request.read_ratio < 1 for request in requests)
    assert requests[1].token_ids == shown["complete"](prompts[1:], NEW, SMALL).requests[0].token_ids
    trace = Trace.open(tmp_path / "run")
    assert check(trace)["problems"] == []
    summary = summarize(trace)
    assert (summary["run"]["model"], summary["run"]["architecture"]) == ("toy", "ToyHost")
    assert all(summary["phases"].values())


@pytest.mark.parametrize(("small", "steps"), [(1 << 26, {1}), (1, {2})])
def test_decoding_steps_of_a_small_model_take_one_thread(monkeypatch, small, steps):
    """The prompt takes all, and the number is the process' own again afterwards, also after an error."""
    monkeypatch.setattr("sfi_core.hosts.transformers.replays.SMALL_BYTES", small)
    before = torch.get_num_threads()
    model, tokenizer = load()
    seen = {True: set(), False: set()}

    def look(module, args):
        seen[args[0].shape[1] == 1].add(torch.get_num_threads())

    hook = model.model.layers[0].input_layernorm.register_forward_pre_hook(look)
    torch.set_num_threads(2)
    try:
        generate(model, tokenizer, ["Belora hid a red lantern."], max_new_tokens=4)
        assert seen == {True: steps, False: {2}}
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), threads.one_thread(wanted=True):
            _ = 1 / 0
        assert torch.get_num_threads() == 2
    finally:
        hook.remove()
        torch.set_num_threads(before)

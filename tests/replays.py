"""What tests of replayed steps share: prompts, settings, and how a run is compared with an eager one."""

import torch

from sfi_core import SfiConfig
from tests.fakes import Listener, positions

PROMPTS = [list(range(5, 45)), list(range(3, 28)), list(range(50, 57)), list(range(9, 50))]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=8, budget=6, t_max=4, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 3)), trigger_delay=0,
)  # fmt: skip
NEW = 12
EVERY_STEP = CONFIG.replace(
    trigger_delay=1, baseline={"page": 4}, freekv={"page": 4, "tau": 0.1, "first_layer_dense": False},
    synckv={"heads": "even", "stride": 3},
)  # fmt: skip
DELAYED = CONFIG.replace(trigger_delay=1)


def told(observer: Listener) -> tuple:
    """Return what the observer heard, without the padding of positions, diagnostics and times."""
    chosen = {
        (e.step, e.layer, e.request, e.reason): (
            positions(e.index_HK),
            None if e.heads_H is None else e.heads_H.tolist(),
        )
        for e in observer.selections
    }
    steps = [
        (e.step, e.request, e.position, e.token_id, e.reason, e.attended_tokens, e.context_tokens)
        for e in observer.steps
    ]
    return steps, [(e.step, e.slow, e.fast) for e in observer.begun], chosen


def same(graphed: tuple, eager: tuple) -> None:
    (report, heard), (wanted, expected) = graphed, eager
    assert [r.token_ids for r in report.requests] == [r.token_ids for r in wanted.requests]
    assert told(heard) == told(expected)
    for ours, theirs in zip(heard.selections, expected.selections, strict=True):
        assert ours.diagnostics.keys() == theirs.diagnostics.keys()
        for name, value in theirs.diagnostics.items():
            torch.testing.assert_close(ours.diagnostics[name], value, rtol=1e-4, atol=1e-6)
    replays, once = (report.paths.pop(f"graph.{how}", 0) for how in ("replay", "eager"))
    report.paths.pop("graph.ahead", None)
    assert replays > 0
    assert replays + once == sum(not event.reads_prompt for event in heard.begun)
    assert report.paths == wanted.paths
    assert report.not_replayed == ""

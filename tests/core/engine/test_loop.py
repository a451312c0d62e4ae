"""Algorithm 1 on a model whose tokens are written down."""

from collections.abc import Sequence

import pytest
import torch

from sfi_core import NullObserver, Sampling
from sfi_core.engine.loop import Loop
from sfi_core.generation.sampling import Sampler
from sfi_core.state.request import RequestState

VOCABULARY = 100


class ScriptedHost:
    """A host that is its own run; token t of request b is `script[b][t]`."""

    def __init__(self, script: Sequence[Sequence[int]], stop: int | None = None):
        self.script, self.stop, self.calls = script, stop, []
        self.ids_BT = torch.zeros(len(script), 1, dtype=torch.long)
        self.requests = [RequestState(request=b) for b in range(len(script))]
        self.run, self.observer, self.t = self, NullObserver(), 0

    @property
    def done(self) -> bool:
        return all(state.finished for state in self.requests)

    def prefill(self) -> torch.Tensor:
        self.calls.append("prefill")
        return self._logits()

    def step(self, token_B: list[int]) -> torch.Tensor:
        self.calls.append(list(token_B))
        self.t += 1
        return self._logits()

    def record(self, token_B: list[int]) -> None:
        self.calls.append(("record", list(token_B)))
        for state, token in zip(self.requests, token_B, strict=True):
            state.tokens.append(token)
            state.finished |= token == self.stop

    def count_selected(self) -> None:
        pass

    def _logits(self) -> torch.Tensor:
        ids = torch.tensor([row[self.t] for row in self.script])
        return torch.nn.functional.one_hot(ids, VOCABULARY).float()


def loop(host: ScriptedHost, limit: int) -> Loop:
    rows = [[1]] * len(host.script)
    return Loop(host, rows, [limit] * len(rows), Sampler(Sampling(), host.ids_BT))


def test_each_step_decodes_the_token_before_it():
    """Step 0 is the prompt's; step t reads x_{t-1}, then notes x_t."""
    host = ScriptedHost([[5, 6, 7]])
    list(loop(host, 3).decode())
    assert host.calls == ["prefill", ("record", [5]), [5], ("record", [6]), [6], ("record", [7])]


@pytest.mark.parametrize("bound", [1, 2])
def test_no_more_tokens_than_asked_for(bound: int):
    host = ScriptedHost([[5, 6, 7]])
    assert len(list(loop(host, bound).decode())) == bound
    assert host.t == bound - 1


def test_decoding_ends_with_the_token_that_ends_the_last_request():
    """A request that has ended has no token, and reads padding."""
    host = ScriptedHost([[5, 7, 3, 3], [8, 9, 7, 3]], stop=7)
    assert list(loop(host, 4).decode()) == [{0: [5], 1: [8]}, {0: [7], 1: [9]}, {1: [7]}]
    assert host.calls[-1] == ("record", [0, 7])


def test_a_token_is_given_out_before_the_next_is_computed():
    """Streaming: the caller has x_t while step t + 1 has not begun, and x_t is recorded."""
    host = ScriptedHost([[5, 6, 7]])
    tokens = loop(host, 3).decode()
    assert next(tokens) == {0: [5]}
    assert host.calls == ["prefill", ("record", [5])]

"""Algorithm 1 on a model whose tokens are written down."""

import pytest
import torch

from sfi_core.generation.decode import decode
from tests.fakes import ScriptedModel


def greedy(logits_BV: torch.Tensor) -> list[int]:
    return logits_BV.argmax(-1).tolist()


def test_each_step_decodes_the_token_before_it():
    """Step 0 is the prompt's; step t reads x_{t-1}, then notes x_t."""
    model = ScriptedModel([[5, 6, 7]])
    list(decode(model, greedy, 3))
    assert model.calls == ["prefill", ("record", [5]), [5], ("record", [6]), [6], ("record", [7])]


@pytest.mark.parametrize("bound", [1, 2])
def test_no_more_tokens_than_asked_for(bound: int):
    model = ScriptedModel([[5, 6, 7]])
    assert len(list(decode(model, greedy, bound))) == bound
    assert model.t == bound - 1


def test_decoding_ends_with_the_token_that_ends_the_last_request():
    model = ScriptedModel([[5, 0, 3, 3], [8, 9, 0, 3]], stop=0)
    assert list(decode(model, greedy, 4)) == [[5, 8], [0, 9], [3, 0]]
    assert model.t == 2


def test_who_is_admitted_is_decoded_next():
    """A request that begins where another one ended brings its first token."""

    class Admitting(ScriptedModel):
        def admit(self, token_B: list[int]) -> list[int]:
            return [token_B[0], 77]

    model = Admitting([[5, 6], [8, 9]])
    assert list(decode(model, greedy, 2)) == [[5, 8], [6, 9]]
    assert model.calls[2] == [5, 77]


def test_a_token_is_given_out_before_the_next_is_computed():
    """Streaming: the caller has x_t while step t + 1 has not begun, and x_t is recorded."""
    model = ScriptedModel([[5, 6, 7]])
    tokens = decode(model, greedy, 3)
    assert next(tokens) == [5]
    assert model.calls == ["prefill", ("record", [5])]


def test_what_is_sampled_is_what_is_decoded():
    """The sampler decides, not the logits."""
    model = ScriptedModel([[5, 6, 7]])
    assert list(decode(model, lambda logits: [42], 2)) == [[42], [42]]
    assert model.calls[2] == [42]

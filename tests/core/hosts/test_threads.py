"""Decoding steps of a small model on one thread; everything else on all."""

import pytest
import torch

from sfi_core import generate, load
from sfi_core.machine import threads


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

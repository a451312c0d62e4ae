"""Which masks a model makes under sfi: those that somebody reads."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sfi_core import EngineOptions, SfiConfig, generate, slow_fast
from tests.architectures import padded, prompts, tiny

pytestmark = pytest.mark.seam

ROWS = prompts(37, 9, 24)
CONFIG = SfiConfig(trigger_token_ids=(0,))


class Masks(TorchDispatchMode):
    """Notes the sizes of all bool tensors [B, 1, T, S] that are made inside, a row of queries apart."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.bool and made.dim() == 4 and made.shape[1] == 1:
            self.sizes |= {tuple(made.shape)} if made.shape[2] > 1 < made.shape[3] else set()
        return made


def masks_of(label: str, rows=ROWS, **options) -> set[tuple[int, ...]]:
    with Masks() as masks:
        generate(tiny(label), None, rows, CONFIG, max_new_tokens=3, stop_token_ids=(), **options)
    return masks.sizes


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_ragged_batch_makes_no_mask_over_its_queries_and_keys(chunk: int):
    assert masks_of("qwen3", engine=EngineOptions(prefill_chunk=chunk)) == set()


def test_equal_prompts_read_in_pieces_make_none_either():
    assert masks_of("qwen3", prompts(37, 37), engine=EngineOptions(prefill_chunk=16)) == set()


def test_layers_with_a_sliding_window_have_theirs():
    assert (3, 1, 37, 37) in masks_of("gemma-2")


def test_a_call_outside_a_run_pays_heed_to_padding():
    model, batch = tiny("qwen3"), padded(ROWS)
    expected = model(**batch, use_cache=False).logits[:, -1]
    with slow_fast(model, None, CONFIG), Masks() as masks:
        logits = model(**batch, use_cache=False).logits[:, -1]
    assert (3, 1, 37, 37) in masks.sizes
    torch.testing.assert_close(logits, expected)
    unpadded = model(torch.tensor([ROWS[1]]), use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits[1:2], unpadded)

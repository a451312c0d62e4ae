"""Dense attention that hands out its logits, in one pass: equal to the two ops that it stands for."""

from typing import Any

import pytest
import torch

from sfi_kernels import pages
from sfi_kernels.dense_attention import reference
from tests.covering import covering
from tests.fakes import paged
from tests.kernels.test_verification_attention import OPTIONS, SCALE, D, G, H, check_output

CHUNK = 512  # tokens turned into float32 at once
LENGTHS = [CHUNK + 65, 9, 2 * CHUNK]  # a part of a chunk, less than one, whole ones


@pytest.mark.parametrize(
    ("page_size", "W", "options", "dtype"),
    covering([64, 700, 3000], [1, 3, 12], OPTIONS, [torch.float32, torch.float16, torch.bfloat16]),
)
def test_output_and_logits_come_in_one_pass(
    page_size: int, W: int, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "WIDE", CHUNK * H * D)
    query = torch.randn(len(LENGTHS), H, G, W, D).to(dtype)
    keys = [torch.randn(H, T, D).to(dtype) for T in LENGTHS]
    values = [torch.randn(H, T, D + 8).to(dtype) for T in LENGTHS]
    (key_PHND, table_BP), (value_PHNE, _) = paged(keys, page_size), paged(values, page_size)
    length_B = torch.tensor(LENGTHS, dtype=torch.int32)
    out, logits = reference.dense_attention_with_logits(
        query, key_PHND, value_PHNE, table_BP, length_B, scale=SCALE, **options
    )
    cap = options.get("soft_cap")
    alone = reference.window_logits(query, key_PHND, table_BP, length_B, scale=SCALE, soft_cap=cap)
    assert torch.equal(logits, alone)
    assert out.dtype == dtype
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        check_output(out[row : row + 1], query[row : row + 1], key[None], value[None], options)

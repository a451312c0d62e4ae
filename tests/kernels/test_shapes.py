import pytest
import torch

from sfi_kernels.shapes import check_int32, check_same, check_shape

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((2, 8, 32), {"B": 2, "H": None, "D": 64}, r"^key must be \[B=2, H, D=64\], got \[2, 8, 32\]$"),
        ((2, 8, 64), {"B": None, "H": None}, r"^key must be \[B, H\], got \[2, 8, 64\]$"),
        ((2, 8), {"B": 2, "T": 9}, r"^key must be \[B=2, T=9\], got \[2, 8\]$"),
    ],
)
def test_the_message_names_the_tensor_the_wanted_and_the_given_sizes(shape, sizes, message):
    with pytest.raises(ValueError, match=message):
        check_shape(torch.empty(shape), "key", **sizes)


def test_what_fits_passes():
    """The first tensor itself may be strided."""
    check_shape(torch.empty(2, 8, 64), "key", B=2, H=None, D=64)
    like = torch.empty(2, 3, dtype=torch.float16)
    check_same(like.T, "query", key=torch.empty(4, 5, dtype=torch.float16), value=like[:1])
    check_int32(CPU, length=torch.empty(2).int(), start=torch.empty(0).int())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (torch.empty(2).half(), r"^key must have the dtype of query, torch.float32, got torch.float16$"),
        (torch.empty(2, device="meta"), r"^key must be on cpu like query, got meta$"),
        (torch.empty(2, 3).T, r"^key must be contiguous, got strides \(1, 3\)$"),
    ],
)
def test_another_dtype_device_or_layout_than_the_first_tensors_is_refused(key, message):
    with pytest.raises(ValueError, match=message):
        check_same(torch.empty(2), "query", value=torch.empty(3), key=key)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (torch.empty(2).long(), r"^start must be int32, got torch.int64$"),
        (torch.empty(2), r"^start must be int32, got torch.float32$"),
        (torch.empty(2, device="meta").int(), r"^start must be on cpu, got meta$"),
        (torch.empty(6).int()[::2], r"^start must be contiguous, got strides \(2,\)$"),
    ],
)
def test_words_of_another_dtype_device_or_layout_are_refused(start, message):
    with pytest.raises(ValueError, match=message):
        check_int32(CPU, length=torch.empty(2).int(), start=start)

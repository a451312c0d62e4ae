import pytest
import torch

from sfi_kernels.shapes import check_int32, check_same, check_shape


def test_message_names_the_tensor_the_wanted_and_the_given_sizes():
    with pytest.raises(ValueError, match=r"^key must be \[B=2, H, D=64\], got \[2, 8, 32\]$"):
        check_shape(torch.empty(2, 8, 32), "key", B=2, H=None, D=64)


def test_a_fitting_shape_passes():
    check_shape(torch.empty(2, 8, 64), "key", B=2, H=None, D=64)


def test_a_different_rank_does_not_fit():
    with pytest.raises(ValueError, match=r"^key must be \[B, H\], got \[2, 8, 64\]$"):
        check_shape(torch.empty(2, 8, 64), "key", B=None, H=None)


def test_a_different_size_does_not_fit():
    with pytest.raises(ValueError, match=r"^key must be \[B=2, T=9\], got \[2, 8\]$"):
        check_shape(torch.empty(2, 8), "key", B=2, T=9)


def test_operands_of_one_dtype_and_device_pass():
    like = torch.empty(2, 3, dtype=torch.float16)
    check_same(like, "query", key=torch.empty(4, 5, dtype=torch.float16), value=like[:1])


def test_another_dtype_than_the_first_tensors_is_refused():
    message = r"^value must have the dtype of query, torch.float16, got torch.float32$"
    like = torch.empty(2, dtype=torch.float16)
    with pytest.raises(ValueError, match=message):
        check_same(like, "query", key=like, value=torch.empty(2))


def test_another_device_than_the_first_tensors_is_refused():
    with pytest.raises(ValueError, match=r"^key must be on cpu like query, got meta$"):
        check_same(torch.empty(2), "query", key=torch.empty(2, device="meta"))


def test_a_strided_operand_is_refused_where_kernels_read_rows():
    with pytest.raises(ValueError, match=r"^key must be contiguous, got strides \(1, 3\)$"):
        check_same(torch.empty(2), "query", key=torch.empty(2, 3).T)


def test_the_first_tensor_itself_may_be_strided():
    check_same(torch.empty(2, 3).T, "query", key=torch.empty(2))


def test_int32_words_on_the_device_pass():
    check_int32(torch.device("cpu"), length=torch.empty(2).int(), start=torch.empty(0).int())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32])
def test_another_dtype_than_int32_is_refused(dtype: torch.dtype):
    with pytest.raises(ValueError, match=rf"^start must be int32, got {dtype}$"):
        check_int32(
            torch.device("cpu"), length=torch.empty(2).int(), start=torch.empty(2, dtype=dtype)
        )


def test_words_on_another_device_are_refused():
    words = torch.empty(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"^length must be on cpu, got meta$"):
        check_int32(torch.device("cpu"), length=words)


def test_strided_words_are_refused():
    with pytest.raises(ValueError, match=r"^length must be contiguous, got strides \(2,\)$"):
        check_int32(torch.device("cpu"), length=torch.empty(6).int()[::2])

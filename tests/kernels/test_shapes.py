import pytest
import torch

from sfi_kernels.shapes import check_shape


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

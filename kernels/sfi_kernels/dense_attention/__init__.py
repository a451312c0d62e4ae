"""Attention to a request's whole history, and the window logits for the Selector."""

from sfi_kernels.dense_attention import reference
from sfi_kernels.op import Op

dense_attention = Op(reference.dense_attention)
dense_attention_with_logits = Op(reference.dense_attention_with_logits)
window_logits = Op(reference.window_logits)

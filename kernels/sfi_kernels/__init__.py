"""Tensor operations of SFI, each as a PyTorch reference and, where it pays, a Triton kernel.

Dimension key, used in every name: a tensor's suffix lists its dimensions, slowest first.

B  requests in the batch          H  KV heads (the paper's H)
L  transformer layers             G  query heads per KV head (GQA)
T  cached tokens of a request     W  queries in the observation window
   (the paper's L_t)              K  selected tokens per KV head
D  head dimension                 S  sink and selected tokens, the packed segment
V  vocabulary                     R  rows: some requests of the batch
E  width of a value               X  work items, or a flattened dimension
P  pages of the KV cache          N  tokens per page (`page_size` as a number)
F  features of a token, as an MLP or a norm has them

Sizes are the bare letters. Operands of many ops: `key_PHND` and `value_PHNE` are pages of keys and values, of any
strides, for a kernel with a last stride of 1; `block_table_BP` has the page numbers of each request, `length_B` its
cached tokens, the queries' own included; `scale` is the factor on the products, `soft_cap` c of c * tanh(logit / c),
`sink_HG` are learned sink logits. Positions, counts and page numbers are int32. What does not fit raises `ValueError`.

Ops work on tensors and know no model and no schedule. `append`, `pack`, `recall`, `code_tokens`, `code_scan` and
`page_scan` write to their operands; the others only return. No import of Triton comes before an op's kernel is called.
"""

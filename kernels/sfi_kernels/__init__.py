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

Sizes are the bare letters. Everything here is a pure function of tensors: no model, no schedule,
no state, and no import of Triton until an op's kernel is called.
"""

"""How the Selector's kernels leave what they find in a chunk of a row, and merge the chunks of a row."""

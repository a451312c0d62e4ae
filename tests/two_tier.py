"""A store, by default of two tiers, and, beside it, plain tensors of what it was given."""

import torch

from sfi_core.state.kv_store import KVStore
from sfi_core.state.side_stream import SideStream
from sfi_core.state.two_tier import TwoTierStore
from sfi_kernels.pages import read_pages
from tests.fakes import int32
from tests.schedules import AnyTime, Lazy

B, H, D, E, N, RING = 3, 2, 4, 6, 4, 3
CAPACITY = 70
SIDES = {"in order": SideStream, "lazy": Lazy, "random": lambda: AnyTime(3)}


class Written:
    """A store and, beside it, plain tensors of what was appended to each request."""

    def __init__(self, side=None, resident=(), store=None, dtype=torch.float32, **options) -> None:
        options = {"page_size": N, "ring_pages": RING, **options}
        heads = None if not resident else lambda layer, heads: resident
        self.store = store or TwoTierStore(B, CAPACITY, side=side, resident=heads, **options)
        self.keys = [torch.empty(H, 0, D, dtype=dtype) for _ in range(B)]
        self.values = [torch.empty(H, 0, E, dtype=dtype) for _ in range(B)]

    def append(self, *count: int, into=(), layer: int = 0) -> None:
        """Append `count[b]` tokens to request b of the store and of others, left-padded with NaN."""
        key, value = (torch.full((B, H, max(count), X), torch.nan, dtype=self.keys[0].dtype) for X in (D, E))
        start = [rows.shape[1] for rows in self.keys]
        for row, new in enumerate(count):
            piece = slice(max(count) - new, None)
            key[row, :, piece], value[row, :, piece] = torch.randn(H, new, D), torch.randn(H, new, E)
            self.keys[row] = torch.cat([self.keys[row], key[row, :, piece]], 1)
            self.values[row] = torch.cat([self.values[row], value[row, :, piece]], 1)
        for store in (self.store, *into):
            store.append(layer, key, value, int32(start), int32(count), start, count)

    def assert_found(self, layer: int = 0) -> None:
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            length, (key_PHND, value_PHNE, _) = key.shape[1], self.store.pages(layer).tensors
            tables, ring = self.store.block_table_BP, self.store.ring(layer)
            pages = [(tables[row], 0, slice(None), key_PHND, value_PHNE)]
            if ring is not None:
                first = max(0, length - RING * self.store.page_size)
                pages.append((ring.block_table_BP[row], first, slice(None), *ring[:2]))
                if ring.heads is not None:
                    homes = [head for head in range(H) if ring.heads.place_H[head] >= 0]
                    pages.append((tables[row], 0, homes, *ring.heads[1:]))
            for table_P, first, heads, *both in pages:
                for rows, expected in zip(both, (key, value), strict=True):
                    assert torch.equal(read_pages(rows, table_P, first, length)[0], expected[heads, first:])
            norms = norms_of(self.store, layer, row, key.shape[1])
            torch.testing.assert_close(norms.double(), key.double().norm(dim=-1), rtol=1e-6, atol=0)


def norms_of(store: KVStore, layer: int, row: int, length: int) -> torch.Tensor:
    """Return a request's key norms, [H, length]."""
    heads = store.pages(layer).key_PHND.shape[1]
    page_1HP = store.block_table_BP[row][None, None] * heads + torch.arange(heads)[:, None].int()
    return store.norms(layer, page_1HP)[0, :, :length]

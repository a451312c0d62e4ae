"""Inside vLLM, in plain numbers: what slots take, and which row is which entry."""

import pytest
import torch

from sfi_core.engine.ledger import RequestPass
from sfi_core.errors import ConfigError
from sfi_core.hosts.serving.plan import Entry, RowMatcher, last_blocks
from sfi_core.hosts.serving.worker import BorrowedPages
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.memory import packed_rows
from sfi_core.sizes.policy import check_slots, norm_count, untriggered
from sfi_core.state.layer_pages import LayerShape, PackedSegment

CONFIG = SfiConfig().replace(budget=100, sink=4, recent=8)
SHAPE = LayerShape(heads=2, key_width=8, value_width=4, itemsize=2, query_heads=6)
LIKE = tuple(torch.empty(0, 2, 1, width, dtype=torch.float16) for width in (8, 4))
LAYERS, SLOTS, LONGEST = 3, 5, 1000
SFI = untriggered("sfi", CONFIG)
ROWS = packed_rows(SFI, LONGEST)


def room(config: SfiConfig = CONFIG, slots: int = SLOTS) -> int:
    segment = PackedSegment(slots, packed_rows(untriggered("sfi", config), LONGEST), *LIKE)
    return LAYERS * (segment.nbytes - segment.length_BH.nbytes)


def check(policy, limit: int | None) -> None:
    sizes = {"slots": SLOTS, "layers": LAYERS, "longest": LONGEST}
    check_slots(policy, SHAPE, limit=limit, **sizes)


def test_segments_fit_to_the_byte() -> None:
    check(SFI, room())
    check(SFI, None)
    with pytest.raises(ConfigError):
        check(SFI, room() - 1)


def test_refusal_names_what_fits() -> None:
    """The budget of the message fits, and so do its slots; one more of either does not."""
    limit = room(CONFIG.replace(budget=37)) + 10
    with pytest.raises(ConfigError) as caught:
        check(SFI, limit)
    advice = "set budget to at most 37 or slots to at most 1 or slots_memory higher"
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)
    assert room(slots=1) <= limit < room(slots=2)
    assert limit < room(CONFIG.replace(budget=38))


def test_norms_lie_in_the_room_given() -> None:
    """Room counted from the free bytes holds the norms of every block that fits beside them."""
    free, page, row = 10_000, 16, 2 * (8 + 4)
    count = norm_count(free, LAYERS, row)
    blocks = (free - LAYERS * 4 * count) // (LAYERS * SHAPE.heads * page * row)
    key, value = (torch.zeros(blocks, 2, page, width) for width in (8, 4))
    store, norm_X = BorrowedPages("torch", page, SLOTS, LONGEST, key.device), torch.ones(count)
    store.borrow(0, key, value, norm_X)
    norm_PHN = store.pages(0).norm_PHN
    assert norm_PHN.data_ptr() == norm_X.data_ptr()
    assert norm_PHN.shape == (blocks, 2, page)
    assert not norm_PHN.any()


class Runner:
    """Rows of a pass, in an order of its own; counts how often the device is read."""

    def __init__(self) -> None:
        self.matcher, self.reads = RowMatcher(), 0

    def match(self, order: list[Entry], numbers: list[int] | None, planned: list[Entry]) -> None:
        counts = [(entry.length, entry.count) for entry in order]
        assert self.matcher.match(counts, numbers, planned, lambda: self._read(order)) == order

    def _read(self, order: list[Entry]) -> list[int]:
        self.reads += 1
        return [entry.block for entry in order]


def entry(request: int, start: int, count: int = 1) -> Entry:
    piece, step = RequestPass.prompt(count, ends=False), RequestPass.decode("trigger")
    request_pass = step if count == 1 else piece
    return Entry(request, request, start, 100 + request, request_pass)


def test_rows_of_different_counts_need_no_read() -> None:
    runner, planned = Runner(), [entry(0, 5), entry(1, 9), entry(2, 0, 6)]
    runner.match(planned[::-1], None, planned)
    assert runner.reads == 0


def test_rows_that_share_counts_are_read_once_where_the_runner_numbers_them() -> None:
    """Numbers change owners between passes; a number seen in the pass before is believed, another is not."""
    runner = Runner()
    for step in range(3):
        planned = [entry(0, 5 + step), entry(1, 5 + step)]
        runner.match(planned[:: -1 if step else 1], [[7, 3], [3, 7]][step > 0], planned)
    assert runner.reads == 1
    planned = [entry(1, 8), entry(2, 8), entry(4, 20)]  # 0 has ended, and 2 has its number
    runner.match([planned[1], planned[0], planned[2]], [7, 3, 5], planned)
    assert runner.reads == 2


def test_without_numbers_shared_counts_are_read_in_every_pass() -> None:
    runner = Runner()
    for step in range(2):
        planned = [entry(0, 5 + step), entry(1, 5 + step)]
        runner.match(planned[::-1], None, planned)
    assert runner.reads == 2


def test_last_blocks() -> None:
    table_RP = torch.tensor([[4, 6, 0], [5, 7, 9], [8, 8, 8]], dtype=torch.int32)
    assert last_blocks(table_RP, [16, 33], 16, 1) == [4, 9]
    assert last_blocks(table_RP, [16, 33], 16, 3) == [1, 3], "of pages, three a block"


def test_codescans_slots_hold_codes_and_no_rows() -> None:
    """At most the bytes that the policy states, which are those of codes in bytes, as PyTorch keeps them."""
    policy = untriggered("codescan", CONFIG)
    codes = policy.companion.keeps(SLOTS, 3, *LIKE, LONGEST)
    summary = policy.summary_bytes(SHAPE, LONGEST)
    assert codes.nbytes <= SLOTS * summary
    segment = PackedSegment(SLOTS, ROWS, *LIKE, packs=False)
    limit = LAYERS * (segment.position_BHS.nbytes + SLOTS * summary)
    assert segment.key_BHSD.numel() == segment.value_BHSE.numel() == 0
    positions = 4 * SHAPE.heads  # of a row
    check(policy, limit)
    with pytest.raises(ConfigError, match="set slots to at most 4 or"):
        check(policy, limit - LAYERS * SLOTS * ROWS * positions - 1)

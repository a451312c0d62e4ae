"""The two-tier store on two streams: events order every access to its memory."""

import pytest
import torch

from sfi_core.state.layer_pages import PackedSegment
from sfi_core.state.side_stream import SecondStream
from sfi_kernels.pack import recall
from tests.cuda_clocks import Device
from tests.fakes import int32
from tests.two_tier import B, H, Written

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="streams of CPU tensors")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Note every copy of a segment, by the memory that it reads and writes, and what a recall does."""
    device = Device()
    device.install(monkeypatch)
    copy, reference = torch.index_select, recall.reference

    def noting_copy(source: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        read(device, source)
        device.touch(place(out), write=True)
        return copy(source, dim, index, out=out)

    def noting_recall(*tensors: torch.Tensor, **how) -> None:
        for tensor in (tensors[0], *tensors[3:10]):
            read(device, tensor)
        for tensor in tensors[10:15]:
            device.touch(place(tensor), write=True)
        reference(*tensors, **how)

    monkeypatch.setattr(torch, "index_select", noting_copy)
    monkeypatch.setitem(recall.__dict__, "reference", noting_recall)
    return device


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def read(device: Device, tensor: torch.Tensor) -> None:
    device.touch(place(tensor), write=False)


def decode(device: Device) -> None:
    """Read a prompt, then take two steps: each packs, and attends to what was packed."""
    written = Written(SecondStream(torch.cuda.Stream(torch.device("cuda:0"), priority=0)))
    store = written.store
    written.append(41, 33, 37)
    segment = PackedSegment(B, 9, *store.pages(0).tensors[:2])
    held = [segment.key_BHSD, segment.value_BHSE, segment.position_BHS, segment.length_BH]
    for step in range(2):
        for row in range(B):
            index = int32([5, 9 + step, 6, 11 + step]).view(1, 2, H)
            store.pack_into(segment, 0, int32([row]), int32([2]), index, 2)
        written.append(4, 4, 4)
        store.ready(0)
        for tensor in held:
            read(device, tensor)


def test_events_order_every_access(device: Device):
    decode(device)
    assert {stream for _, stream, *_ in device.accesses} == {"main", "side"}
    assert device.races() == []


@pytest.mark.parametrize(("stream", "race"), [("side", ("main", "side")), ("main", ("side", "main"))])
def test_an_event_that_a_stream_does_not_wait_for_is_a_race(device: Device, stream: str, race: tuple[str, str]):
    device.dropped = (stream,)
    decode(device)
    assert race in device.races()


def test_a_step_that_does_not_wait_for_its_rows_is_a_race(device: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sfi_core.state.two_tier.TwoTierStore.ready", lambda store, layer: None)
    decode(device)
    assert ("side", "main") in device.races()

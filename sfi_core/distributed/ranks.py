"""Processes that run one model together, one a device, and their messages.

Code that must agree, or needs other ranks' heads, takes a `Ranks`; `ALONE`, of one process, gives back its arguments.
Every rank must make the same calls in the same order, so what decides about a call must be equal on every rank.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from sfi_core import distributed as torchrun
from sfi_core.errors import ConfigError, RankLostError, SfiError

TIMEOUT = "SFI_TIMEOUT"
LOADING = timedelta(minutes=30)  # ranks may read a large checkpoint at very different speeds
T = TypeVar("T")
GLOO = "gloo/transport"  # its errors have no type of their own


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that run one model, seen from rank `number`, whose KV heads begin at `number * H`."""

    number: int = 0
    size: int = 1
    group: Any = None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, stacked in front: [size, ...], the same on every rank."""
        if self.size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather([*gathered], tensor.contiguous(), group=self.group)
        return gathered

    def settle(self, bits_RX: torch.Tensor) -> torch.Tensor:
        """Return the first rank's rows, except row 1: 1 where every rank is fine; one collective.

        `bits_RX` are integers, or other numbers' bits; row 1 is 1 where this rank is fine, else 0.
        """
        if self.size == 1:
            return bits_RX
        if self.number:
            fine_X = bits_RX[1].clone()
            bits_RX = torch.zeros_like(bits_RX)
            bits_RX[1] = fine_X
        dist.all_reduce(bits_RX, group=self.group)
        bits_RX[1] = bits_RX[1] == self.size
        return bits_RX

    def same_tokens(self, token_B: torch.Tensor) -> list[int]:
        """Return a step's tokens, which other code sampled on every rank; raise `SfiError` if they differ."""
        rows: list[list[int]] = self.gather(token_B).tolist()
        if any(row != rows[0] for row in rows):
            raise SfiError(f"every rank must sample the same tokens, got {rows}; seed them alike")
        return rows[0]

    def share_seed(self, device: torch.device) -> None:
        """Give every rank the first one's random state, so that all sample alike."""
        state = torch.get_rng_state().to(device)
        torch.set_rng_state(self.gather(state)[0].cpu())
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device).to(device)
            torch.cuda.set_rng_state(self.gather(state)[0].cpu(), device)

    def check_same(self, facts: dict[str, Any]) -> None:
        """Raise `ConfigError` on every rank if a fact differs between them; facts are compared by `repr`."""
        if self.size == 1:
            return
        ours = {name: hashlib.sha256(repr(fact).encode()).digest() for name, fact in facts.items()}
        digests = self.exchange(ours)
        for name in ours:
            if odd := [rank for rank, theirs in enumerate(digests) if theirs[name] != digests[0][name]]:
                raise ConfigError(f"{name} must be the same on every rank, got another on rank {odd[0]} than on 0")

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise the first rank's `SfiError` on every rank, named unless all have it.

        Inside, a rank that fails makes all calls of other ranks first, or they would wait for it.
        """
        error: SfiError | None = None
        try:
            yield
        except SfiError as mine:
            error = mine
        errors = self.exchange(error)
        raised = [(rank, theirs) for rank, theirs in enumerate(errors) if theirs is not None]
        if not raised:
            return
        rank, first = raised[0]
        if error is not None and [str(theirs) for theirs in errors] == [str(first)] * self.size:
            raise error
        raise type(first)(f"rank {rank}: {first}") from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn a collective that failed inside, by a dead or silent rank, into `RankLostError`."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or GLOO in str(error)):
                raise
            late = "imed out" in str(error)
            got = f"no answer in time; one of them hangs ({TIMEOUT} says how long to wait)"
            raise RankLostError(
                f"rank {self.number} of {self.size} must hear from every other, "
                f"got {got if late else 'a closed connection; one of them has died'}"
            ) from error

    def exchange(self, fact: T) -> list[T]:
        """Return every rank's `fact`, which pickle can write, on every rank; raise `RankLostError` if one is gone."""
        facts: list[Any] = [fact] * self.size
        if self.size > 1:
            with self.guarded():
                dist.all_gather_object(facts, fact, group=self.group)
        return facts

    def apart(self) -> "Ranks":
        """Return the same ranks with a group of their own, for a thread beside the model's; every rank must call it."""
        if self.size == 1:
            return self
        with self.guarded():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout()))
        return Ranks(self.number, self.size, group)


ALONE = Ranks()


def timeout() -> float:
    """Return the seconds to wait for a rank; raise `ConfigError` if SFI_TIMEOUT is not a positive number."""
    text, seconds = os.environ.get(TIMEOUT, "300"), math.nan
    with suppress(ValueError):
        seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{TIMEOUT} must be a positive number of seconds, got {text}")
    return seconds


def join() -> Ranks:
    """Meet the other processes of torchrun, once, as long as loading takes; raise `RankLostError` if one is lost."""
    if torchrun.size() == 1:
        return ALONE
    timeout()  # a mistake in it shows now
    ranks = Ranks(torchrun.number(), torchrun.size())
    if not dist.is_initialized():
        with ranks.guarded():
            # gloo, on every device: these ranks tell each other words, not tensors
            dist.init_process_group("gloo", store=_store(), rank=ranks.number, world_size=ranks.size, timeout=LOADING)
    return ranks


@cache
def mesh(device: torch.device) -> DeviceMesh:
    """Make the device mesh of a tensor-parallel model over all ranks; its calls end after `timeout()`."""
    limit = timedelta(seconds=timeout())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=limit, device_id=device)
    else:
        group = dist.new_group(backend="gloo", timeout=limit)
    return DeviceMesh.from_group(group, device.type)


def ranks_of(model: Any) -> Ranks:
    """Return the ranks over which transformers has split a model; `ALONE` for an unsplit one."""
    settings = getattr(model.config, "distributed_config", None)
    if settings is None or (settings.tp_size or 1) == 1:
        return ALONE
    whole = next(p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh"))
    split = whole["tp"] if whole.ndim > 1 else whole
    return Ranks(split.get_local_rank(), split.size(), split.get_group())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank holds."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def tells_errors() -> bool:
    """Say whether this process reports an error: of all ranks, the first that asks does."""
    if torchrun.size() == 1 or not dist.is_initialized():
        return torchrun.local() == 0
    try:
        return int(_store().add("sfi/told", 1)) == 1
    except dist.DistError:
        return True  # the process that kept the count is gone


@cache
def _store() -> Any:
    store, _, _ = next(rendezvous("env://", timeout=LOADING))
    return store

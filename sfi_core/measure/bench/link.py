"""The link to host memory: its bandwidth, the bytes of a step, and the time that they take."""

from dataclasses import dataclass

from sfi_core.errors import ConfigError

LINKS = {"pcie4": 25.0, "pcie5": 50.0}  # GB/s that copies from pinned memory reach over 16 lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes of a mean step.

    Attributes:
        device_bytes: Read from device memory.
        link_bytes: Over the link, from host memory to the device.
        critical_bytes: Those of `link_bytes` that the step waits for; the others move beside its device time.
    """

    device_bytes: float
    link_bytes: float = 0.0
    critical_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no byte count knows: it takes a run.

    Attributes:
        turnover: Share of the selected rows that a recall brings anew, the others are on the device.
        corrected: Share of the KV heads that FreeKV corrects at a step (Sec. 3.3).
    """

    turnover: float
    corrected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link to host memory, and what a forecast assumes of the traffic.

    Attributes:
        gb_per_s: Bandwidth of the link from host to device, in GB/s.
        assumed: Turnover and corrected share.
    """

    gb_per_s: float
    assumed: Assumptions


def link_gb_per_s(text: str) -> float:
    """Read a link's bandwidth in GB/s: a number, or a name of `LINKS`.

    Raises:
        ConfigError: The text is neither, or the number is not positive and finite.
    """
    wrong = ConfigError(f"link must be GB/s such as 25, or one of {tuple(LINKS)}, got {text!r}")
    try:
        value = LINKS.get(text.strip().lower()) or float(text)
    except ValueError as error:
        raise wrong from error
    if not 0 < value < float("inf"):
        raise wrong
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The milliseconds of a mean step.

    Attributes:
        device_ms: Of its reads from device memory.
        link_ms: Of its bytes over the link.
        hidden_ms: The part of `link_ms` that passes beside `device_ms`.
    """

    device_ms: float
    link_ms: float
    hidden_ms: float

    @property
    def step_ms(self) -> float:
        """Of the step: device time, and the link's time that is not hidden."""
        return self.device_ms + self.link_ms - self.hidden_ms


def step_time(
    traffic: Traffic, batch: int, bandwidth_gb_per_s: float, link_gb_per_s: float
) -> StepTime:
    """Return the time of a mean step of `batch` requests; the link hides at most the step's own device time.

    Args:
        traffic: The bytes of a request.
        batch: Requests that share the device and the link.
        bandwidth_gb_per_s: Bandwidth of device memory, GB/s.
        link_gb_per_s: Bandwidth of the link, GB/s.
    """
    device = batch * traffic.device_bytes / bandwidth_gb_per_s / 1e6
    link, free = (
        batch * size / link_gb_per_s / 1e6
        for size in (traffic.link_bytes, traffic.link_bytes - traffic.critical_bytes)
    )
    return StepTime(device_ms=device, link_ms=link, hidden_ms=min(free, device))

"""What `sfi tune --lossless` searches: values, trigger sets, and traces that go together."""

from collections.abc import Mapping, Sequence

from sfi_core.errors import ConfigError, TraceError
from sfi_core.settings.config import SfiConfig
from sfi_traces.read.reader import Trace
from sfi_traces.replay import Setting
from sfi_traces.replay.measured import check_one_model
from sfi_traces.tune.space import Axis
from sfi_traces.tune.trigger_sets import NamedSet, given_sets, punctuation_sets, recorded_set

MAX_TOKENS = 32  # the longest draft that is searched
AXES = {"trigger_delay": (0, 1, 2), "min_gap": (0, 2, 4, 8, 16)}
# settings in which traces that are tuned together may differ
FREE = ("triggers", "trigger_token_ids", "trigger_policy", "trigger_delay", "t_max", "min_gap")


def proposed_sets(
    traces: Sequence[Trace], setting: Setting, given: Mapping[str, Sequence[str]]
) -> list[NamedSet]:
    """Match strings with the generated tokens; without strings propose the traces' own set and punctuation.

    Raises:
        TraceError: Strings for a run without a tokenizer, which recorded no texts.
    """
    nameless = next(
        (one for one in traces if one.table("steps", ["token_text"])["token_text"].null_count), None
    )
    if given and nameless is not None:
        raise TraceError(f"trace {nameless.path} must have texts for a trigger-set, got token ids")
    if given:
        return given_sets(traces, given)
    return [recorded_set(setting), *([] if nameless else punctuation_sets(traces))]


def searched_values(base: SfiConfig, given: Mapping[str, str | None]) -> dict[str, tuple[int, ...]]:
    """Return the values of each dimension but the draft's length.

    Raises:
        ConfigError: Another dimension, or a value out of range.
    """
    values: dict[str, tuple[int, ...]] = {"t_max": (max(base.t_max, MAX_TOKENS),), **AXES}
    for name, text in given.items():
        if text is None:
            continue
        if name not in values:
            raise ConfigError(f"search of --lossless must be of {', '.join(values)}, got {name}")
        axis = Axis.parse(name, text)
        for value in axis.values:
            base.replace(**{name: value})
        low, *_, high = (*axis.values, axis.values[-1])
        values[name] = tuple(range(low, high + 1)) if axis.is_range else axis.values
    return values


def check_alike(trace: Trace, other: Trace) -> None:
    """Refuse traces whose drafts are not of one kind.

    Raises:
        TraceError: Another model, policy or memory, or other evidence.
    """
    check_one_model(trace, other)
    if trace.manifest["policy"] != other.manifest["policy"]:
        raise TraceError(
            f"traces must be of one policy, got {other.manifest['policy']} in {other.path}"
        )
    ours, theirs = ({**one.manifest["config"]} for one in (trace, other))
    evidence = [one.pop("draft", {}).get("evidence") for one in (ours, theirs)]
    for name in FREE:
        ours.pop(name, None)
        theirs.pop(name, None)
    different = sorted(name for name in ours if theirs.get(name) != ours[name])
    if different or evidence[0] != evidence[1]:
        name = different[0] if different else "draft.evidence"
        raise TraceError(f"traces must have one {name}, got another in {other.path}")

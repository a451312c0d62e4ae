"""The result of a search: the front, the choice, confirmations, and the files written."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Self

from sfi_core.machine.versions import versions
from sfi_core.settings.config import SfiConfig, changed_settings
from sfi_traces.replay import SCAN, Outcome, Setting
from sfi_traces.replay.setting import uses
from sfi_traces.tune.front import Candidate, Confirmation, choose, even_places, front_of, no_feasible
from sfi_traces.tune.space import NamedSet
from sfi_traces.tune.study import Search
from sfi_traces.tune.tuning import Tuning, costs

SHOWN = ("slow_rate", "retained_mass", "retained_mass_upper", "retained_mass_p5", "read_ratio",
         "bytes_per_token", "speedup")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a search.

    Attributes:
        front: The settings that no other trial beats, cheapest first.
        chosen: Place of the recommended setting on the front; `rule` says why.
        interrupted: Whether Ctrl-C ended the search.
        confirmed: Real runs, by place on the front.
        full_kv_tokens_per_second: Full attention's speed in the same runs.
    """

    tuning: Tuning
    search: Search
    front: Sequence[Candidate]
    chosen: int
    rule: str
    interrupted: bool = False
    confirmed: Mapping[int, Confirmation] | None = None
    full_kv_tokens_per_second: float | None = None

    def config(self, place: int) -> SfiConfig:
        """Return the config to run the setting at a place of the front."""
        setting = self.front[place].setting
        return tuned_config(setting, self.tuning.space.sets.get(setting.triggers))

    def confirm(
        self, run: Callable[[Sequence[SfiConfig], Sequence[str]], tuple[list[Confirmation], float]], count: int
    ) -> Self:
        """Run `count` settings for real, evenly over the front and including the chosen one.

        If the chosen one breaks a limit or gives a wrong answer, a confirmed one that does not is chosen
        instead. `run` is a `Confirmer`, which takes configs and policies: it returns the confirmations and full
        attention's tokens per second. Ctrl-C leaves the result as it was.
        """
        places = even_places(len(self.front), count, self.chosen)
        policies = [SCAN if self.front[place].setting.scans else "sfi" for place in places]
        try:
            rows, speed = run([self.config(place) for place in places], policies)
        except KeyboardInterrupt:
            return replace(self, interrupted=True)
        confirmed = dict(zip(places, rows, strict=True))
        good = [
            place
            for place, ran in confirmed.items()
            if ran.exact_match is not False and self.tuning.limits.kept_by(ran.comparison.measured)
        ]
        chosen, rule = self.chosen, self.rule
        if chosen not in good and good:
            index, rule = choose([self.front[place] for place in good], self.tuning.limits)
            chosen, rule = good[index], f"{rule}; of the confirmed settings that held when they ran"
        elif not good:
            rule = f"{rule}; but it did not hold when it ran, nor did another that was run"
        return replace(self, chosen=chosen, rule=rule, confirmed=confirmed, full_kv_tokens_per_second=speed)

    def document(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON, the tables and the figure."""
        tuning = self.tuning
        base, trials = tuning.space.base, self.search.complete()
        return {
            "traces": [str(trace.path) for trace in tuning.traces],
            "model": tuning.traces[0].manifest["model"]["name"],
            "requests": len(tuning.evaluate.recorded),
            "steps": sum(request.steps for request in tuning.evaluate.recorded),
            "space": tuning.space.to_dict(),
            "trigger_sets": [
                {
                    "name": named.name, "token_ids": sorted(named.token_ids),
                    "strings": named.strings and list(named.strings), "texts": list(named.texts),
                }
                for named in tuning.space.sets.values()
            ],
            "limits": {"min_retained": tuning.limits.min_retained, "max_read": tuning.limits.max_read},
            "trials": len(trials),
            "distinct_trials": len({json.dumps(t.params, sort_keys=True) for t in trials}),
            "points": [[bytes_, -mass] for bytes_, mass in (trial.values for trial in trials)],
            "recorded": _row(base, tuning.evaluate(base)),
            "recorded_budget": tuning.traces[0].manifest["config"]["budget"],
            "front": [
                {**_row(candidate.setting, candidate.outcome), "chosen": place == self.chosen}
                for place, candidate in enumerate(self.front)
            ],
            "rule": self.rule,
            "confirmed": [{"place": place, **ran.to_dict()} for place, ran in (self.confirmed or {}).items()],
            "full_kv_tokens_per_second": self.full_kv_tokens_per_second,
            "policy": SCAN if self.front and self.front[self.chosen].setting.scans else "sfi",
            "config": self.config(self.chosen).to_dict() if self.front else None,
            "interrupted": self.interrupted,
        }  # fmt: skip

    def toml(self) -> str:
        """Return the chosen settings and their provenance, for `--config`."""
        document, chosen = self.document(), self.front[self.chosen]
        ran = next((row for row in document["confirmed"] if row["place"] == self.chosen), None)
        confirmed = ran and {
            **{name: ran["measured"][name] for name in SHOWN},
            **{k: v for k, v in ran.items() if k not in ("place", "predicted", "measured")},
        }
        sets = self.tuning.space.sets
        named = sets.get(chosen.setting.triggers) if chosen.setting.policy == "boundary" else None
        searched = [name for name in self.tuning.space.axes if uses(chosen.setting.policy, name)]
        return tuned_toml(
            self.config(self.chosen),
            ["trigger_policy", *searched],
            {
                "command": "sfi tune",
                "policy": SCAN if chosen.setting.scans else "sfi",
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "model": document["model"],
                "trigger_set": named and named.name,
                "trigger_texts": list(named.texts) if named and named.texts else None,
                "trials": document["trials"],
                "sampler": type(self.search.study.sampler).__name__,
                "rule": self.rule,
                "limits": {k: v for k, v in document["limits"].items() if v is not None},
                "versions": {**versions(), "optuna": version("optuna")},
                "traces": [
                    {"path": str(t.path), "created": t.manifest["created"], "policy": t.manifest["policy"]}
                    for t in self.tuning.traces
                ],
                "predicted": {name: getattr(chosen.outcome, name) for name in SHOWN},
                "confirmed": confirmed,
            },
        )


def find(tuning: Tuning, trials: int, *, seed: int = 0, on_trial: Callable[[int], None] = lambda _: None) -> TuneResult:
    """Search with so many trials; `on_trial` is told how many are done. The front is empty only after Ctrl-C.

    Raises `SfiError` if no trial keeps the limits.
    """
    search = Search.of(seed)

    def measure(setting: Setting) -> tuple[tuple[float, float], dict[str, float]]:
        outcome = tuning.evaluate(setting)
        return costs(outcome), tuning.limits.violations(outcome)

    interrupted = search.run(tuning.space.setting, measure, trials, first=tuning.space.base_values(), on_trial=on_trial)
    front = front_of(search, tuning.space, tuning.evaluate)
    if not front and not interrupted:
        raise no_feasible(search, tuning.space, tuning.evaluate, tuning.limits)
    chosen, rule = choose(front, tuning.limits) if front else (0, "")
    return TuneResult(tuning=tuning, search=search, front=front, chosen=chosen, rule=rule, interrupted=interrupted)


def _row(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    ids = sorted(setting.trigger_token_ids) if setting.policy == "boundary" else []
    return {**setting.to_dict(), "trigger_token_ids": ids, **asdict(outcome)}


def tuned_config(setting: Setting, chosen: NamedSet | None) -> SfiConfig:
    """Return the config to run: a set of strings as strings, a mined one as token ids."""
    if chosen is None or setting.policy != "boundary":
        return setting.config
    if chosen.strings is not None:
        return setting.config.replace(triggers=chosen.strings, trigger_token_ids=None)
    return setting.config.replace(trigger_token_ids=sorted(chosen.token_ids))


def tuned_toml(config: SfiConfig, searched: Collection[str], provenance: Mapping[str, Any]) -> str:
    """Write settings for `--config`, with their provenance in a table that `--config` skips.

    Settings that were not searched and have their default are comments.
    """
    live, table = {*searched, *changed_settings(config.to_dict())}, ""
    lines = ["# Found by sfi tune. A line with # has the default of a setting that was not searched."]
    for line in config.to_toml().splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        name = table + line.partition(" = ")[0]
        lines.append(line if "=" not in line or name in live else f"# {line}")
    lines += ["", "[provenance]"]
    lines += [f"{key} = {_toml(value)}" for key, value in provenance.items() if _has_value(value)]
    return "".join(f"{line}\n" for line in lines)


def _toml(value: Any) -> str:
    # TOML has no null; JSON's strings, numbers and booleans are valid TOML, except for a bare DEL
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(own)}' for key, own in value.items() if _has_value(own))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _has_value(value: Any) -> bool:
    return value not in (None, {}) and not (isinstance(value, float) and not math.isfinite(value))

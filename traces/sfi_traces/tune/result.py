"""The result of a search: the front, the choice, confirmations; written as a document, a file and a figure."""

import json
import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from sfi_core.machine.versions import versions
from sfi_core.settings.config import SfiConfig, changed_settings, toml_lines
from sfi_traces.figures import MUTED, new_figure, plain, save
from sfi_traces.model.trace import Row
from sfi_traces.replay import SCAN, Comparison, Outcome, Setting
from sfi_traces.replay.setting import uses
from sfi_traces.tune.space import NamedSet
from sfi_traces.tune.tuning import Candidate, Tuning, choose, costs, even_places, none_keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A setting's prediction beside its run.

    Attributes:
        comparison: Over the steps whose earlier tokens are the trace's.
        kl_next_token: Mean KL from dense attention's next-token distribution at fast steps, nats.
        argmax_agreement: Share of fast steps with dense attention's most probable token.
        decode_tokens_per_second: Speed without the audit.
        exact_match: Whether the answer is right, word for word; None if the right one is unknown.
    """

    comparison: Comparison
    kl_next_token: float | None
    argmax_agreement: float | None
    decode_tokens_per_second: float
    exact_match: bool | None

    @property
    def error(self) -> float:
        """Predicted retained mass (lower bound) less the measured one."""
        return self.comparison.predicted.retained_mass - self.comparison.measured.retained_mass

    def to_dict(self) -> Row:
        """Plain values, for JSON."""
        row = asdict(self)
        compared = row.pop("comparison")
        requests = compared.pop("requests")
        counts = {name: sum(request[name] for request in requests) for name in ("steps", "recorded_steps")}
        return {**compared, **counts, "error": self.error, **row}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a search.

    Attributes:
        study: Optuna's.
        front: The settings that no other trial beats, cheapest first.
        chosen: Place of the recommended setting on the front; `rule` says why.
        interrupted: Whether Ctrl-C ended the search.
        confirmed: Real runs, by place on the front.
        full_kv_tokens_per_second: Full attention's speed in the same runs.
    """

    tuning: Tuning
    study: Any
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

        If the chosen one breaks a limit or gives a wrong answer, a confirmed one that does not is chosen instead. `run`
        is a `Confirmer`. Ctrl-C leaves the result as it was.
        """
        places = even_places(len(self.front), count, self.chosen)
        policies = [_policy(self.front[place].setting) for place in places]
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
        tuning, base = self.tuning, self.tuning.space.base
        trials = [trial for trial in self.study.trials if trial.values is not None]
        return {
            "traces": [str(trace.path) for trace in tuning.traces],
            "model": tuning.traces[0].manifest["model"]["name"],
            "requests": len(tuning.requests),
            "steps": sum(request.steps for request in tuning.requests),
            "space": tuning.space.to_dict(),
            "trigger_sets": [
                {"name": named.name, "token_ids": sorted(named.token_ids), "strings": named.strings}
                for named in tuning.space.sets.values()
            ],
            "limits": asdict(tuning.limits),
            "trials": len(trials),
            "distinct_trials": len({json.dumps(t.params, sort_keys=True) for t in trials}),
            "points": [[bytes_, -mass] for bytes_, mass in (trial.values for trial in trials)],
            "recorded": _row(base, tuning.outcome(base)),
            "recorded_budget": tuning.traces[0].manifest["config"]["budget"],
            "front": [
                {**_row(candidate.setting, candidate.outcome), "chosen": place == self.chosen}
                for place, candidate in enumerate(self.front)
            ],
            "rule": self.rule,
            "confirmed": [{"place": place, **ran.to_dict()} for place, ran in (self.confirmed or {}).items()],
            "full_kv_tokens_per_second": self.full_kv_tokens_per_second,
            "policy": _policy(self.front[self.chosen].setting) if self.front else "sfi",
            "config": self.config(self.chosen).to_dict() if self.front else None,
            "interrupted": self.interrupted,
        }

    def toml(self) -> str:
        """Return the chosen settings and their provenance, for `--config`."""
        document, chosen = self.document(), self.front[self.chosen]
        ran = next((row for row in document["confirmed"] if row["place"] == self.chosen), None)
        searched = [name for name in self.tuning.space.axes if uses(chosen.setting.policy, name)]
        return tuned_toml(
            self.config(self.chosen),
            ["trigger_policy", *searched],
            {
                "command": "sfi tune",
                "policy": document["policy"],
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "model": document["model"],
                "trigger_set": chosen.setting.triggers if chosen.setting.policy == "boundary" else None,
                "trials": document["trials"],
                "sampler": type(self.study.sampler).__name__,
                "rule": self.rule,
                "limits": {k: v for k, v in document["limits"].items() if v is not None},
                "versions": {**versions(), "optuna": version("optuna")},
                "traces": [
                    {"path": str(t.path), "created": t.manifest["created"], "policy": t.manifest["policy"]}
                    for t in self.tuning.traces
                ],
                "predicted": asdict(chosen.outcome),
                "confirmed": ran and {k: v for k, v in ran.items() if k not in ("place", "predicted")},
            },
        )


def find(tuning: Tuning, trials: int, *, seed: int = 0, on_trial: Callable[[int], None] = lambda _: None) -> TuneResult:
    """Try so many settings, at first the trace's own, and choose; the same seed tries the same ones.

    `on_trial` is told how many trials are done. Ctrl-C ends the search; only then the front may be empty.

    Raises `SfiError` if no trial keeps the limits.
    """
    import optuna  # noqa: PLC0415 - an extra

    optuna.logging.set_verbosity(logging.CRITICAL)
    settings: list[Setting] = []
    interrupted = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
        if first := tuning.space.base_values():
            study.enqueue_trial(first)
        try:
            for number in range(trials):
                trial = study.ask()
                settings.append(tuning.space.setting(trial))
                outcome = tuning.outcome(settings[-1])
                for name, value in tuning.limits.violations(outcome).items():
                    trial.set_constraint(name, value)
                study.tell(trial, costs(outcome))
                on_trial(number + 1)
        except KeyboardInterrupt:
            interrupted = True
        best = {settings[trial.number].key: settings[trial.number] for trial in study.best_trials}
    if not best and not interrupted:
        raise none_keeps(tuning.limits, [tuning.outcome(setting) for setting in settings])
    front = [Candidate(setting=setting, outcome=tuning.outcome(setting)) for setting in best.values()]
    front.sort(key=lambda candidate: costs(candidate.outcome))
    chosen, rule = choose(front, tuning.limits) if front else (0, "")
    return TuneResult(tuning=tuning, study=study, front=front, chosen=chosen, rule=rule, interrupted=interrupted)


def _policy(setting: Setting) -> str:
    return SCAN if setting.scans else "sfi"


def _row(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    ids = sorted(setting.trigger_token_ids) if setting.policy == "boundary" else []
    return {**setting.to_dict(), "trigger_token_ids": ids, **asdict(outcome)}


def tuned_config(setting: Setting, chosen: NamedSet | None) -> SfiConfig:
    """Return the config to run: a set of strings as strings, another one as token ids."""
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
    for line in config.to_toml().split("\n")[:-1]:  # a string may hold another end of a line
        if line.startswith("["):
            table = line.strip("[]") + "."
        name = table + line.partition(" = ")[0]
        lines.append(line if "=" not in line or name in live else f"# {line}")
    return "".join(f"{line}\n" for line in [*lines, "", "[provenance]"]) + toml_lines(provenance)


def plot_tuning(document: Row, path: Path, *, kind: str) -> None:
    """Draw retained mass against the bytes of a token, as "png" or "svg": trials, the front and measured settings.

    The document, a tuning's, has at least one setting on the front.
    """
    figure = new_figure(7.5, 5.0)
    axes: Any = figure.subplots()
    points = [(bytes_ / 1e6, mass) for bytes_, mass in document["points"]]
    axes.scatter(*zip(*points, strict=True), s=9, color="#9aa5b1", alpha=0.5, linewidths=0, label="trials")
    front = list(map(_place, document["front"]))
    axes.plot(*zip(*front, strict=True), "o-", color="tab:blue", markersize=4, linewidth=0.9, label="Pareto front")
    axes.scatter(
        *_place(document["recorded"]), s=70, marker="*", color="black", label="the trace's own setting", zorder=3
    )
    (chosen,) = (_place(row) for row in document["front"] if row["chosen"])
    axes.scatter(*chosen, s=110, facecolors="none", edgecolors="tab:red", linewidths=1.6, label="chosen", zorder=4)
    _draw_runs(axes, document)
    plain(axes)
    axes.set_xlabel("MB read for a token, byte model")
    axes.set_ylabel("retained mass of fast steps, mean")
    axes.legend(frameon=False, fontsize=8)
    trials = f"{document['trials']:,} trials on {document['steps']:,} recorded steps"
    figure.suptitle(f"{document['model']}: {trials}", fontsize=10, color=MUTED)
    save(figure, path, kind=kind)


def _draw_runs(axes: Any, document: Row) -> None:
    # a run whose tokens soon differ is comparable on a few steps only, and is drawn where it was predicted
    looks = {"measured": ("x", "tab:orange"), "WRONG answer": ("X", "tab:red"), "other tokens": ("P", "tab:purple")}
    places: dict[str, list[tuple[float, float]]] = {}
    for run in document["confirmed"]:
        differs = run["exact_match"] is False or run["steps"] < run["recorded_steps"]
        name = "measured" if not differs else "WRONG answer" if run["exact_match"] is False else "other tokens"
        row = document["front"][run["place"]] if differs else run["measured"]
        places.setdefault(name, []).append(_place(row))
    for name, points in places.items():
        label, (marker, color) = name if name == "measured" else f"{name} when it ran", looks[name]
        axes.scatter(*zip(*points, strict=True), s=60, marker=marker, color=color, label=label, zorder=5)


def _place(row: Row) -> tuple[float, float]:
    return row["bytes_per_token"] / 1e6, row["retained_mass"]

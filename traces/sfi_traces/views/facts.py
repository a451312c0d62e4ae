"""What a reader asks of a run first, as short facts and small tables, for `sfi trace show` and the report."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from sfi_core.engine.report_text import read_words
from sfi_traces.views.table import Columns, Row, Table, count, dense_words, duration, number, percent, plural, quoted

SECTIONS = ("run", "steps", "lossless", "triggers", "audit", "logits", "disagreements", "latency")  # of the summary
MOST_TRIGGERS, WORST_HEADS = 12, 3


class Fact(NamedTuple):
    """One number with its name, and a note on what it counts."""

    name: str
    value: str
    note: str


def facts(document: Row) -> Iterator[Fact]:
    """Yield what a reader wants first: what ran slow, was read, differs from full attention, and what it cost."""
    run, steps, lossless = document["run"], document["steps"], document["lossless"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in steps["reasons"].items())
    yield Fact("slow steps", percent(steps["slow_share"]), f"{steps['slow']:,} of {steps['steps']:,} ({reasons})")
    yield Fact("cache read", *_cache_read(steps, lossless=bool(lossless)))
    if lossless:
        drafts = f"{lossless['accepted']:,} of {lossless['drafted']:,} drafted tokens"
        yield Fact("drafts kept", percent(lossless["acceptance"]), drafts)
        passes = f"in {number(lossless['passes_per_token'], 2)} passes a token"
        yield Fact("tokens a verification", number(lossless["tokens_per_verification"], 2), passes)
    if logits := document["logits"]:
        kl = logits["kl_next_token"]
        what = plural(kl["n"], "tested token" if lossless else "audited fast step")
        note = f"of {what}; KL {number(kl['mean'], 4)} nats on average, at most {number(kl['max'], 4)}"
        yield Fact("full attention's token", percent(logits["argmax_agreement"]), note)
    elif not (run["audit"] or run["imported"] or lossless or run["policy"] == "full-kv"):
        yield Fact("full attention's token", "not compared", "record with --audit 1")
    audit = document["audit"]
    if audit and audit["retained_mass"]["n"]:
        worst = (
            f"{number(head['retained_mass']['mean'])} in layer {head['layer']} head {head['head']}"
            for head in audit["heads"][:WORST_HEADS]
        )
        note = f"of dense attention, in fast steps; least {', '.join(worst)}"
        yield Fact("retained mass", number(audit["retained_mass"]["mean"]), note)
    health = document["health"]
    judged = f"by {plural(len(health['judged']), 'rule')}; {len(health['not_judged'])} not judged"
    yield Fact("health", plural(len(health["findings"]), "problem"), judged)
    latency = document["latency"]
    kinds = {kind["kind"]: duration(kind["p50_us"]) for kind in latency["kinds"]}
    if medians := ", ".join(f"{name} {kinds[name]}" for name in ("fast", "mixed", "slow") if name in kinds):
        note = f"median step: {medians}"
        if latency["audited"]:  # the audit's work would hide which kind is faster
            note = "with the audit's work; record without it for the speed"
        yield Fact("tokens/s", number(latency["tokens_per_second"], 1), note)


def _cache_read(steps: Row, *, lossless: bool) -> tuple[str, str]:
    # the share of the cache, and a note on its parts
    if steps["cache_read_ratio"] is None:
        return "-", "no step after step 0"
    tokens = steps["mean_attended_tokens"] + (steps["mean_selection_tokens"] or 0.0)
    share, _, parts = read_words(*(steps[f"{name}_ratio"] for name in ("cache_read", "read", "selection"))).partition(
        ": "
    )
    note = f"{number(tokens, 0)} tokens a {'token given' if lossless else 'step'}" + (f" ({parts})" if parts else "")
    return share, f"{note}; fast steps {percent(steps['fast_cache_read_ratio'])}"


def disagreement(row: Row) -> str:
    """Say what a step gave, and what full attention would have said."""
    gave = "" if row["token_text"] is None else f"{quoted(row['token_text'])}, "
    return f"{gave}full attention {dense_words(row)}"


def run_table(run: Row) -> Table:
    """List what ran."""
    way = ", lossless" if run["lossless"] else ""
    where = "" if run["imported"] else f", {run['backend']} on {run['device']}"
    changed = ", ".join(f"{name} {_setting(value)}" for name, value in run["settings"].items())
    finished = run["finished"] or "no: the run was killed, or goes on"
    lines = {
        "model": f"{run['model']} ({run['architecture']}){where}",
        "policy": f"{run['policy']}{way}, preset {run['preset'] or 'default'}",
        "settings": changed or "the defaults",
        "audit": audit_words(run),
        "begun": run["created"],
        "finished": finished + (f", stopped early: {run['stopped']}" if run["stopped"] else ""),
    }
    return Table("Run", (), [(name, str(value)) for name, value in lines.items() if value])


def latency_table(latency: Row) -> Table:
    """Show the time of each kind of step."""
    title = "Time of a step" + ", the audit's work included" * latency["audited"]
    return Table.of(title, LATENCY, latency["kinds"])


def trigger_table(triggers: list[Row]) -> Table:
    """Show the tokens that end a sentence."""
    more = len(triggers) - MOST_TRIGGERS
    title = "Tokens that end a sentence" + (f", and {more:,} more" if more > 0 else "")
    return Table.of(title, TRIGGERS, triggers[:MOST_TRIGGERS])


def audit_words(run: Row) -> str:
    """Describe what was audited, or imported."""
    audit, imported = run["audit"], run["imported"]
    if imported:
        return f"{imported['kind']} of {imported['file']}, up to {audit['top']:,} positions"
    if audit is None:
        return "none"
    often = "every step" if audit["every"] == 1 else f"every {audit['every']} steps and the slow ones"
    return f"{often}, the top {audit['top']:,} positions"


def _setting(value: object) -> str:
    return " ".join(map(repr, value)) if isinstance(value, list) else str(value)


def _token(row: Row) -> str:
    if row["token_text"] is not None:
        return quoted(row["token_text"])
    return "(left out)" if row["token_id"] is None else "-"


LATENCY: Columns = {
    "step": lambda row: row["kind"] + (" (audited)" if row["audited"] else ""),
    "n": (count, "n"),
    **{name: (duration, f"{name}_us") for name in ("mean", "p50", "p95", "p99")},
}
TRIGGERS: Columns = {
    "token": _token,
    "id": (count, "token_id"),
    "count": (count, "count"),
    "slow after": (partial(percent, digits=0), "slow_after"),
}

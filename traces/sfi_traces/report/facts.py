"""The page's numbers and tables, from the trace's summary."""

from typing import Any, NamedTuple

SECTIONS = (  # of the summary, without those that have figures here
    "run", "steps", "lossless", "triggers", "stability", "audit", "logits", "selections", "coverage",
    "corrections", "recalls", "latency",
)  # fmt: skip
Row = dict[str, Any]
NONE = "-"


class Card(NamedTuple):
    """One number with its name, and a note on what it counts."""

    name: str
    value: str
    note: str


class Table(NamedTuple):
    """A small table; `head` is empty for a list of names and values."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def cards(summary: Row) -> list[Card]:
    """Choose the numbers that a reader wants first, if the trace has them."""
    steps, lossless = summary["steps"], summary["lossless"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in steps["reasons"].items())
    found = [
        Card("Slow steps", _percent(steps["slow_share"], 1), f"{steps['slow']:,} of {steps['steps']:,}: {reasons}"),
        Card(
            "Cache read",
            _percent(steps["read_ratio"], 1),
            f"{_number(steps['mean_attended_tokens'], 0)} tokens a {'token given' if lossless else 'step'}; "
            f"fast steps {_percent(steps['fast_read_ratio'], 1)}",
        ),
    ]
    if lossless:
        found += _lossless_cards(lossless)
    found += [*_support_cards(summary), *_freekv_cards(summary), *_speed_cards(summary["latency"])]
    return found


def _lossless_cards(found: Row) -> list[Card]:
    kept = f"{found['accepted']:,} of {found['drafted']:,} drafted tokens"
    each = f"in {_number(found['passes_per_token'], 2)} passes a token"
    return [
        Card("Drafts kept", _percent(found["acceptance"], 1), kept),
        Card("Tokens a verification", _number(found["tokens_per_verification"], 2), each),
    ]


def _support_cards(summary: Row) -> list[Card]:
    found, stability, audit = [], summary["stability"], summary["audit"]
    if stability:
        within, across = (stability[name] and stability[name]["mean"] for name in ("within", "across"))
        note = "of consecutive steps, within a sentence | across a boundary"
        found.append(Card("Support overlap", f"{_number(within, 2)} | {_number(across, 2)}", note))
    if audit and audit["retained_mass"]["n"]:
        worst = audit["heads"][0]
        note = (
            f"of fast steps; least {_number(worst['retained_mass']['mean'], 3)} in layer {worst['layer']}, "
            f"KV head {worst['head']}"
        )
        found.append(Card("Retained mass", _number(audit["retained_mass"]["mean"], 3), note))
    if audit and audit["top_1_read"]["n"]:
        note = (
            "of query heads: fast steps read their most probable position; a KV head's query head that "
            f"retains least keeps {_number(audit['retained_mass_min']['mean'], 3)}"
        )
        found.append(Card("Top-1 hit", _percent(audit["top_1_read"]["mean"], 1), note))
    if logits := summary["logits"]:
        what = "tested tokens" if summary["lossless"] else "audited fast steps"
        note = f"of {what}; KL {_number(logits['kl_next_token']['mean'], 5)} nats on average"
        found.append(Card("Same next token", _percent(logits["argmax_agreement"], 1), note))
    found += _coverage_cards(summary["coverage"])
    selections = summary["selections"]
    if selections and selections["lambda_star"]["n"]:
        note = f"on average; {_percent(selections['clipped_share'], 0)} of the values stand at the clip"
        found.append(Card("lambda*", _number(selections["lambda_star"]["mean"], 4), note))
    return found


def _coverage_cards(found: Row | None) -> list[Card]:
    if not found:
        return []
    note = (
        f"of the prompt was ever selected by a KV head, {_percent(found['selected_by_any'], 1)} by any; half "
        f"of it lies {_number(found['distance']['p50'], 0)} tokens back or more; a position stays "
        f"for {_number(found['stay'], 1)} refreshes"
    )
    return [Card("Coverage", _percent(found["selected"], 1), note)]


def _freekv_cards(summary: Row) -> list[Card]:
    found = []
    if (corrected := summary["corrections"]) and corrected["n"]:
        note = f"of {corrected['n']:,} fast steps x layers x KV heads"
        found.append(Card("Corrections", _percent(corrected["share"], 1), note))
    if recalled := summary["recalls"]:
        note = f"of K and V a step, from the host; {_number(recalled['step_waited_us'], 1)} us waited"
        found.append(Card("Recalled", f"{_number(recalled['step_bytes'], 0)} bytes", note))
    return found


def _speed_cards(latency: Row) -> list[Card]:
    kinds = {kind["kind"]: kind for kind in latency["kinds"]}
    decoding = [name for name in ("fast", "mixed", "slow") if name in kinds]
    medians = ", ".join(f"{name} {_milliseconds(kinds[name]['p50_us'])}" for name in decoding)
    if not medians:
        return []
    note = f"median step: {medians}" + ("; the audit's cost included" if latency["audited"] else "")
    return [Card("Tokens a second", _number(latency["tokens_per_second"], 1), note)]


def tables(summary: Row) -> list[Table]:
    """List the run, its settings, its triggers and its times."""
    run = summary["run"]
    way = ", lossless" if run["lossless"] else ""
    facts = {
        "model": f"{run['model']} ({run['architecture']})",
        "policy": f"{run['policy']}{way}, preset {run['preset'] or 'default'}",
        "backend": run["backend"] and f"{run['backend']} on {run['device']}",
        "audit": audit_words(run),
        "begun": run["created"],
        "finished": run["finished"] or "no: the run was killed, or goes on",
        "stopped": run["stopped"],
    }
    return [
        Table("Run", (), [(name, str(value)) for name, value in facts.items() if value]),
        Table(
            "Settings that differ from the defaults",
            (),
            [(name, _setting(value)) for name, value in run["settings"].items()] or [("none", "")],
        ),
        Table(
            "Time of a step",
            ("step", "n", "mean", "p50", "p95", "p99"),
            [
                (
                    kind["kind"] + (" (audited)" if kind["audited"] else ""), f"{kind['n']:,}",
                    *(_milliseconds(kind[f"{name}_us"]) for name in ("mean", "p50", "p95", "p99")),
                )
                for kind in summary["latency"]["kinds"]
            ],
        ),
        Table(
            "Tokens that end a sentence",
            ("token", "count", "slow after"),
            [
                (
                    NONE if one["token_text"] is None else repr(one["token_text"]), f"{one['count']:,}",
                    _percent(one["slow_after"], 0),
                )
                for one in summary["triggers"][:12]
            ],
        ),
    ]  # fmt: skip


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


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def _milliseconds(value: float) -> str:
    return f"{value / 1000:,.2f} ms"

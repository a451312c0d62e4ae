"""The verifications of a lossless run, for `sfi trace show`."""

from typing import Any

from sfi_cli.terminal.tables import count, number, percent, plural, table
from sfi_traces.views.labels import span

Row = dict[str, Any]


def lossless_line(found: Row) -> str:
    """Say how many tokens a verification gave, and how many drafted tokens were kept."""
    each = number(found["tokens_per_verification"], 2)
    passes = number(found["passes_per_token"], 2)
    kept = f"{count(found['accepted'])} of {count(found['drafted'])} drafted tokens"
    return (
        f"lossless: {plural(found['verifications'], 'verification')} gave {count(found['tokens'])} tokens, "
        f"{each} each, in {passes} passes a token; kept {kept} ({percent(found['acceptance'])}), "
        f"{percent(found['token_acceptance'])} of the {count(found['tested'])} tested\n"
    )


def reason_table(found: Row) -> Any:
    """Show why drafts ended, and how many of their tokens were kept."""
    rows = [
        (
            one["reason"], count(one["verifications"]), count(one["drafted"]), count(one["accepted"]),
            percent(one["acceptance"]),
        )
        for one in found["reasons"]
    ]  # fmt: skip
    columns = ("reason", "verifications", "drafted", "kept", "share")
    return table("Verifications by why the draft ended", columns, rows)


def place_table(found: Row) -> Any:
    """Show acceptance by place in the sentence."""
    return _bins("place", found["places"], "place in the sentence; 0 is its first token")


def depth_table(found: Row) -> Any:
    """Show acceptance by depth in the draft."""
    return _bins("depth", found["depths"], "depth in the draft; 1 is its first token")


def tested_line(found: Row) -> str:
    """Say how far the drafts' next-token distributions are from full attention's."""
    kl = found["kl_next_token"]
    return (
        f"tested tokens: KL {number(kl['mean'], 4)} nats on average, p95 {number(kl['p95'], 4)}, at most "
        f"{number(kl['max'], 4)}; same most probable token in {percent(found['argmax_agreement'])} of "
        f"{count(kl['n'])}\n"
    )


def _bins(name: str, rows: list[Row], what: str) -> Any:
    cells = [
        (
            span(one[f"from_{name}"], one[f"to_{name}"]), count(one["accepted"]), count(one["tested"]),
            percent(one["acceptance"]),
        )
        for one in rows
    ]  # fmt: skip
    return table(f"Acceptance by {what}", (name, "kept", "of tested", "share"), cells)

"""The verifications of a lossless run, for `sfi trace show`."""

from sfi_cli.commands.trace.support_views import compared_words
from sfi_traces.views.table import Columns, Row, Table, count, number, percent, plural, span


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


def reason_table(found: Row) -> Table:
    """Show why drafts ended, and how many of their tokens were kept."""
    return Table.of("Verifications by why the draft ended", REASONS, found["reasons"])


def place_table(found: Row) -> Table:
    """Show acceptance by place in the sentence."""
    return _bins("place", found["places"], "place in the sentence; 0 is its first token")


def depth_table(found: Row) -> Table:
    """Show acceptance by depth in the draft."""
    return _bins("depth", found["depths"], "depth in the draft; 1 is its first token")


def tested_line(found: Row) -> str:
    """Say how far the drafts' next-token distributions are from full attention's."""
    return f"tested tokens: {compared_words(found)}\n"


def _bins(name: str, rows: list[Row], what: str) -> Table:
    columns: Columns = {name: lambda one: span(one[f"from_{name}"], one[f"to_{name}"])}
    return Table.of(f"Acceptance by {what}", columns | TESTED, rows)


REASONS: Columns = {
    "reason": (str, "reason"),
    "verifications": (count, "verifications"),
    "drafted": (count, "drafted"),
    "kept": (count, "accepted"),
    "share": (percent, "acceptance"),
}
TESTED: Columns = {"kept": (count, "accepted"), "of tested": (count, "tested"), "share": (percent, "acceptance")}

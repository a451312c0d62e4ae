"""What `sfi trace import` says when it is done."""

from typing import Any

from sfi_cli.terminal.tables import plural


def import_text(document: dict[str, Any]) -> str:
    """Say what the trace has, and what it has not."""
    imported, rows = document["imported"], document["tables"]
    what = f"{imported['kind']} of {imported['file']}"
    if imported["block_size"]:
        what += f", blocks of {imported['block_size']} positions"
    layers = document["model"]["layers"]
    heads = max(layer["heads"] for layer in layers)
    told = (
        f"{what}: {plural(len(document['prompts']), 'request')}, {plural(rows['steps'], 'step')}, "
        f"{plural(len(layers), 'layer')} of {plural(heads, 'head')}, "
        f"up to {document['audit']['top']:,} positions a row"
    )
    lines = [told]
    if not imported["masses"]:
        lines.append("note: the file has no masses, so overlaps are known and retained mass is not")
    if not document["trigger_token_ids"]:
        lines.append(
            "note: no token ends a sentence; give --tokenizer, or trigger_token_ids in the file"
        )
    return "\n".join([*lines, f"trace: {document['trace']}"])

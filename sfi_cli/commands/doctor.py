"""`sfi doctor`: what this machine can run."""

from typing import Any

import typer

from sfi_cli import options as o

MARKS = {True: "ok", False: "FAILS", None: "-"}


def doctor(model: o.Model = None, json: o.Json = False) -> None:
    """Try the backends, and print versions, hardware and the trigger set of a model's tokenizer.

    For example:

      sfi doctor --model ./my-model
    """
    from dataclasses import asdict

    from sfi_cli.terminal.output import Output
    from sfi_core.machine.memory import describe
    from sfi_core.machine.versions import versions
    from sfi_core.measure.doctor import checks
    from sfi_core.models.load import load_tokenizer
    from sfi_core.settings.config import SfiConfig
    from sfi_core.triggers.trigger import build_trigger_set

    triggers = build_trigger_set(load_tokenizer(model), SfiConfig().triggers)
    document: dict[str, Any] = {
        "machine": describe(),
        "versions": versions(),
        "checks": [asdict(check) for check in checks()],
        "triggers": [
            {"trigger": name, "tokens": count, "examples": examples} for name, count, examples in triggers.describe()
        ],
    }
    Output(json=json).data(document, lambda _: _lines(document))
    if any(check["ok"] is False for check in document["checks"]):
        raise typer.Exit(1)


def _lines(document: dict[str, Any]) -> list[str]:
    machine = document["machine"]
    free, total = machine["free_memory_bytes"] or 0, machine["memory_bytes"] or 0
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, {machine['system']}",
        f"memory {free / 1e9:.1f} GB free of {total / 1e9:.1f} GB",
        ", ".join(f"{name} {number or 'missing'}" for name, number in document["versions"].items()),
        "",
    ]
    lines += [f"{c['name']:<15} {MARKS[c['ok']]:<6} {c['detail']}" for c in document["checks"]]
    lines += ["", "tokens that end a sentence"]
    lines += [f"{t['trigger']:<6} {t['tokens']:>4}  {t['examples']}" for t in document["triggers"]]
    return lines

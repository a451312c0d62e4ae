"""Real runs of tuned settings, for `sfi tune --confirm`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sfi_cli.commands.generate.prompts import read_prompts
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import InputError
from sfi_core.settings.engine import EngineOptions


def load_confirmer(
    tuning: Any, texts: list[str], model: str | None, engine: EngineOptions, loading: dict[str, Any]
) -> Any:
    """Load the model that the traces were recorded with; return what `Found.confirm` runs settings by.

    It runs `texts`, or without any the traces' own prompts, and tells its keyword `on_run` of each run.
    `loading` has further arguments of `load`. Raises `SfiError` if the model cannot be loaded, or is another
    one.
    """
    from sfi_core.engine.backends.registry import check_backend
    from sfi_core.models.load import load, resolve_device
    from sfi_traces.tune.confirm import Confirmer, Material, check_model

    check_backend(engine.backend, resolve_device(loading["device"]))
    loaded, tokenizer = load(model, **loading)
    for trace in tuning.traces:
        check_model(loaded, tokenizer, trace)
    pairs = zip(tuning.traces, tuning.recorded, strict=True)
    material = (
        [Material.of_texts(texts, tokenizer)]
        if texts
        else [Material.of_trace(trace, recorded, tokenizer) for trace, recorded in pairs]
    )
    top = min(one.top for one in tuning.evaluate.recorded)
    return partial(Confirmer(model=loaded, tokenizer=tokenizer, top=top, engine=engine), material)


def read_texts(prompt_file: Path | None, batch: Path | None) -> list[str]:
    """Read the prompts that the options name; none without such an option.

    Raises:
        InputError: The file has no prompts, or it has messages.
    """
    if prompt_file is None and batch is None:
        return []
    entries = read_prompts(None, prompt_file, batch).entries
    texts = [entry for entry in entries if isinstance(entry, str)]
    if len(texts) < len(entries):
        raise InputError(f"batch {batch} must hold prompts, got messages")
    return texts


def confirmed(found: Any, confirm: Any, count: int, *, quiet: bool) -> Any:
    """Run `count` settings of a search's result for real; Ctrl-C leaves the result as it was."""
    with BenchProgress(quiet=quiet) as progress:
        try:
            run = partial(confirm, on_run=partial(progress.update, "confirming"))
            return found.confirm(run, count)
        except KeyboardInterrupt:
            return replace(found, interrupted=True)

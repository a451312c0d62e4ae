"""`sfi generate` after its options are read."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sfi_cli.commands.generate.prompts import Prompts, token_ids
from sfi_cli.commands.generate.views import advice_before, plan_line, report_lines
from sfi_cli.options import Subject
from sfi_cli.settings import Given, TraceTable
from sfi_cli.terminal.output import INTERRUPTED, Output, message
from sfi_cli.terminal.progress import Progress, ProgressObserver
from sfi_core import distributed as torchrun
from sfi_core.errors import SfiError
from sfi_core.settings.engine import AuditConfig, EngineOptions, Sampling
from sfi_core.settings.policy_names import default_policy

if TYPE_CHECKING:
    from sfi_core.observers.observer import Observer
    from sfi_traces.record.parquet import ParquetObserver

ENDED = ("stop", "length")  # reasons of a whole answer


def run(
    output: Output,
    prompts: Prompts,
    subject: Subject,
    settings: Given,
    *,
    policy: str,
    named: bool,
    preset: str,
    chat: bool,
    compare: bool,
    beside: bool,
    trace: Path | None,
    audit: AuditConfig | None,
    seed: int,
    max_new_tokens: int,
    max_batch: int | None,
    by_line: bool,
    prompt_cache: Path | None,
) -> None:
    """Load the model, decode, write the text or the document, and report; `by_line` writes each answer as it ends.

    `named` says whether the policy was asked for. `compare` and `beside` ask for further runs for comparison, under
    full attention and lossless.
    """
    engine, sampling = settings.table(EngineOptions), settings.of("sampling")
    drawing, folder = prompts.sampling(Sampling(**sampling)), None
    if prompt_cache is not None:
        from sfi_cli.commands.prompt_folder import PromptFolder

        folder = PromptFolder(prompt_cache, output.say)
    with Progress(quiet=output.quiet) as progress:
        progress.update(f"loading {subject.name}", 0, 0)
        from sfi_core.models.rotation import check_rotation, pass_rotation

        _check(policy, engine, subject, audited=audit is not None)
        subject.check()
        model, tokenizer = subject.loaded(check_rotation if engine.lossless else None)
    rows = [token_ids(entry, tokenizer, chat=chat) for entry in prompts.entries]
    shows = output.path is None and not output.json and len(rows) == 1
    limits = prompts.limits(max_new_tokens)
    silent = named or output.quiet or policy != "sfi" or subject.name == "bundled"
    _advise(settings.config, model, max(map(len, rows)) + max(limits), silent=silent)
    run_once: Callable[..., Any] = partial(
        decode, model, tokenizer, rows, settings.config, quiet=output.quiet,
        max_new_tokens=limits, max_batch=max_batch,
        sampling=drawing, seed=prompts.seeds(seed), cache=folder and folder.cache,
    )  # fmt: skip
    provenance = {
        "preset": preset, "seed": seed, "revision": subject.loading["revision"], "sampling": sampling,
        "max_new_tokens": max_new_tokens,
    }  # fmt: skip

    def on_end(request: int, report: Any, text: str) -> None:
        line = prompts.lines[request]
        output.line({"id": line.id, "line": line.number, "text": text, **asdict(report)})

    table = settings.table(TraceTable)
    with recording(trace, table, output, tokenizer=tokenizer, provenance=provenance) as (observers, recorder):
        if by_line:
            output.begin_lines()
        result = run_once(
            policy, engine, stream=output if shows else None, observers=observers, audit=audit,
            on_end=on_end if by_line else None,
        )  # fmt: skip
        if recorder is not None and (result.interrupted or result.error is not None):
            recorder.close("interrupted" if result.interrupted else str(result.error))
    if folder is not None:
        folder.keep()
    document = _document(
        result, subject, prompts, engine, str(model.device), policy=policy, preset=preset,
        config=settings.config.to_dict(),
    )  # fmt: skip
    if not result.interrupted and result.error is None:
        if compare:
            document["comparison"] = {"policy": "full-kv", **_measured(run_once("full-kv", engine))}
        if beside and not pass_rotation(model.config):
            drafting = default_policy(lossless=True)
            other = run_once(drafting, replace(engine, lossless=True))
            document["lossless"] = {"policy": f"{drafting}, lossless", **_measured(other)}
    _write(output, document, result, shown=shows, by_line=by_line)
    if recorder is not None and recorder.failure is not None:
        raise SfiError(f"trace {trace} must be whole, got {recorder.failure.strerror} before the run's end")


@contextmanager
def recording(
    folder: Path | None, table: TraceTable, output: Output, **options: Any
) -> Iterator[tuple[list["Observer"], "ParquetObserver | None"]]:
    """Yield the observers of a run, and that of the trace, with `options`; at the end close them and name the trace."""
    from sfi_traces.health import Watch
    from sfi_traces.record.nvtx import NvtxObserver
    from sfi_traces.record.parquet import ParquetObserver

    with ExitStack() as stack:
        observers: list[Observer] = []
        nvtx = NvtxObserver(spans=table.spans)
        if nvtx.wants:
            observers.append(stack.enter_context(closing(nvtx)))
        if folder is None:
            yield observers, None
            return
        parquet = ParquetObserver(
            folder, positions=table.positions, redact_text=table.redact_text, spans=table.spans,
            force=output.force, warn=output.say, watch=(watch := Watch()), **options,
        )  # fmt: skip
        yield [*observers, stack.enter_context(parquet)], parquet
    if (
        parquet.failure is None and folder.exists() and not output.quiet
    ):  # absent if the run ended before its first step
        message(f"Wrote {folder}; look at it with: sfi trace show {folder}")
        if torchrun.first():
            for line in watch.news(folder):
                message(f"warning: {line}")


def _check(name: str, engine: EngineOptions, subject: Subject, *, audited: bool) -> None:
    # report mistakes in settings before a large model loads
    from sfi_core.engine.attend import check_backend
    from sfi_core.hosts.transformers.stores import check_able, check_lossless
    from sfi_core.models.load import resolve_device
    from sfi_core.policies import policy_class

    policy = policy_class(name)
    if engine.kv_device_budget is not None:
        check_able(policy, name, "offloads")
    if engine.lossless:
        check_lossless(policy, name, engine, audited=audited)
    check_backend(engine.backend, resolve_device(subject.loading["device"]))


def decode(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    config: Any,
    policy: str,
    engine: EngineOptions,
    *,
    quiet: bool,
    max_new_tokens: list[int],
    stream: Output | None = None,
    observers: Any = (),
    **options: Any,
) -> Any:
    """Complete prompts by `sfi_core.generate`, with progress; one prompt's text goes to `stream` as it comes."""
    from sfi_core.generation.generate import generate
    from sfi_core.generation.prompts import TextStream
    from sfi_core.hosts.transformers.stores import engine_for

    shown = TextStream(tokenizer)
    on_token: Callable[[list[int | None]], None] | None = None
    if stream is not None:

        def on_token(tokens: list[int | None]) -> None:
            if tokens[0] is not None:
                stream.stream(shown.push(tokens[0]))

    def on_plan(plan: Any) -> None:
        if not quiet and plan.requests > 1:
            message(f"{policy}: {plan_line(plan)}")

    try:
        with Progress(quiet=quiet) as progress:

            def on_prefill(read: int, total: int) -> None:
                if read < total:
                    progress.update(f"{policy}: reading the prompt", read, total)
                else:
                    progress.clear()

            on_prefill(0, 1)  # before the first piece is read
            bar = [ProgressObserver(progress, max(max_new_tokens))] if stream is None else []
            result = generate(
                model, tokenizer, prompts, config, policy=policy, engine=engine_for(policy, engine),
                max_new_tokens=max_new_tokens, observers=[*observers, *bar],
                on_plan=on_plan, on_token=on_token, on_prefill=on_prefill, **options,
            )  # fmt: skip
            if stream is not None:
                stream.stream(shown.end())
            return result
    finally:
        if stream is not None:
            stream.end_line()


def _advise(config: Any, model: Any, longest: int, *, silent: bool) -> None:
    # before a run whose policy nobody asked for
    line = advice_before(model.config.get_text_config(decoder=True).model_type, config, longest)
    if line is not None and not silent:
        message(line)


def _document(
    result: Any, subject: Subject, prompts: Prompts, engine: EngineOptions, device: str, **about: Any
) -> dict[str, Any]:
    from sfi_core.machine.versions import versions

    limit = result.byte_limit
    document = {
        "model": subject.name,
        **about,
        "kv_device_budget": engine.kv_device_budget,
        "is_lossless": engine.lossless,
        "trigger_token_ids": list(result.trigger_token_ids),
        **_measured(result),
        "advice": limit.advice(about["policy"]) if limit else None,
        "forecast_bytes": result.forecast.total_bytes,
        "versions": versions(),
        "device": device,
        "ranks": torchrun.size(),
    }
    for line, request in zip(prompts.lines, document["requests"], strict=False):
        if line.id is not None:
            request["id"] = line.id
    if prompts.expected is not None:
        document["expected"] = prompts.expected
        document["exact_match"] = result.texts[0] == prompts.expected
    return document


def _measured(result: Any) -> dict[str, Any]:
    data: dict[str, Any] = result.report.to_dict()
    for request, text in zip(data["requests"], result.texts, strict=True):
        request["text"] = text
    limit = result.byte_limit and asdict(result.byte_limit)
    return {**data, "slots": result.slots, "peak_memory_bytes": result.peak_memory_bytes, "byte_limit": limit}


def _write(output: Output, document: dict[str, Any], result: Any, *, shown: bool, by_line: bool) -> None:
    # the text or the document, and the report; then the error that ended the run
    if output.json:
        output.document(document)
    elif not (shown or by_line):
        texts = [f"[{index}] {text.removeprefix(' ')}\n" for index, text in enumerate(result.texts)]
        output.text("".join(texts) if len(texts) > 1 else f"{result.texts[0]}\n")
    for line in report_lines(document):
        output.say(line, indent=13)
    if by_line:
        ended = sum(request.finish_reason in ENDED for request in result.report.requests)
        more = (
            "" if ended == len(result.texts) else f" of {len(result.texts):,}; the same command with --resume goes on"
        )
        output.say(f"Wrote {output.path}, {ended:,} answers{more}")
    if result.error is not None:
        raise result.error
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)

"""`sfi generate` after its options are read."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import typer

from sfi_cli.commands.generate.prompts import Prompts, token_ids
from sfi_cli.commands.generate.recording import TraceRecording
from sfi_cli.commands.generate.views import plan_line, report_lines
from sfi_cli.loading import Subject
from sfi_cli.terminal.output import INTERRUPTED, Output, message
from sfi_cli.terminal.progress import DecodeProgress, PrefillProgress, ProgressObserver
from sfi_core.distributed import torchrun
from sfi_core.errors import NumericsError
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions
from sfi_core.settings.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """The options of `sfi generate`; `beside` asks for a lossless run too, for comparison."""

    prompts: Prompts
    chat: bool
    subject: Subject
    policy: str
    preset: str
    config: SfiConfig
    sampling: dict[str, Any]
    seed: int
    max_new_tokens: int
    max_batch: int | None
    compare: bool
    beside: bool
    verify: bool
    recording: TraceRecording
    engine: EngineOptions

    def run(self, output: Output) -> None:
        """Load the model, decode, write the text or the document, and report."""
        from sfi_core.models.rotation import check_rotation

        self._check()
        model, tokenizer = self.subject.loaded(
            quiet=output.quiet, check=check_rotation if self.engine.lossless else None
        )
        prompts = [token_ids(entry, tokenizer, chat=self.chat) for entry in self.prompts.entries]
        shows = output.streams and not output.json and len(prompts) == 1
        decode = partial(self._decode, model, tokenizer, prompts, output.quiet)
        recording = self.recording.observers(
            tokenizer, model.device, self._provenance(), output.quiet
        )
        with recording as (watch, stopped):
            result = decode(self.policy, output if shows else None, watch, self.recording.audit)
            if result.interrupted or result.error is not None:
                stopped("interrupted" if result.interrupted else str(result.error))
        document = self._document(result, str(model.device))
        if not result.interrupted and result.error is None:
            document |= self._beside(decode, model.config)
            if self.verify:
                document["verification"] = self._verified(model, prompts, result)
        if output.json:
            output.document(document)
        elif shows:
            output.stream("" if result.texts[0].endswith("\n") else "\n")
        else:
            output.text(
                "".join(_block(i, text, len(prompts)) for i, text in enumerate(result.texts))
            )
        for line in report_lines(document):
            output.say(line)
        _fail(result, document)

    def _check(self) -> None:
        # report mistakes in settings before a large model loads
        from sfi_core.engine.backends.registry import check_backend
        from sfi_core.hosts.transformers.lossless import check_asked, check_drafts
        from sfi_core.hosts.transformers.stores import check_offloads
        from sfi_core.models.load import resolve_device
        from sfi_core.policies import policy_class
        from sfi_core.triggers.trigger import Trigger

        policy = policy_class(self.policy)
        if self.engine.kv_device_budget is not None:
            check_offloads(policy, self.policy)
        if self.engine.lossless:
            check_drafts(policy, self.policy)
            made = policy(self.config, Trigger(frozenset(), self.config))
            check_asked(made, self.policy, self.engine, audited=self.recording.audit is not None)
        check_backend(self.engine.backend, resolve_device(self.subject.loading["device"]))
        Sampling(**self.sampling)
        self.subject.check()

    def _beside(self, decode: Callable[..., Any], config: Any) -> dict[str, Any]:
        # runs for comparison
        from sfi_core.models.rotation import pass_rotation

        found = {}
        if self.compare:
            other = decode("full-kv", None, [], None)
            found["comparison"] = {"policy": "full-kv", **_measured(other)}
        if self.beside and not pass_rotation(config):
            other = decode(self.policy, None, [], None, lossless=True)
            found["lossless"] = {"policy": f"{self.policy}, lossless", **_measured(other)}
        return found

    def _verified(self, model: Any, prompts: list[list[int]], result: Any) -> dict[str, Any]:
        from sfi_core.generation.verify import verify

        outputs = [request.token_ids for request in result.report.requests]
        sampling = Sampling(**self.sampling)
        try:
            return verify(model, prompts, outputs, sampling=sampling, seed=self.seed).to_dict()
        except NumericsError as error:  # the generated text is shown all the same
            return {"ok": False, "error": str(error)}

    def _decode(
        self,
        model: Any,
        tokenizer: Any,
        prompts: list[list[int]],
        quiet: bool,
        policy: str,
        stream: Output | None,
        observers: list[Any],
        audit: Any,
        lossless: bool = False,
    ) -> Any:
        from sfi_core.generation.generate import generate
        from sfi_core.generation.text_stream import text_stream
        from sfi_core.hosts.transformers.stores import engine_for

        engine = engine_for(policy, replace(self.engine, lossless=lossless or self.engine.lossless))
        shown, limits = text_stream(tokenizer), self.prompts.limits(self.max_new_tokens)
        on_token: Callable[[list[int | None]], None] | None = None
        if stream is not None:

            def on_token(tokens: list[int | None]) -> None:
                if tokens[0] is not None:
                    stream.stream(shown.push(tokens[0]))

        with (
            PrefillProgress(quiet=quiet, label=policy) as reading,
            DecodeProgress(quiet=quiet or stream is not None) as decoding,
        ):
            return generate(
                model,
                tokenizer,
                prompts,
                self.config,
                policy=policy,
                max_new_tokens=limits,
                max_batch=self.max_batch,
                sampling=Sampling(**self.sampling),
                seed=self.seed,
                observers=[*observers, ProgressObserver(decoding, max(limits))],
                audit=audit,
                engine=engine,
                on_plan=partial(_say_plan, policy, quiet),
                on_token=on_token,
                on_prefill=reading.update,
            )

    def _provenance(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "seed": self.seed,
            "revision": self.subject.loading["revision"],
            "sampling": self.sampling,
            "max_new_tokens": self.max_new_tokens,
        }

    def _document(self, result: Any, device: str) -> dict[str, Any]:
        from sfi_core.machine.versions import versions

        document = {
            "model": self.subject.name,
            "policy": self.policy,
            "preset": self.preset,
            "config": self.config.to_dict(),
            "kv_device_budget": self.engine.kv_device_budget,
            "is_lossless": self.engine.lossless,
            "trigger_token_ids": list(result.trigger_token_ids),
            **_measured(result),
            "advice": limit.advice(self.policy) if (limit := result.byte_limit) else None,
            "forecast_bytes": result.forecast.total_bytes,
            "versions": versions(),
            "device": device,
            "ranks": torchrun.size(),
        }
        if self.prompts.expected is not None:
            document["expected"] = self.prompts.expected
            document["exact_match"] = result.texts[0] == self.prompts.expected
        return document


def _fail(result: Any, document: dict[str, Any]) -> None:
    # raise only after the text and the report are written
    if result.error is not None:
        raise result.error
    verification = document.get("verification", {"ok": True})
    if "error" in verification:
        raise NumericsError(f"output cannot be verified: {verification['error']}")
    if not verification["ok"]:
        raise NumericsError("output must be full attention's, got other tokens; see the report")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _say_plan(policy: str, quiet: bool, plan: Any) -> None:
    if not quiet and plan.requests > 1:
        message(f"{policy}: {plan_line(plan)}")


def _measured(result: Any) -> dict[str, Any]:
    data: dict[str, Any] = result.report.to_dict()
    for request, text in zip(data["requests"], result.texts, strict=True):
        request["text"] = text
    limit = None if result.byte_limit is None else asdict(result.byte_limit)
    more = {"slots": result.slots, "peak_memory_bytes": result.peak_memory_bytes}
    return {**data, **more, "byte_limit": limit}


def _block(index: int, text: str, count: int) -> str:
    return f"{text}\n" if count == 1 else f"[{index}]{text}\n"

"""`sfi tune heads` after its options are read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sfi_cli.commands.generate.prompts import read_prompts
from sfi_cli.commands.tune_heads.views import heads_text
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError
from sfi_core.settings.engine import EngineOptions

T = TypeVar("T")
TOP = 64  # default of k. Paper gap: the paper gives none


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The similarities, and what they were measured on.

    Attributes:
        texts: Similarity by layer, for each text.
        model: The model's name.
        digest: The checkpoint's digest; "" if unknown.
        made_from: The source of the texts, plain values.
    """

    texts: Sequence[dict[int, Any]]
    model: str
    digest: str
    made_from: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsJob:
    """The options of `sfi tune heads`.

    Attributes:
        files: Files with texts.
        length: Tokens of a text.
        parts: Disjoint parts of the texts; None for the default.
        clusters: N_r.
        top: k; None for the default.
        model: A hub id, folder or GGUF file; None is the bundled checkpoint.
    """

    traces: Sequence[Path]
    files: Sequence[Path]
    length: int
    parts: int | None
    clusters: int
    top: int | None
    model: str | None
    engine: EngineOptions
    loading: dict[str, Any]
    output: Output

    def run(self) -> None:
        """Measure the similarities, cluster the heads, show the clusters and write the head file."""
        from sfi_core.measure.heads.clustering import check_scipy
        from sfi_core.measure.heads.layers import cluster_layers, parts_of
        from sfi_traces.tune.heads_plot import write_plot

        check_scipy()
        if self.traces and self.files:
            raise ConfigError("texts must be traces or prompt files, got both")
        if not self.traces and not self.files and self.model is not None:
            raise ConfigError("texts must be traces or prompt files, got none; add -f FILE")
        with self.output:
            found = self._of_traces() if self.traces else self._of_model()
            parts = parts_of(found.texts, self.parts)
            document = self._document(found, cluster_layers(parts, self.clusters), len(parts))
            self.output.show(document, heads_text)
            self.output.figure(write_plot, document)
            self.output.text(_head_file(document))

    def _of_traces(self) -> Measured:
        from sfi_traces.model.trace import Trace
        from sfi_traces.tune.head_supports import largest_top, request_supports, requests_of

        traces = [Trace.open(path) for path in self.traces]
        top = min(TOP, largest_top(traces)) if self.top is None else self.top
        wanted = [(trace, request) for trace in traces for request in requests_of(trace)]
        texts = self._texts(wanted, lambda place: request_supports(*place, top))
        model = self.model or traces[0].manifest["model"]["name"]
        source = {"traces": [str(path) for path in self.traces], "top_k": top, "pooled": "mean"}
        return Measured(
            texts=texts, model=model, digest=self._digest_of_name(model), made_from=source
        )

    def _digest_of_name(self, name: str) -> str:
        # a trace has only the model's name; --model names the checkpoint
        from sfi_core.models.digest import source_digest
        from sfi_core.models.load import BUNDLED
        from sfi_core.models.source import find_source

        if self.model is None:
            return source_digest(find_source(str(BUNDLED))) if name == "bundled" else ""
        return source_digest(find_source(self.model), self.loading["revision"])

    def _of_model(self) -> Measured:
        from sfi_core.engine.backends.registry import check_backend
        from sfi_core.measure.heads.model_supports import cut_texts, text_supports
        from sfi_core.models.digest import model_digest
        from sfi_core.models.load import load, resolve_device

        check_backend(self.engine.backend, resolve_device(self.loading["device"]))
        read = [read_prompts(None, file, None) for file in (self.files or (None,))]
        model, tokenizer = load(self.model, **self.loading)
        top = TOP if self.top is None else self.top
        pieces = cut_texts(tokenizer, [str(one.entries[0]) for one in read], self.length, top)
        texts = self._texts(pieces, lambda ids: text_supports(model, ids, top, self.engine))
        source = {
            "files": [str(file) for file in self.files] or ["the bundled document"],
            "tokens": sum(map(len, pieces)),
            "top_k": top,
            "pooled": "max",
        }
        return Measured(
            texts=texts, model=self.model or "bundled", digest=model_digest(model), made_from=source
        )

    def _texts(
        self, texts: Sequence[T], read: Callable[[T], Iterable[tuple[int, Any]]]
    ) -> list[dict[int, Any]]:
        # the similarities of each text; invalid settings are refused at the first text
        from sfi_core.measure.heads.clustering import check_count
        from sfi_core.measure.heads.layers import part_count
        from sfi_core.measure.heads.similarity import Similarity

        part_count(len(texts), self.parts)
        found: list[dict[int, Any]] = []
        with BenchProgress(quiet=self.output.quiet) as progress:
            for text in texts:
                progress.update("comparing heads, text", len(found), len(texts))
                sums = {layer: Similarity.of(index) for layer, index in read(text)}
                for one in sums.values():
                    check_count(self.clusters, len(one.total_HH))
                found.append(sums)
        return found

    def _document(self, found: Measured, layers: Sequence[Any], parts: int) -> dict[str, Any]:
        from sfi_core import __version__

        steps = sum(next(iter(text.values())).steps for text in found.texts)
        return {
            "model": found.model,
            "digest": found.digest,
            "clusters": self.clusters,
            "texts": len(found.texts),
            "steps": steps,
            "parts": parts,
            **found.made_from,
            "sfi": __version__,
            "layers": [one.to_dict() for one in layers],
        }


def _head_file(document: dict[str, Any]) -> str:
    from sfi_core.policies.head_clusters import HeadClusters

    layers = document["layers"]
    return HeadClusters(
        model_digest=document["digest"],
        model=document["model"],
        cluster_of={one["layer"]: tuple(one["cluster_of"]) for one in layers},
        representatives={one["layer"]: tuple(one["representatives"]) for one in layers},
        made_from={
            name: value
            for name, value in document.items()
            if name not in ("model", "digest", "layers")
        },
    ).text()

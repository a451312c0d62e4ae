"""`sfi tune heads`: cluster the KV heads of each layer, offline, and write a head file."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.commands.generate.prompts import read_prompts
from sfi_cli.commands.tune_heads.views import heads_text
from sfi_cli.settings.given import given
from sfi_cli.settings.tables import ModelTable
from sfi_cli.terminal.output import Output
from sfi_core import __version__
from sfi_core.errors import ConfigError
from sfi_core.settings.engine import EngineOptions

_texts, _clusters = partial(o.option, "Texts"), partial(o.option, "Clusters")
OUTPUT = Path("heads.json")
TOP = 64  # default of k. Paper gap: the paper gives none

Row = dict[str, Any]
Texts = list[dict[int, Any]]  # for each text, the similarity of the heads of each layer
Compare = Callable[[Sequence[Any], Callable[[Any], Iterable[tuple[int, Any]]]], Texts]


def heads(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces of --audit, of one model.", metavar="DIR...", show_default=False)
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        _texts(
            "Read the model on this text instead; repeat for more.",
            "--prompt-file",
            "-f",
            shown="the bundled document, for the bundled checkpoint",
        ),
    ] = None,
    length: Annotated[int, _texts("Tokens of a text; a longer file is several.", min=2)] = 1000,
    parts: Annotated[
        o.Number,
        _texts("Disjoint parts of the texts, whose clusters are compared.", shown="2, or 1 for a single text", min=1),
    ] = None,
    clusters: Annotated[int, _clusters("Clusters of each layer, N_r.", min=1)] = 2,
    top_k: Annotated[
        o.Number, _clusters("Positions of each head's set, k.", shown="64, or what the traces have of them", min=1)
    ] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[o.Words, o.sets("tune heads", o.MODEL)] = None,
    output: Annotated[Path, o.output("Head file.")] = OUTPUT,
    plot: Annotated[o.File, o.option(o.OUTPUT, "Draw the similarity of heads to a .png or .svg.")] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Cluster the KV heads of each layer by what they attend to; choose a head for each cluster (SyncKV).

    The similarity of two heads is the overlap of their top-k sets, on average over steps and texts. The texts
    come from traces, which need no model, or from files that the model reads. With traces, --model only names
    the checkpoint in the head file.

    For example:

      sfi tune heads -f a.txt -f b.txt --model my-model --parts 2 --plot heads.png

      sfi tune heads dense --clusters 1 -o heads.json
    """
    from sfi_core.measure.heads.clustering import check_scipy, cluster_layers, parts_of
    from sfi_traces.tune.heads_plot import write_plot

    check_scipy()
    if traces and prompt_file:
        raise ConfigError("texts must be traces or prompt files, got both")
    if not traces and not prompt_file and model is not None:
        raise ConfigError("texts must be traces or prompt files, got none; add -f FILE")
    settings = given("tune heads", sets=sets)
    revision = settings.table(ModelTable).revision
    with Output(output, plot=plot, force=force, json=json, quiet=quiet) as written:
        compare = partial(_similarities, parts, clusters, quiet)
        if traces:
            found, named, source = _of_traces(traces, top_k, model, revision, compare)
        else:
            loading = {"revision": revision, "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
            engine = settings.table(EngineOptions)
            files = prompt_file or []
            found, named, source = _of_model(files, length, top_k, model, loading, engine, compare)
        groups = parts_of(found, parts)
        document = {
            **named,
            "clusters": clusters,
            "texts": len(found),
            "steps": sum(next(iter(text.values())).steps for text in found),
            "parts": len(groups),
            **source,
            "sfi": __version__,
            "layers": [one.to_dict() for one in cluster_layers(groups, clusters)],
        }
        written.show(document, heads_text)
        written.figure(write_plot, document)
        written.text(_head_file(document))


def _of_traces(
    paths: list[Path], top: int | None, model: str | None, revision: str | None, compare: Compare
) -> tuple[Texts, Row, Row]:
    # similarities; the model's name and digest; the source of the texts
    from sfi_core.models.digest import source_digest
    from sfi_core.models.load import BUNDLED
    from sfi_core.models.source import find_source
    from sfi_traces.model.trace import Trace
    from sfi_traces.tune.head_supports import largest_top, request_supports, requests_of

    traces = [Trace.open(path) for path in paths]
    k = min(TOP, largest_top(traces)) if top is None else top
    wanted = [(trace, request) for trace in traces for request in requests_of(trace)]
    found = compare(wanted, lambda place: request_supports(place[0], place[1], k))
    name, digest = traces[0].manifest["model"]["name"], ""
    if model is not None:  # a trace has only the model's name; --model names the checkpoint
        digest = source_digest(find_source(model), revision)
    elif name == "bundled":
        digest = source_digest(find_source(str(BUNDLED)))
    source = {"traces": [str(path) for path in paths], "top_k": k, "pooled": "mean"}
    return found, {"model": model or name, "digest": digest}, source


def _of_model(
    files: list[Path],
    length: int,
    top: int | None,
    model: str | None,
    loading: Row,
    engine: EngineOptions,
    compare: Compare,
) -> tuple[Texts, Row, Row]:
    from sfi_core.engine.backends.registry import check_backend
    from sfi_core.measure.heads.model_supports import cut_texts, text_supports
    from sfi_core.models.digest import model_digest
    from sfi_core.models.load import load, resolve_device

    check_backend(engine.backend, resolve_device(loading["device"]))
    read = [read_prompts(None, file, None) for file in (files or (None,))]
    loaded, tokenizer = load(model, **loading)
    k = TOP if top is None else top
    pieces = cut_texts(tokenizer, [str(one.entries[0]) for one in read], length, k)
    found = compare(pieces, lambda ids: text_supports(loaded, ids, k, engine))
    source = {
        "files": [str(file) for file in files] or ["the bundled document"],
        "tokens": sum(map(len, pieces)),
        "top_k": k,
        "pooled": "max",
    }
    return found, {"model": model or "bundled", "digest": model_digest(loaded)}, source


def _similarities(
    parts: int | None,
    clusters: int,
    quiet: bool,
    texts: Sequence[Any],
    read: Callable[[Any], Iterable[tuple[int, Any]]],
) -> Texts:
    # the similarities of each text; invalid settings are refused at the first text
    from sfi_cli.terminal.progress import BenchProgress
    from sfi_core.measure.heads.clustering import Similarity, check_count, part_count

    part_count(len(texts), parts)
    found: Texts = []
    with BenchProgress(quiet=quiet) as progress:
        for text in texts:
            progress.update("comparing heads, text", len(found), len(texts))
            sums = {layer: Similarity.of(index) for layer, index in read(text)}
            for one in sums.values():
                check_count(clusters, len(one.total_HH))
            found.append(sums)
    return found


def _head_file(document: dict[str, Any]) -> str:
    from sfi_core.policies.head_clusters import HeadClusters

    layers = document["layers"]
    return HeadClusters(
        model_digest=document["digest"],
        model=document["model"],
        cluster_of={one["layer"]: tuple(one["cluster_of"]) for one in layers},
        representatives={one["layer"]: tuple(one["representatives"]) for one in layers},
        made_from={name: value for name, value in document.items() if name not in ("model", "digest", "layers")},
    ).text()

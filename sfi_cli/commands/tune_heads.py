"""`sfi tune heads`: cluster the KV heads of each layer, offline, and write a head file."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from sfi_cli import options as o
from sfi_cli.commands.generate.prompts import read_prompts
from sfi_cli.settings import given
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.tables import Part
from sfi_core import __version__
from sfi_core.errors import ConfigError, require
from sfi_core.settings.engine import EngineOptions
from sfi_traces.views.table import Columns, Row, Table, number, plural

_texts, _clusters = partial(o.option, "Texts"), partial(o.option, "Clusters")
OUTPUT = Path("heads.json")
Files = list[Path] | None
BUNDLED = "the bundled document"
TOP = 64  # default of k. Paper gap: the paper gives none


def heads(
    prompt_file: Annotated[Files, _texts("Text that the model reads.", "--prompt-file", "-f", shown=BUNDLED)] = None,
    length: Annotated[int, _texts("Tokens of a text; a longer file is several.", min=2)] = 1000,
    clusters: Annotated[int, _clusters("Clusters of each layer, N_r.", min=1)] = 2,
    top_k: Annotated[int, _clusters("Positions of each head's set, k.", min=1)] = TOP,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[o.Words, o.sets(o.MODEL)] = None,
    output: Annotated[Path, o.output("Head file.")] = OUTPUT,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Cluster the KV heads of each layer by what they attend to; choose a head for each cluster (SyncKV).

    The model reads texts. The similarity of two heads is the overlap of their top-k sets, on average over the last
    queries of each text.

    For example:

      sfi tune heads -f a.txt -f b.txt --model my-model
    """
    require("head clusters need", "tune", "scipy")
    if not prompt_file and model is not None:
        raise ConfigError("texts must be prompt files, got none; add -f FILE")
    settings = given("tune heads", sets=sets)
    subject = o.Subject.of(settings, model, dtype, device, trust_remote_code)
    with Output(output, force=force, json=json, quiet=quiet) as written:
        document = _clustered(
            subject, prompt_file or [], settings.table(EngineOptions),
            length=length, top=top_k, clusters=clusters, quiet=quiet,
        )  # fmt: skip
        written.show(document, heads_text)
        written.text(_head_file(document))


def _clustered(
    subject: o.Subject, files: list[Path], engine: EngineOptions, *, length: int, top: int, clusters: int, quiet: bool
) -> dict[str, Any]:
    # the document of `--json`; invalid settings are refused at the first text
    from sfi_cli.terminal.progress import Progress
    from sfi_core.engine.attend import check_backend
    from sfi_core.measure.clustering import Similarity, check_count, cluster_layers, cut_texts, text_supports
    from sfi_core.models.load import resolve_device
    from sfi_core.models.source import model_digest

    check_backend(engine.backend, resolve_device(subject.loading["device"]))
    prompts = [read_prompts(None, file, None) for file in (files or (None,))]
    model, tokenizer = subject.loaded()
    texts = cut_texts(tokenizer, [str(prompt.entries[0]) for prompt in prompts], length, top)
    similarities: list[dict[int, Similarity]] = []
    with Progress(quiet=quiet) as progress:
        for number, text in enumerate(texts):
            progress.update("comparing heads, text", number, len(texts))
            layers = {layer: Similarity.of(index) for layer, index in text_supports(model, text, top, engine)}
            for similarity in layers.values():
                check_count(clusters, len(similarity.total_HH))
            similarities.append(layers)
    return {
        "model": subject.name,
        "digest": model_digest(model),
        "clusters": clusters,
        "texts": len(texts),
        "steps": sum(next(iter(layers.values())).steps for layers in similarities),
        "files": [str(file) for file in files] or [BUNDLED],
        "tokens": sum(map(len, texts)),
        "top_k": top,
        "pooled": "max",
        "sfi": __version__,
        "layers": cluster_layers(similarities, clusters),
    }


def _head_file(document: dict[str, Any]) -> str:
    from sfi_core.policies.built_in.synckv import HeadClusters, LayerClusters

    return HeadClusters(
        digest=document["digest"],
        model=document["model"],
        layers={
            layer["layer"]: LayerClusters(
                cluster_of=tuple(layer["cluster_of"]), representatives=tuple(layer["representatives"])
            )
            for layer in document["layers"]
        },
        made_from={name: value for name, value in document.items() if name not in ("model", "digest", "layers")},
    ).text()


def heads_text(document: Row) -> list[Part]:
    """Return the clusters of each layer."""
    heading = (
        f"{document['model']}, {plural(document['texts'], 'text')} of {', '.join(document['files'])}: "
        f"{plural(document['clusters'], 'cluster')} a layer"
    )
    legend = (
        f"alike: overlap of the top {document['top_k']:,} of two heads, of one cluster or of two, over "
        f"{plural(document['steps'], 'step')}; a dash where there is no such pair."
    )
    notes = [] if document["digest"] else ["", "The head file does not say which checkpoint it is of."]
    return [heading, "", Table.of("Clusters of KV heads", CLUSTERS, document["layers"], left=3), legend, *notes]


def _groups(cluster_of: list[int]) -> str:
    # 0 2 3 | 1
    return " | ".join(
        " ".join(str(head) for head, label in enumerate(cluster_of) if label == cluster)
        for cluster in range(max(cluster_of) + 1)
    )


CLUSTERS: Columns = {
    "layer": (str, "layer"),
    "clusters": (_groups, "cluster_of"),
    "representatives": lambda layer: ", ".join(map(str, layer["representatives"])),
    "alike within": (number, "similarity_within"),
    "between": (number, "similarity_between"),
}

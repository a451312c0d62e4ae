"""The schema of a trace's manifest, which may be a stranger's; other keys are kept as they are."""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from sfi_core.errors import TraceError
from sfi_core.machine.files import read_file
from sfi_core.machine.text import parse_json, printable, shown
from sfi_core.settings.fields import LARGEST
from sfi_traces.schema import MANIFEST, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, SCHEMA_VERSION

Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Tokens = Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)]
Some = Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]
Bool = Annotated[bool, Field(strict=True)]
Line = Annotated[str, AfterValidator(printable)]  # is shown
MOST_PLACES = 1 << 18  # layers and KV heads


class Layer(TypedDict):
    """A layer of the model."""

    layer: Annotated[int, Field(strict=True, ge=0, lt=MOST_LAYERS)]
    heads: Annotated[int, Field(strict=True, ge=1, lt=MOST_HEADS)]
    key_width: Tokens | None
    value_width: Tokens | None
    itemsize: Tokens | None
    window: Tokens | None


def _few_places(layers: list[Layer]) -> list[Layer]:
    numbers = [layer["layer"] for layer in layers]
    if numbers != sorted(set(numbers)) or sum(layer["heads"] for layer in layers) > MOST_PLACES:
        raise ValueError(f"must ascend, with {MOST_PLACES:,} KV heads at most")
    return layers


class Model(TypedDict):
    """The model in numbers, as `describe_model` gives them."""

    name: Line
    architecture: NotRequired[Line | None]
    dtype: NotRequired[Line | None]
    layers: Annotated[list[Layer], AfterValidator(_few_places)]
    query_heads: Some
    weight_bytes: Whole | None
    embedding_bytes: Whole | None


class Selector(TypedDict):
    """What is read of the Selector's settings."""

    lambda_clip: Annotated[float, Field(ge=0, le=1)]


class Draft(TypedDict):
    """What is read of the settings of drafting."""

    max_tokens: Some


class Config(TypedDict):
    """What is read of the run's settings."""

    sink: Whole
    recent: Whole
    recent_mode: Line
    budget: Whole
    dense_layers: list[Whole]
    trigger_delay: NotRequired[Tokens]
    trigger_policy: NotRequired[Line]
    selector: NotRequired[Selector]
    draft: NotRequired[Draft]


class Audit(TypedDict):
    """What was audited."""

    every: Some
    top: Some
    layers: list[Whole] | None


class Prompt(TypedDict):
    """A request's prompt, and its own settings."""

    request: Whole
    tokens: Tokens
    sha256: Line | None
    settings: NotRequired[dict[str, Any]]


class Imported(TypedDict):
    """The file that a trace was imported from."""

    file: Line
    kind: Literal["selections", "attention"]
    masses: Bool
    block_size: Whole | None


class Manifest(TypedDict):
    """A trace's manifest."""

    schema_version: Annotated[int, Field(strict=True, ge=1)]
    run_id: NotRequired[Line | None]
    created: Line
    finished: Line | None
    stopped: NotRequired[Line | None]
    rank: NotRequired[Annotated[int, Field(strict=True, ge=0, lt=1 << 12)]]
    ranks: NotRequired[Annotated[int, Field(strict=True, ge=1, le=1 << 12)]]
    redacted: Bool
    not_replayed: NotRequired[Line | None]
    spans: NotRequired[Bool | None]
    audit: Audit | None
    model: Model
    policy: Line
    preset: NotRequired[Line | None]
    lossless: NotRequired[Bool | None]
    backend: NotRequired[Line | None]
    device: NotRequired[Line | None]
    config: Config
    trigger_token_ids: list[Whole]
    prompts: list[Prompt]
    versions: dict[str, Line | None]
    tables: NotRequired[dict[str, Whole]]
    imported: NotRequired[Imported]


for table in (Layer, Model, Selector, Draft, Config, Audit, Prompt, Imported, Manifest):
    with_config(ConfigDict(extra="allow"))(table)
SCHEMA: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def read_manifest(folder: Path, advice: str = "") -> dict[str, Any]:
    """Read a trace's manifest; raises `TraceError`, with `advice` where there is none, if it breaks the schema."""
    try:
        document = parse_json(read_file(folder / MANIFEST))
        version = document["schema_version"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TraceError(f"{folder} is not a trace: it has no {MANIFEST}{advice}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"trace {folder} has an unreadable {MANIFEST}: {error}") from error
    if type(version) is int and version > SCHEMA_VERSION:
        raise TraceError(f"trace {folder} has schema {version}, this sfi reads 1 to {SCHEMA_VERSION}; upgrade sfi")
    try:
        return dict(SCHEMA.validate_python(document))
    except ValidationError as error:
        raise TraceError(f"trace {folder} has a {MANIFEST} {_fault(error)}") from error


def _fault(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]:
        return f"without {', '.join(missing)}"
    where = ".".join(map(str, faults[0]["loc"]))
    return f"that is damaged: {where}: {faults[0]['msg']}, got {shown(faults[0]['input'])}"

"""The schema of a trace's manifest, which may be a stranger's."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from sfi_core.errors import TraceError
from sfi_core.machine.files import read_file
from sfi_core.machine.text import parse_json, printable, shown
from sfi_core.settings.fields import LARGEST
from sfi_traces.schema import MANIFEST, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, SCHEMA_VERSION

MOST_PLACES = 1 << 18  # layers and KV heads
Line = Annotated[str, AfterValidator(printable)]  # is shown


def _number(most: int, least: int = 0) -> Any:
    return Annotated[int, Field(strict=True, ge=least, le=most)]


def _few_places(layers: list[Any]) -> list[Any]:
    numbers = [one.layer for one in layers]
    if numbers != sorted(set(numbers)) or sum(one.heads for one in layers) > MOST_PLACES:
        raise ValueError(f"must ascend, with {MOST_PLACES:,} KV heads at most")
    return layers


# a field is its type, with ... where it must be there
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Tokens, Some = _number(MOST_TOKENS), _number(MOST_TOKENS, 1)
Bool, Words, Size = Annotated[bool, Field(strict=True)], (Line | None, None), (Tokens | None, ...)
_table = partial(create_model, __config__=ConfigDict(extra="allow"))
Layer = _table(
    "Layer", layer=(_number(MOST_LAYERS - 1), ...), heads=(_number(MOST_HEADS - 1), ...), key_width=Size,
    value_width=Size, itemsize=Size, window=Size,
)  # fmt: skip
Model = _table(
    "Model", name=(Line, ...), architecture=Words, dtype=Words, query_heads=(Some, ...),
    layers=(Annotated[list[Layer], AfterValidator(_few_places)], ...),  # type: ignore[valid-type]
    weight_bytes=(Whole | None, ...), embedding_bytes=(Whole | None, ...),
)  # fmt: skip
Config = _table(
    "Config", sink=(Whole, ...), recent=(Whole, ...), recent_mode=(Line, ...), budget=(Whole, ...),
    dense_layers=(list[Whole], ...), trigger_delay=(Tokens, ...), trigger_policy=(Line, None),
    selector=(_table("Selector", lambda_clip=(Annotated[float, Field(ge=0, le=1)], ...)), ...),
    draft=(_table("Draft", max_tokens=(Some, ...)), None),
)  # fmt: skip
Audit = _table("Audit", every=(Some, ...), top=(Some, ...), layers=(list[Whole] | None, ...))
Prompt = _table(
    "Prompt", request=(Whole, ...), tokens=(Tokens, ...), sha256=(Line | None, ...), settings=(dict[str, Any], None)
)
Imported = _table(
    "Imported", file=(Line, ...), kind=(Literal["selections", "attention"], ...), masses=(Bool, ...),
    block_size=(Whole | None, ...),
)  # fmt: skip
SCHEMA = _table(
    "Manifest", schema_version=(_number(LARGEST, 1), ...), run_id=Words, created=(Line, ...),
    finished=(Line | None, ...), stopped=Words, ranks=(_number(1 << 12, 1), None),
    redacted=(Bool, ...), not_replayed=Words, spans=(Bool | None, None), audit=(Audit | None, ...), model=(Model, ...),
    policy=(Line, ...), preset=Words, lossless=(Bool | None, None), backend=Words, device=Words, config=(Config, ...),
    trigger_token_ids=(list[Whole], ...), prompts=(list[Prompt], ...),  # type: ignore[valid-type]
    versions=(dict[str, Line | None], ...),
    tables=(dict[str, Whole], None), imported=(Imported, None),
)  # fmt: skip


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a trace's manifest; raises `TraceError` where there is none, if it breaks the schema, or is of one rank."""
    try:
        document = parse_json(read_file(folder / MANIFEST))
        version = document["schema_version"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TraceError(f"{folder} is not a trace: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"trace {folder} has an unreadable {MANIFEST}: {error}") from error
    if type(version) is int and version > SCHEMA_VERSION:
        raise TraceError(f"trace {folder} has schema {version}, this sfi reads 1 to {SCHEMA_VERSION}; upgrade sfi")
    try:
        manifest: dict[str, Any] = SCHEMA.model_validate(document).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise TraceError(f"trace {folder} has a {MANIFEST} {_fault(error)}") from error
    if "rank" in manifest and manifest.get("ranks", 1) > 1:
        raise TraceError(
            f"trace {folder} must be of all ranks, got a part that an earlier sfi wrote; record the run again"
        )
    return manifest


def _fault(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]:
        return f"without {', '.join(missing)}"
    where = ".".join(map(str, faults[0]["loc"]))
    return f"that is damaged: {where}: {faults[0]['msg']}, got {shown(faults[0]['input'])}"

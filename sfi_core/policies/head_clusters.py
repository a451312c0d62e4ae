"""Clusters of KV heads that attend alike, each with a representative (SyncKV, Sec. 4.1), and their file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.text import printable

SHOWN = 12  # characters of a digest in a message


class LayerClusters(BaseModel):
    """The cluster of each KV head of a layer, and the representative KV head of each cluster."""

    model_config = ConfigDict(strict=True, frozen=True)
    cluster_of: tuple[int, ...]
    representatives: tuple[int, ...]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        count = len(self.representatives)
        if set(self.cluster_of) != set(range(count)):
            raise ValueError(f"cluster_of must use each number from 0 to {count - 1}, got {list(self.cluster_of)}")
        for cluster, head in enumerate(self.representatives):
            if not 0 <= head < len(self.cluster_of) or self.cluster_of[head] != cluster:
                raise ValueError(
                    f"representatives must be in their own clusters, got head {head} for cluster {cluster}"
                )
        return self


class HeadClusters(BaseModel):
    """The clusters of KV heads of each layer.

    `digest` is the checkpoint's, or its commit on the hub, "" if unknown; `model` its name for messages; `made_from`
    says how the similarity was measured, in plain values.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    format: Literal[1] = 1
    model: str = ""
    digest: str
    layers: dict[Annotated[int, Field(ge=0)], LayerClusters] = Field(min_length=1)
    made_from: dict[str, Any] = {}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a head file; raises `InputError` if it cannot be read, is damaged or of another format."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"head file {path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            rule = first["msg"].removeprefix("Value error, ")
            raise InputError(f"head file {path} is damaged: {printable(where)}: {printable(rule)}") from error

    def text(self) -> str:
        """Return the file's text."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    def leader_of(self, layer: int) -> tuple[int, ...]:
        """Return the representative of each KV head of a layer; a representative's is itself."""
        clusters = self.layers[layer]
        return tuple(clusters.representatives[cluster] for cluster in clusters.cluster_of)

    def check(self, heads_by_layer: Mapping[int, int], digest: str) -> None:
        """Raise `ConfigError` for a model with another checkpoint, other layers, or other KV heads.

        `heads_by_layer` are those of the full-attention layers; the running model's digest, "" if unknown,
        must agree if both are known.
        """
        whose = f"head clusters of {self.model or 'a model without a name'}"
        if self.digest and digest and self.digest != digest:
            raise ConfigError(
                f"{whose} must be of the checkpoint that runs, {digest[:SHOWN]}, "
                f"got {self.digest[:SHOWN]}; make them with sfi tune heads"
            )
        if self.layers.keys() != heads_by_layer.keys():
            raise ConfigError(
                f"{whose} must be of the model's full-attention layers {sorted(heads_by_layer)}, "
                f"got {sorted(self.layers)}"
            )
        for layer, heads in heads_by_layer.items():
            count = len(self.layers[layer].cluster_of)
            if count != heads:
                raise ConfigError(f"{whose} must have the model's {heads} KV heads in layer {layer}, got {count}")

"""Clusters of KV heads that attend alike, each with a representative (SyncKV, Sec. 4.1), and their file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_core.machine.files import write_atomically
from sfi_core.machine.text import printable

FORMAT = 1
SHOWN = 12  # characters of a digest in a message


class _Layer(BaseModel):
    model_config = ConfigDict(strict=True)
    cluster_of: tuple[int, ...]
    representatives: tuple[int, ...]


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    format: Literal[1]
    digest: str
    model: str
    layers: dict[Annotated[int, Field(ge=0)], _Layer]
    made_from: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadClusters:
    """The clusters of KV heads of each layer.

    By layer, `cluster_of` has the cluster of each KV head, and `representatives` the representative KV head
    of each cluster. `model_digest` is the checkpoint's digest, or its commit on the hub, "" if unknown;
    `model` its name for messages; `made_from` says how the similarity was measured, in plain values.
    """

    model_digest: str
    cluster_of: Mapping[int, tuple[int, ...]]
    representatives: Mapping[int, tuple[int, ...]]
    model: str = ""
    made_from: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers that contradict each other."""
        if self.cluster_of.keys() != self.representatives.keys():
            raise ConfigError(
                f"representatives must be of the layers {sorted(self.cluster_of)}, got {sorted(self.representatives)}"
            )
        if not self.cluster_of:
            raise ConfigError("layers must be at least one, got none")
        for layer, clusters in self.cluster_of.items():
            _check_layer(layer, clusters, self.representatives[layer])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a head file; raises `InputError` if it cannot be read, is damaged or of another format."""
        try:
            file = _File.model_validate_json(path.read_bytes())
            return cls(
                model_digest=file.digest,
                cluster_of={number: layer.cluster_of for number, layer in file.layers.items()},
                representatives={number: layer.representatives for number, layer in file.layers.items()},
                model=file.model,
                made_from=file.made_from,
            )
        except OSError as error:
            raise InputError(f"head file {path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise InputError(f"head file {path} is damaged: {printable(where)}: {printable(first['msg'])}") from error
        except ConfigError as error:
            raise InputError(f"head file {path} is damaged: {error}") from error

    def text(self) -> str:
        """Return the file's text."""
        layers = {
            layer: {"cluster_of": clusters, "representatives": self.representatives[layer]}
            for layer, clusters in sorted(self.cluster_of.items())
        }
        document = {"format": FORMAT, "model": self.model, "digest": self.model_digest, "layers": layers}
        return json.dumps({**document, "made_from": dict(self.made_from)}, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: Path) -> None:
        """Write the file; on an error the old file stays, and `SfiError` is raised."""
        try:
            write_atomically(path, self.text().encode())
        except OSError as error:
            raise SfiError(f"head file {path} cannot be written: {error.strerror}") from error

    def leader_of(self, layer: int) -> tuple[int, ...]:
        """Return the representative of each KV head of a layer; a representative's is itself."""
        representatives = self.representatives[layer]
        return tuple(representatives[cluster] for cluster in self.cluster_of[layer])

    def check(self, heads_by_layer: Mapping[int, int], model_digest: str) -> None:
        """Raise `ConfigError` for a model with another checkpoint, other layers, or other KV heads.

        `heads_by_layer` are those of the full-attention layers; the running model's digest, "" if unknown,
        must agree if both are known.
        """
        whose = f"head clusters of {self.model or 'a model without a name'}"
        if self.model_digest and model_digest and self.model_digest != model_digest:
            raise ConfigError(
                f"{whose} must be of the checkpoint that runs, {model_digest[:SHOWN]}, "
                f"got {self.model_digest[:SHOWN]}; make them with sfi tune heads"
            )
        if self.cluster_of.keys() != heads_by_layer.keys():
            raise ConfigError(
                f"{whose} must be of the model's full-attention layers {sorted(heads_by_layer)}, "
                f"got {sorted(self.cluster_of)}"
            )
        for layer, heads in heads_by_layer.items():
            if len(self.cluster_of[layer]) != heads:
                raise ConfigError(
                    f"{whose} must have the model's {heads} KV heads in layer {layer}, "
                    f"got {len(self.cluster_of[layer])}"
                )


def _check_layer(layer: int, cluster_of: tuple[int, ...], representatives: tuple[int, ...]) -> None:
    if set(cluster_of) != set(range(len(representatives))):
        raise ConfigError(
            f"cluster_of of layer {layer} must use each number from 0 to {len(representatives) - 1}, "
            f"got {list(cluster_of)}"
        )
    for cluster, head in enumerate(representatives):
        if not 0 <= head < len(cluster_of) or cluster_of[head] != cluster:
            raise ConfigError(
                f"representatives of layer {layer} must be in their own clusters, got head {head} for cluster {cluster}"
            )

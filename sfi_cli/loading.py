"""The model of a command: `--model`, `--random-weights`, `model.weights`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sfi_cli.settings import Given, ModelTable
from sfi_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model of a command."""

    model: str | None  # hub id, folder, GGUF file or alias; None is the bundled checkpoint
    loading: dict[str, Any]  # other arguments of `load`
    random_weights: str | None = None  # a config file or a known architecture, instead of a checkpoint; None for none
    seed: int = 0  # seed of random weights

    @classmethod
    def of(cls, settings: Given, model: str | None, dtype: str, device: str, trust: bool, **more: Any) -> "Subject":
        """Take the options of a command; `trust` allows code from the checkpoint."""
        table = settings.table(ModelTable).to_dict()
        return cls(model=model, loading={**table, "dtype": dtype, "device": device, "trust_remote_code": trust}, **more)

    @property
    def name(self) -> str:
        """The model's name in documents."""
        return self.random_weights or self.model or "bundled"

    def check(self) -> None:
        """Raise `ConfigError` for both a checkpoint and random weights, else as `check_weights`."""
        if self.model is not None and self.random_weights is not None:
            raise ConfigError(f"random_weights must come without --model, got {self.random_weights} and {self.model}")
        from sfi_core.models.load import check_weights, resolve_device, resolve_dtype

        device, dtype = resolve_device(self.loading["device"]), resolve_dtype(self.loading["dtype"])
        check_weights(self.loading["weights"], device, dtype)

    def loaded(self, check: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
        """Return the model and its tokenizer, for random weights the bundled one.

        `check` is called with a checkpoint's config before its weights are read, and may refuse it.
        """
        from sfi_core.models.load import load, load_tokenizer, resolve_device

        if self.random_weights is None:
            return load(self.model, **self.loading, check=check)
        from sfi_core.measure.bench.architectures import random_config, random_model
        from sfi_core.models.block_linear import round_weights

        device = resolve_device(self.loading["device"])
        model = random_model(random_config(self.random_weights), device, self._dtype(), self.seed)
        if self.loading["weights"] == "int8":
            round_weights(model.float())
        return model, load_tokenizer()

    def unloaded(self) -> Any:
        """Return the model without weights, on the meta device."""
        import torch

        from sfi_core.measure.bench.architectures import empty_model, model_config, random_config

        meta = torch.device("meta")
        if self.random_weights is not None:
            return empty_model(random_config(self.random_weights), meta, self._dtype())
        config = model_config(self.model)
        asked = self._dtype() if self.loading["dtype"] != "auto" else config.dtype
        return empty_model(config, meta, asked or torch.bfloat16)

    def _dtype(self) -> Any:
        import torch

        from sfi_core.models.load import resolve_dtype

        dtype = resolve_dtype(self.loading["dtype"])
        return torch.bfloat16 if dtype == "auto" else dtype

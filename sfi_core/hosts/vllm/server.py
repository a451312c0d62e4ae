"""vLLM's OpenAI-compatible server in this process; settings are checked before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError
from uvloop import run as run_loop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_core.hosts.vllm import attention_flags
from sfi_core.hosts.vllm.names import check_model, settings_of, trigger_ids
from sfi_core.hosts.vllm.settings import Settings
from sfi_core.models.load import check_exists


@dataclass(frozen=True, slots=True)
class Server:
    """A server whose settings fit, not started yet: vLLM's flags and configuration, and the plugin's."""

    args: Any
    vllm: Any
    settings: Settings
    trigger_ids: tuple[int, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Server":
        """Read vLLM's flags; raise `ConfigError`, in one line, unless all settings fit."""
        cli_env_setup()
        load_general_plugins()
        chosen = any(word.startswith(("--attention-config", "--attention_config", "-ac")) for word in words)
        more = attention_flags() if current_platform.is_cuda() and not chosen else []
        try:
            parser = make_arg_parser(FlexibleArgumentParser(prog="sfi serve --"))
            parser.error = refuse
            args = parser.parse_args([*words, *more])
            configure_logging_from_args(args)
            check_flags(args)
            validate_parsed_serve_args(args)
            vllm = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        except (ConfigError, InputError):
            raise
        except (ValueError, TypeError, OSError, NotImplementedError) as error:
            raise ConfigError(f"vLLM: {one_line(error)}") from error
        settings = settings_of(vllm)
        check_model(vllm, settings)
        return cls(args, vllm, settings, trigger_ids(vllm, settings))

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; raise `SfiError` if the address is taken, or vLLM's engine died."""
        try:
            run_loop(run_server(self.args))
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            raise SfiError(f"vLLM: {one_line(error)}") from error


def check_flags(args: Any) -> None:
    """Raise `ConfigError` for flags that vLLM would read and ignore, `InputError` for a folder that does not exist."""
    if args.model_tag is not None:
        raise ConfigError(f"give the model as --model before --, got {args.model_tag!r} among vLLM's flags")
    for name in ("headless", "grpc"):
        if getattr(args, name, False):
            raise ConfigError(f"vLLM's flags must be without --{name} for sfi serve, got it")
    if (args.api_server_count or 1) > 1:
        raise ConfigError(f"api_server_count must be 1 for sfi serve, got {args.api_server_count}")
    for name in ("tokenizer", "hf_config_path"):
        place = getattr(args, name, None)
        if place is not None and "://" not in place:
            check_exists(f"folder of {name}", place)


def refuse(message: str) -> NoReturn:
    """Raise `ConfigError` for a wrong flag of vLLM's."""
    raise ConfigError(f"vLLM's flags: {message}")


def one_line(error: Exception) -> str:
    """Return an error's message in one line; of several mistakes the first."""
    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error) or type(error).__name__
    return " ".join(text.split())

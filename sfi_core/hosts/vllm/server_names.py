"""The names of vLLM's HTTP server that `sfi serve` uses; `names` has the plugin's."""

from uvloop import run as run_loop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = [
    "AsyncEngineArgs", "FlexibleArgumentParser", "cli_env_setup", "configure_logging_from_args",
    "current_platform", "load_general_plugins", "make_arg_parser", "run_loop", "run_server",
    "validate_parsed_serve_args",
]  # fmt: skip

"""Write docs/cli/ from the parser and the settings' fields: `make docs-cli`.

Nothing there is written by hand; `tests/cli/test_docs.py` fails while a page is stale.
"""

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from sfi_cli.app import HELP, app
from sfi_cli.settings import COMMANDS, DIMENSIONS, SETTINGS, TABLES, places, written
from sfi_cli.terminal.output import INTERRUPTED
from sfi_core.errors import BackendError, ConfigError, InputError, SfiError
from sfi_core.settings.config import PRESETS, SfiConfig
from sfi_core.settings.fields import Setting

FOLDER = Path(__file__).parent / "cli"
EXIT_CODES = {
    0: "ok",
    SfiError.exit_code: "failure",
    ConfigError.exit_code: "bad usage or setting",
    InputError.exit_code: "unreadable input or trace",
    BackendError.exit_code: "this machine cannot do it",
    INTERRUPTED: "interrupted",
}
SETTINGS_LINE = f"""\
[settings.md](settings.md) lists the {len(SETTINGS)} settings of `--set` and `--config`.
`sfi COMMAND --help` says what a page here says; `--debug` anywhere shows the traceback of an error."""
SETTINGS_HEAD = """\
`--set NAME=VALUE` takes these, and so does the TOML file of `--config`: there a table's settings stand below
`[table]`, without the name before the dot. `sfi config list` prints them."""
KINDS = {bool: "flag", Path: "path"}  # how a page calls a type; others by their names


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    commands = dict(commands_of(typer.main.get_command(app)))
    found = {file_of(name): command_page(name, command) for name, command in commands.items()}
    return found | {"README.md": index(commands), "settings.md": settings_page()}


def commands_of(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """List the commands by their words after `sfi`."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from commands_of(inner, f"{name} {word}".strip())


def file_of(name: str) -> str:
    """Name a command's page."""
    return f"{name.replace(' ', '-')}.md"


def index(commands: dict[str, Any]) -> str:
    """Return the page that lists the commands, and what a command ends with."""
    lines = [
        (f"[sfi {name}]({file_of(name)})", escaped(" ".join(paragraphs(command.help)[0].split())))
        for name, command in commands.items()
    ]
    codes = [(str(code), meaning) for code, meaning in EXIT_CODES.items()]
    return page(
        "# The command line",
        HELP,
        table(("command", ""), lines),
        SETTINGS_LINE,
        "## Exit codes",
        table(("code", "meaning"), codes),
    )


def command_page(name: str, command: Any) -> str:
    """Return a command's page: usage, help, and a table for each panel of its options."""
    shown = [one for one in command.params if one.name != "help"]
    operands = [operand(one) for one in shown if one.param_type_name == "argument"]
    panels: dict[str, list[Any]] = {}
    for one in shown:
        other = "Arguments" if one.param_type_name == "argument" else "Options"
        panels.setdefault(one.rich_help_panel or other, []).append(one)
    kinds = get_type_hints(inspect.unwrap(command.callback))
    parts = [f"# sfi {name}", block([" ".join((f"sfi {name} [OPTIONS]", *operands))])]
    parts += prose(command.help)
    for panel, members in panels.items():
        first = "argument" if panel == "Arguments" else "option"
        rows = [row(one, kinds[one.name]) for one in members]
        parts += [f"## {panel}", table((first, "type", "default", "meaning"), rows)]
    if name in COMMANDS:
        parts.append(f"[settings.md](settings.md) says which settings have an effect on `{name}`.")
    return page(*parts)


def prose(text: str) -> list[str]:
    """Split a help text into paragraphs; indented lines in a row become one block of code."""
    found: list[str] = []
    code: list[str] = []
    for part in [*paragraphs(text), ""]:
        if part.startswith("  "):
            code += inspect.cleandoc(part).splitlines()
            continue
        found += [block(code)] if code else []
        found += [escaped(part)] if part else []
        code = []
    return found


def row(one: Any, hint: Any) -> tuple[str, ...]:
    """Describe an argument or option: name, type, default, meaning."""
    is_operand = one.param_type_name == "argument"
    names = [operand(one)] if is_operand else [*one.opts, *one.secondary_opts]
    type_ = kind_of(hint) if is_operand or not one.metavar else one.metavar
    default = "" if one.default is None or one.default is False else str(one.default)
    where = f" Environment: `{one.envvar}`." if one.envvar else ""
    return (
        ", ".join(f"`{name}`" for name in names),
        f"{type_}, may repeat" if one.multiple else type_,
        escaped(one.show_default if isinstance(one.show_default, str) else default),
        escaped(one.help) + where,
    )


def kind_of(hint: Any) -> str:
    """Name the type of a value: `list[str] | None` is a str."""
    while get_args(hint):
        hint = get_args(hint)[0]
    return KINDS.get(hint, hint.__name__)


def operand(one: Any) -> str:
    """Write an argument as a usage line does."""
    name = one.metavar or one.name.upper()
    return name if one.required else f"[{name}]"


def settings_page() -> str:
    """Return the page of the settings, by table."""
    tables: dict[str, list[Setting]] = {}
    for name, one in SETTINGS.items():
        tables.setdefault(name.rpartition(".")[0], []).append(one)
    parts = ["# Settings", SETTINGS_HEAD]
    for name, members in tables.items():
        parts.append(f"## {name}" if name else "## Decoding")
        parts += [inspect.cleandoc(TABLES[name].__doc__ or "")] if name in TABLES else []
        rows = [(f"`{one.name}`", *described(one)) for one in members]
        parts.append(table(("setting", "type and range", "default", "meaning", "commands"), rows))
    return page(*parts, *presets())


def described(one: Setting) -> tuple[str, ...]:
    """Describe a setting: type and range, default, meaning, commands."""
    limits = [one.range] if one.choices else [one.type, one.range]
    commands = places(one.name)
    if one.name in DIMENSIONS:
        commands[-1] = "tune (`--search`)"
    return (", ".join(filter(None, limits)), f"`{written(one.default)}`", escaped(one.meaning), ", ".join(commands))


def presets() -> list[str]:
    """Return what the presets change, as a section."""
    values = [flat(SfiConfig.preset(name).to_dict()) for name in PRESETS]
    rows = [
        (f"`{name}`", *(f"`{written(one[name])}`" for one in values))
        for name in values[0]
        if len({written(one[name]) for one in values}) > 1
    ]
    return ["## What the presets change", table(("setting", *PRESETS), rows)]


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Name the settings of inner tables in full."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict)
        found |= {f"{name}.{one}": of for one, of in value.items()} if inner else {name: value}
    return found


def paragraphs(text: str) -> list[str]:
    """Split at blank lines."""
    return [part.rstrip() for part in text.split("\n\n") if part.strip()]


def escaped(text: str) -> str:
    """Write text so that Markdown shows it as it is."""
    for character in "|<*":
        text = text.replace(character, f"\\{character}")
    return text


def block(lines: Iterable[str]) -> str:
    """Return a block of code."""
    return "\n".join(("```", *lines, "```"))


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(*parts: str) -> str:
    """Join the parts of a page."""
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the pages, and remove those of commands that are gone."""
    FOLDER.mkdir(exist_ok=True)
    found = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in found:
            path.unlink()
    for name, text in found.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

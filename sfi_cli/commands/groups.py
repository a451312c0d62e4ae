"""Commands of two words whose first word is a command as well: `sfi tune heads` beside `sfi tune DIR...`."""

from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Finds a command by the first two words where there is one, else by the first."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command's name, the command, and the words after the name."""
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Leave out names of two words, which a shell would put in as one."""
        return [one for one in super().shell_complete(ctx, incomplete) if " " not in one.value]

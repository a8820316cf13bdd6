"""Groups of commands that suggest the right command for a wrong name."""

import difflib
from collections.abc import Mapping, Sequence

import click

OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("jobs", "list", "ps", "queue", "top"), "ls"),
    **dict.fromkeys(("describe", "get", "info", "show"), "status"),
    **dict.fromkeys(("explain", "reason"), "why"),
    **dict.fromkeys(("output", "tail"), "logs"),
    **dict.fromkeys(("delete", "end", "kill", "rm", "stop"), "cancel"),
    **dict.fromkeys(("hosts", "nodes", "slices"), "workers"),
    **dict.fromkeys(("exec", "start"), "run"),
    "cordon": "drain",
    "uncordon": "undrain",
    "check": "doctor",
}
"""The names that other tools give to our commands."""


class SuggestingGroup(click.Group):
    """Suggests the nearest commands for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {args[0]!r}{_hint(args[0].lower(), names)}")
        return super().resolve_command(ctx, args)


def _hint(name: str, names: Sequence[str]) -> str:
    meant = OTHER_NAMES.get(name, "")
    near = [meant] if meant in names else difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "."

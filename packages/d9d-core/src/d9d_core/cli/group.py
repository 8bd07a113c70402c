"""Sub-commands that plugins bring along."""

from __future__ import annotations

import os
from typing import Any

import typer.core

from d9d_core.plugin.loader import discover
from d9d_core.plugin.policy import PluginPolicy
from d9d_core.plugin.records import CommandSpec


class PluginGroup(typer.core.TyperGroup):
    """Core's commands, and those that plugins declare."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order in which help shows them."""
        return [*super().list_commands(ctx), *sorted(_declared())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, from core or from a plugin."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        spec = _declared().get(cmd_name)
        return None if spec is None else _Lazy(spec)


def _declared() -> dict[str, CommandSpec]:
    registry = discover(PluginPolicy.from_environment(os.environ))
    return {entry.spec.name: entry.spec for entry in registry.entries("command") if isinstance(entry.spec, CommandSpec)}


class _Lazy(typer.core.TyperCommand):
    """A command that imports the plugin's application when it runs and hands all arguments on, ``--help`` included."""

    def __init__(self, spec: CommandSpec) -> None:
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(spec.name, context_settings=settings, help=spec.summary, add_help_option=False)
        self._spec = spec

    def invoke(self, ctx: Any) -> Any:
        """Run the plugin's application."""
        return self._spec.app.load()(args=list(ctx.args), prog_name=f"d9d {self._spec.name}")

"""Defaults of the tracker: what leaves the machine is asked for."""

from __future__ import annotations

from d9d_wandb.config import WandbConfig


def test_terminal_logs_are_kept_only_if_asked_for() -> None:
    config = WandbConfig(project="mine")
    assert not config.capture_terminal_logs
    assert (config.mode, config.lost_run, config.tags, config.entity, config.dir) == ("online", "off", [], None, None)

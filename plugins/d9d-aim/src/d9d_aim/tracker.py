"""Tracker that writes to Aim."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import aim
from aim.ext.utils import get_environment_variables, get_git_info
from aim.sdk.configs import get_aim_repo_name
from aim.sdk.errors import MissingRunError
from d9d_core.errors import PluginError
from d9d_core.tracker import Histogram, Picture, RunInfo, split_tags
from d9d_core.types import State

from d9d_aim.config import AimConfig


class AimTracker:
    """Tracker ``aim``, which opens or resumes a run in an Aim repository."""

    def __init__(self, config: AimConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> AimRun:
        """Start a run, or resume the run whose hash is in ``state``.

        Raises:
            PluginError: the repository cannot be opened, or the run no longer exists and ``lost_run`` is ``off``.
        """
        config = self._config
        place = config.repo or str(run.directory / "aim")
        remote = "://" in place
        try:
            if not remote:
                Path(place).mkdir(parents=True, exist_ok=True)
            # Aim writes VERSION last when it creates a repository, which takes seconds. A repository without VERSION is
            # incomplete, so it is created again.
            made = remote or (Path(place) / get_aim_repo_name() / "VERSION").is_file()
            repo = aim.Repo.from_path(place, init=not made)
        except Exception as error:  # Aim and its dependencies raise many types
            raise PluginError(
                f"the Aim repository {place} cannot be opened ({error}); set repo of the tracker 'aim' to a "
                "repository that can be opened"
            ) from error
        opened = None
        if run.resumed_step and state is not None:
            opened = self._continued(repo, place, str(state["hash"]))
        if opened is None:
            opened = self._run(repo)
            _describe(opened, run)
        if not remote:
            opened.set_artifacts_uri((Path(place).absolute() / "artifacts").as_uri())
        return AimRun(opened)

    def _continued(self, repo: aim.Repo, place: str, run_hash: str) -> aim.Run | None:
        """Open the run with the saved hash; ``None`` if the run is lost and the config has ``lost_run: new``."""
        try:
            # A lock on the run can only be left from a process that died, because d9d never lets two processes
            # continue one job. So ``force_resume`` takes it over.
            return self._run(repo, run_hash=run_hash, force_resume=True)
        except MissingRunError as error:
            text = f"the Aim repository {place} no longer has the run '{run_hash}' of this job"
            if self._config.lost_run == "off":
                raise PluginError(f"{text}; set 'lost_run: new' of the tracker 'aim' to go on in a new run") from error
        with suppress(OSError):
            print(f"warning: {text}; a new run replaces it", file=sys.stderr)  # noqa: T201
        return None

    def _run(self, repo: aim.Repo, **arguments: Any) -> aim.Run:
        config = self._config
        run = aim.Run(
            repo=repo,
            experiment=config.experiment,
            log_system_params=False,
            capture_terminal_logs=config.capture_terminal_logs,
            system_tracking_interval=config.system_tracking_interval,
            **arguments,
        )
        if config.log_system_params:
            # This method writes the environment itself, in Aim's format, because Aim's code fails if setuptools lacks
            # `pkg_resources`.
            run["__system_params"] = {
                "packages": {installed.name: installed.version for installed in distributions()},
                "env_variables": get_environment_variables(),
                "git_info": get_git_info(),
                "executable": sys.executable,
                "arguments": sys.argv,
            }
        return run


class AimRun:
    """Open run of the tracker ``aim``. The tags of a series become Aim's context of the series.

    Aim stores one value per step of a series, so steps that a resumed run repeats overwrite the earlier values.

    Args:
        run: Aim's run object.
    """

    def __init__(self, run: aim.Run) -> None:
        self._run = run
        self._hash = str(run.hash)
        self._open = True

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point per series."""
        self._track(step, values, "number")

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms as distributions."""
        made = {
            name: aim.Distribution(hist=value.counts.numpy(), bin_range=(float(value.low), float(value.high)))
            for name, value in histograms.items()
        }
        self._track(step, made, "histogram")

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""
        self._track(step, {name: aim.Text(text) for name, text in texts.items()}, "text")

    def write_pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Write pictures."""
        self._track(step, {name: aim.Image(picture.numpy()) for name, picture in pictures.items()}, "picture")

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        """Write artifacts named ``<name>/<step>``."""
        self._check()
        for name, path in files.items():
            self._run.log_artifact(str(path), f"{name}/{step}{path.suffix}", block=True)

    def flush(self) -> None:
        """Do nothing but check that the run is open: a write has reached the repository when it returns."""
        self._check()

    def state(self) -> State:
        """Hash of the run, for resuming."""
        return {"hash": self._hash}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Store the final status of the run, and close it."""
        if self._open:
            self._open = False
            self._run["status"] = status
            self._run.close()

    def _track(self, step: int, values: Mapping[str, Any], kind: str) -> None:
        self._check()
        for series, value in values.items():
            name, tags = split_tags(series)
            try:
                self._run.track(value, name=str(name), step=step, context=dict(tags))
            except ValueError as error:
                if "Incompatible data types" not in str(error):
                    raise
                # Aim allows one value type per name: the first type keeps the plain name, other types get a suffix.
                self._run.track(value, name=f"{name} ({kind})", step=step, context=dict(tags))

    def _check(self) -> None:
        if not self._open:
            raise ValueError("the run is closed")


def _describe(opened: aim.Run, run: RunInfo) -> None:
    """Store name, description, tags and hyperparameters of the job in the run."""
    opened.name = run.name
    if run.description:
        opened.description = run.description
    for tag in run.tags:
        opened.add_tag(tag)
    if run.hparams:
        opened["hparams"] = dict(run.hparams)
    opened["job"] = dict(run.config)

"""Results as files: a table's numbers with its hardware, versions, command and commit."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_engine.trackers.utilisation import known_peak
from settings import Setting

ROOT = Path(__file__).resolve().parents[3]
#: Whom the others are compared with.
OURS = "d9d"
Answer = Mapping[str, Any]


def summary(setting: Setting, answers: Mapping[str, Sequence[Answer]], command: str, taken: str) -> dict[str, Any]:
    """Everything that is known of a comparison, as JSON can hold it.

    Args:
        setting: of the comparison.
        answers: of the contenders, round by round.
        command: that made it.
        taken: when, as a date.
    """
    machine = next(answer["hardware"] for found in answers.values() for answer in found if "hardware" in answer)
    peak = known_peak(machine["device"])
    ours = _seconds(answers.get(OURS, ()))
    flops = setting.flops_per_token()
    contenders: dict[str, Any] = {}
    for name, found in answers.items():
        seconds = _seconds(found)
        if not seconds:
            contenders[name] = {key: found[-1][key] for key in ("skipped", "failed") if key in found[-1]}
            continue
        first = found[0]
        speed = setting.tokens / statistics.median(seconds)
        contenders[name] = {
            "ms": [round(1e3 * value, 2) for value in seconds],
            "tokens_per_second": round(speed),
            "mfu": None if peak is None else round(speed * flops / (peak * 1e12), 4),
            "peak_gib": max((answer["peak_gib"] for answer in found if "peak_gib" in answer), default=None),
            # Side by side: each round of one with the same round of the other.
            "times_ours": [round(mine / value, 4) for mine, value in zip(ours, seconds, strict=False)],
            **{
                key: first[key]
                for key in ("parameters", "versions", "remarks", "losses", "start_seconds", "ms_by_kind", "roofline")
                if key in first
            },
        }
    return {
        "table": setting.name,
        "taken": taken,
        "command": command,
        "commit": commit(),
        "setting": setting.as_json(),
        "model": setting.model_values,
        "hardware": machine,
        "peak_tflops": peak,
        "flops_per_token": flops,
        "contenders": contenders,
    }


def commit(root: Path = ROOT) -> str:
    """Commit of the sources, with ``+`` if something differs from it; ``unknown`` where git does not tell."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write a result into the file of its table and device, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]["device"]).lower()).strip("-")
    path = folder / f"{result['table']}--{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path) -> list[dict[str, Any]]:
    """All results, in order of their files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _seconds(found: Sequence[Answer]) -> list[float]:
    return [answer["seconds"] for answer in found if "seconds" in answer]

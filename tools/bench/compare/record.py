"""Result of a comparison: a table's numbers with its hardware, versions, command and commit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from d9d_engine.trackers.utilisation import known_peak
from records import commit
from settings import Setting

#: Key that identifies results of comparisons.
KIND = "contenders"
#: Contender to which the others are compared.
OURS = "d9d"
Answer = Mapping[str, Any]


def summary(setting: Setting, answers: Mapping[str, Sequence[Answer]], command: str, taken: str) -> dict[str, Any]:
    """All results of a comparison, as JSON values.

    Args:
        setting: setting of the comparison.
        answers: answers of the contenders, round by round.
        command: command that made the comparison.
        taken: date of the comparison.
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
            # Compare each round of one contender with the same round of the other.
            "times_ours": [round(mine / value, 4) for mine, value in zip(ours, seconds, strict=False)],
            **{
                key: first[key]
                for key in (
                    "parameters",
                    "trained",
                    "versions",
                    "remarks",
                    "losses",
                    "start_seconds",
                    "ms_by_kind",
                    "roofline",
                )
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
        KIND: contenders,
    }


def _seconds(found: Sequence[Answer]) -> list[float]:
    return [answer["seconds"] for answer in found if "seconds" in answer]

"""One contender in a process of its own: builds it, warms up, measures one round."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from contender import NotHereError, builder_of
from records import GIB, hardware
from settings import Setting
from timing import timed
from work_by_kind import roofline, work_by_kind


def run_round(name: str, setting: Setting, profiled: bool) -> dict[str, Any]:
    """Measure one round of a contender.

    Args:
        name: name of the contender.
        setting: setting of the comparison.
        profiled: whether to measure the time by kind of work, too, after the round.

    Returns:
        ``seconds`` of a step, ``losses`` of the first steps, ``start_seconds`` until the warm-up was over, and the
        contender's description; or ``skipped``, or ``failed``, with the reason.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    try:
        contender = builder_of(name)(setting, device)
        gc.collect()
        gc.freeze()  # like d9d's training loop
        losses = [contender.step().item() for _ in range(setting.warmup)]
        ready = time.perf_counter() - started
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(contender.step, setting.steps)
        found: dict[str, Any] = {
            "seconds": seconds,
            "losses": losses,
            "start_seconds": ready,
            "parameters": contender.parameters,
            **({} if contender.trained is None else {"trained": contender.trained}),
            "versions": dict(contender.versions),
            "remarks": contender.remarks,
        }
        if device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        if profiled:
            kinds = work_by_kind(contender.step, device)
            found["ms_by_kind"] = kinds
            trained = contender.parameters if contender.trained is None else contender.trained
            found["roofline"] = roofline(setting, kinds, trained, contender.optimizer_bytes)
    except NotHereError as error:
        return {"skipped": str(error)}
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # a failure of another contender is a result, too
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return found


def main(name: str, setting: str, profiled: str, answer: str) -> None:
    """Write the answer of one round into a file, because libraries may print to standard output and error."""
    found = run_round(name, Setting.from_json(json.loads(setting)), profiled == "profiled")
    Path(answer).write_text(json.dumps({**found, "hardware": hardware()}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

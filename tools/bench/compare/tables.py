"""Tables of the results in ``benchmarks/README.md``, and their summary in the front page, between marks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contender import title_of
from record import OURS
from records import fill, origin, table

MARKS = ("<!-- comparisons: written by tools/bench/compare -->", "<!-- end of comparisons -->")
NONE_YET = "No comparison has been measured yet."
#: Results to show on the front page.
SHOWN = ("dense-2b-4k-random", "dense-2b-64k-random", "moe-5.6b-4k-random")
_KINDS = ("matmul", "attention", "other", "optimizer", "communication", "idle")


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables: a summary, then a section for each result."""
    return "\n\n".join([summary_of(results), *map(_section, results)]) if results else NONE_YET


def write(page: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables of all results into a page."""
    page.write_text(fill(page.read_text(encoding="utf-8"), text_of(results), MARKS), encoding="utf-8")


def write_summary(page: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the summary of the results in ``SHOWN`` into a page."""
    shown = [result for result in results if result["table"] in SHOWN]
    page.write_text(fill(page.read_text(encoding="utf-8"), summary_of(shown), MARKS), encoding="utf-8")


def summary_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Table with one row per result: tokens per second, and d9d's speed relative to each other contender."""
    compared = []
    for result in results:
        measured = {name: found for name, found in result["contenders"].items() if "ms" in found}
        if OURS in measured and any(map(_is_rival, measured)):
            compared.append((result, measured))
    if not compared:
        return NONE_YET
    names = list(dict.fromkeys(name for _, measured in compared for name in measured if _is_rival(name)))
    head = ("tokens per second", title_of(OURS), *map(title_of, names))
    rows = []
    for result, measured in compared:
        for mine in [name for name in measured if not _is_rival(name)]:
            change = title_of(mine).removeprefix(title_of(OURS))
            title = f"{result['table']}{change}, {result['hardware']['device']}"
            beside = (_beside(measured[mine], measured.get(name)) for name in names)
            rows.append([title, f"{measured[mine]['tokens_per_second']:,}", *beside])
    return "\n".join(table(head, rows))


def _is_rival(name: str) -> bool:
    return name != OURS and not name.startswith(f"{OURS}-")


def _beside(ours: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    """Table cell of another contender: its speed, and d9d's relative speed in the same rounds."""
    if found is None:
        return ""
    rounds = zip(ours["times_ours"], found["times_ours"], strict=True)
    return f"{found['tokens_per_second']:,} ({1 / statistics.median(its / mine for mine, its in rounds):.2f}x)"


def _section(result: Mapping[str, Any]) -> str:
    contenders: Mapping[str, Mapping[str, Any]] = result["contenders"]
    setting, machine = result["setting"], result["hardware"]
    measured = {name: found for name, found in contenders.items() if "ms" in found}
    lines = [f"### {result['table']}: {machine['device']}", ""]
    lines.append(
        f"{setting['samples']} x {setting['length']} tokens a step, {setting['data']}, {setting['precision']}"
        f"{', checkpointed' if setting['checkpointed'] else ''}; {origin(result)}. MFU: "
        f"{result['flops_per_token']:.4g} FLOPs per token{_peak(result['peak_tflops'])}."
    )
    rows = [_row(name, found) for name, found in measured.items()]
    lines += ["", *table(("contender", "tokens/s", "MFU", "step, ms", "peak GiB", "times d9d's speed"), rows)]
    if kinds := {name: found for name, found in measured.items() if "ms_by_kind" in found}:
        head = ("ms of a profiled step", *_KINDS, "matmul TFLOP/s", "attention TFLOP/s", "optimizer TB/s")
        lines += ["", *table(head, [_kinds(name, found) for name, found in kinds.items()])]
    for name, found in contenders.items():
        if reason := found.get("skipped") or found.get("failed"):
            lines += ["", f"{title_of(name)}: {'left out' if 'skipped' in found else 'failed'}: {reason}"]
    for key, what in (("parameters", "model"), ("trained", "LoRA")):
        count = measured.get(OURS, {}).get(key)
        for name, found in measured.items():
            if count is not None and found[key] != count:
                lines += ["", f"{title_of(name)}: its {what} has {found[key]:,} parameters, ours {count:,}"]
    remarks = [f"{title_of(name)}: {found['remarks']}" for name, found in measured.items() if found.get("remarks")]
    return "\n".join([*lines, *(line for remark in remarks for line in ("", remark))])


def _row(name: str, found: Mapping[str, Any]) -> list[str]:
    ratios = found["times_ours"] if name != OURS else []
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
    mfu, peak = found["mfu"], found["peak_gib"]
    return [
        " ".join(
            [title_of(name), *(version for package, version in found["versions"].items() if "d9d" not in package)]
        ),
        f"{found['tokens_per_second']:,}",
        "" if mfu is None else f"{mfu:.1%}",
        f"{statistics.median(found['ms']):.1f} ({min(found['ms']):.1f} to {max(found['ms']):.1f})",
        "" if peak is None else f"{peak:.1f}",
        spread,
    ]


def _kinds(name: str, found: Mapping[str, Any]) -> list[str]:
    rates = found.get("roofline", {})
    times = [f"{found['ms_by_kind'].get(kind, 0.0):.1f}" for kind in _KINDS]
    limits = (("matmul_tflops", ".0f"), ("attention_tflops", ".0f"), ("optimizer_tbps", ".2f"))
    return [title_of(name), *times, *(format(rates[key], form) if key in rates else "" for key, form in limits)]


def _peak(peak: float | None) -> str:
    return "" if peak is None else f" against {peak:.0f} TFLOP/s"

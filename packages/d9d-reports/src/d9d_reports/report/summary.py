"""First card of a report: model, data, optimizer and command of a run; and tiles with its key values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from d9d_engine.launch.startup import FILE as STARTUP
from d9d_engine.run.directory import FACTS

from d9d_reports.report.markup import duration, number, read_facts, table
from d9d_reports.runs.differences import shown
from d9d_reports.runs.record import RunRecord

#: Sizes of a model in the order of the card: field of the job -> name on the card.
_SIZES: Mapping[str, str] = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_experts": "experts",
    "experts_per_token": "experts per token",
    "vocab_size": "vocabulary",
}
#: Names of the data's facts that the card shows, in this order.
_AMOUNTS = ("documents", "conversations", "records", "samples", "tokens")
#: Memory series; the first of them that a run has logged gives its peak memory.
_MEMORY = ("memory/reserved_gib", "memory/allocated_gib", "memory/resident_gib")
_EVALUATION = re.compile(r"eval/(?:(.+)/)?loss")


def trained(runs: Mapping[str, RunRecord]) -> str:
    """Make the table of the first card, with a column per run: model, data, optimizer, layout, command."""
    columns = [_facts(record) for record in runs.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    commands = [str(read_facts(record.directory / STARTUP).get("command") or "") for record in runs.values()]
    if len(runs) > 1:
        return table([row for row in [*rows, ("command", *commands)] if any(row[1:])], ("", *runs))
    return table([row for row in rows if any(row[1:])]) + "".join(map(_command, filter(None, commands)))


def _command(text: str) -> str:
    """Make a line of code that breaks between words only, not after the hyphens of an option."""
    words = " ".join(f"<span>{escape(word)}</span>" for word in text.split(" "))
    return f'<code class="command">{words}</code>'


def results(runs: Mapping[str, RunRecord]) -> str:
    """Make the table of key values of several runs, with a column per run."""
    columns = [
        {title: _joined([value, rest if rest.startswith("best") else ""]) for title, value, rest in _values(record)}
        for record in runs.values()
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    status = ("status", *(record.status for record in runs.values()))
    errors = ("error", *(failure(record) for record in runs.values()))
    rows = [status, *((name, *(column.get(name, "") for column in columns)) for name in names), errors]
    return table([row for row in rows if any(row[1:])], ("", *runs))


def tiles(record: RunRecord) -> str:
    """Make one tile for each key value of a run: loss, evaluation, speed, time, memory."""
    return "".join(
        f'<div class="card tile"><div class="weak">{escape(title)}</div><div class="value">{escape(value)}</div>'
        f'<div class="weak">{escape(rest) or "&nbsp;"}</div></div>'
        for title, value, rest in _values(record)
    )


def failure(record: RunRecord) -> str:
    """Error that ended a failed run; empty for other runs."""
    return (record.error or "unknown error") if record.status == "failed" else ""


def _facts(record: RunRecord) -> dict[str, str]:
    """Facts of a run by name, in the order of the card; empty where nothing is recorded."""
    job, facts, start = record.job, read_facts(record.directory / FACTS), read_facts(record.directory / STARTUP)
    steps = f"{record.step:,}" + (f" of {record.total:,}" if record.total else "") + " steps"
    tokens = record.last("tokens")
    return {
        "model": _joined(_model(job.get("model"), facts)),
        "fine-tuning": _component(job.get("peft")),
        "task": _component(job.get("task")),
        "data": _joined(_data(job.get("data"), facts.get("data"))),
        "optimizer": _component(job.get("optimizer"), ("lr", "weight_decay", "betas")),
        "schedule": _component(job.get("lr_schedule")),
        "batch": _joined(_batch(job.get("batch"), job)),
        "layout": _joined(_layout(job, start)),
        "device": _joined(_device(start, facts)),
        "trained": _joined([steps, f"{number(tokens)} tokens" if tokens else ""]) if record.step else "",
        "last start": f"{at:%Y-%m-%d %H:%M} UTC" if (at := record.started) else "",
        "checkpoint": f"step {record.saved:,}" if record.saved else "",
    }


def _model(model: Any, facts: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(model, Mapping):
        yield "" if model is None else shown(model)
        return
    yield str(model.get("name") or "")
    yield f"from {model['pretrained']}" if model.get("pretrained") else ""
    count, trained_ones = facts.get("parameters"), facts.get("trained_parameters")
    if isinstance(count, int) and isinstance(trained_ones, int) and count > 0:
        share = "all trained" if trained_ones == count else f"{trained_ones:,} trained ({trained_ones / count:.2%})"
        yield f"{count:,} parameters, {share}"
    for field, name in _SIZES.items():
        if isinstance(model.get(field), int):
            yield f"{name} {model[field]:,}"


def _data(data: Any, amounts: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        yield str(data.get("name") or "")
        sources = data.get("sources")
        if isinstance(sources, list):
            yield " ".join(map(shown, sources[:3])) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
        if isinstance(data.get("sequence_length"), int):
            yield f"sequences of {data['sequence_length']:,}"
    if isinstance(amounts, Mapping):
        for name in _AMOUNTS:
            if isinstance(amounts.get(name), int):
                yield f"{amounts[name]:,} {name}"


def _batch(batch: Any, job: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(batch, Mapping) and isinstance(batch.get("size"), int):
        yield f"{batch['size']:,} samples"
        yield f"microbatches of {batch['microbatch']:,}" if isinstance(batch.get("microbatch"), int) else ""
    precision = job.get("precision")
    if isinstance(precision, Mapping):
        yield str(precision.get("parameters") or "")
        yield f"autocast {precision['autocast']}" if precision.get("autocast") else ""


def _layout(job: Mapping[str, Any], start: Mapping[str, Any]) -> Iterator[str]:
    processes, mesh, strategies = start.get("processes"), job.get("mesh"), job.get("parallel")
    if isinstance(processes, int):
        yield f"{processes:,} process{'es' if processes > 1 else ''}"
    if isinstance(mesh, Mapping):
        yield " ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
    if isinstance(strategies, list):
        yield " ".join(_name(strategy) for strategy in strategies)
    yield _name(job.get("pipeline"))


def _device(start: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    environment = start.get("environment")
    versions = environment if isinstance(environment, Mapping) else {}
    yield str(facts.get("device") or versions.get("gpu") or "")
    yield f"torch {versions['torch']}" if versions.get("torch") else ""


def _values(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Key values of a run: title, value, and a further text."""
    if losses := record.points("loss"):
        step, best = min(losses, key=lambda point: point[1])
        first = f"{number(losses[0][1])} → " if len(losses) > 1 else ""
        yield "loss", f"{first}{number(losses[-1][1])}", f"best {number(best)} at step {step:,}"
    names = dict.fromkeys(name for line in record.lines for name in line)
    for name, found in [(name, found) for name in names if (found := _EVALUATION.fullmatch(name))][:3]:
        if points := record.points(name):
            step, best = min(points, key=lambda point: point[1])
            title = "evaluation loss" + (f" on {found[1]}" if found[1] else "")
            yield title, number(points[-1][1]), f"best {number(best)} at step {step:,}"
    rates = record.points("tokens_per_second")
    if rates:
        tokens, share = record.last("tokens"), record.last("mfu")
        mean = f"mean {number(tokens / record.seconds)}" if tokens and record.seconds else ""
        yield "tokens/s", number(rates[-1][1]), _joined([mean, "" if share is None else f"MFU {share:.1%}"])
        yield "training time", duration(record.seconds), "without start-up and saves"
    for name in _MEMORY:
        if points := record.points(name):
            kind = name.removeprefix("memory/").removesuffix("_gib")
            yield "peak memory", f"{number(max(value for _, value in points))} GiB", f"{kind}, first process"
            break


def _component(value: Any, fields: Sequence[str] | None = None) -> str:
    """Format a component's name and its set fields in one line; all fields by default."""
    if not isinstance(value, Mapping):
        return "" if value is None else shown(value)
    chosen = value if fields is None else {field: value.get(field) for field in fields}
    texts = [f"{field.replace('_', ' ')} {_brief(v)}" for field, v in chosen.items() if field != "name" and _is_set(v)]
    return _joined([str(value.get("name") or ""), *texts])


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ([], {}, "")


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_brief, value))
    return _name(value) if isinstance(value, Mapping) else shown(value)


def _name(value: Any) -> str:
    return str(value.get("name") or "") if isinstance(value, Mapping) else "" if value is None else str(value)


def _joined(texts: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(filter(None, texts))

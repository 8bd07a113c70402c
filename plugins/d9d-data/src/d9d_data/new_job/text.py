"""Text of a job file: its sections with comments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from d9d_data.new_job.found import HELD_OUT, Model, Records
from d9d_data.new_job.kinds import Kind
from d9d_data.new_job.samples import VOCABULARY

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
#: Sizes of a model that trains in a minute on a CPU.
_SMALL = """\
# A small model with random weights. For a published one: model: {{pretrained: DIRECTORY}}
model:
  name: qwen3
  vocab_size: {vocabulary}
  hidden_size: 128
  intermediate_size: 384
  num_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  max_positions: {positions}
"""
_SMALL_RATE = "3.0e-3"
_SMALL_BATCH = (16, 8)
_FEW = 400
#: Smallest number of conversations that are packed; fewer, packed, could fill less than a batch.
_PACKED = 1000


@dataclass(frozen=True)
class Plan:
    """Choices of a job file.

    Attributes:
        name: name of the kind, and of the run.
        file: name of the job file.
        kind: the kind.
        model: the model to start from; ``None`` for a new one.
        records: the records.
        length: positions of a sample.
        gpus: number of GPUs.
        tokenizer: tokenizer of a new model: a directory, or empty for one that is trained on the texts.
        teacher: directory of the teacher of a distillation.
    """

    name: str
    file: str
    kind: Kind
    model: Model | None
    records: Records
    length: int
    gpus: int
    tokenizer: str = ""
    teacher: str = ""


def job_text(plan: Plan) -> str:
    """Job file in YAML."""
    return "\n".join(section.rstrip("\n") for section in _sections(plan)) + "\n"


def _sections(plan: Plan) -> Iterator[str]:
    processes = f" --nproc {plan.gpus}" if plan.gpus > 1 else ""
    file = shlex.quote(plan.file)
    yield (
        f"# {plan.kind.title}.\n"
        f"#   d9d check {file}{' ' * len(processes)}      finds errors, and predicts memory\n"
        f"#   d9d data show {file}{' ' * len(processes)}  prints samples; the learned tokens are marked\n"
        f"#   d9d train {file}{processes}      trains; continues after an interruption\n"
        f"run: {{name: {plan.name}}}\n"
    )
    yield _model(plan)
    yield plan.kind.lines.format(teacher=_yaml(plan.teacher)) if plan.teacher else plan.kind.lines
    yield ""
    yield _data(plan)
    yield _optimizer(plan)
    if plan.gpus:
        yield "precision: {autocast: bfloat16} # float32 parameters, matrix products in bfloat16"
        yield "parallel: [compile] # fused kernels; the first step takes longer"
    yield "logging: {every: 10}"
    yield "checkpoint: {every: 100}"
    yield (
        "\n# parallel: [activation_checkpointing] saves memory; trackers: [console, jsonl, wandb] also logs to wandb.\n"
        "# `d9d plugins list` names all components, `d9d plugins show NAME` their fields."
    )


def _model(plan: Plan) -> str:
    head = plan.kind.head.format(classes=max(2, plan.records.classes))
    model = plan.model
    if model is None:
        vocabulary = VOCABULARY if plan.tokenizer or plan.kind.dataset != "pairs" else 257
        text = _SMALL.format(vocabulary=vocabulary, positions=max(128, plan.length))
        return text + (f"  heads: {{{head}}}\n" if head else "  tie_embeddings: true\n")
    about = f"{model.type or 'a checkpoint'}, {model.size / 2**30:.1f} GiB of weights"
    further = model.predicts_further and "task: causal_lm" not in plan.kind.lines
    off = "  mtp: {depths: 0} # this task does not train the layers that predict further tokens\n" if further else ""
    if not head and off:
        return f"model:\n  pretrained: {_yaml(model.directory)} # {about}\n{off}"
    if not head:
        return f"model: {{pretrained: {_yaml(model.directory)}}} # {about}\n"
    tied = "  tie_embeddings: false # there is no head that could share the weight\n" if model.tied else ""
    start = f"model:\n  name: {model.selector} # {about}\n  pretrained: {_yaml(model.directory)}\n"
    return f"{start}{tied}{off}  heads: {{{head}}}\n"


def _data(plan: Plan) -> str:
    records, kind = plan.records, plan.kind
    count = f" # {records.count:,} records" if records.count >= 0 else ""
    sources = ", ".join(map(_yaml, records.sources))
    lines = [f"data: &data{f' # {kind.note}' if kind.note else ''}", f"  name: {kind.dataset}"]
    lines.append(f"  sources: [{sources}]{count}")
    lines += [f"  {name}: {_yaml(theirs)}" for name, theirs in records.fields.items()]
    if plan.tokenizer:
        lines.append(f"  tokenizer: {_yaml(plan.tokenizer)}")
    elif plan.model is None and kind.dataset != "pairs":
        lines.append(f"  tokenizer: {{bpe: {VOCABULARY}}} # trained on these texts")
    longest = "" if records.longest is None else f" # the longest of the first records has {records.longest:,} tokens"
    lines.append(f"  sequence_length: {plan.length}{longest}")
    if kind.dataset == "chat" and not 0 <= records.count < _PACKED:
        lines.append("  packing: best_fit # several conversations per sample; attention stays within each")
    packs = " packs: all," if records.count >= 0 else ""
    evaluation = f"evaluation: {{every: 50,{packs} data: {{<<: *data, split: held_out}}}}"
    if records.few:
        lines.append(
            "# Too few records to hold some out. With 20 or more, add held_out to data, and evaluation below it:"
        )
        lines.append(f"#   held_out: {HELD_OUT}\n# {evaluation}\n")
    else:
        lines.append(f"  held_out: {HELD_OUT} # share of the records that is not learned, but evaluated")
        lines.append(f"{evaluation}\n")
    return "\n".join(lines)


def _optimizer(plan: Plan) -> str:
    new = plan.model is None
    size, part = _SMALL_BATCH if new else plan.kind.batch
    rate = _SMALL_RATE if new else plan.kind.rate
    size = _fitting(size, plan.records, plan.kind)
    part = min(size, part)
    few = 0 <= plan.records.count < _FEW * size
    length = "steps: 200" if new else "epochs: 2" if few else "epochs: 1"
    return (
        f"optimizer: {{name: adamw, lr: {rate}}}\n"
        "lr_schedule: {name: cosine, warmup_fraction: 0.1}\n"
        f"batch: {{size: {size}, microbatch: {part}}} # samples per step, and per forward: as many as fit\n"
        f"{length}\n"
    )


def _fitting(size: int, records: Records, kind: Kind) -> int:
    """Number of samples per step, reduced to a power of 2 if the records to train on are fewer than ``size``."""
    if records.count < 0:
        return size
    if kind.dataset == "text":
        return 1 if records.few else size  # several texts may share a sample, so a few texts may fill only one
    learned = max(1, records.count - int(records.count * HELD_OUT))
    return min(size, 1 << learned.bit_length() - 1)


def _yaml(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text not in ("null", "true", "false") else json.dumps(text)

"""Kinds of jobs that ``d9d new job`` writes: task, dataset, and settings that suit most models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Kind of job.

    Attributes:
        title: first line of the job file.
        dataset: name of the dataset.
        record: example of a record, for comments and messages.
        lines: lines of the job file about the task, the fine-tuning method and metrics.
        rate: learning rate for fine-tuning a published model.
        batch: number of samples per step for a published model, and number of samples per forward.
        fields: field of the dataset's config -> names that this field may have in the records.
        tunes: whether the job starts from a trained model.
        head: config of the head that replaces the model's head.
        note: comment on the most important choice of the kind.
    """

    title: str
    dataset: str
    record: str
    lines: str
    rate: str
    batch: tuple[int, int] = (16, 1)
    fields: Mapping[str, tuple[str, ...]] = ()  # type: ignore[assignment]
    tunes: bool = False
    head: str = ""
    note: str = ""


_TEXT = ("text", "content", "document", "body", "markdown")
_CHAT = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_LORA = """\
# The weights stay as they are; each matrix gets two small ones of rank r that train. alpha / r scales their product.
peft: {name: lora, r: 16, alpha: 32}
"""
KINDS: Mapping[str, Kind] = {
    "pretrain": Kind(
        title="Pretraining: learns to predict the next token of texts",
        dataset="text",
        record='{"text": "..."}',
        lines="task: causal_lm\nmetrics: [perplexity]\n",
        rate="3.0e-5",
        fields={"field": _TEXT},
    ),
    "sft": Kind(
        title="Fine-tuning of all weights on conversations (SFT)",
        dataset="chat",
        record=_CHAT,
        lines="task: causal_lm\n",
        rate="1.0e-5",
        note="the chat template renders each conversation; the assistant's tokens are learned",
    ),
    "lora": Kind(
        title="Fine-tuning on conversations with LoRA: little memory, and an adapter of some megabytes",
        dataset="chat",
        record=_CHAT,
        lines=f"task: causal_lm\n{_LORA}",
        rate="2.0e-4",
        tunes=True,
        note="the chat template renders each conversation; the assistant's tokens are learned",
    ),
    "dpo": Kind(
        title="Direct preference optimisation (DPO): prefers one of two answers to a prompt",
        dataset="preference",
        record='{"prompt": "...", "chosen": "...", "rejected": "..."}',
        lines="# The reference is the same model without its adapter.\n"
        f"task: {{name: dpo, beta: 0.1}}\nmetrics: [preference]\n{_LORA}",
        rate="2.0e-5",
        tunes=True,
    ),
    "classification": Kind(
        title="Classification: learns the label of each text",
        dataset="labelled",
        record='{"text": "...", "label": "..."}',
        lines="task: classification\n",
        rate="2.0e-5",
        batch=(32, 8),
        fields={
            "field": ("text", "sentence", "content", "review", "body", "title"),
            "label": ("label", "labels", "class", "category", "target", "intent"),
        },
        head="label: {{kind: classification, num_classes: {classes}}}",
    ),
    "embedding": Kind(
        title="Embeddings: similar vectors for queries and the texts that answer them",
        dataset="pairs",
        record='{"query": "...", "positive": "..."}',
        lines="# Negatives of a query are also the positives of the other queries in the batch: use a large batch.\n"
        "task: {name: embedding, temperature: 0.05}\n",
        rate="2.0e-5",
        batch=(64, 16),
        fields={
            "query": ("query", "question", "anchor", "sentence1", "text1"),
            "positive": ("positive", "pos", "answer", "document", "passage", "sentence2", "text2"),
        },
        head="vector: {{kind: embedding, pooling: last}}",
    ),
    "distillation": Kind(
        title="Distillation: a small model learns the next-token probabilities of a larger one",
        dataset="text",
        record='{"text": "..."}',
        lines="task:\n"
        "  name: distillation\n"
        "  teacher: {{pretrained: {teacher}}} # has the same vocabulary\n"
        "  top_k: 64 # probabilities of the teacher per token; null learns all of them\n",
        rate="2.0e-5",
        fields={"field": _TEXT},
        tunes=True,
    ),
}

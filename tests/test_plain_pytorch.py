"""A whole job against plain PyTorch: model, losses, optimizer, schedule, metrics, evaluation, written here again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.tensors import local
from d9d_engine.job import Job
from d9d_testing.layouts import topology_here
from d9d_testing.logs import read_log
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

LAYERS, HEADS, HEAD_DIM, EXPERTS, CHOSEN = 2, 2, 8, 4, 2
STEPS, WARMUP, LR, LEAST, MAX_NORM = 7, 2, 0.01, 0.1, 2.0
BALANCE, Z, RATE = 0.1, 0.01, 0.02
#: Index of the step whose loss is not finite, steps that are logged (from 1), and steps after which is evaluated.
POISONED, LOGGED, EVALUATED = 2, [1, 2, 4, 6, 7], [3, 6, 7]
Microbatch = Mapping[str, Tensor]
Write = Callable[..., Path]


# --- the model: Qwen3-MoE, from its paper and the published code


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, S, D] at positions 0, 1, ...: halves are turned against each other."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2]).unsqueeze(1) * 1e6 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def attended(x: Tensor, w: Callable[[str], Tensor]) -> Tensor:
    def heads(name: str) -> Tensor:
        return (x @ w(f"{name}.weight").T).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    q = rotated(norm(heads("q_proj"), w("q_norm.weight")))
    k = rotated(norm(heads("k_proj"), w("k_norm.weight")))
    k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, heads("v_proj")))
    length = x.shape[1]
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w("o_proj.weight").T


@dataclass
class Step:
    """Sums of a step, or of an evaluation, over its microbatches."""

    cross_entropy: Tensor | float = 0.0
    targets: int = 0
    positions: int = 0
    samples: int = 0
    balance: Tensor | float = 0.0
    z: Tensor | float = 0.0
    loads: list[Tensor] = field(default_factory=lambda: [torch.zeros(EXPERTS) for _ in range(LAYERS)])
    entropy: list[float] = field(default_factory=lambda: [0.0] * LAYERS)

    def add(self, weights: Mapping[str, Tensor], biases: list[Tensor], microbatch: Microbatch) -> None:
        tokens, targets, lengths = (microbatch[name] for name in ("tokens", "targets", "lengths"))
        real = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        x = weights["embedding.weight"][tokens]
        for layer in range(LAYERS):

            def w(name: str, layer: int = layer) -> Tensor:
                return weights[f"layers.{layer}.{name}"]

            x = x + attended(norm(x, w("attention_norm.weight")), lambda name: w(f"attention.{name}"))
            x = x + self.experts(layer, norm(x, w("ffn_norm.weight")), w, biases[layer], real)
        logits = norm(x, weights["norm.weight"]) @ weights["heads.causal_lm.weight"].T
        self.cross_entropy += functional.cross_entropy(logits[real], targets[real], ignore_index=-100, reduction="sum")
        self.targets += int((targets != -100).sum())
        self.positions += int(lengths.sum())
        self.samples += len(tokens)

    def experts(self, layer: int, x: Tensor, w: Callable[[str], Tensor], bias: Tensor, real: Tensor) -> Tensor:
        logits = x @ w("ffn.router.weight").T
        scores = logits.softmax(-1)
        chosen = (scores + bias).topk(CHOSEN).indices
        onto = functional.one_hot(chosen, EXPERTS).sum(-2).float() * real.unsqueeze(-1)  # [B, S, E]
        shares = scores * onto
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-20)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, up, down = (w(f"ffn.experts.{name}_proj")[expert] for name in ("gate", "up", "down"))
            out = out + shares[..., expert, None] * (functional.silu(x @ gate) * (x @ up) @ down)
        for sample in range(len(x)):
            s, chose = scores[sample][real[sample]], onto[sample][real[sample]]
            self.balance = self.balance + EXPERTS / CHOSEN * (chose.mean(0) * s.mean(0)).sum()
        self.z = self.z + logits[real].logsumexp(-1).square().sum()
        self.loads[layer] = self.loads[layer] + onto.sum((0, 1))
        self.entropy[layer] += -(scores[real] * scores[real].log()).sum().item()
        return out

    @property
    def terms(self) -> dict[str, Tensor]:
        return {
            "cross_entropy": torch.as_tensor(self.cross_entropy / self.targets),
            "router_balance": torch.as_tensor(self.balance / self.samples),
            "router_z": torch.as_tensor(self.z / self.positions),
        }

    @property
    def loss(self) -> Tensor:
        terms = self.terms
        return terms["cross_entropy"] + BALANCE * terms["router_balance"] + Z * terms["router_z"]


# --- the run


def factor(step: int) -> float:
    """Rise in a line over the warm-up, then half a cosine that ends with the last step."""
    if step < WARMUP:
        return [0.5, 1.0][step]
    return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * (step - WARMUP + 1) / (STEPS - WARMUP))) / 2


class Plain:
    """The job in plain PyTorch, from the same weights and packs."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        matrices = [weight for weight in self.weights.values() if weight.dim() > 1]
        vectors = [weight for weight in self.weights.values() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-5)
        self.biases = [torch.zeros(EXPERTS) for _ in range(LAYERS)]

    def sums(self, packs: Iterable[list[Microbatch]]) -> Step:
        step = Step()
        for pack in packs:
            for microbatch in pack:
                step.add(self.weights, self.biases, microbatch)
        return step

    def train(self, index: int, pack: list[Microbatch]) -> tuple[Step, float]:
        step = self.sums([pack])
        self.optimizer.zero_grad()
        step.loss.backward()
        length = torch.nn.utils.clip_grad_norm_(self.weights.values(), MAX_NORM).item()
        for group in self.optimizer.param_groups:
            group["lr"] = LR * factor(index)
        if index != POISONED:
            self.optimizer.step()
            for layer, load in enumerate(step.loads):
                self.biases[layer] = self.biases[layer] + RATE * (load.mean() - load).sign()
        return step, length


class Poisoner:
    """Makes the outputs of one step NaN, and keeps the packs of all steps and what biases they left."""

    def __init__(self) -> None:
        self.packs: list[list[Microbatch]] = []
        self.biases: list[list[Tensor]] = []
        self.stage: nn.Module | None = None

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.StepStarts, self._begin), (ev.StepEnds, self._end)]

    def poison(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        return output * math.nan if len(self.packs) == POISONED + 1 and len(self.biases) == POISONED else None

    def _begin(self, event: ev.StepStarts) -> None:
        self.packs.append([dict(microbatch) for microbatch in event.pack])

    def _end(self, event: ev.StepEnds) -> None:
        assert self.stage is not None
        self.biases.append([b.clone() for name, b in self.stage.named_buffers() if name.endswith("selection_bias")])


def job_values(directory: Path) -> dict[str, Any]:
    for number in range(40):
        (directory / f"{number}.txt").write_text(f"{number}: " + "a quick brown fox jumps. " * 3, "utf-8")
        text = (directory / f"{number}.txt").read_text("utf-8")
        (directory / f"{number}.txt").write_text(text[: 5 + number * 7 % 23], "utf-8")
    data = {
        "name": "documents", "sources": [str(directory)], "sequence_length": 24, "pad_multiple": 1, "held_out": 0.3,
        "bucket_window": 8,
    }  # fmt: skip
    return {
        "steps": STEPS,
        "batch": {"size": 8, "microbatch": 2},
        "model": {
            "name": "qwen3_moe", "vocab_size": 257, "hidden_size": HEADS * HEAD_DIM, "moe_intermediate_size": 8,
            "num_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1, "max_positions": 64,
            "num_experts": EXPERTS, "experts_per_token": CHOSEN, "initialization": {"std": 0.2},
            "balancing": [
                {"name": "auxiliary_loss", "coefficient": BALANCE},
                {"name": "z_loss", "coefficient": Z},
                {"name": "bias_update", "rate": RATE},
            ],
        },
        "data": data,
        "optimizer": {"name": "adamw", "lr": LR, "eps": 1e-5},
        "lr_schedule": {"name": "cosine", "warmup_steps": WARMUP, "min_factor": LEAST},
        "gradient_clipping": {"max_norm": MAX_NORM},
        "nonfinite": "skip",
        "metrics": ["perplexity", "router"],
        "logging": {"every": 2},
        "evaluation": {"every": 3, "data": data | {"split": "held_out"}},
        "checkpoint": {},
        "export": False,
    }  # fmt: skip


class Clock:
    """Clock of the host that events move: steps take 3, 4, 5, ... seconds, evaluations and saves an hour."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.StepStarts, self._step), (ev.EvaluationStarts, self._hour), (ev.CheckpointStarts, self._hour)]

    def _step(self, event: ev.StepStarts) -> None:
        self.now += 3 + event.step

    def _hour(self, _event: object) -> None:
        self.now += 3600


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job on this rank: weights at its start and end, packs of steps and of an evaluation, biases of steps."""
    poisoner, clock = Poisoner(), Clock()
    here = Job.from_values(values)
    topology = topology_here(here) if dist.is_initialized() else None
    trainer = here.build(lambda _: None, topology, observers=[poisoner, clock])
    assert trainer.evaluator is not None
    poisoner.stage = trainer.stage
    trainer.stage.get_submodule("norm").register_forward_hook(poisoner.poison)
    begin = {name: local(weight.detach()).clone() for name, weight in trainer.stage.named_parameters()}
    held_out: list[list[Microbatch]] = []
    prefetcher = trainer.evaluator.sets[0].prefetcher
    following = prefetcher.next

    def kept() -> Any:
        held_out.append([dict(microbatch) for microbatch in following()])
        return held_out[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetcher, "next", kept)
        patch.setattr("d9d_engine.run.clock.time", clock)
        trainer.train()
    return {
        "begin": begin,
        "end": {name: local(weight.detach()).clone() for name, weight in trainer.stage.named_parameters()},
        "packs": poisoner.packs,
        "held_out": held_out[: len(held_out) // len(EVALUATED)],
        "biases": poisoner.biases,
    }


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_whole_job_is_what_plain_pytorch_computes(
    small_job: Write, world: type[World], tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "texts").mkdir()
    values = json.loads(small_job(**job_values(tmp_path / "texts")).read_text())
    if ranks == 1:
        of_ranks = [run(values)]
    else:
        of_ranks = world(ranks).run(run, values | {"mesh": {"dp_replicate": ranks}, "parallel": ["replicate"]})
    packs, held_out = (
        [list(chain(*of_step)) for of_step in zip(*(found[name] for found in of_ranks), strict=True)]
        for name in ("packs", "held_out")
    )

    plain = Plain(of_ranks[0]["begin"])
    steps: list[Step] = []
    lengths, evaluations = [], {}
    for index, pack in enumerate(packs):
        step, length = plain.train(index, pack)
        steps.append(step)
        lengths.append(length)
        for layer, bias in enumerate(plain.biases):
            for found in of_ranks:
                torch.testing.assert_close(found["biases"][index][layer], bias, msg=f"layer {layer}, step {index}")
        if index + 1 in EVALUATED:
            with torch.no_grad():
                evaluations[index + 1] = float(plain.sums(held_out).terms["cross_entropy"])

    # Purpose of the job: microbatches of unequal length, clipping in some steps, loads that differ.
    assert len({int(microbatch["lengths"].sum()) for pack in packs for microbatch in pack}) > 3
    assert max(lengths) > MAX_NORM > min(lengths)
    assert any(bias.any() for bias in plain.biases)
    for found in of_ranks:
        for name, weight in found["end"].items():
            torch.testing.assert_close(weight, plain.weights[name], rtol=1e-4, atol=2e-5, msg=name)

    lines = read_log(tmp_path / "runs/small")
    logged = {line["step"]: line for line in lines if "lr" in line}
    measured = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert measured == pytest.approx(evaluations, rel=1e-5)
    assert list(logged) == LOGGED
    begin = 0
    for number, line in logged.items():
        period = [step for index, step in enumerate(steps[begin:number], begin) if index != POISONED]
        expected = {
            "loss": number_of(steps[number - 1].loss),
            **{f"loss/{name}": number_of(term) for name, term in steps[number - 1].terms.items()},
            "grad_norm": lengths[number - 1],
            "lr": LR * factor(number - 1),
            "tokens": sum(step.positions for step in steps[:number]),
            "tokens_per_second": (
                sum(step.positions for step in steps[begin:number]) / sum(3 + index for index in range(begin, number))
            ),
            "perplexity": math.exp(
                sum(number_of(step.cross_entropy) for step in period) / sum(step.targets for step in period)
            ),
            "skipped_steps": 1.0 if number > POISONED else None,
            **router_series(period),
        }
        for name, value in expected.items():
            assert line.get(name) == (None if value is None else pytest.approx(value, rel=1e-4)), (number, name)
        begin = number


def number_of(value: Tensor | float) -> float:
    return torch.as_tensor(value).detach().item()


def router_series(period: list[Step]) -> dict[str, float]:
    """Series of the metric ``router``, from its description."""
    entropies, violations = [], []
    for layer in range(LAYERS):
        load = torch.stack([step.loads[layer] for step in period]).sum(0)
        positions = load.sum().item() / CHOSEN
        violations.append((load.max() / load.mean()).item() - 1)
        entropies.append(sum(step.entropy[layer] for step in period) / positions)
    return {
        "router/entropy": sum(entropies) / LAYERS,
        "router/max_violation": max(violations),
        "router/mean_violation": sum(violations) / LAYERS,
    }

"""Records the public surface, and refuses changes that break plugins (docs/api-policy.md).

    uv run python tools/public_surface.py                write tests/public_surface.json and api.json of d9d-core
    uv run python tools/public_surface.py --check        exit with 1 if one of them is out of date
    uv run python tools/public_surface.py --unreleased   also write breaking changes, before the API's first release

The surface covers hooks, traits, the shape of each public name, the job file's fields, and the command line. ``d9d
plugins check`` reads the declared modules with their names from ``api.json``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from api_changes import incompatible, shape, unfit  # a module in this directory
from d9d_core.deprecation import Deprecated, DeprecatedNames
from d9d_core.registry.hooks import API_RELEASES, NEWEST_API

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "public_surface.json"
NAMES = ROOT / "packages" / "d9d-core" / "src" / "d9d_core" / "registry" / "api.json"
#: Advice about breaking changes.
BROKEN = (
    "These changes break plugins of a supported API. Keep the old names and parameters, or keep them as deprecated "
    "names (d9d_core.deprecation), or raise the API in d9d_core/registry/hooks.py; docs/api-policy.md says when to do "
    "which. As long as the API is not released: uv run python tools/public_surface.py --unreleased"
)
#: Packages in which modules with ``__all__`` are declared.
FOUNDATION = ("d9d_core", "d9d_weights", "d9d_engine")
#: Tools around the loop, which may import the modules of the foundation.
OUTER = ("d9d_inference", "d9d_launch", "d9d_planner", "d9d_reports", "d9d_verify")
#: Declared modules for conformance suites only.
FOR_SUITES = (
    "d9d_core.components.instantiate",
    "d9d_core.failures",
    "d9d_core.job_file.document",
    "d9d_core.job_file.inner",
    "d9d_core.job_file.resolve",
    "d9d_core.registry.api",
    "d9d_core.registry.api_check",
    "d9d_core.registry.capabilities",
    "d9d_core.registry.installed",
    "d9d_core.registry.known",
    "d9d_core.registry.single_file",
    "d9d_engine.compose.initialise",
    "d9d_engine.distributed.devices",
    "d9d_engine.distributed.packed_reduction",
    "d9d_engine.distributed.simulate",
    "d9d_engine.step.metrics",
    "d9d_engine.trackers.hub",
    "d9d_launch.record",
    "d9d_launch.report",
    "d9d_launch.submit",
)


def declared_in(package: str) -> list[str]:
    """Modules of a foundation package that define ``__all__``; imports none of them."""
    source = ROOT / "packages" / package.replace("_", "-") / "src"
    return [
        ".".join(path.relative_to(source).with_suffix("").parts)
        for path in sorted((source / package).rglob("*.py"))
        if re.search(r"^__all__ = ", path.read_text("utf-8"), re.MULTILINE)
    ]


#: Modules that other packages and users may import; enforced by tests/test_architecture.py.
DECLARED = (
    *(module for package in FOUNDATION for module in declared_in(package)),
    *("d9d_inference.config", "d9d_inference.evaluation.library", "d9d_inference.evaluation.result"),
    *("d9d_inference.generation.config", "d9d_inference.job", "d9d_inference.runner"),
    *("d9d_launch.record", "d9d_launch.report", "d9d_launch.submit"),
    *("d9d_verify.certify.certificate", "d9d_verify.certify.run", "d9d_verify.certify.tokens"),
    *("d9d_verify.compare", "d9d_verify.deviations", "d9d_verify.layouts", "d9d_verify.measure"),
    *("d9d_verify.measurement", "d9d_verify.run", "d9d_verify.tolerances"),
    *("d9d_data.config", "d9d_data.dataset.config", "d9d_data.mixture.config", "d9d_data.stream.text"),
    *("d9d_data.library.bucketing", "d9d_data.library.packing", "d9d_data.library.padding"),
    *("d9d_data.library.pooling", "d9d_data.library.sharding"),
    *("d9d_deepseek.config", "d9d_deepseek.hugging_face", "d9d_deepseek.model"),
    *("d9d_fp8.config", "d9d_fp8.strategy"),
    *("d9d_aim.config", "d9d_deepep.config", "d9d_mlflow.config", "d9d_tensorboard.config", "d9d_wandb.config"),
    *("d9d_kubernetes.config", "d9d_ray.config", "d9d_skypilot.config", "d9d_slurm.config"),
    *("d9d_gemma.config", "d9d_gemma.hugging_face", "d9d_gemma.model"),
    *("d9d_gpt_oss.config", "d9d_gpt_oss.hugging_face", "d9d_gpt_oss.model"),
    *("d9d_llama.config", "d9d_llama.hugging_face", "d9d_llama.model", "d9d_local_sgd.config"),
    "d9d_torchft.config",
    *("d9d_transformers.build", "d9d_transformers.config", "d9d_transformers.hugging_face"),
    *("d9d_metrics.aggregate.config", "d9d_metrics.auroc.config", "d9d_metrics.compose.config"),
    *("d9d_metrics.confusion.config", "d9d_metrics.token_accuracy.config"),
    *("d9d_moe.balancing.balanced_router", "d9d_moe.balancing.balancers", "d9d_moe.balancing.base"),
    *("d9d_moe.balancing.config", "d9d_moe.costs", "d9d_moe.expert_files"),
    *("d9d_moe.dispatch.async_exchange", "d9d_moe.dispatch.local", "d9d_moe.dispatch.permutation"),
    *("d9d_moe.expert_parallel.communication", "d9d_moe.expert_parallel.config"),
    *("d9d_moe.expert_parallel.dispatchers", "d9d_moe.expert_parallel.strategy"),
    *("d9d_moe.experts.clamped_swiglu", "d9d_moe.experts.grouped_swiglu", "d9d_moe.experts.layer"),
    *("d9d_moe.router.biased", "d9d_moe.router.metric_config", "d9d_moe.router.routing", "d9d_moe.router.top_k"),
    *("d9d_nn.attention.core", "d9d_nn.attention.grouped_query", "d9d_nn.attention.latent", "d9d_nn.attention.masks"),
    *("d9d_nn.auxiliary_loss", "d9d_nn.costs", "d9d_nn.embedding", "d9d_nn.initialization", "d9d_nn.linear"),
    *("d9d_nn.decoder.block", "d9d_nn.decoder.config", "d9d_nn.decoder.config_json"),
    *("d9d_nn.decoder.costs", "d9d_nn.decoder.flops", "d9d_nn.decoder.format", "d9d_nn.decoder.model"),
    *("d9d_nn.decoder.capabilities", "d9d_nn.decoder.presets", "d9d_nn.decoder.stages"),
    *("d9d_nn.decoder.multi_token", "d9d_nn.decoder.multi_token_config", "d9d_nn.further_targets"),
    *("d9d_nn.causal_lm.config", "d9d_nn.causal_lm.task"),
    *("d9d_nn.classification.config", "d9d_nn.contrastive.config"),
    *("d9d_nn.distillation.config", "d9d_nn.inference.config", "d9d_nn.preference.config"),
    *("d9d_nn.delta.gated_delta_net", "d9d_nn.delta.gates", "d9d_nn.delta.short_convolution"),
    *("d9d_nn.geglu", "d9d_nn.grouped_linear"),
    *("d9d_nn.heads.causal_lm", "d9d_nn.heads.config", "d9d_nn.heads.heads", "d9d_nn.heads.layer_mean"),
    "d9d_nn.heads.pooling",
    *("d9d_nn.ops.add_rms_norm", "d9d_nn.ops.attention.slot", "d9d_nn.ops.attention_inputs", "d9d_nn.ops.deferred"),
    *("d9d_nn.ops.gated_delta_rule", "d9d_nn.ops.gelu_mul", "d9d_nn.ops.grouped_linear"),
    *("d9d_nn.ops.linear_cross_entropy", "d9d_nn.ops.low_rank_linear", "d9d_nn.ops.normed_rope"),
    *("d9d_nn.ops.rms_norm", "d9d_nn.ops.rope"),
    *("d9d_nn.ops.silu_mul", "d9d_nn.ops.state_space_rule", "d9d_nn.ops.swiglu", "d9d_nn.ops.vocabulary_parallel"),
    *("d9d_nn.rms_norm", "d9d_nn.rope.rotary_embedding", "d9d_nn.rope.scaling", "d9d_nn.stages", "d9d_nn.swiglu"),
    "d9d_nn.state_space.mamba2",
    *("d9d_optim.optimizer.adamw", "d9d_optim.optimizer.base", "d9d_optim.optimizer.config"),
    *("d9d_optim.optimizer.newton_schulz", "d9d_optim.optimizer.rounding", "d9d_optim.optimizer.whole_matrices"),
    *("d9d_optim.schedule.builder", "d9d_optim.schedule.config", "d9d_optim.schedule.curves"),
    "d9d_optim.schedule.schedules",
    *("d9d_parallel.activation_checkpointing.config", "d9d_parallel.activation_checkpointing.strategy"),
    *("d9d_parallel.compile.config", "d9d_parallel.context_parallel.blocks", "d9d_parallel.context_parallel.config"),
    *("d9d_parallel.data_parallel.config", "d9d_parallel.functions", "d9d_parallel.tensor_parallel.config"),
    *("d9d_peft.config", "d9d_peft.full_tune", "d9d_peft.ia3.config", "d9d_peft.ia3.method"),
    *("d9d_peft.lora.dora", "d9d_peft.lora.method", "d9d_peft.stack"),
    *("d9d_pipeline.config", "d9d_pipeline.runtime.handlers"),
    *("d9d_pipeline.schedule.insert_transfers", "d9d_pipeline.schedule.placement"),
    *("d9d_pipeline.schedule.units", "d9d_pipeline.schedule.zero_bubble_v"),
    *("d9d_pipeline.simulator.costs", "d9d_pipeline.simulator.picture", "d9d_pipeline.simulator.run"),
    "d9d_pipeline.simulator.seconds",
    *("d9d_qwen3.config", "d9d_qwen3.model", "d9d_qwen3.moe_config"),
    *("d9d_qwen3.block", "d9d_qwen3.costs", "d9d_qwen3.hugging_face.dense"),
    *("d9d_qwen3.hugging_face.expert_names", "d9d_qwen3.hugging_face.moe"),
    *("d9d_qwen3_next.config", "d9d_qwen3_next.hugging_face", "d9d_qwen3_next.model"),
    *("d9d_testing.hostile.files", "d9d_testing.hostile.judge", "d9d_testing.hostile.values"),
    *("d9d_testing.layouts", "d9d_testing.stand_ins", "d9d_testing.tolerances", "d9d_testing.world"),
    *("d9d_testing.suites.dataset", "d9d_testing.suites.inference.task", "d9d_testing.suites.inference.writer"),
    *("d9d_testing.suites.kernel", "d9d_testing.suites.launcher", "d9d_testing.suites.lr_schedule"),
    *("d9d_testing.suites.metric", "d9d_testing.suites.model", "d9d_testing.suites.moe.dispatcher"),
    *("d9d_testing.suites.moe.router", "d9d_testing.suites.optimizer", "d9d_testing.suites.peft"),
    *("d9d_testing.suites.plugin", "d9d_testing.suites.schedule", "d9d_testing.suites.strategy"),
    *("d9d_testing.suites.subscriber", "d9d_testing.suites.task", "d9d_testing.suites.tracker"),
    *("d9d_triton.joint.products", "d9d_triton.joint.swiglu"),
)


def surface() -> dict[str, Any]:
    """All names and fields that users and plugin authors may rely on."""
    from d9d_core.registry.hooks import KINDS, OLDEST_API
    from d9d_core.traits import TRAITS

    return {
        "plugin APIs": [OLDEST_API, NEWEST_API],
        "hooks": {kind.hook: kind.record.__name__ for kind in KINDS},
        "traits": {token: trait.__name__ for token, trait in TRAITS.items()},
        "names": {module: _shapes(module) for module in DECLARED if module not in FOR_SUITES},
        "job file": _sections(),
        "command line": _commands(),
    }


def declarations() -> dict[str, Any]:
    """Packages, declared modules and deprecated names, for :mod:`d9d_core.registry.api`."""
    members = [path.parent.name for house in ("packages", "plugins") for path in ROOT.glob(f"{house}/*/pyproject.toml")]
    before = json.loads(NAMES.read_text("utf-8"))["names"]
    return {
        "packages": sorted(member.replace("-", "_") for member in members if member != "d9d-all"),
        "foundation": sorted(FOUNDATION),
        "outer": sorted(OUTER),
        "for_suites": sorted(FOR_SUITES),
        "names": {module: _by_release(_names(module), before.get(module, {})) for module in DECLARED},
        "deprecated": {
            module: {name: dataclasses.asdict(facts) for name, facts in old.items()}
            for module in DECLARED
            if (old := _deprecated(module))
        },
    }


def breaking(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Sentences about changes between two surfaces that break plugins of an API that both support.

    A newer API may change parameters and members, because d9d can tell plugins by ``D9D_API``; names may disappear
    only together with the oldest API.
    """
    (oldest, newest), (new_oldest, new_newest) = before["plugin APIs"], after["plugin APIs"]
    if oldest != new_oldest:
        return []
    fixed = {kind: before[kind] for kind in ("hooks", "traits")}
    changed = [
        f"{kind[:-1]} {name} was {value} and is {after[kind].get(name, 'gone')}"
        for kind, values in fixed.items()
        for name, value in values.items()
        if after[kind].get(name) != value
    ]
    problems = [*changed, *incompatible(before["names"], after["names"])]
    return [text for text in problems if newest == new_newest or text.endswith("is gone")]


def is_unreleased(changelog: str, release: str) -> bool:
    """Whether a changelog says that a release such as ``0.1`` does not exist yet."""
    return bool(re.search(rf"^## {re.escape(release)}\.0 \(not released yet\)$", changelog, re.MULTILINE))


def upcoming(changelog: str, version: str) -> str:
    """Release in which a change of today appears, such as ``0.2``.

    Args:
        changelog: text whose newest section may be of a release that does not exist yet.
        version: version of the packages; without such a section, the next minor release follows.
    """
    if found := re.search(r"^## (\d+\.\d+)\.\d+ \(not released yet\)$", changelog, re.MULTILINE):
        return found[1]
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def next_release() -> str:
    """Release of this repository in which a change of today appears."""
    version = tomllib.loads((ROOT / "packages/d9d-core/pyproject.toml").read_text("utf-8"))["project"]["version"]
    return upcoming((ROOT / "CHANGELOG.md").read_text("utf-8"), version)


def _by_release(names: list[str], before: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """First release -> names; names that are new come with the next release."""
    current = next_release()
    since = {name: release for release, old in before.items() for name in old}
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(since.get(name, current), []).append(name)
    return grouped


def _deprecated(module: str) -> dict[str, Deprecated]:
    serves = vars(importlib.import_module(module)).get("__getattr__")
    return serves.names if isinstance(serves, DeprecatedNames) else {}


def _shapes(module: str) -> dict[str, str]:
    loaded, old = importlib.import_module(module), _deprecated(module)
    targets = {name: facts.target.partition(":") for name, facts in old.items()}
    values = {name: getattr(loaded, name) for name in _names(module)}
    values |= {name: getattr(importlib.import_module(home), end) for name, (home, _, end) in targets.items()}
    return {name: shape(value) for name, value in values.items()}


def _names(module: str) -> list[str]:
    """``__all__``, or else the names that the module defines, without its imports."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return sorted(loaded.__all__)
    names: list[str] = []
    for node in ast.parse(inspect.getsource(loaded)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    public = {name for name in names if not name.startswith("_")}
    return sorted(name for name in public if not isinstance(getattr(loaded, name, None), TypeVar))


def _sections() -> dict[str, Any]:
    from d9d_core.config import Section
    from d9d_core.job_file.job import JobConfig

    def walk(section: type[Section]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, field in section.model_fields.items():
            nested: Any = field.annotation
            is_section = inspect.isclass(nested) and issubclass(nested, Section) and nested.__module__.endswith(".job")
            fields[name] = walk(nested) if is_section else ("required" if field.is_required() else "optional")
        return fields

    return walk(JobConfig)


def _commands() -> dict[str, Any]:
    import option_table  # a module in this directory

    return {
        name: sorted(word for parameter in command.params for word in parameter.opts)
        for name, command in option_table.commands().items()
    }


def main(arguments: list[str]) -> int:
    """Write the files, or check them."""
    files = {FILE: surface(), NAMES: declarations()}
    before = {file: json.loads(file.read_text("utf-8")) for file in files}
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    may_break = arguments == ["--unreleased"] and is_unreleased(changelog, API_RELEASES[NEWEST_API])
    if (problems := breaking(before[FILE], files[FILE])) and not may_break:
        print(*problems, BROKEN, sep="\n", file=sys.stderr)
        return 1
    old, new = (tables[NAMES]["deprecated"] for tables in (before, files))
    if early := list(unfit(old, new, next_release(), NEWEST_API)):
        print(*early, "docs/api-policy.md says when a deprecated name ends", sep="\n", file=sys.stderr)
        return 1
    texts = {file: json.dumps(values, indent=1, sort_keys=True) + "\n" for file, values in files.items()}
    if arguments == ["--check"]:
        if all(file.read_text("utf-8") == text for file, text in texts.items()):
            return 0
        print("the public surface changed; if intended, run: uv run python tools/public_surface.py", file=sys.stderr)
        return 1
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Certificates of models."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import ModuleType, SimpleNamespace
from typing import Any

import d9d_nn.plugin as nn_plugin
import d9d_optim.plugin as optim_plugin
import d9d_parallel.plugin as parallel_plugin
import d9d_peft.plugin as peft_plugin
import d9d_qwen3.plugin as qwen3_plugin
import pytest
import torch
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext
from d9d_core.errors import JobError
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, hookimpl
from d9d_core.registry.registry import Registry
from d9d_testing.suites.dataset import DatasetSuite
from d9d_verify.certify import features, forks, run
from d9d_verify.certify.certificate import Cell, Certificate, fingerprint, installed_versions
from d9d_verify.certify.features import export, packing, parity
from d9d_verify.certify.forks import ended, forking_launch
from d9d_verify.certify.run import certify, job_of
from d9d_verify.certify.tokens import CertificateTokens, CertificateTokensConfig
from d9d_verify.compare import Verdict
from torch import Tensor, nn

#: Without d9d-pipeline.
REGISTRY = Registry.of(nn_plugin, optim_plugin, parallel_plugin, peft_plugin, qwen3_plugin)


class TestRandomTokens(DatasetSuite):
    plugin = "d9d_verify.plugin"
    target = "certificate_tokens"


class Tokens(nn.Module):
    """Language model whose logits are features of the token, and of others that it sees."""

    def __init__(self, sees: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self._sees = nn.Embedding(8, 4), sees

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Any:
        features = self.table(tokens)
        if documents is None:
            documents = torch.zeros_like(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        return {"logits": features + self._sees(features, documents, positions)}


def own(features: Tensor, documents: Tensor, _positions: Tensor) -> Tensor:
    seen = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().float()
    return seen @ features


def all_earlier(features: Tensor, _documents: Tensor, _positions: Tensor) -> Tensor:
    return features.cumsum(dim=1)


def place(features: Tensor, documents: Tensor, _positions: Tensor) -> Tensor:
    return torch.arange(documents.shape[1]).view(1, -1, 1).expand_as(features)


def place_in_document(features: Tensor, _documents: Tensor, positions: Tensor) -> Tensor:
    return positions.unsqueeze(2).expand_as(features)


@pytest.mark.parametrize(
    ("sees", "standing", "text"),
    [
        (own, "exact", "alone and packed: 0.0e+00"),
        (place_in_document, "exact", "alone and packed: 0.0e+00"),
        (all_earlier, "differs", "a document changes its neighbour's logits by"),
        (place, "differs", "alone and packed: "),
    ],
)
def test_a_document_that_depends_on_its_neighbour_or_its_place_is_found(
    sees: Callable[..., Tensor], standing: str, text: str
) -> None:
    with torch.device("meta"):
        stage = Tokens(sees)
    cell = packing(stage)
    assert (cell.name, cell.standing) == ("packed", standing)
    assert cell.detail.startswith(text)


@pytest.mark.parametrize(
    ("changed", "alone", "expected"),
    [
        (1.0, 2.0, Cell("packed", "differs", "a document changes its neighbour's logits by 5.0e-01")),
        (2.0, 4.0, Cell("packed", "differs", "alone and packed: 1.0e+00")),
        (2.0, 2.0, Cell("packed", "exact", "alone and packed: 0.0e+00")),
    ],
)
def test_deviations_of_packed_documents_are_relative_to_their_largest_logit(
    changed: float, alone: float, expected: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: list[dict[str, Tensor]] = []
    outputs = iter([2.0, changed, alone])

    def logits(_model: nn.Module, **given: Tensor) -> Tensor:
        inputs.append(given)
        return torch.full((*given["tokens"].shape, 3), next(outputs))

    monkeypatch.setattr(features, "_logits", logits)
    with torch.device("meta"):
        stage = Tokens(own)
    assert packing(stage) == expected
    packed, other, single = inputs
    assert packed["documents"].tolist() == other["documents"].tolist() == [[0] * 7 + [1] * 9]
    assert packed["positions"].tolist() == other["positions"].tolist() == [[*range(7), *range(9)]]
    assert torch.equal(packed["tokens"][:, 7:], other["tokens"][:, 7:])
    assert not torch.equal(packed["tokens"][:, :7], other["tokens"][:, :7])
    assert torch.equal(single["tokens"], packed["tokens"][:, 7:])
    assert single.keys() == {"tokens"}


def test_a_model_that_mixes_documents_by_design_is_refused_for_packed_data() -> None:
    with torch.device("meta"):
        stage: Any = Tokens(all_earlier)
    stage.token_mixers = lambda: ["layers.0.mixer"]
    assert packing(stage) == Cell("packed", "refused", "layers.0.mixer mixes tokens by something other than attention")


def test_numbers_are_compared_with_the_ones_of_transformers() -> None:
    spec = REGISTRY.find("model", "qwen3").spec
    assert isinstance(spec, ModelSpec)
    assert spec.tiny is not None
    config = spec.tiny.load()()

    def cell(**changes: Any) -> Cell:
        with torch.device("meta"):
            stage = spec.build.load()(config.model_copy(update=changes), Stage())
        return parity(stage, spec, config)

    exact = cell()
    assert (exact.name, exact.standing) == ("transformers", "exact")
    assert exact.detail.startswith("logits: ")
    assert cell(rms_norm_eps=0.1).standing == "differs"
    assert cell(rope_theta=50.0).standing == "differs"
    more = cell(num_layers=config.num_layers + 1)
    assert more.standing == "differs"
    assert "export and transformers model have different tensors: model.layers." in more.detail
    assert more.detail.count(", ") == 2  # at most three names
    none: Any = SimpleNamespace(hugging_face=None)
    with torch.device("meta"):
        cell_of_none = parity(Tokens(own), none, None)
    assert cell_of_none == Cell("transformers", "not applicable", "the model has no Hugging Face format")


def test_without_transformers_numbers_are_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features.importlib.util, "find_spec", lambda _name: None)
    spec: Any = SimpleNamespace(hugging_face="format")
    with torch.device("meta"):
        cell = parity(Tokens(own), spec, None)
    assert cell == Cell("transformers", "not applicable", "transformers is not installed; d9d-transformers brings it")


def test_gradients_are_compared_too() -> None:
    spec = REGISTRY.find("model", "qwen3").spec
    assert isinstance(spec, ModelSpec)
    assert spec.tiny is not None
    config = spec.tiny.load()()
    inputs: list[tuple[int, ...]] = []

    def cell(scale: float) -> Cell:
        with torch.device("meta"):
            stage = spec.build.load()(config, Stage())

        def scaled(module: nn.Module, args: Any, given: dict[str, Tensor], outputs: dict[str, Tensor]) -> Any:
            inputs.extend(tuple(tensor.shape) for tensor in given.values())
            return outputs | ({"token_loss": scale * outputs["token_loss"]} if "token_loss" in outputs else {})

        stage.register_forward_hook(scaled, with_kwargs=True)
        return parity(stage, spec, config)

    assert cell(1.0).standing == "exact"
    assert set(inputs) == {(2, 16)}
    doubled = cell(2.0)
    assert doubled.standing == "differs"
    logits, _, gradients = doubled.detail.partition(", ")
    assert float(logits.removeprefix("logits: ")) < 1e-5
    count, _, worst = gradients.partition(" gradients: ")
    assert int(count) == len(spec.build.load()(config, Stage()).state_dict())
    assert 1.0 <= float(worst) < 1.1


def test_forked_ranks_begin_with_the_libraries_that_this_process_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    server = SimpleNamespace(set_forkserver_preload=told.append)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: {"forkserver": server}[method])
    forking_launch(30.0)
    (*imported, last) = told[0]
    assert last == "d9d_verify.worker"
    assert {"d9d_core.errors", "torch", "torch.nn"} <= set(imported)
    assert not {"json", "pytest", "numpy"} & set(imported)


def test_forked_ranks_say_why_they_end(tmp_path: Path) -> None:
    values = {"steps": 1, "model": "no_such_model"}
    (tmp_path / "job.json").write_text(json.dumps(values))
    assert "no_such_model" in (forking_launch(30.0)(tmp_path, 2) or "")
    outputs = sorted(file.name for file in tmp_path.glob("output-*.txt"))
    assert outputs == ["output-0.txt", "output-1.txt"]


def test_forked_ranks_that_give_no_reason_are_told_by_their_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = multiprocessing.get_context("fork")
    server = SimpleNamespace(
        set_forkserver_preload=lambda _: None, Process=lambda target, args: forks.Process(target=os._exit, args=(3,))
    )
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: server)
    assert forking_launch(30.0)(tmp_path, 1) == "exit status 3"


def test_a_forked_rank_writes_into_its_own_file_and_computes_with_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redirected: list[tuple[int, int]] = []
    ran: list[Any] = []
    monkeypatch.setattr(forks.os, "dup2", lambda *given: redirected.append(given))
    monkeypatch.setattr("d9d_verify.worker.main", ran.append)
    monkeypatch.setattr(torch, "set_num_threads", ran.append)
    monkeypatch.setenv("RANK", "0")
    forks._run(tmp_path, {"RANK": "3"})
    ((output, _), _) = redirected
    os.write(output, b"text")
    os.close(output)
    assert redirected == [(output, 1), (output, 2)]
    assert (ran, os.environ["RANK"]) == ([1, tmp_path], "3")
    assert (tmp_path / "output-3.txt").read_text() == "text"


def test_the_first_of_several_failures_is_told() -> None:
    context = multiprocessing.get_context("fork")

    def fails_later() -> None:
        sleep(0.2)
        os._exit(4)

    processes = [context.Process(target=os._exit, args=(3,)), context.Process(target=fails_later)]
    for process in processes:
        process.start()
    assert ended(processes, 10.0) == "exit status 3"
    assert [process.exitcode for process in processes] == [3, 4]


def test_a_rank_that_does_not_end_is_stopped() -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=sleep, args=(seconds,)) for seconds in (0.0, 60.0)]
    try:
        for process in processes:
            process.start()
        assert ended(processes, 0.5) == "no further process ended in 0.5 s"
        failing = context.Process(target=os._exit, args=(3,))
        failing.start()
        assert ended([failing], 10.0) == "exit status 3"
        processes[1].kill()
        assert ended(processes, 10.0) == "killed by signal 9"
    finally:
        processes[1].kill()


def test_weights_and_config_go_to_files_and_back() -> None:
    spec = REGISTRY.find("model", "qwen3").spec
    assert isinstance(spec, ModelSpec)
    assert spec.tiny is not None
    config = spec.tiny.load()()
    with torch.device("meta"):
        stage = spec.build.load()(config, Stage())
    count = len(list(stage.parameters()))
    assert export(stage, spec, config) == Cell("export", "exact", f"{count} tensors bit for bit")

    class Forgets:
        def __init__(self) -> None:
            assert spec.hugging_face is not None
            self.form = spec.hugging_face.load()()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.form, name)

        def config_from_json(self, data: Any) -> Any:
            return self.form.config_from_json(data).model_copy(update={"rms_norm_eps": 0.5})

    forgetful: Any = SimpleNamespace(hugging_face=SimpleNamespace(load=lambda: Forgets))
    assert export(stage, forgetful, config) == Cell("export", "differs", "the config")
    none: Any = SimpleNamespace(hugging_face=None)
    assert export(stage, none, config).standing == "not applicable"


@pytest.mark.parametrize(
    ("changes", "reads", "expected"),
    [
        ({}, "config", Cell("export", "exact", "1 tensors bit for bit")),
        ({"table.weight": torch.zeros(8, 4)}, "config", Cell("export", "differs", "weights")),
        ({"more": torch.zeros(1)}, "config", Cell("export", "differs", "weights")),
        ({"more": torch.zeros(1)}, "another", Cell("export", "differs", "weights")),
        ({}, "another", Cell("export", "differs", "the config")),
    ],
)
def test_weights_that_an_import_changes_are_found(
    changes: dict[str, Tensor], reads: str, expected: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = SimpleNamespace(
        config_json=lambda config, dtype: {"config": config, "dtype": dtype},
        config_from_json=lambda values: reads if values == {"config": "config", "dtype": "float32"} else None,
        importer=lambda *given: ("import", *given),
        exporter=lambda *given: ("export", *given),
    )
    graphs: list[Any] = []

    def map_tensors(graph: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        graphs.append(graph)
        return tensors if graph[0] == "export" else tensors | changes

    monkeypatch.setattr(features, "map_tensors", map_tensors)
    spec: Any = SimpleNamespace(hugging_face=SimpleNamespace(load=lambda: lambda: form))
    with torch.device("meta"):
        stage = Tokens(own)
    assert export(stage, spec, "config") == expected
    assert graphs == [("export", "config"), ("import", "config", reads)]


@pytest.mark.parametrize("experts", [False, True])
def test_experts_are_laid_out_if_a_model_has_any(experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("parity", "packing", "export"):
        monkeypatch.setattr(run, name, lambda *_, name=name: Cell(name, "exact", ""))
    monkeypatch.setattr(run, "has_trait", lambda *_: experts)
    monkeypatch.setattr(
        run, "_in_layouts", lambda _job, layouts, *_: [Cell(layout.name, "exact", "") for layout in layouts]
    )
    layouts = [layout for layout in run.LAYOUTS if layout.name in ("tp 2", "ep 2")]
    found = certify("qwen3", REGISTRY, print, layouts, lora=False)
    own = ["tp 2", "ep 2"]
    assert [cell.name for cell in found.cells] == ["parity", "packing", *own, "export"]
    assert [cell.standing for cell in found.cells if cell.name == "ep 2"] == ["exact" if experts else "not applicable"]


def test_a_certificate_has_a_cell_for_each_layout_and_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def verify(job: Any, layouts: Sequence[Any], steps: int, note: Any, launch: Any) -> list[Verdict]:
        assert (steps, note) == (2, print)
        assert callable(launch)
        ran.append([layout.name for layout in layouts])
        nothing = (0.5, "weight")
        diverged = {"cp 2": (1, "the loss is off")}
        return [
            Verdict(layout.name, 0.0, 0.0, nothing, nothing, nothing, diverged.get(layout.name)) for layout in layouts
        ]

    monkeypatch.setattr(run, "verify", verify)
    found = certify("qwen3", REGISTRY, print)
    cells = {cell.name: (cell.standing, cell.detail) for cell in found.cells}
    assert cells.pop("packed")[0] == "exact"
    assert cells.pop("transformers")[0] == "exact"
    assert cells.pop("export")[0] == "exact"
    assert cells.pop("ep 2") == ("not applicable", "d9d finds no experts in the model")
    assert cells.pop("cp 2") == ("differs", "step 2: the loss is off")
    for name in ("pp 2", "tp 2 x pp 2"):
        standing, why = cells.pop(name)
        assert standing == "refused"
        assert "schedule '1f1b' comes from d9d-pipeline; install it with: pip install d9d-pipeline" in why
    assert set(cells) == {"replicate 2", "fsdp 2", "hsdp 2 x 2", "tp 2", "checkpointing", "compile", "lora"}
    assert set(cells.values()) == {("exact", "gradients: 1-cos 5.0e-01")}
    assert ran == [["replicate 2", "fsdp 2", "hsdp 2 x 2", "tp 2", "cp 2", "checkpointing", "compile"], ["lora"]]
    assert (found.model, found.model_type, found.holds) == ("qwen3", "qwen3", False)


def test_a_certificate_is_of_one_config_and_of_the_installed_versions() -> None:
    spec = REGISTRY.find("model", "qwen3").spec
    assert isinstance(spec, ModelSpec)
    assert spec.tiny is not None
    config = spec.tiny.load()()
    assert fingerprint(config) == fingerprint(config.model_copy(update={"pretrained": "elsewhere"}))
    assert fingerprint(config) != fingerprint(config.model_copy(update={"num_layers": 3}))

    class Options(PluginConfig):
        name: str = "m"
        options: dict[str, int]

    parts = fingerprint(Options(options={"a": 1, "b": 2})), fingerprint(Options(options={"b": 2, "a": 1}))
    text = b'{"name": "m", "options": {"a": 1, "b": 2}}'
    assert parts == (hashlib.sha256(text).hexdigest(),) * 2
    versions = installed_versions()
    assert versions["torch"] == torch.__version__.partition("+")[0]
    assert {"d9d-core", "d9d-verify"} <= versions.keys()
    assert not {"numpy", "pytest"} & versions.keys()
    held = Certificate("m", None, "x", {}, [Cell("a", "exact", ""), Cell("b", "refused", "")])
    assert held.holds
    assert json.loads(json.dumps(held.to_json()))["cells"][1] == {"name": "b", "standing": "refused", "detail": ""}


def test_a_model_is_given_by_directory_name_or_type(tmp_path: Path) -> None:
    assert job_of("qwen3", REGISTRY).model.name == "qwen3"
    spec = REGISTRY.find("model", "qwen3").spec
    assert isinstance(spec, ModelSpec)
    assert spec.tiny is not None
    assert spec.hugging_face is not None
    tiny = spec.tiny.load()()
    (tmp_path / "config.json").write_text(json.dumps(spec.hugging_face.load()().config_json(tiny, "float32")))
    found = job_of(str(tmp_path), REGISTRY).model
    assert found.model_dump(exclude={"pretrained"}) == tiny.model_dump(exclude={"pretrained"})
    with pytest.raises(JobError, match="no installed model reads model_type 'no_such'"):
        job_of("no_such", REGISTRY)
    large = ModuleType("large")
    vars(large).update(D9D_API=2, d9d_models=hookimpl(lambda: [replace(spec, name="large", tiny=None)]))
    with pytest.raises(JobError, match="model 'large' has no tiny config; give the directory of a model instead"):
        job_of("large", Registry.of(nn_plugin, optim_plugin, large))


def test_the_job_of_a_certificate_trains_for_two_steps_and_writes_no_export() -> None:
    job = job_of("qwen3", REGISTRY)
    assert (job.steps, job.batch.size, job.microbatch_size, job.device) == (2, 8, 2, "cpu")
    assert (job.export, job.trackers) == (False, [])
    assert job.optimizer.model_dump(include={"name", "lr"}) == {"name": "adamw", "lr": 0.01}
    assert (job.task.name, job.data.name) == ("causal_lm", "certificate_tokens")


def test_ranks_share_the_samples_of_a_pack() -> None:
    context = {"seed": 3, "batch_size": 8, "microbatch_size": 2, "cache_dir": Path()}
    whole = CertificateTokens(CertificateTokensConfig(), DataContext(**context)).next_pack()
    parts = [
        CertificateTokens(CertificateTokensConfig(), DataContext(**context, rank=rank, ranks=2)).next_pack()
        for rank in (0, 1)
    ]
    assert [len(part) for part in (whole, *parts)] == [4, 2, 2]
    for name in ("tokens", "targets"):
        assert torch.equal(torch.cat([m[name] for m in whole]), torch.cat([m[name] for part in parts for m in part]))
    tokens, targets = (torch.cat([m[name] for m in whole]) for name in ("tokens", "targets"))
    assert tokens.shape == targets.shape == (8, 16)
    kept = targets[:, :-1] != -100
    assert torch.equal(targets[:, :-1][kept], tokens[:, 1:][kept])
    (first, *_) = CertificateTokens(
        CertificateTokensConfig(vocab_size=3, sequence_length=5), DataContext(**context)
    ).next_pack()
    assert first["tokens"].shape == (2, 5)
    assert first["tokens"].unique().tolist() == [0, 1, 2]
    share = (targets == -100).float().mean().item()
    assert math.isclose(share, 0.2, abs_tol=0.1)

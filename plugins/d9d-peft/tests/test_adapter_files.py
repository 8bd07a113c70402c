"""Adapters are read by the ``peft`` library, compute the same there, and come back."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.cli.main import main
from d9d_core.errors import BuildError, CheckpointError, JobError
from d9d_peft.config import LoraConfig
from d9d_peft.lora.method import Lora
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin",
    "d9d_qwen3.plugin", "d9d_peft.plugin",
)  # fmt: skip
# The library asks transformers for a name that has changed by now.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True."),
]
LORA = {"name": "lora", "r": 4, "alpha": 8}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora of the vocabulary": {"name": "lora", "r": 4, "alpha": 3, "targets": ["embedding", "heads.*", "q_proj"]},
    "dora": {"name": "dora", "r": 4, "alpha": 6, "exclude": ["o_proj"]},
    "ia3": {"name": "ia3", "targets": ["k_proj", "v_proj"], "feedforward": ["down_proj"]},
    "lora with patterns and modules": {
        "name": "lora", "r": 4, "alpha": 8, "modules_to_save": ["heads.*", "norm", "k_norm"],
        "rank_pattern": {"layers.1.*": 2, "q_proj": 8}, "alpha_pattern": {"v_proj": 3},
    },
    "dora with patterns and modules": {
        "name": "dora", "r": 4, "alpha": 8, "modules_to_save": "embedding", "rank_pattern": {"q_proj": 8},
    },
}  # fmt: skip
TOKENS = torch.arange(12)[None] * 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2, attention_bias=True,
        eos_token_id=[3, 5], pad_token_id=7,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("base")
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def values(base: Path, directory: Path, **sections: Any) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    (directory / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return {
        "run": {"name": "tuned", "dir": str(directory / "runs")},
        "steps": 3,
        "device": "cpu",
        "batch": {"size": 4, "microbatch": 1},
        "model": {"name": "qwen3", "pretrained": str(base)},
        "task": "causal_lm",
        "data": {
            "name": "text",
            "sources": [str(directory / "corpus.txt")],
            "tokenizer": "bytes",
            "sequence_length": 24,
        },
        "optimizer": {"name": "adamw", "lr": 0.02},
        "peft": LORA,
        "trackers": [],
        **sections,
    }


def train(jobs: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Whole runs, one after the other; what their adapters hold at the end."""
    for one in jobs:
        job = job_of(one, PLUGINS)
        job.build(lambda _: None, topology_here(job) if dist.is_initialized() else None).train()
    return [load_file(Path(one["run"]["dir"]) / "tuned" / "adapter" / "adapter_model.safetensors") for one in jobs]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(TOKENS).logits
    return out


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = (load_file(directory / "model.safetensors") for directory in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
    {"mesh": {"pp": 2}, "pipeline": "zb1p"},
)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_in_every_layout_the_library_reads_the_same_adapter_and_computes_what_the_merged_model_does(
    base: Path, tmp_path: Path, method: str
) -> None:
    jobs = []
    for number, layout in enumerate(({}, *LAYOUTS)):
        (tmp_path / str(number)).mkdir()
        jobs.append(values(base, tmp_path / str(number), peft=METHODS[method], **layout))
    (alone,) = World(1).run(train, jobs[:1])
    spread = World(2).run(train, jobs[1:])[0]
    for one in (*alone, *spread):
        assert one.keys() == alone[0].keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, alone[0][name], atol=1e-4, rtol=1e-3)
    plain = logits(transformers.AutoModelForCausalLM.from_pretrained(base))
    for number in range(len(jobs)):
        run = tmp_path / str(number) / "runs" / "tuned"
        merged = logits(transformers.AutoModelForCausalLM.from_pretrained(run / "model"))
        kept = json.loads((run / "model" / "config.json").read_text())
        assert (kept["eos_token_id"], kept["pad_token_id"]) == ([3, 5], 7)
        adapted = logits(
            peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), run / "adapter")
        )
        torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-5)
        assert (adapted - plain).abs().max() > 0.01


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_what_the_library_saves_starts_a_run_that_computes_the_same_and_merges_from_its_checkpoint(
    base: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (written,) = train([values(base, tmp_path, peft=METHODS[method])])
    run = tmp_path / "runs" / "tuned"
    library = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), run / "adapter")
    expected = logits(library)
    library.save_pretrained(tmp_path / "saved")
    started = {**METHODS[method], "init_from": str(tmp_path / "saved")}
    again = values(base, tmp_path, peft=started, run={"name": "again", "dir": str(tmp_path / "runs")})
    stage = job_of(again, PLUGINS).build(lambda _: None).stage.eval()
    with torch.no_grad():
        ours = stage(tokens=TOKENS, positions=torch.arange(TOKENS.shape[1])[None])["logits"]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors").keys()
    assert {name for name in saved if not name.endswith("base_layer.weight")} == written.keys()
    assert convert(monkeypatch, run, tmp_path / "merged") == 0
    assert_same_tensors(run / "model", tmp_path / "merged")


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of two layers, and nothing else."""
    directory = tmp_path_factory.mktemp("tuned")
    method = {**LORA, "rs_lora": True, "targets": ["q_proj", "layers.1.ffn.*"]}
    job_of(values(base, directory, peft=method, export="adapter"), PLUGINS).build(lambda _: None).train()
    assert not (directory / "runs" / "tuned" / "model").exists()
    return directory / "runs" / "tuned" / "adapter"


@pytest.mark.thorough
def test_an_adapter_has_a_model_card_of_its_own(base: Path, tuned: Path) -> None:
    card = (tuned / "README.md").read_text()
    front = ["library_name: peft", f"base_model: {base.name}", "tags:", "- d9d", "pipeline_tag: text-generation"]
    assert card.split("---\n")[1].splitlines() == front
    assert "| Fine-tuning method | lora |" in card
    assert str(base.parent) not in card


@pytest.mark.thorough
def test_any_checkpoint_is_merged_by_the_command_as_the_export_was(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(values(base, tmp_path, checkpoint={"every": 2}), PLUGINS)
    job.build(lambda _: None).train()
    run = tmp_path / "runs" / "tuned"
    assert convert(monkeypatch, run, tmp_path / "last", "--keep-from", base) == 0
    assert_same_tensors(run / "model", tmp_path / "last")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "last" / file).read_bytes() == (run / "model" / file).read_bytes()
    assert convert(monkeypatch, run / "checkpoints" / "step-00000002", tmp_path / "second") == 0
    assert f"the run started from '{base}'; use --keep-from to copy its tokenizer" in capsys.readouterr().err
    earlier = load_file(tmp_path / "second" / "model.safetensors")
    last = load_file(tmp_path / "last" / "model.safetensors")
    assert any(not torch.equal(tensor, earlier[name]) for name, tensor in last.items())
    part = values(
        base, tmp_path, run={"name": "part", "dir": str(tmp_path / "runs")}, checkpoint={"trainable_only": True}
    )
    job_of(part, PLUGINS).build(lambda _: None).train()
    assert convert(monkeypatch, tmp_path / "runs" / "part", tmp_path / "third") == 2
    assert "lacks frozen weights (checkpoint.trainable_only)" in capsys.readouterr().err


def convert(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["d9d", "state", "convert", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_targets_and_scales_are_those_of_the_library(base: Path, tuned: Path) -> None:
    config = json.loads((tuned / "adapter_config.json").read_text())
    assert config["target_modules"] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tuned)
    assert model.base_model.model.model.layers[1].mlp.up_proj.scaling["default"] == 8 / 4**0.5


def test_an_adapter_of_the_library_starts_a_run(base: Path, tmp_path: Path, tuned: Path) -> None:
    method = {**LORA, "rs_lora": True, "targets": ["q_proj", "layers.1.ffn.*"], "init_from": str(tuned)}
    trainer = job_of(values(base, tmp_path, peft=method), PLUGINS).build(lambda _: None)
    held = load_file(tuned / "adapter_model.safetensors")
    there = dict(trainer.stage.named_parameters())["layers.0.attention.q_proj.lora_B.weight"]
    assert torch.equal(there, held["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"])
    assert there.abs().max() > 0


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ({"r": 2}, r"init_from: .*'s r, rs_lora differ from the job's; set the adapter's values: peft.r: 4"),
        (
            {"rs_lora": True},
            "the adapter file has no tensor base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight, ",
        ),
        ({"init_from": "nowhere"}, "peft.init_from: nowhere: "),
    ],
)
def test_another_adapter_is_refused(base: Path, tmp_path: Path, tuned: Path, method: dict[str, Any], text: str) -> None:
    job = job_of(values(base, tmp_path, peft={**LORA, "init_from": str(tuned), **method}), PLUGINS)
    with pytest.raises(CheckpointError, match=text):
        job.build(lambda _: None)


@pytest.mark.thorough
def test_an_adapter_of_another_kind_or_with_other_parts_is_refused_by_ia3(
    base: Path, tmp_path: Path, tuned: Path
) -> None:
    job = values(base, tmp_path, peft={"name": "ia3", "init_from": str(tuned)})
    with pytest.raises(CheckpointError, match="the adapter has peft_type 'LORA', but the job's peft is 'ia3'"):
        job_of(job, PLUGINS).build(lambda _: None)
    train([values(base, tmp_path, peft=METHODS["ia3"])])
    adapter = tmp_path / "runs" / "tuned" / "adapter"
    other = {**METHODS["ia3"], "feedforward": ["up_proj"], "init_from": str(adapter)}
    again = {"run": {"name": "again", "dir": str(tmp_path / "runs")}}
    with pytest.raises(
        CheckpointError, match="the adapter file has no tensor base_model.model.model.layers.0.mlp.up_proj.ia3_l"
    ):
        job_of(values(base, tmp_path, peft=other, **again), PLUGINS).build(lambda _: None)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    with pytest.raises(
        CheckpointError, match=r"its config has modules_to_save=\['lm_head'\], which d9d's 'ia3' does not support"
    ):
        job_of(values(base, tmp_path, peft={**METHODS["ia3"], "init_from": str(adapter)}, **again), PLUGINS).build(
            lambda _: None
        )


#: Values of the library's fields that leave the meaning of tensors as it is; every other value is refused.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "layers_to_transform": ([0, 1, 7],),
    "exclude_modules": (["lm_head"], ".*lm_head"),
    "task_type": ("CAUSAL_LM",),
    "auto_mapping": ({"base_model_class": "Qwen3ForCausalLM"},),
    "peft_version": ("0.99",),
    "base_model_name_or_path": ("acme/model",),
    "revision": ("main",),
    "inference_mode": (True, False),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
    "lora_dropout": (0.1,),
    "eva_config": ({"rho": 2.0},),
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
    "modules_to_save": (["lm_head"],),  # tensors show these modules
    "rank_pattern": ({"q_proj": 4}, {"k_proj": 2, "^layers.0.self_attn.q_proj": 2, "attn": 2}, {".*q_proj": 4}),
    "alpha_pattern": ({"model.layers.0.self_attn.q_proj": 8}, {"layers.0.*q_proj|.*k_proj": 8.0}),
}
HARMFUL = {
    "init_lora_weights": ("pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "something new", {"a": 1}),
    "layers_to_transform": ([0], 0, [5], [[1]]),
    "target_modules": (["k_proj"], ["proj"]),
    "exclude_modules": (["q_proj"], ["model.layers.1.mlp.up_proj"]),
    "rank_pattern": ({"q_proj": 2}, {"attn.q_proj|self_attn.q_proj": 2, "q_proj": 4}, {"(q_proj": 4}, [1], "on"),
    "alpha_pattern": ({r"layers\.0\..*": 2.0}, {"^model.layers.0.self_attn.q_proj": 2}, {"(a+)+": 8}, {"q_proj": "a"}),
    "a_field_of_the_next_release": ({"rank": 1}, "on", True, 1),
}
COMPARED = {"r", "lora_alpha", "use_rslora", "peft_type", "target_modules", "layers_pattern"}


def start_from(config: dict[str, Any], tuned: Path) -> None:
    method = Lora(LoraConfig(r=4, alpha=8, rs_lora=True, targets="q_proj"))
    stage = nn.ModuleDict({"q_proj": nn.Linear(8, 8)})
    method.inject(stage)
    published = {"q_proj.weight": "model.layers.0.self_attn.q_proj.weight"}
    method.check_adapter(stage, published, config, load_file(tuned / "adapter_model.safetensors").keys())


def test_every_field_of_the_library_is_known_to_be_harmless_or_refused(tuned: Path) -> None:
    config = json.loads((tuned / "adapter_config.json").read_text())
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)} - {"target_modules"}
    assert names > HARMLESS.keys() - COMPARED
    start_from({**peft.LoraConfig().to_dict(), **config}, tuned)  # with every default
    for name in names | HARMLESS.keys():
        for value in HARMLESS.get(name, ()):
            start_from({**config, name: value}, tuned)
        for value in HARMFUL.get(name, () if name in HARMLESS.keys() | COMPARED else ("on", True, {"a": 1}, [1])):
            with pytest.raises(CheckpointError, match=name):
                start_from({**config, name: value}, tuned)
    for name in HARMFUL.keys() - names:
        for value in HARMFUL[name]:
            with pytest.raises(CheckpointError, match=name):
                start_from({**config, name: value}, tuned)


@pytest.mark.parametrize("initialisation", ["pissa", "olora"])
def test_an_adapter_that_left_another_base_model_behind_is_refused(
    base: Path, tmp_path: Path, initialisation: str
) -> None:
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=initialisation)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    model.save_pretrained(tmp_path / "theirs")
    method = {**LORA, "targets": ["q_proj"], "init_from": str(tmp_path / "theirs")}
    with pytest.raises(
        CheckpointError, match=f"init_from: .*: its config has init_lora_weights='{initialisation}'.* merge the adapter"
    ):
        job_of(values(base, tmp_path, peft=method), PLUGINS).build(lambda _: None)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["lora", "ia3", "dora"])
def test_classes_of_the_library_find_the_base_model_by_themselves(base: Path, tmp_path: Path, method: str) -> None:
    train([values(base, tmp_path, peft=METHODS[method])])
    adapter = tmp_path / "runs" / "tuned" / "adapter"
    automatic = peft.AutoPeftModelForCausalLM.from_pretrained(str(adapter))
    by_hand = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        assert torch.equal(automatic.eval()(TOKENS).logits, by_hand.eval()(TOKENS).logits)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_dora": True}, "its config has use_dora=True, which d9d's 'lora' does not support"),
        ({"peft_type": "IA3"}, "the adapter has peft_type 'IA3', but the job's peft is 'lora'"),
    ],
)
def test_an_adapter_with_parts_that_we_lack_is_refused(
    base: Path, tmp_path: Path, tuned: Path, change: dict[str, Any], text: str
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "adapter_model.safetensors").write_bytes((tuned / "adapter_model.safetensors").read_bytes())
    config = json.loads((tuned / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | change))
    method = {**LORA, "rs_lora": True, "targets": ["q_proj", "layers.1.ffn.*"], "init_from": str(copy)}
    with pytest.raises(CheckpointError, match=text):
        job_of(values(base, tmp_path, peft=method), PLUGINS).build(lambda _: None)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ({"name": "lora", "targets": ["q_prj"]}, "no layers match 'q_prj'; did you mean 'q_proj'?"),
        ({"name": "lora", "targets": ["norm"]}, "no layers match 'norm'; there are: "),
        ({"name": "lora", "r": 33}, r"rank of 33 is larger than the matrix of 'layers.0.attention.q_proj' \[32, 32\]"),
        ({"name": "lora", "exclude": ["*"]}, "peft.exclude: all targets are excluded"),
        ({"name": "ia3", "targets": ["k_prj"]}, "peft.targets: no linear layers match 'k_prj'; did you mean 'k_proj'?"),
        ({"name": "ia3", "feedforward": ["a.b"]}, "peft.feedforward: no linear layers match 'a.b'; there are: "),
        ({"name": "ia3", "feedforward": ["v_proj"]}, "'layers.0.attention.v_proj' is also in peft.targets"),
        ({"name": "full_tune", "match": ["nrm"]}, "no modules or parameters match 'nrm'; did you mean 'norm'?"),
        ({"name": "full_tune", "match": ["rope"]}, "match 'rope'|rope have no parameters, so nothing would train"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_refused(base: Path, tmp_path: Path, method: dict[str, Any], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        job_of(values(base, tmp_path, peft=method), PLUGINS).plan()


NORMS = {"name": "full_tune", "match": ["norm"]}
STACK = {"name": "stack", "methods": [{**LORA, "targets": "q_proj"}, {**LORA, "targets": "up_proj", "r": 2}, NORMS]}


@pytest.mark.parametrize("method", [NORMS, STACK], ids=lambda method: method["name"])
def test_an_adapter_alone_needs_a_method_that_has_one(base: Path, tmp_path: Path, method: dict[str, Any]) -> None:
    job = job_of(values(base, tmp_path, peft=method, export="adapter"), PLUGINS)
    with pytest.raises(JobError, match=f"export is 'adapter', but peft method '{method['name']}' .* no adapter files"):
        job.build(lambda _: None)


@pytest.mark.thorough
def test_the_checkpoint_of_a_stack_is_merged_by_the_command_as_the_export_was(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_of(values(base, tmp_path, peft=STACK), PLUGINS).build(lambda _: None).train()
    run = tmp_path / "runs" / "tuned"
    assert convert(monkeypatch, run, tmp_path / "merged") == 0
    assert_same_tensors(run / "model", tmp_path / "merged")


def pairs(directory: Path) -> dict[str, Any]:
    """Sections of a job that trains embeddings of queries and their texts."""
    file = directory / "pairs.jsonl"
    names = ("fox", "dog", "bear", "wolf")
    file.write_text("".join(json.dumps({"query": name, "positive": f"a quick {name}"}) + "\n" for name in names))
    data = {"name": "pairs", "sources": [str(file)], "tokenizer": "bytes", "sequence_length": 24}
    return {"task": "embedding", "data": data}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"added_tokens": 2}, []),
        (
            {"attention_mask": "bidirectional", "heads": {"vector": {"kind": "embedding"}}},
            ["is_causal (False) of config"],
        ),
        ({"sliding_window": 7}, ["sliding_window (7)"]),
    ],
)
def test_a_model_that_computes_otherwise_than_its_base_model_is_told(
    base: Path, tmp_path: Path, changes: dict[str, Any], said: list[str]
) -> None:
    model = {"name": "qwen3", "pretrained": str(base), "tie_embeddings": False} | changes
    sections = pairs(tmp_path) if "heads" in changes else {}
    warnings = job_of(values(base, tmp_path, model=model, **sections), PLUGINS).plan().warnings
    found = [one for one in warnings if "the model differs from its base model in" in one]
    assert len(found) == len(said)
    assert all(text in found[0] for text in said)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_the_adapter_of_a_model_without_head_is_loaded_by_the_library_and_starts_runs(
    base: Path, tmp_path: Path, method: str
) -> None:
    model = {"name": "qwen3", "pretrained": str(base), "tie_embeddings": False}
    model |= {"heads": {"vector": {"kind": "embedding"}}}
    sections = {"model": model, "peft": METHODS[method], **pairs(tmp_path)}
    first = train([values(base, tmp_path / "first", **sections)])[0]
    run = tmp_path / "first" / "runs" / "tuned"
    automatic = peft.AutoPeftModel.from_pretrained(str(run / "adapter"))
    merged = transformers.AutoModel.from_pretrained(run / "model")
    with torch.no_grad():
        found, expected = (one.eval()(TOKENS).last_hidden_state for one in (automatic, merged))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain = transformers.AutoModel.from_pretrained(base).eval()
    assert not torch.allclose(plain(TOKENS).last_hidden_state, expected, atol=1e-3)
    started = {**METHODS[method], "init_from": str(run / "adapter")}
    for place, more in {"again": sections, "language": {}}.items():
        job = job_of(values(base, tmp_path / place, **{**more, "peft": started}), PLUGINS)
        trainer = job.build(lambda _: None)
        own = [parameter.flatten() for parameter in trainer.stage.parameters()]  # the shapes of IA3 differ in files
        assert all(any(torch.equal(one, two.flatten()) for one in own) for two in first.values())


def test_a_model_that_no_config_json_describes_is_refused_before_training(base: Path, tmp_path: Path) -> None:
    model = {"name": "qwen3", "pretrained": str(base), "attention_mask": "bidirectional", "sliding_window": 7}
    model |= {"heads": {"vector": {"kind": "embedding"}}}
    job = values(base, tmp_path, model=model, peft=None, **pairs(tmp_path))
    with pytest.raises(BuildError, match=r"export: model .* has no Hugging Face layout: .*; or set 'export: false'"):
        job_of(job, PLUGINS).plan()
    job_of({**job, "export": False}, PLUGINS).plan()


MODULES = {"name": "lora", "r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"], "modules_to_save": ["heads.*", "norm"]}
PATTERNS = {**MODULES, "rank_pattern": {"layers.1.*": 2}, "alpha_pattern": {"v_proj": 3}}


@pytest.mark.filterwarnings("ignore:.*layer_replication")
def test_an_adapter_that_the_library_made_starts_a_run_whose_export_computes_the_same(
    base: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM",
        modules_to_save=["lm_head", "model.norm"], rank_pattern={r"layers\.1\..*": 2}, alpha_pattern={"v_proj": 3},
    )  # fmt: skip
    library = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in library.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = logits(library)
    library.save_pretrained(tmp_path / "theirs")
    method = {**PATTERNS, "init_from": str(tmp_path / "theirs")}
    trainer = job_of(values(base, tmp_path, peft=method, export="adapter"), PLUGINS).build(lambda _: None)
    trained = {name for name, parameter in trainer.stage.named_parameters() if parameter.requires_grad}
    (head,) = (name for name in trained if name.startswith("heads."))
    assert {name for name in trained if "lora" not in name} == {head, "norm.weight"}
    with torch.no_grad():
        ours = trainer.stage.eval()(tokens=TOKENS, positions=torch.arange(TOKENS.shape[1])[None])["logits"]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    trainer.export()
    adapter = tmp_path / "runs" / "tuned" / "adapter"
    saved, written = (load_file(one / "adapter_model.safetensors") for one in (tmp_path / "theirs", adapter))
    assert saved.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in saved.items())
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head", "model.norm"]
    attention = "model.layers.1.self_attn"
    assert config["rank_pattern"] == {f"{attention}.q_proj": 2, f"{attention}.v_proj": 2}
    assert config["alpha_pattern"] == {f"model.layers.{layer}.self_attn.v_proj": 3.0 for layer in (0, 1)}
    again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits(again), expected, atol=1e-6, rtol=1e-6)
    for change, text in (
        ({"rank_pattern": {"layers.1.*": 3}},
         r"rank for 'model.layers.1.self_attn.q_proj' is 2, but the job's is 3; .* "
         r"peft.rank_pattern: \{layers.1.attention.q_proj: 2, layers.1.attention.v_proj: 2\}$"),
        ({"alpha_pattern": {}}, "alpha for 'model.layers.0.self_attn.v_proj' is 3, but the job's is 8.0; "),
        ({"modules_to_save": ["norm"]}, "base_model.model.lm_head.weight, but peft selects .* peft.modules_to_save"),
        ({"modules_to_save": ["heads.*", "*norm"]}, "the adapter file has no tensor base_model.model.model.layers.0."),
    ):  # fmt: skip
        run = {"run": {"name": "again", "dir": str(tmp_path / "runs")}}
        with pytest.raises(CheckpointError, match=text):
            job_of(values(base, tmp_path, peft={**method, **change}, **run), PLUGINS).build(lambda _: None)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            {"rank_pattern": {"k_proj": 2}},
            "peft.rank_pattern: no targets match 'k_proj'; did you mean 'v_proj' or 'q_proj'",
        ),
        ({"alpha_pattern": {"a.b": 2}}, "peft.alpha_pattern: no targets match 'a.b'; there are: q_proj, v_proj"),
        ({"rank_pattern": {"v_proj": 17}}, "peft.rank_pattern.v_proj: a rank of 17 is larger than the matrix of"),
        ({"modules_to_save": "nrm"}, "peft.modules_to_save: no modules match 'nrm'; did you mean 'norm'"),
        ({"modules_to_save": "rotary"}, "peft.modules_to_save: 'rotary' has no parameters; name another module"),
        ({"modules_to_save": "layers.1"}, "'layers.1.attention.q_proj' is also in peft.targets, .* peft.exclude"),
    ],
)
def test_patterns_and_modules_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, method: dict[str, Any], text: str
) -> None:
    with pytest.raises(BuildError, match=text):
        job_of(values(base, tmp_path, peft={**MODULES, **method}), PLUGINS).plan()


@pytest.mark.parametrize("module", ["embedding", "heads.*"])
def test_modules_that_share_a_weight_are_refused(base: Path, tmp_path: Path, module: str) -> None:
    tied = tmp_path / "tied"
    settings = {**json.loads((base / "config.json").read_text()), "tie_word_embeddings": True}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings)).save_pretrained(tied)
    with pytest.raises(BuildError, match="embedding and head share the weight .* untie them"):
        job_of(values(tied, tmp_path, peft={**MODULES, "modules_to_save": module}), PLUGINS).plan()

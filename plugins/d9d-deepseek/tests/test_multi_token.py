"""Multi-token prediction computes the paper's formula, document by document, and reads and writes DeepSeek's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.job_file.pretrained import with_stored_sizes
from d9d_core.model import Stage
from d9d_core.registry.registry import Registry
from d9d_deepseek import plugin
from d9d_deepseek.config import DeepSeekConfig, tiny
from d9d_deepseek.hugging_face import DeepSeekHuggingFace
from d9d_deepseek.model import DeepSeek
from d9d_deepseek.plugin import d9d_models
from d9d_nn.further_targets import further_targets
from d9d_testing.suites.support.models import gradients_of, initialised
from d9d_testing.tolerances import Tolerance, assert_close_gradients, assert_close_values
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.sharding.model_tensors import model_tensors
from pydantic import ValidationError
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

(SPEC,) = d9d_models()
FORM = DeepSeekHuggingFace()
IGNORE = -100


def changed(**fields: Any) -> DeepSeekConfig:
    return DeepSeekConfig.model_validate(tiny().model_dump() | fields)


CONFIGS = {
    "one depth": changed(mtp={"depths": 1, "weight": 0.7}),
    "two depths, hidden state first, tied": changed(mtp={"depths": 2, "first": "hidden"}, tie_embeddings=True),
    "three depths, no dense layer": changed(mtp={"depths": 3}, first_expert_layer=0, num_layers=1, added_tokens=4),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def random_model(config: DeepSeekConfig) -> DeepSeek:
    """Weights and selection biases far from their start, so that nothing cancels."""
    model = initialised(SPEC, config)
    assert isinstance(model, DeepSeek)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model_tensors(model).items():
            inside = tensor.shape[-2] if ".experts." in name else tensor.shape[-1]
            tensor.normal_(mean=1.0 if "norm" in name else 0.0, std=inside**-0.5, generator=draws)
    return model


@dataclass
class Document:
    """Document of a packed row.

    Attributes:
        tokens: int64 [n].
        targets: int64 [n], the next tokens; -100 at the end, and where a mask of fine-tuning hides them.
    """

    tokens: Tensor
    targets: Tensor


def packed() -> tuple[dict[str, Tensor], list[Document]]:
    """Two packed rows with documents of 1 to 7 tokens, padding and masked targets, and their documents."""
    draws = torch.Generator().manual_seed(1)
    rows: list[dict[str, Tensor]] = []
    documents = []
    for sizes, padding in (([5, 1, 6], 0), ([7, 2], 3)):
        numbers = [torch.full((size,), number) for number, size in enumerate(sizes)]
        for size in sizes:
            tokens = torch.randint(64, (size,), generator=draws)
            masked = torch.rand(size - 1, generator=draws) < 0.2
            documents.append(
                Document(tokens, functional.pad(tokens[1:].masked_fill(masked, IGNORE), (0, 1), value=IGNORE))
            )
        own = documents[-len(sizes) :]
        rows.append(
            {
                "tokens": functional.pad(torch.cat([document.tokens for document in own]), (0, padding)),
                "targets": functional.pad(
                    torch.cat([document.targets for document in own]), (0, padding), value=IGNORE
                ),
                "documents": functional.pad(torch.cat(numbers), (0, padding), value=9),
                "lengths": torch.tensor(sum(sizes)),
            }
        )
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    restart = [torch.arange(size) for sizes in ([5, 1, 6], [7, 2, 3]) for size in sizes]
    return batch | {"positions": torch.cat(restart).view(2, 12)}, documents


def reference_losses(model: DeepSeek, document: Document) -> Iterator[Tensor]:
    """Losses of one document alone, by DeepSeek-V3, section 2.2: of the next tokens, then of each depth.

    Only decoder blocks are the model's own. Depth k has the n - k positions that have a token k places later.
    """
    config, weights, n = model.config, dict(model.named_parameters()), len(document.tokens)
    assert isinstance(config, DeepSeekConfig)
    embedding, head = model.embedding.vocabulary_weight(), weights.get("heads.causal_lm.weight")
    if head is None:
        head = embedding if config.tie_embeddings else model.heads["causal_lm"]._own_weight()
    main = DeepSeek(changed_without(config), heads=False)
    own = {name: weights.get(name, tensor) for name, tensor in model.state_dict().items() if name in main.state_dict()}
    hidden = functional_call(main, own, kwargs={"tokens": document.tokens[None]})["hidden"][0]  # [n, H]
    yield functional.cross_entropy(hidden @ head.T, document.targets, reduction="none", ignore_index=IGNORE).sum()

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[name], config.rms_norm_eps)

    for depth in range(1, config.mtp.depths + 1):
        count, name = max(n - depth, 0), f"mtp.{depth - 1}"
        if not count:
            yield torch.zeros(())
            continue
        ahead = normed(embedding[document.tokens[depth:]], f"{name}.embedding_norm.weight")  # [n - k, H]
        before = normed(hidden[:count], f"{name}.hidden_norm.weight")
        parts = (ahead, before) if config.mtp.first == "embedding" else (before, ahead)
        joined = torch.cat(parts, dim=-1) @ weights[f"{name}.projection.weight"].T
        rotation = model.rotary(torch.arange(count)[None])[-1]
        assert model.mtp is not None
        layer = model.mtp[str(depth - 1)]
        hidden = normed(layer.block(joined[None], rotation, None)[0], f"{name}.norm.weight")
        aims = document.targets[depth:]
        yield functional.cross_entropy(hidden @ head.T, aims, reduction="none", ignore_index=IGNORE).sum()


def changed_without(config: DeepSeekConfig) -> DeepSeekConfig:
    return DeepSeekConfig.model_validate(config.model_dump() | {"mtp": {"depths": 0}})


def train(model: DeepSeek, batch: dict[str, Tensor]) -> list[Tensor]:
    """Forward and backward as in a training loop; the mean loss of the next tokens, then of each depth."""
    assert model.mtp is not None
    further = further_targets(
        batch["tokens"],
        batch["targets"],
        len(model.mtp),
        documents=batch.get("documents"),
        lengths=batch.get("lengths"),
    )
    means = []
    for depth, factor in enumerate(model.mtp.loss_factors().values()):
        count = (further["mtp_targets"][..., depth] != IGNORE).sum()
        means.append(count)
        factor.copy_(model.config.multi_token().weight / len(model.mtp) / count.clamp(min=1))
    model.zero_grad()
    loss = model(**batch)["token_loss"].sum() / (batch["targets"] != IGNORE).sum()
    loss.backward()
    sums = model.mtp.loss_sums().values()
    return [loss.detach(), *(total / count.clamp(min=1) for total, count in zip(sums, means, strict=True))]


@configs
def test_losses_and_every_gradient_are_the_papers_of_each_document_alone(config: DeepSeekConfig) -> None:
    model = random_model(config)
    batch, documents = packed()
    found = train(model, batch)
    gradients = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    model.zero_grad()
    of_documents = [list(reference_losses(model, document)) for document in documents]
    sums = [torch.stack(of_term).sum() for of_term in zip(*of_documents, strict=True)]
    depths = range(1, config.mtp.depths + 1)
    counts = [sum(int((one.targets[depth:] != IGNORE).sum()) for one in documents) for depth in (0, *depths)]
    expected = [total / count for total, count in zip(sums, counts, strict=True)]
    assert_close_values(torch.stack(found), torch.stack(expected).detach(), within=Tolerance(1e-5, 1e-5, 0, 0))
    (expected[0] + config.mtp.weight / config.mtp.depths * torch.stack(expected[1:]).sum()).backward()
    assert_close_gradients(gradients, gradients_of(model), within=Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4))


@configs
def test_no_document_sees_another(config: DeepSeekConfig) -> None:
    model, (batch, _) = random_model(config), packed()
    changes = torch.where(batch["documents"] == 1, (batch["tokens"] + 7) % 64, batch["tokens"])

    def states(tokens: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        assert model.mtp is not None
        hook = model.mtp.register_forward_hook(lambda _module, _inputs, found: seen.extend(found))
        model(**batch | {"tokens": tokens})
        hook.remove()
        return seen

    for before, after in zip(states(batch["tokens"]), states(changes), strict=True):
        others = (batch["documents"] != 1) & (batch["documents"] != 9)
        assert_close_values(after[others], before[others])
        assert not torch.allclose(after[~others], before[~others])


def test_losses_of_next_tokens_do_not_depend_on_further_tokens() -> None:
    config, (batch, _) = CONFIGS["one depth"], packed()
    model = random_model(config)
    alone = DeepSeek(changed_without(config))
    alone.load_state_dict({name: model.state_dict()[name] for name in alone.state_dict()})
    assert torch.equal(model(**batch)["token_loss"], alone(**batch)["token_loss"])


def test_evaluation_and_generation_do_not_run_the_further_layers() -> None:
    model, (batch, _) = random_model(CONFIGS["one depth"]), packed()
    assert model.mtp is not None
    calls: list[Any] = []
    model.mtp["0"].register_forward_hook(lambda *call: calls.append(call))
    model(tokens=batch["tokens"])  # logits
    model.eval()
    model(**batch)
    assert calls == []
    model.train()
    model(**batch)
    assert len(calls) == 1


def test_samples_shorter_than_the_depths_have_no_further_targets() -> None:
    model = random_model(CONFIGS["three depths, no dense layer"])
    tokens = torch.tensor([[3, 5]])
    losses = train(model, {"tokens": tokens, "targets": torch.tensor([[5, IGNORE]])})
    assert losses[0] > 0
    assert [loss.item() for loss in losses[1:]] == [0.0, 0.0, 0.0]
    assert all(gradient.isfinite().all() for gradient in gradients_of(model).values())
    batch = {"tokens": tokens[:, :1], "targets": torch.full((1, 1), IGNORE)}
    assert [loss.item() for loss in train(model, batch)[1:]] == [0.0, 0.0, 0.0]


def test_the_last_of_several_stages_needs_the_shifted_inputs() -> None:
    config = changed(mtp={"depths": 1})
    last = DeepSeek(config, Stage(1, 2))
    assert {"embedding.weight", "mtp.0.projection.weight", "norm.weight"} <= set(dict(last.named_parameters()))
    assert "mtp.0.projection.weight" not in dict(DeepSeek(config, Stage(0, 2)).named_parameters())
    hidden, targets = torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"needs 'mtp_tokens' and 'mtp_targets'; compute them from whole samples by"):
        last(hidden=hidden, targets=targets)
    last(hidden=hidden, targets=targets, **further_targets(targets, targets, 1))


@configs
def test_two_stages_compute_what_the_whole_does(config: DeepSeekConfig) -> None:
    config = DeepSeekConfig.model_validate(config.model_dump() | {"num_layers": 2})
    model, (batch, _) = random_model(config), packed()
    losses = train(model, batch)
    first, last = (DeepSeek(config, Stage(index, 2)) for index in range(2))
    for stage in (first, last):
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
    assert model.mtp is not None
    assert last.mtp is not None
    for own, factor in zip(last.mtp.loss_factors().values(), model.mtp.loss_factors().values(), strict=True):
        own.copy_(factor)
    further = further_targets(depths=config.mtp.depths, **{n: t for n, t in batch.items() if n != "positions"})
    shared = {name: tensor for name, tensor in batch.items() if name != "tokens"} | further
    sent = first(**batch)["hidden"]
    hidden = sent.detach().requires_grad_()
    loss = last(hidden=hidden, **shared)["token_loss"].sum() / (batch["targets"] != IGNORE).sum()
    loss.backward()
    sent.backward(hidden.grad)
    assert_close_values(loss.detach(), losses[0])
    found: dict[str, Tensor] = {}
    for stage in (first, last):
        found |= {name: found[name] + g if name in found else g for name, g in gradients_of(stage).items()}
    assert_close_gradients(found, gradients_of(model))


@pytest.mark.thorough
def test_layers_are_those_of_transformers() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this release of transformers has no layers of multi-token prediction")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = CONFIGS["one depth"]
    model = random_model(config)
    exported = map_tensors(FORM.exporter(config), {name: t.detach() for name, t in model_tensors(model).items()})
    written = FORM.config_json(config, "float32")
    read = theirs.DeepseekV3Config(**{k: v for k, v in written.items() if k not in ("architectures", "model_type")})
    read._attn_implementation = "eager"
    layer = layers.MtpLayer(read, theirs.DeepseekV3DecoderLayer, theirs.DeepseekV3RMSNorm, config.num_layers)
    prefix = f"model.layers.{config.num_layers}."
    state = {name.removeprefix(prefix): tensor for name, tensor in exported.items() if name.startswith(prefix)}
    apart = {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
    renamed = {"shared_head.norm.weight": "post_norm.weight"}
    state = {
        name if name in apart else renamed.get(name, f"mtp_block.{name}"): tensor
        for name, tensor in state.items()
        if name not in ("embed_tokens.weight", "shared_head.head.weight")
    }
    experts = {name: state.pop(name) for name in [name for name in state if ".experts." in name]}
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        parts = [experts[f"mtp_block.mlp.experts.{number}.{matrix}.weight"] for number in range(config.num_experts)]
        experts[matrix] = torch.stack(parts)
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([experts["gate_proj"], experts["up_proj"]], dim=1)
    state["mtp_block.mlp.experts.down_proj"] = experts["down_proj"]
    layer.load_state_dict(state)
    hidden = torch.randn(2, 9, config.hidden_size, generator=torch.Generator().manual_seed(2))
    embedded = hidden.flip(0, 1)
    # The positions of the embeddings, as in transformers; scores depend on distances only.
    positions = torch.arange(1, 10)[None]
    angles = theirs.DeepseekV3RotaryEmbedding(read)(hidden, positions)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected = layer(embedded, hidden, angles, mask, positions, None)
    assert model.mtp is not None
    rotation = model.rotary(torch.arange(9)[None])[-1]
    found = model.mtp["0"](hidden, embedded, rotation, None)
    assert_close_values(found, expected.detach(), within=Tolerance(1e-5, 1e-5, 0, 0))


@configs
def test_files_hold_the_layers_as_published_and_are_read_again(config: DeepSeekConfig, tmp_path: Path) -> None:
    state = {name: tensor.detach() for name, tensor in model_tensors(random_model(config)).items()}
    files = map_tensors(FORM.exporter(config), state)
    for depth in range(config.mtp.depths):
        place = f"model.layers.{config.num_layers + depth}"
        assert {f"{place}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= files.keys()
        assert torch.equal(files[f"{place}.embed_tokens.weight"], files["model.embed_tokens.weight"])
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        assert torch.equal(files[f"{place}.shared_head.head.weight"], files[head])
    described = json.loads(json.dumps(FORM.config_json(config, "float32")))
    assert described["num_nextn_predict_layers"] == config.mtp.depths
    assert FORM.config_from_json(described) == config
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    without = {name: t for name, t in files.items() if "layers." not in name or not name.endswith(copies)}
    for kept in (files, without):
        bare = {name if "lm_head" in name else name.removeprefix("model."): tensor for name, tensor in kept.items()}
        for found in (kept, bare):
            read = map_tensors(FORM.importer(config, config), found)
            assert read.keys() == state.keys()
            assert all(torch.equal(read[name], state[name]) for name in state)


def test_a_published_model_is_read_with_as_many_depths_as_the_job_says() -> None:
    config = CONFIGS["three depths, no dense layer"]
    files = map_tensors(FORM.exporter(config), {n: t.detach() for n, t in model_tensors(random_model(config)).items()})
    published = {k: v for k, v in FORM.config_json(config, "float32").items() if k != "d9d"}
    stored = FORM.config_from_json(published)
    assert stored.mtp.depths == 0
    for depths in (0, 1, 3):
        wanted = DeepSeekConfig.model_validate(config.model_dump() | {"mtp": {"depths": depths}})
        graph = StateGraph(FORM.importer(wanted, stored), specs_of(files))
        with torch.device("meta"):
            built = DeepSeek(wanted)
        graph.check(specs_of(model_tensors(built)))
        assert {name.split(".")[2] for name in graph.left_out} == {str(1 + depth) for depth in range(depths, 3)}


def test_layers_that_the_files_lack_are_new() -> None:
    config, wanted = tiny(), changed(mtp={"depths": 2})
    files = map_tensors(FORM.exporter(config), {n: t.detach() for n, t in model_tensors(random_model(config)).items()})
    graph = StateGraph(FORM.importer(wanted, config), specs_of(files))
    model = random_model(wanted)
    graph.check(specs_of(model_tensors(model)))
    assert set(graph.fresh) == {name for name in model_tensors(model) if name.startswith("mtp.")}


def test_files_with_another_embedding_for_further_tokens_are_refused() -> None:
    config = CONFIGS["one depth"]
    files = map_tensors(FORM.exporter(config), {n: t.detach() for n, t in model_tensors(random_model(config)).items()})
    copies = StateGraph(FORM.importer(config, config), specs_of(files)).duplicates
    assert {(copy.name.rpartition("0.")[2], copy.original.name) for copy in copies} == {
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    }
    assert all("model.mtp.depths to 0" in copy.otherwise for copy in copies)


def test_files_with_another_order_are_refused() -> None:
    config = CONFIGS["two depths, hidden state first, tied"]
    with pytest.raises(
        CheckpointError, match="mtp.first is hidden, but the projections in the files read the embedding"
    ):
        FORM.importer(config, tiny())
    described = FORM.config_json(config, "float32")
    assert described["mtp_hidden_states_first"] is True
    theirs = {name: value for name, value in described.items() if name != "d9d"}
    assert FORM.config_from_json(theirs).mtp.first == "hidden"


def test_a_model_without_a_language_model_head_predicts_no_further_tokens() -> None:
    heads = {"causal_lm": {"kind": "causal_lm"}, "classes": {"kind": "classification", "num_classes": 3}}
    with pytest.raises(ValidationError, match=r"heads has: causal_lm \(causal_lm\), classes \(classification\); set d"):
        changed(mtp={"depths": 1}, heads=heads)


@pytest.mark.parametrize("kind", ["prefix", "blocks"])
def test_no_position_sees_its_own_target_among_the_further_inputs(kind: str) -> None:
    with pytest.raises(
        ValidationError, match=f"further tokens need attention_mask causal, not {kind}; set depths to 0"
    ):
        changed(mtp={"depths": 1}, attention_mask=kind)
    assert changed(mtp={"depths": 0}, attention_mask=kind).attention_mask == kind


def test_a_resumed_run_may_change_the_weight_alone() -> None:
    config = changed(mtp={"depths": 1, "weight": 0.1})
    config.check_resume(changed(mtp={"depths": 1, "weight": 0.3}).model_dump())
    with pytest.raises(ValueError, match="mtp has depths 1 and first embedding, the saved model has depths 0"):
        config.check_resume({})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (2, 0.3, "embedding")), ({"weight": 0.1}, (2, 0.1, "embedding")), ({"depths": 1}, (1, 0.3, "embedding")),
        ({"depths": 0}, (0, 0.3, "embedding")), ({"first": "hidden"}, (2, 0.3, "hidden")),
    ],
)  # fmt: skip
def test_a_job_changes_single_fields_of_pretrained_weights(
    tmp_path: Path, given: dict[str, Any] | None, expected: tuple[int, float, str]
) -> None:
    described = FORM.config_json(changed(mtp={"depths": 2}), "float32")
    (tmp_path / "config.json").write_text(json.dumps(described))
    entry = Registry.of(plugin).find("model", "deepseek_v3")
    fields = {"name": "deepseek_v3", "pretrained": str(tmp_path)} | ({} if given is None else {"mtp": given})
    found = DeepSeekConfig.model_validate(with_stored_sizes(entry, fields)).mtp
    assert (found.depths, found.weight, found.first) == expected

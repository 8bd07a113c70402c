"""Conformance suite of models. Shapes: B samples, S positions, V token ids."""

from __future__ import annotations

import fnmatch
import importlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import HasHeads, SplitsSequence, Stage
from d9d_core.plugin import ANY_MODEL_TYPE, ModelSpec, Ref
from d9d_core.traits import (
    TRAITS,
    ContextParallelizable,
    HasBlocks,
    HasOps,
    LateInit,
    PipelineStage,
    TensorParallelizable,
    TensorStyle,
    modules_with,
)
from d9d_core.types import TensorSpec
from d9d_verify.layouts import Layout
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from torch import Tensor, nn

from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.suites.support.model_matrices import MatrixUse, residual_writers
from d9d_testing.suites.support.models import (
    IGNORE,
    count_blocks,
    export_to,
    gradients_of,
    initialised,
    is_poisoned,
    logits_of,
    microbatch,
    on_meta,
    poison,
    random_model,
    require,
    split,
    submodule,
    tensors_of,
)
from d9d_testing.tolerances import Tolerance, assert_close_gradients, assert_close_values

#: Plugins that the jobs of the layout test use in addition to the model's.
_LAYOUT_PLUGINS = ("d9d_nn.plugin", "d9d_parallel.plugin", "d9d_testing.toy.plugin")


class ModelSuite:
    """Conformance suite of models: tests a model on its ``tiny`` config.

    Subclass it and name the declaration module and the model::

        class TestMyModel(ModelSuite):
            plugin = "acme_models.plugin"
            target = "my_model"

    Tests of capabilities that the model does not claim (``provides``) are skipped. A model may claim fewer traits than
    its modules have; strategies that need unclaimed traits are then refused. Models that claim ``model:causal_lm`` are
    called with ``tokens``, ``positions``, ``documents`` and ``targets``.

    Attributes:
        plugin: declaration module, which the entry point names.
        target: name of the model.
        flops_per_parameter: lowest and highest training FLOPs per token and parameter of the tiny config. 6 for a dense
            model; less with a large embedding or idle experts, more with long sequences.
        depth: config field with the number of blocks.
        depth_scaled: whether initial outputs of blocks to the residual stream are divided by the square root of the
            depth (Radford et al. 2019, "GPT-2", section 2.3), so that the stream does not grow with depth.
        initial_std: pattern of parameter names -> initial standard deviation.
        exported_as_stored: patterns of parameter names whose Hugging Face layout is [in, out], like GPT-2's Conv1D; all
            other matrices are exported in the layout of linear layers, [out, in].
        reference: ``module:class`` whose ``from_pretrained(directory, dtype=...)`` loads a language model from exported
            files, such as ``transformers:AutoModelForCausalLM``. Or override ``reference_logits`` with a
            plain function of the model's parameters.
        further_from_exact: largest allowed ratio of two distances from the float32 result: the distance of the model's
            bfloat16 result, divided by the distance of the reference's bfloat16 result.
    """

    pytestmark = pytest.mark.smoke

    plugin: ClassVar[str]
    target: ClassVar[str]
    flops_per_parameter: ClassVar[tuple[float, float]] = (3.0, 9.0)
    depth: ClassVar[str] = "num_layers"
    depth_scaled: ClassVar[bool] = True
    initial_std: ClassVar[Mapping[str, float]] = {}
    exported_as_stored: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str | None] = None
    further_from_exact: ClassVar[float] = 1.25

    # --- for subclasses to override

    def reference_logits(self, config: Any, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Reference as a plain function: logits [B, S, V] of token ids int64 [B, S], from the parameters by name.

        It must be differentiable, and compute in the dtype of the parameters as a careful implementation would.
        """
        raise NotImplementedError

    @pytest.fixture
    def spec(self) -> ModelSpec:
        """Record of the model."""
        specs = [spec for spec in importlib.import_module(self.plugin).d9d_models() if spec.name == self.target]
        assert specs, f"{self.plugin} declares no model '{self.target}'"
        return specs[0]  # type: ignore[no-any-return]

    @pytest.fixture
    def config(self, spec: ModelSpec) -> Any:
        """Tiny config of the model; override it if the record has none."""
        assert spec.tiny is not None, f"the record of '{spec.name}' has no 'tiny'; add it, or override 'config'"
        return spec.tiny.load()()

    @pytest.fixture
    def model(self, spec: ModelSpec, config: Any) -> nn.Module:
        """Full tiny model, initialised, in float32."""
        return initialised(spec, config)

    @pytest.fixture
    def language_model(self, spec: ModelSpec, model: nn.Module) -> nn.Module:
        """Full tiny model; skips the test if it is not a causal language model."""
        require(spec, "model:causal_lm")
        return model

    # --- building ---------------------------------------------------------------------------------------------------

    def test_builds_on_the_meta_device_without_memory(self, spec: ModelSpec, config: Any) -> None:
        """Building on the meta device must allocate nothing, so that a laptop can plan a large model."""
        allocated = [name for name, tensor in tensors_of(on_meta(spec, config)) if not tensor.is_meta]
        assert not allocated, f"not on the meta device: {allocated}; create tensors without a device argument"

    def test_initialisation_fills_every_parameter_and_buffer(self, spec: ModelSpec, config: Any) -> None:
        """After materialisation and ``reset_parameters``, no uninitialised element is left."""
        stage = on_meta(spec, config).to_empty(device="cpu")
        poison(stage)
        for module in modules_with(stage, LateInit).values():
            module.reset_parameters()
        left = [name for name, tensor in tensors_of(stage) if is_poisoned(tensor)]
        assert not left, f"not filled by any reset_parameters(): {left}"

    def test_reset_parameters_fills_own_parameters_only(self, spec: ModelSpec, config: Any) -> None:
        """A module must not initialise its children, because each module has its own seed."""
        stage = on_meta(spec, config).to_empty(device="cpu")
        for name, module in modules_with(stage, LateInit).items():
            poison(stage)
            module.reset_parameters()
            own = {id(tensor) for _, tensor in tensors_of(stage.get_submodule(name), recurse=False)}
            filled = [other for other, t in tensors_of(stage) if id(t) not in own and not is_poisoned(t)]
            assert not filled, f"{name or 'the model'}.reset_parameters() also fills {filled}"

    def test_initialisation_depends_on_the_seed_alone(self, spec: ModelSpec, config: Any) -> None:
        """Equal seeds give equal initial weights; other seeds give other initial weights."""
        first, again, other = (dict(initialised(spec, config, seed=s).named_parameters()) for s in (0, 0, 1))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)

    def test_parameters_start_with_the_stated_deviation(self, model: nn.Module) -> None:
        """All parameters that match a pattern of ``initial_std`` together have its standard deviation."""
        if not self.initial_std:
            pytest.skip(f"{type(self).__name__}.initial_std is empty")
        for pattern, expected in self.initial_std.items():
            found = [p.flatten() for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
            assert found, f"initial_std: no parameter matches '{pattern}'"
            std = torch.cat(found).std().item()
            within = max(0.05, 4 / (2 * sum(map(len, found))) ** 0.5)  # four standard errors of a standard deviation
            assert abs(std - expected) <= within * expected, (
                f"parameters like '{pattern}' start with a standard deviation of {std:.3g}, stated is {expected:.3g}"
            )

    def test_the_residual_stream_starts_the_same_in_deeper_models(self, spec: ModelSpec, config: Any) -> None:
        """Initial outputs of a block's modules to the residual stream shrink with the square root of the depth."""
        require(spec, "model:causal_lm", "model:blocks")
        if not self.depth_scaled:
            pytest.skip(f"{type(self).__name__}.depth_scaled is False")
        fields = config.model_dump()
        assert self.depth in fields, (
            f"the config has no '{self.depth}'; set {type(self).__name__}.depth to its depth field"
        )
        written = []
        for depth in (2, 18):
            deeper = type(config).model_validate({**fields, self.depth: depth})
            written.append(residual_writers(initialised(spec, deeper), microbatch(deeper)))
        if not written[0]:
            pytest.skip("it is unclear which modules write to the residual stream")
        for name, shallow in written[0].items():
            ratio = written[1][name] / max(shallow, 1e-30)
            assert ratio < 0.6, (
                f"{name} writes {ratio:.2f} times as much to the residual stream of 18 blocks as of 2, where 0.33 "
                "keeps the size of the stream; divide the initial deviation of its output projection by "
                f"sqrt(2 x layers), or set {type(self).__name__}.depth_scaled = False"
            )

    def test_config_round_trips_through_json(self, spec: ModelSpec, config: Any) -> None:
        """The config reads back equal from its JSON dump, because it is saved with a run."""
        assert type(config) is spec.config.load()
        assert type(config).model_validate_json(config.model_dump_json()) == config

    # --- declarations -----------------------------------------------------------------------------------------------

    def test_claims_agree_with_traits(self, spec: ModelSpec, model: nn.Module) -> None:
        """``provides`` names only traits that some module of the model implements."""
        has = {token for token, trait in TRAITS.items() if modules_with(model, trait)}
        claimed = spec.provides & TRAITS.keys()
        assert claimed <= has, f"claimed, but no module implements it: {sorted(claimed - has)}"

    def test_traits_name_modules_that_exist(self, model: nn.Module) -> None:
        """Names of blocks, attention cores, tensor-parallel children and op slots lead to the stated modules.

        Tensor-parallel plans split no vector, except for one with an element per head.
        """
        for module in modules_with(model, HasBlocks).values():
            assert all(submodule(module, name) is block for name, block in module.blocks().items())
        for core_owner in modules_with(model, ContextParallelizable).values():
            assert all(submodule(core_owner, name) is core for name, core in core_owner.attention_cores().items())
        split = (TensorStyle.COLUMN, TensorStyle.ROW, TensorStyle.VOCAB)
        for planned in modules_with(model, TensorParallelizable).values():
            heads = planned.tensor_parallel_heads() if isinstance(planned, HasHeads) else {}
            for name, style in planned.tensor_parallel_plan().items():
                weight = getattr(submodule(planned, name), "weight", None)  # a tied head has no weight
                # the weight has one element for each head, as sinks have
                of_heads = weight is not None and heads.get(name) == len(weight)
                is_vector = weight is not None and weight.ndim < 2 and not of_heads
                assert not (is_vector and style in split), f"{name}: a vector cannot be {style}"
        for caller in modules_with(model, HasOps).values():
            assert all(attrgetter(name)(caller) is slot for name, slot in caller.op_slots().items())

    def test_flops_are_about_six_per_parameter(self, spec: ModelSpec, config: Any, model: nn.Module) -> None:
        """A token costs 2 forward and 4 backward FLOPs per parameter of a product, and more in longer sequences."""
        if spec.flops is None:
            pytest.skip("the model states no FLOPs")
        flops = spec.flops.load()
        parameters = sum(p.numel() for p in model.parameters())
        assert parameters > 0
        least, greatest = self.flops_per_parameter
        assert least <= flops(config, 8) / parameters <= greatest
        assert flops(config, 16) >= flops(config, 8)

    def test_hugging_face_round_trip_is_bitwise(self, spec: ModelSpec, config: Any, model: nn.Module) -> None:
        """Export and import restore the state bit for bit, and the config; the export contains each weight once."""
        if spec.hugging_face is None:
            pytest.skip("the model has no Hugging Face format")
        form = spec.hugging_face.load()()
        state = {name: p.detach() for name, p in model.named_parameters()}
        exported = map_tensors(form.exporter(config), state)
        imported = map_tensors(form.importer(config, config), exported)
        assert imported.keys() == state.keys()
        assert all(torch.equal(imported[name], state[name]) for name in state)
        assert len({(t.data_ptr(), t.shape) for t in exported.values()}) == len(exported), "a weight appears twice"
        described = json.loads(json.dumps(form.config_json(config, "float32")))
        assert described["architectures"]
        stated = {described["model_type"], ANY_MODEL_TYPE}
        assert spec.model_types & stated, f"the record's model_types lack {described['model_type']!r}"
        assert form.config_from_json(described) == config, "config.json lacks some fields of the config"

    def test_matrices_are_exported_as_linear_layers_hold_them(self, spec: ModelSpec, config: Any) -> None:
        """Exported matrices are [out, in].

        For square matrices, whose shape does not show the layout, the test compares with their use in the forward.
        """
        if spec.hugging_face is None:
            pytest.skip("the model has no Hugging Face format")
        require(spec, "model:causal_lm")
        model = random_model(spec, config)
        with MatrixUse(model) as used:
            model(**microbatch(config))
        state = {name: p.detach() for name, p in model.named_parameters()}
        exported = map_tensors(spec.hugging_face.load()().exporter(config), state)
        for name, matrices in used.found.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exported_as_stored):
                continue
            for matrix in matrices:
                wrong = [other for other, t in exported.items() if t.shape == matrix.shape and torch.equal(t, matrix)]
                assert not wrong, (
                    f"{name} is used as right factor [in, out] = {list(matrix.shape)}, and is exported in this layout "
                    f"as {wrong[0]}; Hugging Face's linear layers have [out, in]: transpose it in the exporter and the "
                    f"importer, or add it to {type(self).__name__}.exported_as_stored"
                )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_logits_and_every_gradient_are_those_of_the_reference(
        self, spec: ModelSpec, config: Any, tmp_path: Path, dtype: str
    ) -> None:
        """The reference computes the same logits and gradients.

        In bfloat16, the model's result must be about as close to the float32 result as the bfloat16 result of the
        reference is.
        """
        if not self.has_reference(spec):
            pytest.skip("there is no reference implementation")
        require(spec, "model:causal_lm")
        ours = random_model(spec, config).to(getattr(torch, dtype))
        tokens = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
        logits, mine = self.computed(ours, tokens)
        expected, reference = self.referred(spec, config, ours, tokens, tmp_path)
        if dtype == "float32":
            assert_close_values(logits, expected, within=Tolerance(1e-5, 1e-5, 0, 0))
            assert_close_gradients(mine, reference, within=Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4))
            return
        exact, gradients = self.computed(ours.float(), tokens)  # float32, from the parameters rounded to dtype
        self.compare_distances("the logits", logits, expected, exact)
        assert mine.keys() == reference.keys(), f"gradients of {sorted(mine)}, the reference has {sorted(reference)}"
        flat = [
            torch.cat([found[name].flatten().float() for name in sorted(mine)])
            for found in (mine, reference, gradients)
        ]
        self.compare_distances("all gradients", *flat)

    def has_reference(self, spec: ModelSpec) -> bool:
        """Whether the suite names a reference; skips the test if the package of the reference is not installed."""
        if type(self).reference_logits is not ModelSuite.reference_logits:
            return True
        if self.reference is None or spec.hugging_face is None:
            return False
        pytest.importorskip(self.reference.partition(":")[0])
        return True

    def computed(self, model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of a model, converted to float32, and gradients of the summed next-token loss by parameter name."""
        model.zero_grad()
        with torch.no_grad():
            logits = model(tokens=tokens)["logits"].float()
        model(tokens=tokens, targets=tokens.roll(-1, dims=1))["token_loss"].sum().backward()
        return logits, {name: gradient.clone() for name, gradient in gradients_of(model).items()}

    def referred(
        self, spec: ModelSpec, config: Any, model: nn.Module, tokens: Tensor, directory: Path
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and gradients of the reference, from the parameters of the model."""
        dtype = next(model.parameters()).dtype
        if type(self).reference_logits is not ModelSuite.reference_logits:
            weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            logits = self.reference_logits(config, weights, tokens).float()
            torch.autograd.backward(_next_token_loss(logits, tokens))
            return logits.detach(), {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        assert self.reference is not None
        assert spec.hugging_face is not None
        form = spec.hugging_face.load()()
        export_to(directory, form, config, model, str(dtype).removeprefix("torch."))
        theirs = Ref(self.reference).load().from_pretrained(directory, dtype=dtype)
        logits = theirs(tokens).logits.float()
        torch.autograd.backward(_next_token_loss(logits, tokens))
        gradients = gradients_of(theirs)
        graph = StateGraph(form.importer(config, config), specs_of(gradients))
        return logits.detach(), graph.apply(gradients)

    def compare_distances(self, what: str, mine: Tensor, reference: Tensor, exact: Tensor) -> None:
        """Assert that the model's bfloat16 result is about as close to the float32 result as the reference's is."""
        ours, theirs = ((found - exact).norm().item() / exact.norm().item() for found in (mine, reference))
        limit = self.further_from_exact * max(theirs, torch.finfo(torch.bfloat16).eps / 4)
        assert ours <= limit, (
            f"in bfloat16, {what} differ by {ours:.2e} from the result in float32, and the reference's by {theirs:.2e} "
            f"only; compute norms, softmax, angles and losses in float32 (at most {self.further_from_exact:g} times "
            "the reference's distance is allowed)"
        )

    def test_a_call_does_not_depend_on_earlier_ones(
        self, spec: ModelSpec, config: Any, language_model: nn.Module
    ) -> None:
        """A microbatch gives the same result in a new model as after another microbatch of its shape."""
        first = microbatch(config)
        second = {name: tensor.flip(0) for name, tensor in first.items()}
        expected = initialised(spec, config)(**second)["token_loss"]
        language_model(**first)
        found = language_model(**second)["token_loss"]
        assert torch.equal(found, expected), (
            "after a microbatch with other documents, a microbatch gives another loss than alone; key caches of masks "
            "and positions by their values, or compute them in each forward"
        )

    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        """Loss, gradients and updates of three steps match a single process; needs d9d-nn and d9d-parallel."""
        if missing := [plugin for plugin in _LAYOUT_PLUGINS if not find_spec(plugin.partition(".")[0])]:
            pytest.skip(f"needs {', '.join(missing)}")
        specs = [spec for spec in importlib.import_module(self.plugin).d9d_models() if spec.name == self.target]
        require(specs[0], "model:causal_lm", "model:blocks")
        fields = config.model_dump(mode="json", exclude_defaults=False)
        values = {
            "steps": 3,
            "device": "cpu",
            "model": {**fields, "name": self.target},
            "task": "causal_lm",
            "data": {"name": "toy_tokens", "vocab_size": config.vocab_size},
            "batch": {"size": 8, "microbatch": 1},
            "optimizer": "toy_optimizer",
            "trackers": [],
            "export": False,
        }
        layouts = [
            Layout("fsdp 2", {"dp_shard": 2}, ("fsdp",)),
            Layout("replicate 2", {"dp_replicate": 2}, ("replicate",)),
            Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ("hsdp",)),
            Layout("fsdp 4", {"dp_shard": 4}, ("fsdp",)),
        ]
        assert_passed(Harness(values, (self.plugin, *_LAYOUT_PLUGINS)).compare(layouts))

    # --- computation ------------------------------------------------------------------------------------------------

    def test_loss_has_one_value_per_token_and_none_for_ignored_targets(
        self, language_model: nn.Module, config: Any
    ) -> None:
        """``token_loss`` is float32 [B, S] and finite: zero where the target is -100, and positive elsewhere."""
        batch = microbatch(config)
        for inputs in (batch, {name: batch[name] for name in ("tokens", "targets")}):
            loss = language_model(**inputs)["token_loss"]
            assert loss.shape == batch["tokens"].shape
            assert loss.dtype == torch.float32
            assert loss.isfinite().all()
            assert (loss[batch["targets"] == IGNORE] == 0).all()
            assert (loss[batch["targets"] != IGNORE] > 0).all()

    def test_logits_give_the_loss(self, language_model: nn.Module, config: Any) -> None:
        """Without targets the model returns logits [B, S, V], and their cross entropy is the loss."""
        batch = microbatch(config)
        logits = logits_of(language_model, batch)
        assert logits.shape == (*batch["tokens"].shape, config.vocab_size)
        flat = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        assert_close_values(language_model(**batch)["token_loss"], flat.view_as(batch["targets"]))

    def test_every_parameter_gets_a_gradient(self, language_model: nn.Module, config: Any) -> None:
        """Every parameter gets a gradient, not all zeros: a parameter without one would break gradient reductions."""
        language_model(**microbatch(config))["token_loss"].sum().backward()
        idle = [name for name, p in language_model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not idle, f"without gradient: {idle}"

    def test_a_step_never_waits_for_the_device(self, spec: ModelSpec, config: Any) -> None:
        """Forward and backward read no value of a tensor: they run on the meta device, where that is an error."""
        require(spec, "model:causal_lm")
        model = on_meta(spec, config)
        for batch in (inputs := microbatch(config), {name: inputs[name] for name in ("tokens", "targets")}):
            model(**{name: tensor.to("meta") for name, tensor in batch.items()})["token_loss"].sum().backward()
        assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())

    def test_samples_are_independent(self, language_model: nn.Module, config: Any) -> None:
        """A sample gives the same logits alone and in a batch."""
        batch = microbatch(config)
        alone = {name: tensor[:1] for name, tensor in batch.items()}
        assert_close_values(logits_of(language_model, alone), logits_of(language_model, batch)[:1])

    def test_later_tokens_do_not_change_earlier_logits(self, language_model: nn.Module, config: Any) -> None:
        """Changing a token does not change logits at earlier positions."""
        batch, position = microbatch(config), 7
        changed = batch["tokens"].clone()
        changed[:, position] = (changed[:, position] + 1) % config.vocab_size
        before, after = logits_of(language_model, batch), logits_of(language_model, {**batch, "tokens": changed})
        assert_close_values(after[:, :position], before[:, :position])
        assert not torch.allclose(after[:, position], before[:, position])

    def test_packed_documents_do_not_see_each_other(self, language_model: nn.Module, config: Any) -> None:
        """Documents packed into one sample have the same losses as alone."""
        batch = microbatch(config)
        packed = language_model(**batch)["token_loss"]
        for sample in range(len(packed)):
            for document in range(int(batch["documents"][sample].max()) + 1):
                inside = batch["documents"][sample] == document
                alone = {name: batch[name][sample, inside].unsqueeze(0) for name in ("tokens", "targets")}
                assert_close_values(language_model(**alone)["token_loss"][0], packed[sample, inside])

    def test_padding_changes_nothing(self, language_model: nn.Module, config: Any) -> None:
        """Padded samples have the same losses and gradients as alone."""
        batch, lengths = microbatch(config), torch.tensor([12, 7])
        padding = torch.arange(12) >= lengths.unsqueeze(1)
        padded = {
            "tokens": batch["tokens"],
            "targets": batch["targets"].masked_fill(padding, IGNORE),
            "documents": padding.long(),
            "lengths": lengths,
        }
        found = language_model(**padded)["token_loss"]
        found.sum().backward()
        together = {name: gradient.clone() for name, gradient in gradients_of(language_model).items()}
        language_model.zero_grad()
        for sample, length in enumerate(lengths.tolist()):
            alone = {name: padded[name][sample, :length].unsqueeze(0) for name in ("tokens", "targets")}
            loss = language_model(**alone)["token_loss"]
            loss.sum().backward()
            assert_close_values(found[sample, :length], loss[0])
        assert_close_gradients(together, gradients_of(language_model))

    # --- pipeline stages --------------------------------------------------------------------------------------------

    def test_stages_start_as_the_whole_does(self, spec: ModelSpec, config: Any, model: nn.Module) -> None:
        """Names and initial values of parameters do not depend on the split into stages; shared tensors start equal."""
        require(spec, "model:pipeline")
        stages, source = (
            [initialised(spec, config, stage=Stage(index, 2)) for index in range(2)],
            dict(tensors_of(model)),
        )
        found = [item for stage in stages for item in tensors_of(stage)]
        assert {name for name, _ in found} == source.keys()
        different = [name for name, tensor in found if not torch.equal(tensor, source[name])]
        assert not different, f"values differ from the full model's: {different}"

    def test_layers_are_split_as_the_job_says(self, spec: ModelSpec, config: Any, model: nn.Module) -> None:
        """Stages get the numbers of layers in ``pipeline.layers``; numbers that do not fit the model are refused."""
        require(spec, "model:pipeline", "model:blocks")
        total = count_blocks(model)
        counts = (total - 1, 1)
        assert tuple(count_blocks(on_meta(spec, config, Stage(index, 2, counts))) for index in range(2)) == counts
        for wrong in ((total, 1), (total,)):
            with pytest.raises(BuildError, match="layers"):
                on_meta(spec, config, Stage(0, 2, wrong))

    def test_two_stages_compute_what_the_whole_does(self, spec: ModelSpec, config: Any, model: nn.Module) -> None:
        """Two stages give the full model's losses and gradients; gradients of a weight that both stages hold add up."""
        require(spec, "model:pipeline", "model:causal_lm")
        batch, stages = microbatch(config), split(spec, config, model)
        loss = model(**batch)["token_loss"]
        loss.sum().backward()
        shared = {name: tensor for name, tensor in batch.items() if name != "tokens"}
        sent = stages[0](**batch)
        between = {name: tensor.detach().requires_grad_() for name, tensor in sent.items()}
        split_loss = stages[1](**between, **shared)["token_loss"]
        split_loss.sum().backward()
        torch.autograd.backward(list(sent.values()), [between[name].grad for name in sent])

        assert_close_values(split_loss, loss)
        found: dict[str, Tensor] = {}
        for stage in stages:
            gradients = gradients_of(stage)
            assert gradients.keys() == dict(stage.named_parameters()).keys(), "a stage has unused parameters"
            found |= {name: found[name] + g if name in found else g for name, g in gradients.items()}
        assert_close_gradients(found, gradients_of(model))

    def test_boundary_predicts_what_crosses_it(self, spec: ModelSpec, config: Any, model: nn.Module) -> None:
        """``boundary`` returns the names, shapes and dtypes of a stage's outputs; for the last stage, it is empty."""
        require(spec, "model:pipeline", "model:causal_lm")
        batch = microbatch(config)
        shapes = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
        for dtype in (torch.float32, torch.bfloat16):
            first, last = (stage.to(dtype) for stage in split(spec, config, model))
            assert isinstance(first, PipelineStage)
            assert isinstance(last, PipelineStage)
            sent = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in first(**batch).items()}
            assert dict(first.boundary(shapes)) == sent
            assert dict(last.boundary(shapes)) == {}
            if isinstance(first, SplitsSequence):  # then ranks of tp split the positions
                first.split_sequence(2)
                halved = {name: (one.shape[0], one.shape[1] // 2, *one.shape[2:]) for name, one in sent.items()}
                assert {name: one.shape for name, one in first.boundary(shapes).items()} == halved


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, dims=1).flatten(), reduction="sum")

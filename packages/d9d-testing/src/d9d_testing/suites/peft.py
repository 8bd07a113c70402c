"""Conformance suite of fine-tuning methods: trainable parameters, merging, names and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.peft import StartsFromWeights, SwitchesOff
from d9d_core.plugin import ModelSpec
from d9d_core.traits import HasBlocks
from d9d_engine.compose.initialise import initialise
from d9d_verify.layouts import Layout
from torch import Tensor, nn

from d9d_testing.layouts import Harness, assert_passed, job_of
from d9d_testing.suites.support.component import ComponentSuite
from d9d_testing.suites.support.tensors import bits, differing, facts
from d9d_testing.tolerances import TOLERANCES, assert_close_values, compare_directions

_TOY = "d9d_testing.toy.plugin"
_PARALLEL = "d9d_parallel.plugin"
#: Name of the input among gradients.
_INPUT = "the input"


class PeftSuite(ComponentSuite):
    """Conformance suite of fine-tuning methods (:class:`d9d_core.peft.PeftMethod`).

    Subclass it and name the method::

        class TestMyMethod(PeftSuite):
            target = "my_method"
            config = {"rank": 4}
            matches_nothing = {"match": "absent"}

    By default the method adapts the toy model ``toy_linears``, which has blocks of ``torch.nn.Linear``. For a method
    that adapts other layers, provide a model that maps ``x`` [B, features] to ``y`` [B, features]::

        model_plugin = "my_plugin.my_tests.model"
        model = {"name": "my_model", "features": 8}

    Attributes:
        model: config fields of the model.
        model_plugin: declaration module of the model; ``None`` for a toy model.
        matches_nothing: config fields that match no layer.
        starts_as_the_model: whether the adapted model initially computes the same as the original model.
    """

    kind = "peft method"

    model: ClassVar[Mapping[str, Any]] = {"name": "toy_linears", "features": 6, "blocks": 3}
    model_plugin: ClassVar[str | None] = None
    matches_nothing: ClassVar[Mapping[str, Any]] = {}
    starts_as_the_model: ClassVar[bool] = True

    # --- names

    def test_parameters_of_the_model_keep_names_and_shapes(self) -> None:
        """``inject`` keeps names, shapes and dtypes of the model's parameters, and allocates no memory.

        So weights and checkpoints can be loaded.
        """
        stage = self.on_meta()
        before = facts(dict(stage.named_parameters()))
        self.build().inject(stage)
        after = facts(dict(stage.named_parameters()))
        gone = sorted(before.keys() - after.keys())
        assert not gone, f"inject() removes {gone}; parameters of the model must keep their names"
        other = sorted(name for name in before if before[name] != after[name])
        assert not other, f"inject() changes shapes or dtypes of {other}"
        here = [name for name, tensor in stage.named_parameters() if not tensor.is_meta]
        assert not here, f"inject() allocates {here}; create tensors on the device of the layer they belong to"

    def test_it_names_what_trains(self) -> None:
        """``inject`` returns the trainable parameters: the same on every rank, with all new parameters among them."""
        stages = [self.on_meta(), self.on_meta()]
        known = dict(stages[0].named_parameters()).keys()
        named = [self.build().inject(stage) for stage in stages]
        assert isinstance(named[0], frozenset), f"inject() returns a {type(named[0]).__name__}; return a frozenset"
        assert named[0], "inject() trains nothing"
        assert named[0] == named[1], f"inject() returns {sorted(named[0] ^ named[1])} for one model and not another"
        now = dict(stages[0].named_parameters()).keys()
        unknown = sorted(named[0] - now)
        assert not unknown, f"inject() returns {unknown}, which the model does not have"
        idle = sorted(now - known - named[0])
        assert not idle, f"inject() adds {idle} but does not return them; return them too, or make them buffers"

    def test_a_method_that_matches_nothing_is_refused(self) -> None:
        """A method that matches nothing raises ``BuildError``, because every setting must have an effect."""
        if not self.matches_nothing:
            pytest.skip(f"{type(self).__name__}.matches_nothing has no fields that match no layer")
        with pytest.raises(BuildError) as refusal:
            self.build(**self.matches_nothing).inject(self.on_meta())
        assert str(refusal.value).strip(), "the BuildError has no text"

    # --- computation

    def test_new_tensors_can_be_initialised(self) -> None:
        """Modules initialise their tensors in ``reset_parameters()``; the model's own parameters are unaffected.

        With ``starts_as_the_model``, the output is the original model's at first.
        """
        (plain, _), (adapted, _) = self.adapted(), self.adapted(self.build())
        left = sorted(name for name, tensor in adapted.named_parameters() if not tensor.isfinite().all())
        assert not left, f"{left} are not initialised; the modules that own them need reset_parameters()"
        own = dict(plain.named_parameters())
        other = [name for name, p in adapted.named_parameters() if name in own and not torch.equal(p, own[name])]
        assert not other, f"with the method, {other} have other initial values"
        if self.starts_as_the_model:
            what = "the output of the adapted model before any step, compared with the original model"
            assert_close_values(self.forward(adapted), self.forward(plain), what=what)

    def test_merging_changes_no_output(self) -> None:
        """Merging keeps the output, the model's own parameters and their names, and removes injected tensors."""
        own = facts(dict(self.on_meta().named_parameters()))
        method = self.build()
        stage, named = self.adapted(method)
        _randomise(stage, named)
        base = self.forward(self.adapted()[0])
        expected = self.forward(stage)
        assert not torch.allclose(expected, base), f"random values in {sorted(named)} do not change the output"
        method.merge(stage)
        assert_close_values(self.forward(stage), expected, what="the output after merge(), compared with before")
        left = facts(dict(stage.named_parameters()))
        assert left == own, (
            f"after merge() there are extra {sorted(left.keys() - own.keys())} and no {sorted(own.keys() - left)}; "
            "an export must have the model's own tensors only"
        )

    def test_gradients_pass_through_as_through_merged_weights(self) -> None:
        """Inputs, and parameters that merging does not change, get the gradients of the merged model."""
        method = self.build()
        stage, named = self.adapted(method)
        _randomise(stage, named)
        before = bits(dict(stage.named_parameters()))
        adapted = self.gradients(stage)
        method.merge(stage)
        merged = self.gradients(stage)
        kept = bits(dict(stage.named_parameters()))
        same = [name for name in merged if name == _INPUT or (name in before and torch.equal(before[name], kept[name]))]
        wrong = []
        for name in same:
            angle, length = compare_directions(adapted[name], merged[name])
            if not (angle <= TOLERANCES[torch.float32].angle * 10 and length <= 1e-4):
                wrong.append(name)
        assert not wrong, (
            f"the gradients of {wrong} differ from the gradients in the merged model, which computes the same; the "
            "method's update must pass gradients on to its input: do not detach it"
        )

    @pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
    def test_switched_off_it_computes_as_the_model_did(self, compiled: bool) -> None:
        """Inside ``off``, outputs equal the original model's; afterwards everything is restored."""
        method = self.build()
        if not isinstance(method, SwitchesOff):
            pytest.skip("the method does not implement off()")
        stage, named = self.adapted(method)
        _randomise(stage, named)
        base, before = self.forward(self.adapted()[0]), bits(dict(stage.named_parameters()))
        expected = self.forward(stage)
        assert not torch.allclose(expected, base), f"random values in {sorted(named)} do not change the output"
        if compiled:
            torch.compiler.reset()
            # Compile block by block, as the strategy does: blocks share compiled code, whether they are adapted or not.
            blocks = stage.blocks().values() if isinstance(stage, HasBlocks) else [stage]
            for block in blocks:
                block.compile(backend="eager", fullgraph=True)
            assert_close_values(self.forward(stage), expected, what="the output of the compiled model")
        with method.off(stage):
            what = "the output inside off(), compared with the original model"
            assert_close_values(self.forward(stage), base, what=what)
            with method.off(stage):
                assert_close_values(self.forward(stage), base, what=f"in a second block, {what}")
            assert_close_values(self.forward(stage), base, what=f"after a second block, {what}")
        assert_close_values(self.forward(stage), expected, what="the output after off(), compared with before")
        assert not differing(before, bits(dict(stage.named_parameters()))), "off() changes tensors"
        with pytest.raises(LookupError), method.off(stage):
            raise LookupError
        assert_close_values(self.forward(stage), expected, what="the output after an error inside off()")

    def test_only_what_it_names_is_trained(self, tmp_path: Path) -> None:
        """Over three steps, all returned parameters change, and all others keep their bits."""
        named = self.build().inject(self.on_meta())
        trainer = job_of(self.job_values(run={"dir": str(tmp_path)}), self.plugins()).build(lambda _: None)
        before = bits(dict(trainer.stage.named_parameters()))
        trainer.train()
        changed = set(differing(before, bits(dict(trainer.stage.named_parameters()))))
        assert not changed - named, f"{sorted(changed - named)} are trained, but inject() does not return them"
        assert not named - changed, f"inject() returns {sorted(named - changed)}, but three steps do not change them"

    # --- jobs

    def test_a_resumed_run_goes_on_as_if_nothing_had_happened(self) -> None:
        """A resumed run has the same results, because checkpoints save and restore injected tensors."""
        plain, other = Layout("first half", {}, ()), Layout("second half", {}, ())
        assert_passed([self.harness().compare_resumed(plain, other)])

    def test_every_data_parallel_layout_computes_the_same(self) -> None:
        """Loss, gradients and updates of three steps match a single process; needs d9d-parallel."""
        self.need_layouts()
        layouts = [Layout("replicate 2", {"dp_replicate": 2}, ("replicate",)), self.sharded()]
        assert_passed(self.harness(_PARALLEL).compare(layouts))

    def test_a_sharded_run_continues_in_one_process_and_back(self) -> None:
        """A checkpoint of two ranks continues in one process, and vice versa, equally; needs d9d-parallel."""
        self.need_layouts()
        plain, harness = Layout("one process", {}, ()), self.harness(_PARALLEL)
        verdicts = [harness.compare_resumed(self.sharded(), plain), harness.compare_resumed(plain, self.sharded())]
        assert_passed(verdicts)

    # --- helpers for subclasses

    def plugins(self, *more: str) -> Sequence[str]:
        """Declaration modules of the toy plugin, the model and the fine-tuning method."""
        return list(dict.fromkeys(p for p in (_TOY, self.model_plugin, self.plugin, *more) if p is not None))

    def job_values(self, **sections: Any) -> dict[str, Any]:
        """Job that fine-tunes the model for three steps."""
        return {
            "steps": 3,
            "device": "cpu",
            "batch": {"size": 4, "microbatch": 1},
            "model": dict(self.model),
            "data": {"name": "toy_data", "features": self.model["features"]},
            "task": "toy_task",
            "optimizer": "toy_optimizer",
            "peft": {"name": self.target, **self.config},
            "gradient_clipping": {"max_norm": None},
            "trackers": [],
            "export": False,
            **sections,
        }

    def harness(self, *more: str) -> Harness:
        """Harness that runs the job in layouts."""
        return Harness(self.job_values(), self.plugins(*more))

    def sharded(self) -> Layout:
        """Layout with FSDP over two ranks."""
        return Layout("fsdp 2", {"dp_shard": 2}, ("fsdp",))

    def need_layouts(self) -> None:
        """Skip the test without d9d-parallel."""
        if find_spec(_PARALLEL.partition(".")[0]) is None:
            pytest.skip("needs d9d-parallel")

    def on_meta(self) -> nn.Module:
        """Model on the meta device, before injection."""
        job = job_of(self.job_values(), self.plugins())
        spec = job.registry.find("model", job.model.selector).spec
        assert isinstance(spec, ModelSpec)
        with torch.device("meta"):
            stage: nn.Module = spec.build.load()(job.model, Stage())
        return stage

    def adapted(self, method: Any = None) -> tuple[nn.Module, frozenset[str]]:
        """Initialised model on the CPU, adapted by the method or not, and the names of its trainable parameters."""
        stage = self.on_meta()
        named = method.inject(stage) if method is not None else frozenset()
        stage.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*stage.parameters(), *stage.buffers()):
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        initialise(stage, 0, torch.device("cpu"))
        if isinstance(method, StartsFromWeights):
            method.start(stage)
        return stage, named

    def gradients(self, stage: nn.Module) -> dict[str, Tensor]:
        """Gradients of the input and of all parameters, for some samples."""
        x = torch.randn(5, self.model["features"], generator=torch.Generator().manual_seed(3)).requires_grad_()
        stage.eval().requires_grad_()
        stage.zero_grad()
        out: Tensor = stage(x=x)["y"]
        given = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
        torch.autograd.backward(out, given)
        found = {name: p.grad.detach().clone() for name, p in stage.named_parameters() if p.grad is not None}
        assert x.grad is not None, "the input gets no gradient"
        return {**found, _INPUT: x.grad}

    def forward(self, stage: nn.Module) -> Tensor:
        """Output for some samples."""
        x = torch.randn(5, self.model["features"], generator=torch.Generator().manual_seed(3))
        stage.eval()
        with torch.no_grad():
            out: Tensor = stage(x=x)["y"]
        return out


def _randomise(stage: nn.Module, names: frozenset[str]) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in sorted(names):
            stage.get_parameter(name).normal_(std=0.5, generator=generator)

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.strategy import Applied
from d9d_engine.distributed.mesh import Topology
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.activation_checkpointing.operators import find_operators
from d9d_parallel.activation_checkpointing.strategy import ActivationCheckpointing
from d9d_testing.operators import OperatorCounter
from pydantic import ValidationError
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.smoke


def apply(model: nn.Module, **settings: Any) -> tuple[str, ...]:
    return applied(model, **settings).modules


def applied(model: nn.Module, **settings: Any) -> Applied:
    return ActivationCheckpointing(ActivationCheckpointingConfig(**settings)).apply(model, Topology())


def count_forwards(model: nn.Module) -> Counter[str]:
    """Counts calls of each block's ``up`` layer, which every forward of a block makes once."""
    calls: Counter[str] = Counter()
    for name, block in model.blocks().items():
        block.up.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


def saved_elements(model: nn.Module) -> int:
    """Elements that autograd keeps between forward and backward."""
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(64, 4))
    return saved


def test_random_numbers_do_not_repeat_when_switched_off(make_model, loss_and_gradients) -> None:
    plain, changed = make_model(), make_model()
    apply(changed, preserve_rng_state=False)
    loss, gradients = loss_and_gradients(plain)
    loss_again, gradients_again = loss_and_gradients(changed)
    assert torch.equal(loss, loss_again)
    assert not all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def test_outputs_gradients_and_dropout_are_the_same(make_model, loss_and_gradients) -> None:
    plain, changed = make_model(), make_model()
    apply(changed)
    loss, gradients = loss_and_gradients(plain)
    loss_again, gradients_again = loss_and_gradients(changed)
    assert torch.equal(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


def test_module_tree_and_parameter_names_stay(make_model) -> None:
    plain, changed = make_model(), make_model()
    apply(changed)
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in changed.named_modules()]
    assert list(plain.state_dict()) == list(changed.state_dict())


def test_blocks_are_computed_twice(make_model, loss_and_gradients) -> None:
    model = make_model()
    names = apply(model)
    calls = count_forwards(model)
    loss_and_gradients(model)
    assert names == ("backbone.layers.0", "backbone.layers.1", "backbone.layers.2")
    assert calls == dict.fromkeys(names, 2)


def test_only_every_second_block_is_computed_twice(make_model, loss_and_gradients) -> None:
    model = make_model(depth=5)
    assert apply(model, every=2) == ("backbone.layers.0", "backbone.layers.2", "backbone.layers.4")
    calls = count_forwards(model)
    loss_and_gradients(model)
    assert [calls[f"backbone.layers.{i}"] for i in range(5)] == [2, 1, 2, 1, 2]


def test_only_matched_blocks_are_computed_twice(make_model, loss_and_gradients) -> None:
    model = make_model()
    assert apply(model, match=["*.1", "*.2"]) == ("backbone.layers.1", "backbone.layers.2")
    calls = count_forwards(model)
    loss_and_gradients(model)
    assert [calls[f"backbone.layers.{i}"] for i in range(3)] == [1, 2, 2]


def test_less_is_kept_for_the_backward(make_model) -> None:
    plain, half, full = make_model(), make_model(), make_model()
    apply(half, every=2)
    apply(full)
    assert saved_elements(full) < saved_elements(half) < saved_elements(plain)
    assert saved_elements(full) < saved_elements(plain) / 3


def calls(model: nn.Module, run: Any) -> Counter[str]:
    with OperatorCounter() as mode:
        run(model)
    return mode.counts


def test_saved_operators_run_once_and_the_others_again(make_model, loss_and_gradients) -> None:
    plain, full, some = make_model(), make_model(), make_model()
    apply(full)
    apply(some, save=["aten.add*", "aten.tanh"])
    once, twice, mixed = (calls(model, loss_and_gradients) for model in (plain, full, some))
    assert (once["aten.tanh"], twice["aten.tanh"], mixed["aten.tanh"]) == (3, 6, 3)
    assert once["aten.addmm"] == mixed["aten.addmm"] < twice["aten.addmm"]
    assert once["aten.bernoulli_"] < mixed["aten.bernoulli_"]


def test_the_blocks_that_store_outputs_of_operators_are_named(make_model) -> None:
    assert applied(make_model()).storing == ()
    found = applied(make_model(), save=["aten.addmm"], every=2)
    assert found.storing == found.modules


def test_gradients_with_saved_operators_are_the_same(make_model, loss_and_gradients) -> None:
    plain, changed = make_model(), make_model()
    apply(changed, save=["aten.addmm", "aten.t*"], every=2)
    loss, gradients = loss_and_gradients(plain)
    loss_again, gradients_again = loss_and_gradients(changed)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


class Storages(TorchDispatchMode):
    """Sees the memory of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def bytes_until_the_backward(model: nn.Module) -> int:
    with Storages() as storages:
        loss = model(torch.ones(1024, 4))
        before = storages.alive()
    loss.backward()
    return before


def test_saved_operators_cost_their_outputs_and_nothing_else(make_model) -> None:
    plain, full, some = make_model(), make_model(), make_model()
    apply(full)
    apply(some, save=["aten.tanh"])
    costs = [bytes_until_the_backward(model) for model in (full, some, plain)]
    assert costs == sorted(costs)
    # [1024, 16] float32 of three blocks.
    assert costs[1] - costs[0] == 3 * 1024 * 16 * 4
    assert costs[0] < costs[2] / 3


def test_deep_copy_calls_its_own_blocks(make_model, loss_and_gradients) -> None:
    model = make_model()
    apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    calls = count_forwards(model)
    loss_and_gradients(twin)
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_on_the_meta_device_can_be_changed(make_model) -> None:
    with torch.device("meta"):
        model = make_model()
    apply(model)
    assert model(torch.ones(2, 4, device="meta")).is_meta


def test_pattern_without_a_match_is_an_error_unless_another_stage_has_one(make_model) -> None:
    outcome = applied(make_model(), match=["layers.*", "*.0"])
    assert outcome.modules
    assert outcome.unmatched.keys() == {"layers.*"}
    assert "pattern 'layers.*' in 'match' matches no block; blocks: backbone.layers.0" in outcome.unmatched["layers.*"]


def test_second_application_to_a_block_is_an_error(make_model) -> None:
    model = make_model()
    apply(model, match=["*.0"])
    with pytest.raises(BuildError, match=r"'backbone\.layers\.0' a second time"):
        apply(model)


def test_model_without_the_trait_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"needs model trait 'blocks', which no module of Linear has"):
        apply(nn.Linear(2, 2))


def test_model_without_blocks_is_an_error(make_model) -> None:
    with pytest.raises(BuildError, match="found no block"):
        apply(make_model(depth=0))


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("aten.mmm", "did you mean 'aten.mm'"),
        ("aten._scaled_dot_product_flash_atention", "'aten._scaled_dot_product_flash_attention'"),
    ],
)
def test_a_pattern_for_operators_without_a_match_is_an_error_with_near_names(make_model, pattern, hint) -> None:
    model = make_model()
    with pytest.raises(BuildError, match=re.escape(f"'{pattern}' in 'save' matches no operator")) as error:
        apply(model, save=["aten.mm", pattern])
    assert hint in str(error.value)
    assert all("forward" not in vars(block) for block in model.blocks().values())  # nothing is half done


def test_patterns_find_all_overloads_of_registered_operators() -> None:
    """The dispatcher's list of names is private; this fails when it changes."""
    assert torch.ops.aten.mm.default in find_operators("aten.mm")
    assert {operator.overloadpacket for operator in find_operators("aten.?mm")} >= {torch.ops.aten.bmm}
    assert len(find_operators("*")) > 2000


def test_operators_that_have_kernels_but_no_definition_are_passed_over() -> None:
    library = torch.library.Library("d9d_undefined", "FRAGMENT")
    library.impl("gone", torch.neg, "CPU")
    with pytest.raises(BuildError, match=r"d9d_undefined\.gone' in 'save' matches no operator"):
        find_operators("d9d_undefined.gone")


class Late(nn.Module):
    """Model of one block that calls an operator by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.block = LateBlock(name)

    def blocks(self) -> dict[str, nn.Module]:
        return {"block": self.block}


class LateBlock(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.operator = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.d9d_testing, self.operator)(self.up(x)).tanh()


def operator(name: str, ran: list[int]) -> Any:
    """An operator of torch that says when it runs."""

    @torch.library.custom_op(f"d9d_testing::{name}", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.sin()

    sine.register_fake(torch.empty_like)
    sine.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return sine


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_of_plugins_may_register_operators_after_the_strategy(compiled: bool) -> None:
    """Like modules of kernels, which are imported when they are bound."""
    name, ran = f"late_{compiled}".lower(), []
    some, full = Late(name), Late(name)
    apply(some, save=[f"d9d_testing.{name}"])
    apply(full)

    operator(name, ran)
    for model, times in ((some, 1), (full, 2)):
        if compiled:
            model.block.compile(backend="aot_eager", fullgraph=True)
        ran.clear()
        model.block(torch.ones(2, 4)).sum().backward()
        assert len(ran) == times


def test_operators_that_a_package_never_registers_are_an_error_in_the_first_block(
    make_model, loss_and_gradients
) -> None:
    model = make_model()
    apply(model, save=["d9d_testing.gone"])
    with pytest.raises(BuildError, match=r"'d9d_testing\.gone' in 'save' matches no operator"):
        loss_and_gradients(model)


class Attending(nn.Module):
    """Model of two blocks that call an op ``wave`` with a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AttendingBlock(), AttendingBlock()])

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum()


class AttendingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.wave = OpSlot("wave", torch.sin)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"wave": self.wave}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wave(self.up(x)).tanh()


def bind(model: Attending, function: Any, *operators: str) -> None:
    for layer in model.layers:
        layer.wave.bind("ours", function)
        layer.wave.operators = operators


@pytest.mark.parametrize("compiled", [False, True])
def test_what_an_op_returns_is_kept_whatever_its_kernel(compiled: bool) -> None:
    ran: list[int] = []
    for kernel in ("one", "other"):
        name = f"{kernel}_{compiled}".lower()
        some, full = Attending(), Attending()
        outcome = applied(some, save=["wave"])
        apply(full)
        for model, times in ((some, 2), (full, 4)):
            bind(model, operator(name, ran) if model is some else getattr(torch.ops.d9d_testing, name), f"*.{name}")
            if model is some:
                assert outcome.check_kernels is not None
                outcome.check_kernels()
            for layer in model.layers if compiled else ():
                layer.compile(backend="aot_eager", fullgraph=True)
            ran.clear()
            model(torch.ones(2, 4)).backward()
            assert len(ran) == times


def test_an_op_whose_kernel_names_no_operators_is_an_error_once_it_is_bound() -> None:
    model = Attending()
    outcome = applied(model, save=["wave"])
    assert outcome.storing == ()  # kernels of the op store their outputs, whatever they are
    assert not outcome.unmatched
    assert outcome.check_kernels is not None
    with pytest.raises(BuildError, match=r"'wave' in 'save': its kernel 'reference' has no operators"):
        outcome.check_kernels()


def test_a_name_that_is_no_op_of_the_blocks_is_an_error_unless_another_stage_has_it(caplog) -> None:
    model = Attending()
    outcome = applied(model, save=["wafe", "aten.tanh"])
    assert outcome.unmatched.keys() == {"wafe"}
    assert (
        "'wafe' in 'save' matches no operator; did you mean 'wave'? (ops of the blocks: wave)"
        in (outcome.unmatched["wafe"])
    )
    for _ in range(2):
        model(torch.ones(2, 4)).backward()
    assert not caplog.records  # this stage stores all that it has


def test_a_name_that_is_near_nothing_is_an_error_that_shows_what_names_look_like() -> None:
    text = applied(Attending(), save=["mm"]).unmatched["mm"]
    assert (
        "'mm' in 'save' matches no operator; names look like 'attention' or 'aten.mm' (ops of the blocks: wave)" in text
    )


def test_operators_that_blocks_do_not_run_are_a_warning_in_the_second_forward(caplog) -> None:
    model = Attending()
    applied(model, save=["aten.sin", "aten.bmm", "wave"])
    bind(model, torch.cos, "aten.erf")
    model(torch.ones(2, 4)).backward()
    assert not caplog.records
    for _ in range(2):
        model(torch.ones(2, 4)).backward()
    (record,) = caplog.records
    assert "stores nothing for 'aten.sin', 'aten.bmm', 'wave' in 'save'" in record.getMessage()


def test_operators_that_blocks_run_are_no_warning(caplog) -> None:
    model = Attending()
    applied(model, save=["aten.t*", "wave"])
    bind(model, torch.cos, "aten.cos")
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
    assert not caplog.records


@pytest.mark.parametrize(("field", "value"), [("every", 0), ("match", []), ("mode", "full")])
def test_impossible_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        ActivationCheckpointingConfig.model_validate({field: value})

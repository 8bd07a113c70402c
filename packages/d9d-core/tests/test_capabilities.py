from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from d9d_core.cli.health import examine
from d9d_core.plugin import CapabilitySpec, ModelSpec, Ref, StrategySpec, hookimpl
from d9d_core.registry.capabilities import MODEL_TRAITS, Chosen, Circumstances, judge, order
from d9d_core.registry.registry import Registry
from d9d_core.traits import TRAITS

REF = Ref("a:b")


def strategy(name: str = "expert_parallel", anchor: str = "data", **kwargs: object) -> StrategySpec:
    return StrategySpec(name=name, summary="x", config=REF, build=REF, anchor=anchor, **kwargs)  # type: ignore[arg-type]


def registry(*specs: StrategySpec | CapabilitySpec) -> Registry:
    model = ModelSpec(name="qwen3", summary="x", config=REF, build=REF, tiny=REF, provides={"model:blocks"})

    @hookimpl
    def d9d_strategies() -> list[object]:
        return [s for s in specs if isinstance(s, StrategySpec)]

    @hookimpl
    def d9d_models() -> list[object]:
        return [model]

    @hookimpl
    def d9d_capabilities() -> list[object]:
        return [s for s in specs if isinstance(s, CapabilitySpec)]

    plugin = SimpleNamespace(
        d9d_strategies=d9d_strategies, d9d_models=d9d_models, d9d_capabilities=d9d_capabilities, __name__="acme"
    )
    return Registry.of(plugin)


def verdicts(spec: StrategySpec, circumstances: Circumstances, *others: StrategySpec | CapabilitySpec) -> list[object]:
    found = registry(spec, *others)
    chosen = [Chosen("model", found.find("model", "qwen3")), Chosen("parallel[0]", found.find("strategy", spec.name))]
    return [(v.satisfied, v.reason) for v in judge(chosen, found, circumstances)]


def one(token: str, circumstances: Circumstances | None = None, *others: CapabilitySpec) -> tuple[bool | None, str]:
    (verdict,) = verdicts(strategy(requires={token}), circumstances or Circumstances(), *others)
    return verdict  # type: ignore[return-value]


def test_a_missing_trait_names_what_the_model_has() -> None:
    assert one("model:experts") == (
        False,
        "strategy 'expert_parallel' needs model trait 'experts'; qwen3 (acme) has: blocks",
    )


def test_a_trait_of_the_model_satisfies() -> None:
    assert one("model:blocks")[0] is True


def test_an_axis_of_one_rank_does_not_satisfy() -> None:
    assert one("mesh:ep", Circumstances(mesh={"ep": 1})) == (
        False,
        "strategy 'expert_parallel' needs mesh:ep: mesh.ep is 1; set mesh.ep to more than 1",
    )
    assert one("mesh:ep", Circumstances(mesh={"ep": 2}))[0] is True


@pytest.mark.parametrize(
    ("token", "device", "capability", "expected"),
    [
        ("device:cuda", "cpu", None, False),
        ("device:cuda", "cuda", None, True),
        ("device:cuda>=9.0", "cuda", (8, 0), False),
        ("device:cuda>=9.0", "cuda", (9, 0), True),
        ("device:cuda>=9.0", "cuda", (10, 0), True),
        ("device:cuda>=9.0", None, None, None),
    ],
)
def test_devices_are_compared(
    token: str, device: str | None, capability: tuple[int, int] | None, expected: bool | None
) -> None:
    assert one(token, Circumstances(device=device, compute_capability=capability))[0] is expected


def test_imports_are_looked_for_without_importing() -> None:
    assert one("import:json")[0] is True
    assert one("import:deep_ep") == (
        False,
        "strategy 'expert_parallel' needs import:deep_ep: module deep_ep is not installed; see the documentation of "
        "acme for how to install it",
    )


@pytest.mark.parametrize("namespace", [True, False])
def test_a_module_inside_of_a_package_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: bool
) -> None:
    (tmp_path / "acme_attn" / "cute").mkdir(parents=True)
    (tmp_path / "acme_attn" / "cute" / "kernels.py").touch()
    if not namespace:
        (tmp_path / "acme_attn" / "__init__.py").write_text("raise AssertionError('imported')")
        (tmp_path / "acme_attn" / "cute" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for module, there in (("acme_attn.cute", True), ("acme_attn.cute.kernels", True), ("acme_attn.interface", False)):
        assert one(f"import:{module}")[0] is there, module
    assert one("import:acme_other.cute")[0] is False
    assert "acme_attn" not in sys.modules


def test_who_stands_in_for_a_module_counts_and_who_is_blocked_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("json.acme")
    module.__spec__ = ModuleSpec("json.acme", None)
    monkeypatch.setitem(sys.modules, "json.acme", module)
    monkeypatch.setitem(sys.modules, "json.decoder", None)
    assert one("import:json.acme")[0] is True
    assert one("import:json.decoder")[0] is False


def test_a_library_that_the_plugin_depends_on_comes_with_it_however_its_module_is_spelt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("d9d_core.registry.capabilities.requires", lambda _: ["torch>=2", "acme-kernel>=1"])
    assert one("import:acme_kernel")[1].endswith("'pip install acme' installs it")
    assert one("import:acme_kernel.ops")[1].endswith("'pip install acme' installs it")
    assert one("import:acme")[1].endswith("'pip install acme' installs it")
    assert one("import:acme_kern")[1].endswith("for how to install it")


def test_a_library_that_a_marker_leaves_out_here_is_said_to_be_with_the_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'acme-kernel>=1; sys_platform == "beos"'
    monkeypatch.setattr("d9d_core.registry.capabilities.requires", lambda _: ["torch>=2", line])
    reason = 'acme omits it here: acme-kernel is supported only where sys_platform == "beos"'
    assert one("import:acme_kernel")[1].endswith(reason)


def test_a_library_of_an_extra_does_not_come_with_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'acme-kernel>=1; extra == "fast"'
    monkeypatch.setattr("d9d_core.registry.capabilities.requires", lambda _: ["torch>=2", line])
    assert one("import:acme_kernel")[1].endswith("for how to install it")
    assert "omits" not in one("import:acme_kernel")[1]


@pytest.mark.thorough
def test_doctor_says_which_components_lack_a_library_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = 'acme-kernel>=1; sys_platform == "beos"'
    monkeypatch.setattr("d9d_core.registry.capabilities.requires", lambda _: [line])
    specs = [strategy(name, requires={"import:acme_kernel", "import:json"}) for name in ("one", "two")]
    assert examine(registry(*specs), verbose=True), "a library that is left out is no fault of the machine"
    (said,) = [line for line in " ".join(capsys.readouterr().out.split()).split(" -- ") if "acme_kernel" in line][-1:]
    assert said.endswith(
        "plugin acme: without acme_kernel, not available: strategy 'one', strategy 'two'; "
        'acme omits it here: acme-kernel is supported only where sys_platform == "beos"'
    )


def test_a_token_nobody_declares_is_an_error() -> None:
    satisfied, reason = one("modle:blocks")
    assert satisfied is False
    assert "no plugin declares the token 'modle:blocks'; it may be misspelt, or a plugin is missing" in reason


def test_a_declared_token_says_how_to_obtain_it() -> None:
    declared = CapabilitySpec(token="acme:fast_links", summary="provided by the strategy acme_links")
    satisfied, reason = one("acme:fast_links", None, declared)
    assert satisfied is False
    assert reason.endswith("needs acme:fast_links: provided by the strategy acme_links")


def test_conflicts_are_refused() -> None:
    ((satisfied, reason),) = verdicts(strategy(conflicts={"model:blocks"}), Circumstances())  # type: ignore[misc]
    assert satisfied is False
    assert "strategy 'expert_parallel' (acme) conflicts with 'model:blocks'" in reason


@pytest.mark.parametrize("token", ["modle:blocks", "model:block", "mesh:xp", "device:", "acme:thing"])
@pytest.mark.parametrize("field", ["requires", "conflicts", "provides"])
def test_a_token_nobody_declares_is_an_error_wherever_it_stands(field: str, token: str) -> None:
    found = registry(strategy(**{field: {token}}))  # type: ignore[arg-type]
    (verdict,) = judge([Chosen("parallel[0]", found.find("strategy", "expert_parallel"))], found, Circumstances())
    assert verdict.satisfied is False
    if field != "requires" or not token.startswith("model:"):
        assert f"no plugin declares the token '{token}'" in verdict.reason


def test_declared_tokens_may_be_provided_and_refused() -> None:
    declared = CapabilitySpec(token="acme:fast_links", summary="provided by the strategy acme_links")
    assert verdicts(strategy(provides={"acme:fast_links", "strategy:fsdp"}), Circumstances(), declared) == []
    ((satisfied, _),) = verdicts(strategy(conflicts={"acme:fast_links"}), Circumstances(), declared)  # type: ignore[misc]
    assert satisfied is True


@pytest.mark.parametrize("namespace", ["mesh", "strategy", "device", "import"])
def test_the_namespaces_of_core_are_reserved(namespace: str) -> None:
    with pytest.raises(ValueError, match=r"the namespace is d9d-core's; use one of your own"):
        CapabilitySpec(token=f"{namespace}:thing", summary="x")


def test_plugins_may_declare_what_models_offer() -> None:
    assert CapabilitySpec(token="model:causal_lm", summary="x").key == "model:causal_lm"


def test_strategies_are_ordered_by_anchor_then_position_then_listing() -> None:
    specs = [
        strategy("compile", "compile"),
        strategy("late", "tensor", position="after"),
        strategy("tp", "tensor"),
        strategy("early", "tensor", position="before"),
        strategy("tp2", "tensor"),
    ]
    found = registry(*specs)
    chosen = [Chosen(f"parallel[{i}]", found.find("strategy", s.name)) for i, s in enumerate(specs)]
    assert [c.spec.name for c in order(chosen)] == ["early", "tp", "tp2", "late", "compile"]


def test_core_knows_the_tokens_of_its_own_traits() -> None:
    assert {f"model:{trait}" for trait in MODEL_TRAITS} == set(TRAITS)


@pytest.mark.parametrize("anchor", ["", "tensors"])
def test_an_unknown_anchor_is_refused(anchor: str) -> None:
    with pytest.raises(ValueError, match="unknown anchor"):
        strategy(anchor=anchor)


def test_an_unknown_position_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown position 'beside'; one of before, at, after"):
        strategy(position="beside")


def test_a_string_is_no_set_of_tokens() -> None:
    with pytest.raises(TypeError, match=r"expected a set of capability tokens, got the string 'mesh:ep'"):
        strategy(requires="mesh:ep")


@pytest.mark.parametrize("target", ["a.b", "a:", ":b", "a b:c", "a:b:c"])
def test_a_malformed_reference_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form 'package.module:attribute'"):
        Ref(target)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("strategy:hsdp", "not there: the job has no strategy hsdp"),
        ("mesh:ep", "not there: mesh.ep is 1"),
        ("acme:fast_links", "not there: no component of the job provides it"),
    ],
)
def test_a_refused_token_that_does_not_hold_gives_no_advice_to_add_it(token: str, reason: str) -> None:
    declared = CapabilitySpec(token="acme:fast_links", summary="provided by the strategy acme_links")
    assert verdicts(strategy(conflicts={token}), Circumstances(), declared) == [(True, reason)]


def test_a_missing_strategy_says_how_to_add_it() -> None:
    assert one("strategy:hsdp") == (
        False,
        "strategy 'expert_parallel' needs strategy:hsdp: add {name: hsdp} to parallel",
    )


def test_an_interrupt_that_pydantic_made_an_error_of_is_an_interrupt_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from pydantic_core import SchemaError\nraise SchemaError('Error building validator:  KeyboardInterrupt: ')\n"
    )
    (tmp_path / "interrupted_config.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Ref("interrupted_config:Config").load()

"""Components that are made of others, which open fields of their configs name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from d9d_core.components.instantiate import inner_builder, instantiate
from d9d_core.config.open_union import inner_configs, open_fields
from d9d_core.config.resolve import choose
from d9d_core.extend import BuildError, Named, PluginConfig
from d9d_core.plugin import Ref, Registry, SubscriberSpec, hookimpl
from d9d_core.plugin.capabilities import Circumstances, judge


class Leaf(PluginConfig):
    name: Literal["leaf"] = "leaf"
    number: int = 0


class Pair(PluginConfig):
    name: Literal["pair"] = "pair"
    first: Annotated[PluginConfig, Named("subscriber")]
    others: tuple[Annotated[PluginConfig, Named("subscriber")], ...] = ()
    last: Annotated[PluginConfig, Named("subscriber")] | None = None


class Component:
    """Subscriber that keeps what it was built with."""

    def __init__(self, config: Any, *arguments: Any) -> None:
        self.config, self.arguments = config, arguments
        self.inner = [arguments[-1](one) for _, _, one in inner_configs(config)]

    def subscriptions(self) -> list[Any]:
        return []


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    classes = {"leaf": Leaf, "pair": Pair, "build": Component}
    monkeypatch.setattr(Ref, "load", lambda self: classes[str(self).rpartition(":")[2]])

    @hookimpl
    def d9d_subscribers() -> list[SubscriberSpec]:
        leaf, pair, build = Ref("acme:leaf"), Ref("acme:pair"), Ref("acme:build")
        return [
            SubscriberSpec(name="leaf", summary="x", config=leaf, build=build, requires={"mesh:ep"}),
            SubscriberSpec(name="pair", summary="x", config=pair, build=build),
        ]

    return Registry.of(SimpleNamespace(d9d_subscribers=d9d_subscribers, __name__="acme"))


def pair(registry: Registry) -> PluginConfig:
    fields = {"first": {"name": "leaf", "number": 3}, "others": ["leaf", {"name": "pair", "first": "leaf"}]}
    return Pair.model_validate(fields, context={"registry": registry})


def test_inner_components_are_found_built_and_judged(registry: Registry) -> None:
    assert open_fields(Pair) == {"first": "subscriber", "others": "subscriber", "last": "subscriber"}
    config = pair(registry)
    chosen = choose("subscriber", "subscribers[0]", config, registry)
    assert [one.where for one in chosen.all()] == [
        "subscribers[0]",
        "subscribers[0].first",
        "subscribers[0].others[0]",
        "subscribers[0].others[1]",
        "subscribers[0].others[1].first",
    ]
    made = instantiate(chosen, config)
    assert made.inner[0].config.number == 3
    assert not made.inner[0].arguments
    assert isinstance(made.inner[2].inner[0].config, Leaf)
    failed = [
        verdict.chosen.where for verdict in judge(chosen.all(), registry, Circumstances()) if not verdict.satisfied
    ]
    assert failed == [f"subscribers[0].{field}" for field in ("first", "others[0]", "others[1].first")]


def test_a_config_of_elsewhere_is_refused(registry: Registry) -> None:
    config = pair(registry)
    (build,) = inner_builder(choose("subscriber", "subscribers[0]", config, registry), config)
    with pytest.raises(
        BuildError, match=r"subscribers\[0\]: 'pair' .* builds a config that is in none of its open fields"
    ):
        build(Leaf())
    assert inner_builder(choose("subscriber", "subscribers[0]", Leaf(), registry), Leaf()) == ()

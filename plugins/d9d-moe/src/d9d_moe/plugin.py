"""What d9d-moe offers: a word for models with experts. Its layers are built by the models that contain them."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import CapabilitySpec, hookimpl

D9D_API = 1


@hookimpl
def d9d_capabilities() -> Iterable[CapabilitySpec]:
    """What a plugin may ask of a model."""
    yield CapabilitySpec(
        token="model:experts",  # noqa: S106 - a capability token
        summary="some layers of the model are mixtures of experts; see d9d_moe.layer.MoELayer",
    )

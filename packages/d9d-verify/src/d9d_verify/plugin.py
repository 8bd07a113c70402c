"""Declaration of the commands ``verify`` and ``certify``, and of the dataset of certificates."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, DatasetSpec, Ref, hookimpl

D9D_API = 2
#: Requirement of plugin records that need torch. Without torch (as in a CI that only checks job files), using such a
#: record is an error that says how to install torch.
TORCH = frozenset({"import:torch"})


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``verify`` and ``certify``."""
    yield CommandSpec(
        name="verify",
        summary="Check that layouts of a job compute the same as one process.",
        requires=TORCH,
        app=Ref("d9d_verify.command:app"),
    )
    yield CommandSpec(
        name="certify",
        summary="Check which layouts and features compute the same for a model.",
        requires=TORCH,
        app=Ref("d9d_verify.certify.command:app"),
    )


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Declare the dataset of certificates."""
    yield DatasetSpec(
        name="certificate_tokens",
        summary="Token ids drawn at random, in samples of one document.",
        config=Ref("d9d_verify.certify.tokens:CertificateTokensConfig"),
        build=Ref("d9d_verify.certify.tokens:CertificateTokens"),
        gives={"tokens": 2, "targets": 2},
        requires=TORCH,
    )

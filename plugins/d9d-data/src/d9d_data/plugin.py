"""Declaration of the datasets, and of the commands ``d9d data`` and ``d9d new job``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, DatasetSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Declare the datasets, which a job selects by the name in its section ``data``."""
    yield DatasetSpec(
        name="text",
        summary="Text files, tokenised once and packed into sequences of equal length.",
        config=Ref("d9d_data.config:TextConfig"),
        build=Ref("d9d_data.stream.text:build_text"),
        gives={"tokens": 2, "targets": 2, "positions": 2, "documents": 2},
    )
    yield DatasetSpec(
        name="documents",
        summary="Documents, tokenised once; each is a sample, and packs have documents of similar length.",
        config=Ref("d9d_data.config:DocumentsConfig"),
        build=Ref("d9d_data.stream.documents:build_documents"),
        gives={"tokens": 2, "targets": 2},
    )
    yield DatasetSpec(
        name="chat",
        summary="Conversations, rendered by the model's chat template; the assistant's tokens are learned.",
        config=Ref("d9d_data.config:ChatConfig"),
        build=Ref("d9d_data.stream.chat:build_chat"),
        gives={"tokens": 2, "targets": 2},
    )
    yield DatasetSpec(
        name="preference",
        summary="Preference pairs: a preferred and a rejected completion, one row each; the completions are learned.",
        config=Ref("d9d_data.config:PreferenceConfig"),
        build=Ref("d9d_data.stream.chat:build_preference"),
        gives={"tokens": 2, "targets": 2, "samples": 1},
    )
    yield DatasetSpec(
        name="tokens",
        summary="Records that are tokenised already: token ids, and labels or a mask of the tokens to learn.",
        config=Ref("d9d_data.config:TokensConfig"),
        build=Ref("d9d_data.stream.chat:build_tokens"),
        gives={"tokens": 2, "targets": 2},
    )
    yield DatasetSpec(
        name="labelled",
        summary="Texts with one label each, or word lists with one label per word, for classification.",
        config=Ref("d9d_data.config:LabelledConfig"),
        build=Ref("d9d_data.stream.documents:build_documents"),
        gives={"tokens": 2, "labels": 1},
    )
    yield DatasetSpec(
        name="pairs",
        summary="Queries with relevant documents and optional negatives, one row per text, for embeddings.",
        config=Ref("d9d_data.config:PairsConfig"),
        build=Ref("d9d_data.stream.documents:build_documents"),
        gives={"tokens": 2, "samples": 1},
    )
    yield DatasetSpec(
        name="dataset",
        summary="Map-style or iterable dataset of PyTorch or Hugging Face, made by a function of yours.",
        config=Ref("d9d_data.dataset.config:DatasetConfig"),
        build=Ref("d9d_data.dataset.stream:build_dataset"),
    )
    yield DatasetSpec(
        name="mixture",
        summary="Samples of several datasets, in exact proportions at any moment.",
        config=Ref("d9d_data.mixture.config:MixtureConfig"),
        build=Ref("d9d_data.mixture.stream:build_mixture"),
        composite=True,
        gives="inner",
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the commands ``d9d data``, which shows the samples of a job, and ``d9d new job``."""
    yield CommandSpec(
        name="job",
        group="new",
        summary="Write a complete job file for a model and records.",
        app=Ref("d9d_data.new_job.command:app"),
    )
    yield CommandSpec(
        name="data",
        summary="Show the samples that a job trains on.",
        app=Ref("d9d_data.cli.commands:app"),
    )

"""Command ``d9d generate``."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.cli.options import Files, NoPlugins, command_app, discover_plugins, say
from d9d_core.errors import JobError

app = command_app()


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Model directory in Hugging Face layout, adapter, run, or checkpoint."),
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue or answer.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer each line of standard input.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="JSON lines with 'prompt' or 'messages', and optionally 'tools'."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the completions of --file, in the same order.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    batch: Annotated[int, typer.Option(metavar="N", help="Number of prompts of --file completed together.", min=1)] = 8,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON list of tool schemas for the chat template.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts without the chat template.")] = False,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Largest number of tokens of a completion.", min=1)
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", help="0 takes the most probable token; by default the model's setting.", min=0.0),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Draw from the most probable tokens with this total probability.", min=1e-9, max=1.0
        ),
    ] = None,
    generation: Annotated[
        list[str],
        typer.Option(
            "--generation",
            metavar="FIELD=VALUE",
            help="Another setting of transformers' GenerationConfig, such as num_beams=1; may be repeated.",
        ),
    ] = [],  # noqa: B006 - typer reads the default
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the sampling.", min=0)] = 0,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Device, such as cpu or cuda; auto by default.")
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Dtype of the weights, such as bfloat16; unchanged by default.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the tokenizer; by default the model's.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base model of an adapter; by default the one that the adapter names."),
    ] = None,
    plugin: Files = [],  # noqa: B006 - typer reads the default
    no_plugins: NoPlugins = False,
) -> None:
    """Generate text with transformers from an export, a run, a checkpoint or an adapter."""
    if [prompt is not None, chat, file is not None].count(True) != 1:
        raise JobError("give one of --prompt TEXT, --chat and --file FILE")
    if (file is None) != (output is None):
        raise JobError("--file FILE and --output FILE must be given together")
    if raw and not (prompt is not None or file is not None):
        raise JobError("--raw: a conversation needs the chat template; remove --raw or --chat")
    from d9d_core.cli.interrupts import interrupts_deferred

    with interrupts_deferred():
        from d9d_engine.distributed.devices import choose_device
        from d9d_weights.state.tensors import parse_dtype

        from d9d_inference.commands.model_files import found_model
        from d9d_inference.generation.chat import chat as converse
        from d9d_inference.generation.file_job import FileJob
        from d9d_inference.generation.language_model import Decoding, LanguageModel, generation_settings
        from d9d_inference.generation.library import load_library
        from d9d_inference.generation.prompts import Prompt, read_prompts, read_tools

        library = load_library("transformers", "d9d generate")
    if not sys.stderr.isatty():
        library.utils.logging.disable_progress_bar()
    further = generation_settings(generation, library)
    decoding = Decoding(max_new_tokens, temperature, top_p, seed, further)
    schemas = None if tools is None else read_tools(tools)
    prompts = [] if file is None else read_prompts(file)
    chosen, number_format = choose_device(device), parse_dtype(dtype)
    with found_model(model, discover_plugins(plugin, no_plugins), say, base) as found:
        job = None
        if output is not None:
            settings = {
                "model": hashlib.sha256(found.origin.encode()).hexdigest(),
                "tokenizer": None if tokenizer is None else str(tokenizer.resolve()),
                **vars(decoding),
                "dtype": dtype,
                "system": system,
                "tools": schemas,
                "raw": raw,
            }
            job = FileJob(prompts, output, batch, overwrite, settings)
            job.check()
        with interrupts_deferred():
            writer = LanguageModel(found.directory, tokenizer or found.directory, found.adapter, chosen, number_format)
        if chat:
            if not writer.has_template:
                raise JobError(f"--chat: {model} has no chat template; continue a text instead: --prompt TEXT")
            converse(writer, decoding, schemas, system, say)
            return
        if prompt is not None:
            if not prompt:
                raise JobError("--prompt: the text is empty")
            prompts = [Prompt("--prompt", {}, prompt)]
        ids = [writer.encode(one, schemas, system, raw) for one in prompts]
        for one, tokens in zip(prompts, ids, strict=True):
            writer.check_length(tokens, max_new_tokens, one.where)
        if job is None:
            writer.stream(ids[0], decoding)
        else:
            job.run(writer, ids, decoding, say)

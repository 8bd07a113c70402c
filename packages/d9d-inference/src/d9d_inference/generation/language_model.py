"""Language model in transformers: encoding of prompts, and generation with the library's ``generate``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from d9d_core.config import closest
from d9d_core.errors import BuildError, CheckpointError, DataError, JobError, PluginError
from d9d_core.job_file.pretrained import read_config_json
from d9d_core.job_file.reading import read_yaml
from d9d_core.untrusted import MAX_JSON_BYTES, parse_json, read_regular, visible
from d9d_weights.hugging_face.adapter import ADAPTER_FILES
from d9d_weights.hugging_face.adapter_bounds import bounded_fields
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.index import read_object
from d9d_weights.hugging_face.layout import some
from d9d_weights.hugging_face.tokenizer_bounds import check_tokenizer
from d9d_weights.templates.process import TemplateError, TemplateProcess

from d9d_inference.generation.decode_graph import SETTINGS, replayed_steps, suits
from d9d_inference.generation.library import load_library
from d9d_inference.generation.prompts import Prompt

_COMMAND = "d9d generate"
#: Files of tokenizers; a tokenizer has at least one of them.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
#: Name of the weight of a language model's head.
_HEAD = "lm_head.weight"
#: Parts of class names: the class name of a model that generates text contains one of them.
_WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
#: Part of a field's name in ``config.json`` -> largest accepted number in such a field.
_MOST_SIZES = {"num_": 1 << 14, "layers": 1 << 14, "_size": 1 << 24, "_dim": 1 << 24, "position": 1 << 27}
#: Largest accepted depth of nested sections in ``config.json``.
_MAX_DEPTH = 8
#: Suffix of files that a library reads at once -> largest accepted size in bytes.
_MOST_BYTES = {
    ".json": MAX_JSON_BYTES, ".txt": MAX_JSON_BYTES, ".model": MAX_JSON_BYTES, ".jinja": 1 << 20, ".py": 1 << 20,
}  # fmt: skip
#: Setting of ``generation_config.json`` that multiplies memory -> largest value accepted from the file.
_MOST_INHERITED = {"num_beams": 16, "num_return_sequences": 1, "num_beam_groups": 16}


@dataclass(frozen=True)
class Decoding:
    """Decoding settings; ``None`` uses the model's ``generation_config.json``.

    Attributes:
        max_new_tokens: largest number of tokens of a completion.
        temperature: divisor of the logits for sampling; 0 takes the most probable token.
        top_p: tokens are sampled from the most probable ones, whose probabilities add up to this number.
        seed: seed of the sampling.
        further: further fields of transformers' ``GenerationConfig``.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    further: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check for contradicting settings.

        Raises:
            JobError: ``top_p`` is set, but has no effect because ``temperature`` is 0.
        """
        if self.temperature == 0 and self.top_p is not None:
            raise JobError("--top-p: it has no effect at temperature 0, which takes the most probable token")

    def arguments(self) -> dict[str, Any]:
        """Return these settings as fields of transformers' ``GenerationConfig``."""
        given: dict[str, Any] = {**self.further, "max_new_tokens": self.max_new_tokens}
        if self.temperature is not None:
            given["do_sample"] = self.temperature > 0
        if self.temperature:
            given["temperature"] = self.temperature
        if self.top_p is not None:
            given |= {"do_sample": True, "top_p": self.top_p}
        return given


def generation_settings(assignments: Sequence[str], library: Any) -> dict[str, Any]:
    """Parse the values of ``--generation``: further fields of transformers' ``GenerationConfig``.

    Args:
        assignments: texts ``field=value``; values are YAML.
        library: the imported module ``transformers``.

    Raises:
        JobError: an assignment is malformed, or names no field.
    """
    known = {name for name in vars(library.GenerationConfig()) if not name.startswith("_")}
    found = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in known:
            near = None if name in known else closest(name, known)
            hint = f"did you mean '{near}'?" if near else "write FIELD=VALUE, such as num_beams=1"
            raise JobError(f"--generation {assignment} is not FIELD=VALUE with a field of GenerationConfig; {hint}")
        found[name] = read_yaml(text, f"--generation {name}")[0]
    return found


class LanguageModel:
    """Language model and tokenizer of a directory in Hugging Face layout, loaded by transformers.

    No code from the directory is run, and no pickle is read.

    Args:
        directory: directory of the model.
        tokenizer: directory of its tokenizer.
        adapter: directory of an adapter in the format of the ``peft`` library; ``None`` without one.
        device: device of the model.
        dtype: dtype of the weights; ``None`` keeps the stored dtype.

    Raises:
        PluginError: transformers is not installed, or peft for an adapter.
        CheckpointError: the model generates no text, has no tokenizer, or cannot be loaded.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Path,
        adapter: Path | None,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._library = load_library("transformers", _COMMAND)
        peft = load_library("peft", f"{_COMMAND} of an adapter") if adapter is not None else None
        if not any((tokenizer / name).is_file() for name in _TOKENIZERS):
            raise CheckpointError(
                f"{tokenizer} has no tokenizer; name a directory with the model's tokenizer: --tokenizer DIR"
            )
        own = {"local_files_only": True, "trust_remote_code": False}
        for place in {directory, tokenizer, adapter or directory}:
            _check_files(place)
        with _loading(tokenizer):
            self.tokenizer = self._library.AutoTokenizer.from_pretrained(tokenizer, **own)
        _check_sizes(f"{directory}/config.json", read_config_json(str(directory)))
        with _loading(directory):
            config = self._library.AutoConfig.from_pretrained(directory, **own)
            _check_writes(directory, config)
            load = self._library.AutoModelForCausalLM.from_pretrained
            model, report = load(
                directory, use_safetensors=True, dtype=dtype or "auto", output_loading_info=True, **own
            )
        _check_complete(directory, model, report)
        if peft is not None:
            assert adapter is not None
            with _loading(adapter):
                settings = _adapter_config(peft, adapter)
                model = peft.PeftModel.from_pretrained(model, adapter, config=settings, local_files_only=True)
                # the adapter may have been trained with other stop tokens
                if (adapter / "generation_config.json").is_file():
                    stated = self._library.GenerationConfig.from_pretrained(adapter, local_files_only=True)
                    model.generation_config.eos_token_id = stated.eos_token_id
        self._model = model.to(device).eval()
        self.device = device
        positions = getattr(config, "max_position_embeddings", None)
        self.positions = positions if type(positions) is int else None

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt, tools: Sequence[Any] | None, system: str | None, raw: bool) -> list[int]:
        """Convert a prompt to token ids; with a chat template, a text becomes a user's message.

        Args:
            prompt: text or messages.
            tools: schemas of tools, for prompts without their own.
            system: system message, for prompts without one.
            raw: whether to continue a text without the chat template.

        Raises:
            DataError: the prompt needs a chat template but there is none, the template rejects the prompt, or the
                prompt has no token.
            CheckpointError: the chat template is malformed.
        """
        tools = tools if prompt.tools is None else prompt.tools
        if prompt.text is not None and (raw or not self.has_template):
            if system or tools:
                raise DataError(
                    f"{prompt.where}: a system message and tools need a chat template, but "
                    + ("--raw disables it" if raw else f"{self._name()} has none")
                )
            with _loading(Path(self.tokenizer.name_or_path)):
                ids = self.tokenizer(prompt.text)["input_ids"]
            return self._checked(ids, prompt.where)
        if not self.has_template:
            raise DataError(
                f"{prompt.where}: {self._name()} has no chat template, so it cannot answer messages; "
                "continue a text instead: --prompt TEXT, or 'prompt' in a file"
            )
        messages = [{"role": "user", "content": prompt.text}] if prompt.text is not None else [*prompt.messages]
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        key = "tool_use" if tools and "tool_use" in self._templates.marked else "default"
        if key not in self._templates.marked:
            names = ", ".join(self._templates.marked)
            raise DataError(f"{self._name()} has no chat template named 'default' (it has {names}); rename one of them")
        variables = {
            **self.tokenizer.special_tokens_map,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text = self._templates.render(key, variables).text
        except TemplateError as error:
            raise DataError(f"{prompt.where}: the chat template of {self._name()} rejects it: {error}") from error
        with _loading(Path(self.tokenizer.name_or_path)):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._checked(ids, prompt.where)

    @cached_property
    def _templates(self) -> TemplateProcess:
        """Chat templates, rendered in a separate process, because the model's publisher may not be trusted."""
        given = self.tokenizer.chat_template
        texts = given if isinstance(given, dict) else {"default": given}
        try:
            return TemplateProcess(texts)
        except TemplateError as error:
            raise CheckpointError(
                f"the chat template of {self._name()} is malformed: {error}; correct the template"
            ) from error

    def check_length(self, ids: Sequence[int], new: int, where: str) -> None:
        """Check that a prompt leaves enough positions for its completion.

        Raises:
            DataError: the model has too few positions.
        """
        if self.positions is not None and len(ids) + new > self.positions:
            raise DataError(
                f"{where}: {len(ids)} tokens and {new} new ones exceed the model's {self.positions} positions; "
                "shorten the prompt, or lower --max-new-tokens"
            )

    def stream(self, ids: Sequence[int], decoding: Decoding) -> list[int]:
        """Print a completion token by token, and return its ids.

        Raises:
            BuildError: the model cannot generate with these settings.
        """
        streamer = _streamer(self._library, self.tokenizer)
        return self._generate([ids], decoding, decoding.seed, streamer)[0]

    def complete(self, prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int) -> list[list[int]]:
        """Complete prompts together, padded on the left.

        Args:
            prompts: token ids of each prompt.
            decoding: decoding settings; their seed is ignored.
            seed: seed of the sampling.

        Returns:
            Token ids of each completion, including the end of text.

        Raises:
            BuildError: the model cannot generate with these settings.
        """
        return self._generate(prompts, decoding, seed, None)

    def text(self, ids: Sequence[int]) -> str:
        """Decode token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends with an end-of-text token; if not, it was cut off at the length limit."""
        return bool(ids) and ids[-1] in self._ends

    @property
    def _ends(self) -> list[int]:
        """Token ids that end a text: the model's, or else the tokenizer's."""
        own = self._model.generation_config.eos_token_id
        own = self.tokenizer.eos_token_id if own is None else own
        return [one for one in (own if isinstance(own, list | tuple) else [own]) if type(one) is int]

    def _generate(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int, streamer: Any
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = self.tokenizer.pad_token_id
        if padding is None:
            padding = (self._ends or [0])[0]
        rows = [[padding] * (longest - len(ids)) + list(ids) for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        settings = copy.deepcopy(self._model.generation_config)
        # Limit the number of new tokens only, not the total number.
        settings.max_length = None
        self._check_inherited(settings, decoding)
        torch.manual_seed(seed)
        try:
            settings.update(**decoding.arguments(), pad_token_id=padding, eos_token_id=self._ends or None)
            settings.return_dict_in_generate = False  # otherwise generate() returns an object instead of token ids
            with torch.inference_mode(), self._fast_steps(settings, decoding.max_new_tokens):
                output = self._model.generate(
                    input_ids=torch.tensor(rows, device=self.device),
                    attention_mask=torch.tensor(mask, device=self.device),
                    generation_config=settings,
                    streamer=streamer,
                )
        except Exception as error:  # untrusted settings may raise any exception
            raise BuildError(f"{self._name()} cannot generate: {_line_of(error)}") from error
        if len(output) != len(prompts):
            raise BuildError(
                f"{self._name()}: {len(prompts)} prompts have {len(output)} completions, but one per prompt is needed; "
                "remove --generation num_return_sequences"
            )
        return [self._cut(row) for row in output[:, longest:].tolist()]

    def _fast_steps(self, settings: Any, new: int) -> AbstractContextManager[None]:
        """Capture a decoding step as a CUDA graph inside the block, if the model, settings and device permit it."""
        inner = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
        if self.device.type == "cpu" or not suits(inner, settings, new):
            return nullcontext()
        settings.update(**SETTINGS)
        return replayed_steps(inner)

    def _check_inherited(self, settings: Any, decoding: Decoding) -> None:
        for name, most in _MOST_INHERITED.items():
            value = getattr(settings, name, None)
            if name not in decoding.further and value is not None and (type(value) is not int or value > most):
                raise BuildError(
                    f"{self._name()}: generation_config.json sets {name} to {str(value)[:40]}; set it explicitly, such "
                    f"as --generation {name}=1"
                )

    def _cut(self, ids: list[int]) -> list[int]:
        """Completion without the padding after its end-of-text token."""
        ends = set(self._ends)
        end = next((position for position, token in enumerate(ids) if token in ends), len(ids))
        return ids[: end + 1]

    def _checked(self, ids: Any, where: str) -> list[int]:
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of the prompt; give another prompt")
        return list(ids)

    def _name(self) -> str:
        return str(self.tokenizer.name_or_path)


def _streamer(library: Any, tokenizer: Any) -> Any:
    """Printer of generated tokens that escapes terminal control sequences."""

    class Streamer(library.TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(visible(text) if sys.stdout.isatty() else text, stream_end)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _check_sizes(file: str, values: Any, depth: int = 0) -> None:
    """Check the sizes in a ``config.json``, because transformers would create that many modules before it fails.

    Raises:
        CheckpointError: a number of layers, heads and so on is larger than in any model.
    """
    for name, value in values.items() if isinstance(values, dict) and depth < _MAX_DEPTH else ():
        _check_sizes(file, value, depth + 1)
        most = next((most for part, most in _MOST_SIZES.items() if part in str(name)), None)
        if most is not None and type(value) is int and value > most:
            raise CheckpointError(f"{file}: {name[:80]} is {value}, but no model has more than {most:,}; correct it")


def _check_complete(directory: Path, model: Any, report: Mapping[str, Any]) -> None:
    """Check that the library initialised no weights at random, and dropped no stored head.

    Raises:
        CheckpointError: a tensor of the model is not in the files, or a stored head is not in the model.
    """
    if lacking := sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])}):
        raise CheckpointError(
            f"{directory}: the files lack {some(lacking)}, which config.json describes, and transformers would "
            "initialise them at random; download the missing weight file, or correct config.json (a head that shares "
            "the embedding needs tie_word_embeddings: true)"
        )
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not table.weight:
        return
    with ModelDirectory.open(directory) as files:
        if _HEAD in files.specs:
            stored = torch.empty(files.specs[_HEAD].shape, dtype=head.weight.dtype)
            files.read(_HEAD, [0] * stored.ndim, stored)
            if not torch.equal(stored, head.weight.detach()):
                raise CheckpointError(
                    f"{directory}: '{_HEAD}' in the files differs from the embedding, but config.json has "
                    "tie_word_embeddings: true; set it to false to keep the head, or remove the head from the files"
                )


def _check_writes(directory: Path, config: Any) -> None:
    names: list[str] = getattr(config, "architectures", None) or []
    if names and not any(part in name for name in names for part in _WRITERS):
        raise CheckpointError(
            f"{directory} is a model of type {', '.join(names)}, which generates no text; use a causal language model"
        )
    own = getattr(config, "d9d", None)
    mask = own.get("attention_mask", "causal") if isinstance(own, Mapping) else "causal"
    if mask != "causal" or getattr(config, "is_causal", True) is False:
        raise CheckpointError(
            f"{directory} is a model whose attention is not causal ({mask if mask != 'causal' else 'bidirectional'}), "
            "but generation computes causal attention; use a causal language model"
        )


@contextmanager
def _loading(directory: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, PluginError):
        raise
    except BaseException as error:  # untrusted files may raise any exception, including Rust panics
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise CheckpointError(f"{directory} cannot be loaded by transformers: {_line_of(error)}") from error


def _line_of(error: BaseException) -> str:
    """Type and message of a library's error, as one shortened line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def _check_files(directory: Path) -> None:
    """Check that no file would be read endlessly by a library, or fill the memory.

    Raises:
        CheckpointError: a file is a device or named pipe, too large, too deeply nested, or a tokenizer that would
            expand texts without bound.
    """
    for file in sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")]):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise CheckpointError(f"{file} is a device or a named pipe, not a regular file; remove it")
        most = _MOST_BYTES.get(file.suffix)
        if most is None or not file.is_file():
            continue
        try:
            content = read_regular(file, most)
            value = parse_json(content) if file.suffix == ".json" else None
            if file.name == "tokenizer.json":
                check_tokenizer(value)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{file} cannot be read: {reason}; use the file of the original model") from error


def _adapter_config(peft: Any, adapter: Path) -> Any:
    """Load an adapter's config, after checks of its fields and of the weights' format.

    Raises:
        CheckpointError: a field is out of bounds, or there are no weights in safetensors format.
    """
    if not (adapter / ADAPTER_FILES.weights).is_file():
        raise CheckpointError(
            f"{adapter} has no {ADAPTER_FILES.weights}; other formats, such as adapter_model.bin, are pickles, which "
            "can run code, so they are not read: convert the weights to safetensors"
        )
    file = adapter / ADAPTER_FILES.config
    fields = bounded_fields(read_object(str(file), read_regular(file, links="near")), str(file))
    kind = fields.pop("peft_type")
    fields.pop("peft_version", None)
    settings = (peft.LoraConfig if kind == "LORA" else peft.IA3Config)(**fields)
    settings.inference_mode = True
    return settings


def row_of(prompt: Prompt, completion: Sequence[int], model: LanguageModel) -> Mapping[str, Any]:
    """Make an output line: the prompt's fields, and ``completion``, ``tokens`` and ``finish``."""
    finish = "stop" if model.ends(completion) else "length"
    return {**prompt.fields, "completion": model.text(completion), "tokens": len(completion), "finish": finish}

"""Chat template of a model: the Jinja text among its tokenizer files that renders conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.templates.process import TemplateError, TemplateLimits, TemplateProcess

from d9d_data.chat.conversation import REASONING, Message
from d9d_data.tokenizer.base import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
#: Largest size of a template in bytes.
MAX_TEMPLATE = 1 << 20
#: Special tokens that templates can read, if the tokenizer defines them.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendering:
    """Rendered conversation.

    Attributes:
        text: the rendering.
        marks: character span ``[begin, end)`` of each generation block, the text that a template marks as written by
            the assistant; None if the template has no such blocks.
    """

    text: str
    marks: tuple[Span, ...] | None


class ChatTemplate:
    """Chat template: renders conversations as ``transformers``' ``apply_chat_template`` does.

    Templates read ``messages``, ``tools``, ``documents`` (always none), ``add_generation_prompt``, the special tokens
    and the arguments. Rendering runs in a separate process with limits on time and memory.

    Args:
        texts: the template, or templates by name: ``default``, and ``tool_use`` for conversations with tools.
        special_tokens: texts of the special tokens by the names of :data:`SPECIAL_TOKENS`.
        name: file of the template, for error messages.
        arguments: further variables of the template, such as ``{"enable_thinking": False}``.
        now: time that ``strftime_now`` returns; the time of rendering by default.
        limits: limits of one rendering.

    Raises:
        DataError: a template is too large or malformed.
    """

    def __init__(
        self,
        texts: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        name: str = "the chat template",
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        self.texts = {"default": texts} if isinstance(texts, str) else dict(texts)
        self.special_tokens = dict(special_tokens or {})
        self.name = name
        self.arguments = dict(arguments or {})
        self._now = now
        for text in self.texts.values():
            if len(text.encode(errors="replace")) > MAX_TEMPLATE:
                raise DataError(f"{self.name}: the template has more than {MAX_TEMPLATE:,} bytes; use another")
        try:
            self._process = TemplateProcess(self.texts, now, limits)
        except TemplateError as error:
            place = self.name if error.line is None else f"{self.name}:{error.line}"
            which = "" if error.key in (None, "default") else f" {error.key!r}"
            raise DataError(f"{place}: the chat template{which} is malformed: {error}; repair the template") from error

    @property
    def depends_on_date(self) -> bool:
        """Whether renderings change from day to day: a template reads the date, and ``now`` is not given."""
        return self._process.depends_on_date

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.texts, self.special_tokens, self.name, self.arguments, self._now)

    @classmethod
    def load(cls, directory: Path, *, arguments: Mapping[str, Any] | None = None, now: datetime | None = None) -> Self:
        """Read the template of a model's tokenizer, from ``chat_template.jinja`` or else ``tokenizer_config.json``.

        Args:
            directory: directory of the ``tokenizer.json``, or the path of that file.
            arguments: further variables of the template.
            now: time that ``strftime_now`` returns.

        Raises:
            DataError: there is no template, or it cannot be read.
        """
        directory = directory if directory.is_dir() else directory.parent
        file, config_file = directory / TEMPLATE_FILE, directory / CONFIG_FILE
        config = _read_config(config_file) if config_file.is_file() else {}
        tokens = {key: _token(config.get(key)) for key in SPECIAL_TOKENS}
        if file.is_file():
            texts, source = {"default": _read_text(file)}, file
        else:
            texts, source = _named(config.get("chat_template"), config_file), config_file
        present = {key: token for key, token in tokens.items() if token is not None}
        return cls(texts, present, name=str(source), arguments=arguments, now=now)

    @classmethod
    def find(cls, directory: Path, *, arguments: Mapping[str, Any] | None = None) -> Self | None:
        """Read the template of a model's tokenizer; ``None`` if there is none. See :meth:`load`.

        Raises:
            DataError: the template cannot be read.
        """
        directory = directory if directory.is_dir() else directory.parent
        file, config_file = directory / TEMPLATE_FILE, directory / CONFIG_FILE
        if not file.is_file():
            config = _read_config(config_file) if config_file.is_file() else {}
            if config.get("chat_template") is None:
                return None
        return cls.load(directory, arguments=arguments)

    @cached_property
    def identity(self) -> str:
        """Digest of the template and all other inputs of a rendering except the conversation and the date."""
        parts = [self.texts, self.special_tokens, self.arguments, str(self._now)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def marked(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template for these tools has generation blocks."""
        return self._process.marked[self._choose(tools)]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
        where: str = "the conversation",
    ) -> Rendering:
        """Render messages.

        Args:
            messages: messages of the conversation, at least one.
            tools: JSON schemas of the tools offered, if any.
            generation_prompt: whether to append the generation prompt, which starts a reply.
            where: name of the record in error messages.

        Raises:
            DataError: the template refuses the messages, fails, exceeds its limits, or has a generation block whose
                position is unknown; or there is no template named ``default``.
        """
        key = self._choose(tools)
        variables = {
            **self.special_tokens,
            **self.arguments,
            "messages": [_named_reasoning(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        try:
            found = self._process.render(key, variables)
        except TemplateError as error:
            raise DataError(
                f"{where}: {self.name} cannot render the conversation: {str(error)[:500]}; "
                "change or leave out the record, or use another template"
            ) from error
        if found.misplaced:
            raise DataError(
                f"{where}: {self.name} has a generation block inside a macro, a set or a filter block, so its "
                "position is unknown; move the block out"
            )
        return Rendering(found.text, found.marks if self._process.marked[key] else None)

    def _choose(self, tools: object) -> str:
        if tools is not None and "tool_use" in self.texts:
            return "tool_use"
        if "default" not in self.texts:
            names = ", ".join(self.texts)
            raise DataError(f"{self.name} has no template named 'default' (it has {names}); rename one")
        return "default"


def _rebuild(texts: Any, tokens: Any, name: str, arguments: Any, now: datetime | None) -> ChatTemplate:
    return ChatTemplate(texts, tokens, name=name, arguments=arguments, now=now)


def _named_reasoning(message: Message) -> dict[str, Any]:
    """Copy of a message without null values, and with its reasoning under each key that templates read."""
    named = {key: value for key, value in message.items() if value is not None}
    reasoning = next((named[key] for key in REASONING if key in named), None)
    if reasoning is not None:
        named = {"thinking": reasoning} | named | {"reasoning_content": reasoning}
    return named


def _read(file: Path, limit: int) -> bytes:
    try:
        return read_regular(file, limit, links="near")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}; make it readable") from error


def _read_text(file: Path) -> str:
    try:
        return _read(file, MAX_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}: {error.reason}); convert it") from error


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = parse_json(_read(file, 1 << 28))
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); repair it or move it away") from error
    if not isinstance(config, dict):
        raise DataError(f"{file} holds no JSON object; repair it or move it away")
    return config


def _token(value: object) -> str | None:
    """Text of a special token, given as a string or as an added token with settings."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _named(value: object, file: Path) -> dict[str, str]:
    """Templates by name, read from the value of the field ``chat_template``."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and value:
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        if len(named) == len(value) and all(isinstance(part, str) for pair in named.items() for part in pair):
            return {str(name): str(text) for name, text in named.items()}
    if value is not None:
        raise DataError(f"{file}: chat_template is neither a text nor a list of named texts; repair it")
    raise DataError(
        f"{file.parent} has no chat template: neither a {TEMPLATE_FILE} nor a field 'chat_template' in {file.name}; "
        "use the tokenizer files of a model trained for conversations, or write that file"
    )

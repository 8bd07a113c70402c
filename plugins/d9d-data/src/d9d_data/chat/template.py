"""Chat template of a model: the Jinja text among its tokenizer files that renders conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, Self

import jinja2
from d9d_core.extend import DataError, parse_json, read_regular
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from d9d_data.chat.conversation import REASONING, Message
from d9d_data.chat.sandbox import Sandbox
from d9d_data.tokenizer.base import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
#: Most bytes of a template.
MAX_TEMPLATE = 1 << 20
#: Special tokens that templates see, if a tokenizer names them.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendering:
    """Rendered conversation.

    Attributes:
        text: the rendering.
        marks: characters ``[begin, end)`` of each generation block; None if the template has no such blocks.
    """

    text: str
    marks: tuple[Span, ...] | None


class ChatTemplate:
    """Template that renders conversations as ``transformers``' ``apply_chat_template`` does.

    It sees ``messages``, ``tools``, ``documents`` (always none), ``add_generation_prompt``, the special tokens and the
    arguments. Rendering is bounded in time and memory (:mod:`d9d_data.chat.sandbox`).

    Args:
        texts: the template, or templates by name: ``default``, and ``tool_use`` for conversations with tools.
        special_tokens: texts of the special tokens by the names of :data:`SPECIAL_TOKENS`.
        name: file of the template, for messages.
        arguments: further variables of the template, such as ``{"enable_thinking": False}``.
        now: time that ``strftime_now`` tells; if absent, the time of the rendering.

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
    ) -> None:
        self.texts = {"default": texts} if isinstance(texts, str) else dict(texts)
        self.special_tokens = dict(special_tokens or {})
        self.name = name
        self.arguments = dict(arguments or {})
        self._now = now
        self._sandbox = Sandbox()
        self._sandbox.filters["tojson"] = _tojson
        self._sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": self._strftime_now}
        self._lock = Lock()
        trees = {key: self._parse(key, text) for key, text in self.texts.items()}
        #: Whether renderings differ from day to day, because a template asks for the date and ``now`` is not given.
        self.depends_on_date = now is None and any(
            node.name == "strftime_now" and node.ctx == "load"
            for tree in trees.values()
            for node in tree.find_all(nodes.Name)
        )
        self._marked = {key: next(_generation_blocks(tree), None) is not None for key, tree in trees.items()}
        self._compiled = {key: self._compile(key, tree) for key, tree in trees.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.texts, self.special_tokens, self.name, self.arguments, self._now)

    @classmethod
    def load(cls, directory: Path, *, arguments: Mapping[str, Any] | None = None, now: datetime | None = None) -> Self:
        """Read the template of a model's tokenizer: ``chat_template.jinja``, else that of ``tokenizer_config.json``.

        Args:
            directory: of the ``tokenizer.json``, or the path of that file.
            arguments: further variables of the template.
            now: time that ``strftime_now`` tells.

        Raises:
            DataError: there is none, or it cannot be read.
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
        """Read the template of a model's tokenizer, or ``None`` where there is none; see :meth:`load`.

        Raises:
            DataError: it cannot be read.
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
        """Digest of everything that renderings depend on besides the conversation and, perhaps, the date."""
        parts = [self.texts, self.special_tokens, self.arguments, str(self._now)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def marked(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template for these tools has generation blocks."""
        return self._marked[self._choose(tools)]

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
            messages: at least one.
            tools: JSON schemas of the tools offered, if any.
            generation_prompt: whether to go on with what makes the model answer.
            where: name of the record in messages.

        Raises:
            DataError: the template refuses the messages, fails, or exceeds its bounds.
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
        with self._lock:
            try:
                text = self._sandbox.run(self._compiled[key], variables)
            except TemplateError as error:
                self._fail(where, error.message or type(error).__name__, error)
            except RecursionError as error:
                self._fail(where, "it calls itself without end", error)
            except Exception as error:  # a template can raise anything that Python does
                self._fail(where, f"{type(error).__name__}: {error}", error)
            found = self._sandbox.marks
        marks = tuple((begin, begin + len(body)) for begin, body in found if body)
        if any(text[begin : begin + len(body)] != body for begin, body in found):
            raise DataError(
                f"{where}: {self.name} has a generation block inside a macro, a set or a filter block, so its place "
                "cannot be told; move the block out"
            )
        return Rendering(text, marks if self._marked[key] else None)

    def _fail(self, where: str, message: str, error: Exception) -> NoReturn:
        raise DataError(
            f"{where}: {self.name} cannot render the conversation: {str(message)[:500]}; "
            "change or leave out the record, or use another template"
        ) from error

    def _choose(self, tools: object) -> str:
        if tools is not None and "tool_use" in self.texts:
            return "tool_use"
        if "default" not in self.texts:
            names = ", ".join(self.texts)
            raise DataError(f"{self.name} has no template named 'default' (it has {names}); rename one")
        return "default"

    def _parse(self, key: str, text: str) -> nodes.Template:
        if len(text.encode(errors="replace")) > MAX_TEMPLATE:
            raise DataError(f"{self.name}: the template has more than {MAX_TEMPLATE:,} bytes; use another")
        try:
            return self._sandbox.parse(text, key, self.name)
        except TemplateSyntaxError as error:
            self._malformed(key, error.lineno, error.message or "", error)
        except (RecursionError, MemoryError, ValueError) as error:
            self._malformed(key, None, f"it is nested too deeply or holds an odd literal ({error})", error)

    def _compile(self, key: str, tree: nodes.Template) -> jinja2.Template:
        try:
            return self._sandbox.compile_bounded(tree, key)
        except (TemplateError, SyntaxError) as error:
            self._malformed(key, getattr(error, "lineno", None), str(error), error)
        except (RecursionError, MemoryError, ValueError) as error:
            self._malformed(key, None, f"it is nested too deeply or holds an odd literal ({error})", error)

    def _malformed(self, key: str, line: int | None, message: str, error: Exception) -> NoReturn:
        place = self.name if line is None else f"{self.name}:{line}"
        which = "" if key == "default" else f" {key!r}"
        raise DataError(f"{place}: the chat template{which} is malformed: {message}; repair it") from error

    def _strftime_now(self, format: str) -> str:  # noqa: A002 - templates may name it
        return (self._now or datetime.now()).strftime(format)


def _rebuild(texts: Any, tokens: Any, name: str, arguments: Any, now: datetime | None) -> ChatTemplate:
    return ChatTemplate(texts, tokens, name=name, arguments=arguments, now=now)


def _generation_blocks(tree: nodes.Template) -> Any:
    return (
        call
        for call in tree.find_all(nodes.CallBlock)
        if isinstance(call.call.node, nodes.ExtensionAttribute) and call.call.node.name == "record"
    )


def _named_reasoning(message: Message) -> dict[str, Any]:
    """Message whose reasoning, if any, has the names that templates look for; nulls left out."""
    named = {key: value for key, value in message.items() if value is not None}
    reasoning = next((named[key] for key in REASONING if key in named), None)
    if reasoning is not None:
        named = {"thinking": reasoning} | named | {"reasoning_content": reasoning}
    return named


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON of a value: unlike jinja2's filter without escapes for HTML, and with keys in their order."""
    if isinstance(indent, int) and indent > 64:
        raise TemplateError("tojson: indent is above 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


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
    """Text of a special token: a string, or an added token with its settings."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _named(value: object, file: Path) -> dict[str, str]:
    """Templates by name of the field ``chat_template``."""
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

"""Token ids and loss weights of conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers
from d9d_core.errors import DataError

from d9d_data.chat.conversation import Conversation
from d9d_data.chat.mask import find_replies
from d9d_data.chat.template import ChatTemplate, Span
from d9d_data.corpus.fit import Limit
from d9d_data.tokenizer.base import Ids, TextTokenizer, panics_refused

Loss = Literal["assistant", "last_turn", "all"]
Weights = npt.NDArray[np.bool_]
W = TypeVar("W", bound=np.bool_ | np.float32)
#: Marker characters for quoted special tokens; the first that the conversation does not contain is used.
_MARKERS = [chr(code) for code in range(0xE000, 0xE010)]


class ChatTokenizer:
    """Tokenizer for rendered chats: recognises special tokens in the text and adds none.

    Args:
        content: text of a ``tokenizer.json``.
    """

    def __init__(self, content: str) -> None:
        self._content = content
        # Remove the post-processor: it adds special tokens, which the template adds already, and may move the offsets
        # of tokens.
        content = json.dumps(json.loads(content) | {"post_processor": None, "truncation": None, "padding": None})
        self._backend = tokenizers.Tokenizer.from_str(content)
        self._plain = tokenizers.Tokenizer.from_str(content)
        self._plain.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = {number for number, token in added.items() if token.special}
        #: Texts of the special tokens, and of all added tokens; longest first.
        self.specials = tuple(sorted((added[number].content for number in self._special_ids), key=len, reverse=True))
        self.added = tuple(sorted((token.content for token in added.values()), key=len, reverse=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._content,)

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Self:
        """Chat tokenizer with the vocabulary of a text tokenizer."""
        return cls(tokenizer.serialised())

    def encode(self, text: str, quoted: Sequence[Span] = ()) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Encode a text: token ids ``[N]`` int64, and the index ``[N]`` int64 of the character where each token begins.

        Args:
            text: text to encode.
            quoted: character spans ``[begin, end)`` of special tokens to encode as ordinary text. The text between the
                nearest special tokens before and after a span is encoded in one piece.
        """
        with panics_refused(text):
            encoding = self._backend.encode(text, add_special_tokens=False)
        tokens = list(zip(encoding.ids, encoding.offsets, strict=True))
        if quoted:
            tokens = list(self._requoted(text, tokens, quoted))
        ids = np.asarray([number for number, _ in tokens], dtype=np.int64)
        return ids, np.asarray([begin for _, (begin, _) in tokens], dtype=np.int64)

    def stop_of(self, ids: Ids) -> str:
        """Text of the special token that ends the ids, ignoring white space after it; empty if none ends them."""
        for number in reversed(ids.tolist()):
            if number in self._special_ids:
                return str(self._backend.id_to_token(number))
            if self._backend.decode([number], skip_special_tokens=False).strip():
                return ""
        return ""

    def _requoted(
        self, text: str, tokens: list[tuple[int, Span]], quoted: Sequence[Span]
    ) -> Iterator[tuple[int, Span]]:
        begin, run = 0, []
        for number, (first, last) in [*tokens, (-1, (len(text), len(text)))]:
            special = number == -1 or number in self._special_ids
            if not special or _overlap((first, last), quoted):
                run.append((number, (first, last)))
                continue
            if _overlap((begin, first), quoted):
                with panics_refused():
                    plain = self._plain.encode(text[begin:first], add_special_tokens=False)
                offsets = [(begin + low, begin + high) for low, high in plain.offsets]
                run = list(zip(plain.ids, offsets, strict=True))
            yield from run
            if number != -1:
                yield number, (first, last)
            begin, run = last, []


def encode(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    loss: Loss = "assistant",
    quoted: Literal["text", "token"] = "text",
) -> tuple[Ids, Weights]:
    """Encode a rendered conversation: token ids ``[N]`` int64, and whether each token counts in the loss, ``[N]`` bool.

    Takes the arguments and raises the errors of :func:`encode_weighted`, which also gives the loss weights.
    """
    ids, weights = encode_weighted(conversation, template, tokenizer, loss, quoted)
    return ids, weights > 0


def encode_weighted(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    loss: Loss = "assistant",
    quoted: Literal["text", "token"] = "text",
) -> tuple[Ids, npt.NDArray[np.float32]]:
    """Encode a rendered chat: token ids ``[N]`` int64, and the loss weight of each token, ``[N]`` float32.

    A token belongs to a reply if its first character belongs to the reply. The prompt of a conversation has no replies.
    A token's weight is the ``weight`` of its message, by default 1, and 0 outside of the replies that ``loss`` chooses.

    Args:
        conversation: conversation to encode.
        template: chat template of the model.
        tokenizer: chat tokenizer of the model.
        loss: tokens with a loss weight: ``assistant``, all replies; ``last_turn``, the replies after the last answered
            user message; ``all``, every token.
        quoted: encoding of special tokens written in the record itself, such as a user's ``<|im_end|>``: ``text``,
            ordinary text, so that a message cannot end its turn; ``token``, the special token, as ``transformers``
            does.

    Raises:
        DataError: the template fails, leaves out a message, renders replies that cannot be located, or renders
            differently because of a special token in a content; or message weights cannot be assigned to tokens.
    """
    first = {"assistant": conversation.prompt, "last_turn": conversation.last_turn, "all": len(conversation.messages)}
    text, spans = find_replies(conversation, template, tokenizer.added, first[loss])
    quotes = _quotes(conversation, template, tokenizer.specials, text) if quoted == "text" else ()
    ids, begins = tokenizer.encode(text, quotes)
    weights = np.full(ids.shape, loss == "all", dtype=np.float32)
    for (begin, end), weight in zip(spans, _weights(conversation, first[loss], len(spans)), strict=True):
        weights[(begins >= begin) & (begins < end)] = weight
    return ids, weights


def _weights(conversation: Conversation, first: int, spans: int) -> list[float]:
    """Loss weight of each character span that the assistant writes.

    Raises:
        DataError: a weight is not 1, and all tokens are learned or the spans do not match the replies one to one.
    """
    own = [float(message.get("weight", 1)) for message in conversation.messages]
    if all(weight == 1 for weight in own):
        return [1.0] * spans
    replies = [index for index in conversation.replies if index >= first]
    if first >= len(own):
        raise DataError(
            f"{conversation.where} has a message with a weight, but data.loss: all trains on every token alike; "
            "use data.loss: assistant or last_turn, or take the weights out"
        )
    if len(replies) != spans:
        raise DataError(
            f"{conversation.where} has messages with weights, but the template marks {spans:,} texts in "
            f"{len(replies):,} replies; remove the weights, or use a template with one generation block per reply"
        )
    return [own[index] for index in replies]


def encode_prompt(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    quoted: Literal["text", "token"] = "text",
) -> Ids:
    """Encode the rendered prompt of a chat, with the generation prompt after it: token ids ``[N]`` int64.

    Args:
        conversation: conversation with a prompt.
        template: chat template of the model.
        tokenizer: chat tokenizer of the model.
        quoted: encoding of special tokens written in the record itself, as for :func:`encode_weighted`.

    Raises:
        DataError: the template fails, or renders differently because of a special token in a content.
    """
    prompt = replace(conversation, messages=conversation.messages[: conversation.prompt])
    where = conversation.where
    text = template.render(prompt.messages, prompt.tools, generation_prompt=True, where=where).text
    quotes = _quotes(prompt, template, tokenizer.specials, text, generation_prompt=True) if quoted == "text" else ()
    return tokenizer.encode(text, quotes)[0]


def truncate(
    ids: Ids, weights: npt.NDArray[W], limit: Limit, where: str = "the conversation"
) -> tuple[Ids, npt.NDArray[W]] | None:
    """Truncate an encoded chat to the token limit.

    Args:
        ids: ``[N]`` int64.
        weights: ``[N]``.
        limit: token limit, and the treatment of a longer conversation.
        where: name of the record in error messages.

    Returns:
        Ids and weights ``[min(N, limit.longest)]``; None for a conversation to leave out.

    Raises:
        TooLongError: the conversation is longer, and the limit's policy is ``error``.
    """
    kept = limit.kept(len(ids), where)
    return None if kept is None else (ids[kept], weights[kept])


def is_trainable(weights: npt.NDArray[Any]) -> bool:
    """Whether a conversation has a token to train on: a token of nonzero weight that is not the first token.

    Args:
        weights: loss weights ``[N]``, numbers or bool.
    """
    return bool(weights[1:].any())


def _quotes(
    conversation: Conversation,
    template: ChatTemplate,
    specials: Sequence[str],
    text: str,
    generation_prompt: bool = False,
) -> tuple[Span, ...]:
    """Character spans ``[begin, end)`` of the special tokens in a rendering that come from the record.

    A second rendering, with a marker character inside each special token of the record, shows where they are.
    """
    special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
    if not any(special.search(part) for part in strings_in([conversation.messages, conversation.tools])):
        return ()
    marker = next((mark for mark in _MARKERS if not any(mark in part for part in strings_in([text]))), None)
    if marker is None:
        raise DataError(f"{conversation.where} contains all characters from U+E000 to U+E00F; leave the record out")

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return special.sub(lambda match: match.group()[0] + marker + match.group()[1:], value)
        if isinstance(value, Mapping):
            return {key: item if key == "role" else mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list | tuple) else value

    tools = mark(conversation.tools)
    marked = template.render(
        mark(conversation.messages), tools, generation_prompt=generation_prompt, where=conversation.where
    )
    pieces = marked.text.split(marker)
    if "".join(pieces) != text:
        raise DataError(
            f"{conversation.where} has a special token in its text, and {template.name} renders other text differently "
            "because of it; remove the token from the text, or set data.special_tokens: token"
        )
    quotes, begin = [], 0
    for piece in pieces[:-1]:
        begin += len(piece)
        match = special.match(text, begin - 1)
        if match:
            quotes.append(match.span())
    return tuple(quotes)


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _overlap(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and begin < span[1] for begin, end in others)

"""Base classes of all configs: frozen; unknown fields are errors, which suggest similar names.

Start here: :class:`PluginConfig` is the base of a component's config, :class:`Section` the base of a nested mapping::

    from typing import Annotated, Literal

    from d9d_core.config import PluginConfig
    from pydantic import Field

    class SmoothLMConfig(PluginConfig):
        '''Next-token prediction with label smoothing.'''

        name: Literal["smooth_lm"] = "smooth_lm"
        '''Selects this task.'''
        smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
        '''Probability mass that is distributed evenly over the vocabulary.'''

A model's config is a :class:`ModelConfig`, a pipeline schedule's a :class:`ScheduleConfig`. A field for another
component is ``Annotated[PluginConfig, Named("dataset")]`` (:class:`d9d_core.job_file.open_union.Named`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from d9d_core.words import find

__all__ = [
    "LoadsCode", "ModelConfig", "PartConfig", "PathOrAddress", "PathText", "PluginConfig", "Resizable",
    "ScheduleConfig", "Section", "closest",
]  # fmt: skip

#: Path of keys and indices to a value in a job file.
Location = tuple[int | str, ...]
#: Largest integer that a config accepts: tensors and clocks use 64-bit integers.
_LARGEST = 2**63 - 1
#: Address such as ``s3:/bucket``, from which ``pathlib`` has dropped a slash. Windows drives, which have one letter, do
#: not match.
_ADDRESS_AS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
#: Smallest similarity at which the hint for an unknown field is the most similar field of its section. If no field is
#: that similar, the hint comes from the table of other tools' words, if the table has the unknown field.
_ALIKE = 0.75
_NO_ADDRESS = "an address is not supported here; give a local path, such as one where the storage is mounted"


def dotted(location: Sequence[int | str]) -> str:
    """Location as text: ``('parallel', 0, 'degree')`` becomes ``parallel[0].degree``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def closest(word: object, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Known word that is most similar to ``word``; ``None`` if none is similar.

    Args:
        word: unknown word.
        known: known words.
        similarity: smallest similarity, from 0 for different words to 1 for equal ones.
    """
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=similarity)), None)


def line_error(kind: str, text: str, loc: tuple[int | str, ...] = (), value: Any = None) -> InitErrorDetails:
    """Entry of a pydantic validation error, with a message written by d9d."""
    return InitErrorDetails(type=PydanticCustomError(kind, "{text}", {"text": text}), loc=loc, input=value)


def speakable(value: Any) -> Any:
    """Value with infinite and NaN floats as strings, which JSON and job files can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: speakable(item) for key, item in value.items()}
    return [speakable(item) for item in value] if isinstance(value, list) else value


def is_address(text: str) -> bool:
    """Whether a text is an address such as ``s3://bucket/run`` rather than a local path."""
    return "://" in text


def _is_path(text: str) -> str:
    if is_address(text):
        raise ValueError(_NO_ADDRESS)
    return text


def _has_driver(text: str) -> str:
    scheme, found, _ = text.partition("://")
    if found:
        from fsspec import available_protocols  # type: ignore[import-untyped]

        unknown = [name for name in scheme.split("::")[-1:] if name not in available_protocols()]
        if unknown:
            near = closest(unknown[0], available_protocols())
            hint = f"; did you mean '{near}://'?" if near else ""
            raise ValueError(f"fsspec has no driver for addresses of '{unknown[0]}://'{hint}")
    return text


#: Text of a local path; an address is refused. A field of type ``Path`` refuses addresses by itself.
PathText = Annotated[str, AfterValidator(_is_path)]
#: Text of a local path, or an address that fsspec has a driver for.
PathOrAddress = Annotated[str, AfterValidator(_has_driver)]


def _refused_values(given: Any, read: Any, loc: tuple[int | str, ...] = ()) -> Iterator[InitErrorDetails]:
    """Yield errors for values that pydantic accepts but d9d does not.

    These are booleans as numbers, integers above 64 bits, infinity and NaN inside mappings and lists, and addresses as
    paths.
    """
    # pydantic's strict mode would also refuse the numbers that YAML leaves as strings, such as 1e3.
    if isinstance(given, bool) and type(read) in (int, float):
        yield line_error("not_a_number", "input should be a number", loc, given)
    elif type(read) is int and abs(read) > _LARGEST:
        yield line_error("too_large", f"a whole number has at most 64 bits, up to {_LARGEST}", loc, given)
    elif len(loc) > 1 and type(read) is float and not math.isfinite(read):
        # A saved job writes infinity as the text "inf", which only a field's type turns back into a number.
        yield line_error("not_finite", "input should be a finite number", loc, given)
    elif isinstance(read, Path) and (is_address(str(given)) or _ADDRESS_AS_PATH.match(str(given))):
        yield line_error("an_address", _NO_ADDRESS, loc, given)
    elif isinstance(given, Mapping) and isinstance(read, Mapping):
        for key in given.keys() & read.keys():
            yield from _refused_values(given[key], read[key], (*loc, key))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for index, pair in enumerate(zip(given, read, strict=False)):
            yield from _refused_values(*pair, (*loc, index))


class LoadsCode:
    """Marker of a config field whose value names code to import: ``build: Annotated[str, LoadsCode()]``.

    Every config field that leads to an import must have the marker, because a job file in a downloaded directory must
    not set such a field; see :mod:`d9d_core.job_file.saved_job`.

    Args:
        imports: function that returns whether a value of the field is imported; by default, every value is.
    """

    def __init__(self, imports: Callable[[str], bool] = lambda _text: True) -> None:
        self.imports = imports


class Section(BaseModel):
    """Base of the job file's sections: frozen; refuses unknown fields, booleans as numbers, huge and infinite numbers.

    A field that accepts infinity is declared ``Annotated[float, Field(allow_inf_nan=True, gt=0)]``.
    """

    # A field refuses infinity and NaN unless it sets allow_inf_nan. JSON dumps write both as constants, not as null.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )
    #: Whether this is a section of a job file, and not the job file itself.
    _nested: ClassVar[bool] = True

    @model_validator(mode="wrap")
    @classmethod
    def _reword_errors(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        try:
            section = handler(value)
        except ValidationError as error:
            lines = [cls._reword(line, info) for line in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(cls.__name__, lines) from None
        given = value if isinstance(value, Mapping) else {}
        read = {name: getattr(section, name) for name in cls.model_fields if name in given}
        if lines := list(_refused_values(given, read)):
            raise ValidationError.from_exception_data(cls.__name__, lines)
        return section

    @classmethod
    def _reword(cls, line: Any, info: ValidationInfo) -> InitErrorDetails:
        kind, text, loc = line["type"], line["msg"], line["loc"]
        # A nested section has already reworded its own errors: their locations are longer, or their types are d9d's.
        if kind == "extra_forbidden" and len(loc) == 1:
            kind, text = "unknown_field", f"not a field of {cls._owner(info)}; {cls._hint(str(loc[0]))}"
        elif kind == "missing" and len(loc) == 1:
            text = f"missing; {cls._owner(info)} needs it"
        return line_error(kind, text, loc, line["input"])

    @classmethod
    def _hint(cls, word: str) -> str:
        """Hint for an unknown field; :mod:`d9d_core.job_file.hints` finds better ones in a whole job."""
        similar = closest(word, cls.model_fields)
        if similar and cls._nested and closest(word, [similar], _ALIKE):
            return f"did you mean '{similar}'?"
        row = find(word, ["field"], cls._nested)
        if row and (cls._nested or row.section is None or row.section in cls.model_fields):
            return row.hint(word)
        return f"did you mean '{similar}'?" if similar else f"fields: {', '.join(cls.model_fields)}"

    @classmethod
    def _owner(cls, info: ValidationInfo) -> str:  # noqa: ARG003 - plugins' configs use it
        return "this section"


class PluginConfig(Section):
    """Base of every config that a job file selects by ``name``.

    Subclasses declare ``name: Literal["..."] = "..."`` and document each field with a docstring below it.
    """

    name: str
    """Selects the plugin."""

    # Set when the job file wrote 'distribution/name'; dumps write it back.
    _distribution: str | None = PrivateAttr(default=None)

    @property
    def selector(self) -> str:
        """Name by which a job file selects exactly this component: ``name`` or ``distribution/name``."""
        return f"{self._distribution}/{self.name}" if self._distribution else self.name

    @classmethod
    def _owner(cls, info: ValidationInfo) -> str:
        label = (info.context or {}).get("label")
        return label or f"'{cls.model_fields['name'].default}'"


class PartConfig(PluginConfig):
    """Base of the configs of strategies that may act on a part of the model."""

    match: tuple[str, ...] = ()
    """Patterns of the names of modules that the strategy acts on, with all that they contain, such as `layers.*.ffn`;
    empty: the whole model. With patterns, a job may have several entries of the strategy, for different modules."""


class ModelConfig(PluginConfig):
    """Base of the configs of models that can start from pretrained weights.

    If ``pretrained`` is set, fields that the job file leaves out are read from the ``config.json`` or checkpoint of the
    pretrained weights.

    Attributes:
        free_on_resume: fields that a resumed run may change, because no saved tensor depends on them.
    """

    free_on_resume: ClassVar[frozenset[str]] = frozenset()

    pretrained: PathOrAddress | None = None
    """Pretrained weights: a directory in Hugging Face layout, or an fsspec address of one; the directory of a run, or
    one of its checkpoints; null initialises weights randomly."""

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """Refuse values of fields in ``free_on_resume`` that do not fit the tensors of the saved model.

        Args:
            saved: all fields of the saved model; only the fields in ``free_on_resume`` may differ from this model's.

        Raises:
            ValueError: a value does not fit; the message begins with the field.
        """


@runtime_checkable
class Resizable(Protocol):
    """Optional protocol of a model config without fields for its sizes; ``d9d verify`` reduces sizes through it."""

    def sizes(self) -> Mapping[str, int]:
        """Sizes of this config that may be reduced: name -> size."""
        ...

    def resized(self, sizes: Mapping[str, int]) -> PluginConfig:
        """Config of a model of the same structure, with the given sizes replaced.

        Raises:
            ValueError: there is no such model.
        """
        ...


class ScheduleConfig(PluginConfig):
    """Base of the configs of pipeline schedules."""

    layers: tuple[PositiveInt, ...] | None = None
    """Number of layers of each stage, in order; null balances stages by the cost of layers, embedding and heads."""

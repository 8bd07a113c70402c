"""Conformance suite of all plugins."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, get_args

import pytest
from d9d_core.plugin import CapabilitySpec, ConfiguredSpec, ModelSpec, Spec
from d9d_core.registry.api import Api, imported_modules, references
from d9d_core.registry.api_check import sources_of
from d9d_core.registry.capabilities import MESH_AXES, MODEL_TRAITS
from d9d_core.registry.entries import Entry
from d9d_core.registry.hooks import KINDS, NEWEST_API, OLDEST_API
from d9d_core.registry.registry import Registry

from d9d_testing.suites.fresh import import_fresh

_SUMMARY_LENGTH = 100
_CORE_NAMESPACES = frozenset({"mesh", "model", "strategy", "device", "import"})


class PluginSuite:
    """Conformance suite of all plugins, of any extension point.

    Subclass it and name the declaration module::

        class TestPlugin(PluginSuite):
            plugin = "acme_moe.plugin"
            examples = {"expert_choice": {"capacity": 2}}

    Attributes:
        plugin: module of the entry point.
        examples: record name -> required fields of its config. Models have their ``tiny`` config instead.
        builds_on: declaration modules of the plugins whose capability tokens this plugin uses.
        imports_undeclared: undeclared modules of d9d's packages that the plugin imports all the same, for example
            because it is released together with them.
    """

    pytestmark = pytest.mark.smoke

    plugin: ClassVar[str]
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    builds_on: ClassVar[tuple[str, ...]] = ()
    imports_undeclared: ClassVar[tuple[str, ...]] = ()

    def test_declaration_imports_nothing_heavy(self, record_property: Callable[[str, object], None]) -> None:
        """The declaration loads without heavy modules such as torch and pydantic.

        The report records the time that the import takes (aim: under 100 ms).
        """
        facts = import_fresh(self.plugin)[self.plugin]
        record_property("declaration_milliseconds", round(facts.milliseconds, 1))
        assert not facts.heavy, f"{self.plugin} imports {', '.join(facts.heavy)}; refer to heavy code with Ref"

    def test_declares_its_plugin_api(self) -> None:
        """``D9D_API`` is a plugin API of the installed d9d-core."""
        stated = getattr(self._module(), "D9D_API", None)
        offered = range(OLDEST_API, NEWEST_API + 1)
        assert type(stated) is int, f"{self.plugin}: D9D_API is {stated!r}; write D9D_API = {NEWEST_API}"
        assert stated in offered, f"{self.plugin}: D9D_API is {stated}; this d9d-core offers {list(offered)}"

    def test_registers_at_least_one_record(self) -> None:
        """The registry accepts the hooks, and they yield at least one record."""
        assert self._entries(), f"{self.plugin} declares no records; are its hooks decorated with @hookimpl?"

    def test_summaries_are_one_line(self) -> None:
        """The summary of each record is one line of at most 100 characters, so that it fits into a table."""
        _none(
            f"{entry}: the summary must be one line of at most {_SUMMARY_LENGTH} characters"
            for entry in self._entries()
            if "\n" in entry.spec.summary or len(entry.spec.summary) > _SUMMARY_LENGTH
        )

    def test_references_load(self) -> None:
        """Every ``Ref`` loads, unless a library is missing that the record requires.

        References that d9d calls, such as ``build``, are callable.
        """
        _none(problem for entry in self._specs() for problem in _reference_problems(entry))

    def test_formats_of_model_files_load_without_torch(self) -> None:
        """Hugging Face formats import no torch, because a job's ``config.json`` is read before torch is imported."""
        references = [
            reference
            for entry in self._specs()
            for field, reference in _spec(entry).refs().items()
            if field == "hugging_face"
        ]
        modules = dict.fromkeys(str(reference).partition(":")[0] for reference in references)
        found = import_fresh(*modules) if modules else {}
        _none(f"{name} imports torch; import it inside functions" for name in found if "torch" in found[name].modules)

    def test_configs_belong_to_their_records(self) -> None:
        """Configs are frozen, strict ``PluginConfig`` classes with the record's ``name``.

        Nested configs are frozen and strict too.
        """
        _none(problem for entry, config in self._configs() for problem in _config_problems(entry, config))

    def test_open_unions_and_composite_records_belong_together(self) -> None:
        """A record is composite exactly if its config holds configs of other components, of existing kinds.

        If these are models only, the record may be composite or not.
        """
        kinds = {kind.name for kind in KINDS}
        for entry, config in self._configs():
            unions = {kind for model in _models(config) for kind in _open_unions(model)}
            unknown = sorted(unions - kinds)
            assert not unknown, f"{entry}: there is no kind {unknown[0]!r} for Named(); kinds are {sorted(kinds)}"
            composite = isinstance(entry.spec, ConfiguredSpec) and entry.spec.composite
            # A field for a model needs no composite record: the training loop builds a first pass's model itself.
            assert composite or not unions - {"model"}, (
                f"{entry}: {config.__name__} holds configs of the kinds {sorted(unions)}, but the record does not "
                "build their components; write composite=True in the record, and let build take build_inner last"
            )
            assert unions or not composite, (
                f"{entry}: the record is composite, but {config.__name__} has no field "
                'Annotated[PluginConfig, Named("kind")]; remove composite=True'
            )

    def test_every_config_field_is_documented(self) -> None:
        """Each field, also of nested configs, has a docstring below it, which editors show as help."""
        _none(
            f"{entry}: {owner}.{field} has no docstring below it"
            for entry, config in self._configs()
            for owner, field in _undocumented(config.model_json_schema(), config.__name__)
        )

    def test_configs_round_trip_through_json(self) -> None:
        """A config reads back equal from its JSON dump, because runs and checkpoints store dumps."""
        for entry, config in self._instances():
            text = json.dumps(config.model_dump(mode="json"))
            again = type(config).model_validate_json(text, context=self._names())
            assert again == config, f"{entry}: {config!r} reads back as {again!r} from {text}"
        for entry, config in self._configs():
            for model in _models(config) - {config}:
                _nested_round_trip(entry, model, self._names())

    def test_config_schemas_export(self) -> None:
        """The JSON schema of each config exists and fixes ``name``."""
        for entry, config in self._configs():
            schema = json.loads(json.dumps(config.model_json_schema()))
            name = schema["properties"]["name"]
            assert name.get("const") == entry.spec.key, f"{entry}: 'name' is {name} in the schema"

    def test_capability_tokens_are_known(self) -> None:
        """Each token is declared by d9d-core, this plugin or one it builds on; a misspelt token would never hold."""
        plugins = [importlib.import_module(name) for name in (self.plugin, *self.builds_on)]
        specs = [entry.spec for entry in Registry.of(*plugins).entries("capability")]
        declared = {spec.token for spec in specs if isinstance(spec, CapabilitySpec)}
        _none(
            f"{entry}: capability '{token}' is neither core's nor declared in d9d_capabilities"
            for entry in self._specs()
            for token in sorted(_spec(entry).requires | _spec(entry).provides | _spec(entry).conflicts)
            if not (_is_core_token(token) or token in declared)
        )

    def test_imports_of_other_packages_are_declared(self) -> None:
        """The plugin's sources use d9d's packages by the names of declared modules only; other names may change."""
        own = self.plugin.partition(".")[0]
        api = Api.shipped()
        exempt, suites = api.exempt(own), own == "d9d_testing"
        problems = []
        for place, file in sources_of(self.plugin, self._entries(), api.packages).items():
            source = file.read_text("utf-8")
            uses = [use for use in (*imported_modules(source), *references(source)) if not self._allows(use.module)]
            problems += [f"{place}:{use.line} uses {use}" for use in api.undeclared(uses, exempt, suites=suites)]
        assert not problems, (
            "\n".join(problems)
            + "\nThese names are not declared and may change in any release. Use the names in __all__ "
            "of declared modules (d9d_core/registry/api.json lists them), or state the modules in "
            f"{type(self).__name__}.imports_undeclared"
        )

    def _allows(self, module: str) -> bool:
        return module in (*self.imports_undeclared, *self.builds_on)

    def _module(self) -> Any:
        return importlib.import_module(self.plugin)

    def _names(self) -> dict[str, Any]:
        """Validation context that resolves names of nested configs."""
        plugins = [importlib.import_module(name) for name in (self.plugin, *self.builds_on)]
        return {"registry": Registry.of(*plugins)}

    def _entries(self) -> list[Entry]:
        registry = Registry.of(self._module())
        return [entry for entry in registry.entries() if entry.origin.module == self.plugin]

    def _specs(self) -> list[Entry]:
        return [entry for entry in self._entries() if isinstance(entry.spec, Spec)]

    def _configs(self) -> list[tuple[Entry, Any]]:
        return [(entry, entry.spec.config.load()) for entry in self._specs() if isinstance(entry.spec, ConfiguredSpec)]

    def _instances(self) -> Iterator[tuple[Entry, Any]]:
        from pydantic import ValidationError

        for entry, config in self._configs():
            if entry.spec.key in self.examples:
                yield entry, config.model_validate(dict(self.examples[entry.spec.key]), context=self._names())
            elif isinstance(entry.spec, ModelSpec) and entry.spec.tiny is not None:
                yield entry, entry.spec.tiny.load()()
            else:
                try:
                    yield entry, config()
                except ValidationError as error:
                    text = f"{entry}: its config needs values; name them in {type(self).__name__}.examples: {error}"
                    raise AssertionError(text) from error


def _none(problems: Iterator[str]) -> None:
    found = list(problems)
    assert not found, "\n".join(found)


def _spec(entry: Entry) -> Spec:
    assert isinstance(entry.spec, Spec)
    return entry.spec


def _reference_problems(entry: Entry) -> Iterator[str]:
    required = {token.removeprefix("import:").partition(".")[0] for token in _spec(entry).requires}
    for field, reference in _spec(entry).refs().items():
        try:
            value = reference.load()
        except (ImportError, AttributeError) as error:
            # A requirement's marker may exclude a library on this platform; the record states that it is needed.
            if isinstance(error, ModuleNotFoundError) and error.name in required:
                continue
            yield f"{entry}: {field}={reference} does not load: {error!r}"
            continue
        if field in ("build", "supports", "tiny", "run", "flops", "cost", "alternatives", "simulate") and not callable(
            value
        ):
            yield f"{entry}: {field}={reference} is a {type(value).__name__}, which is not callable"


def _config_problems(entry: Entry, config: Any) -> Iterator[str]:
    from d9d_core.config import PluginConfig

    if not (isinstance(config, type) and issubclass(config, PluginConfig)):
        yield f"{entry}: config is {config!r}, not a subclass of d9d_core.config.PluginConfig"
        return
    if config.model_fields["name"].default != entry.spec.key:
        yield f"{entry}: {config.__name__}.name must be: Literal['{entry.spec.key}'] = '{entry.spec.key}'"
    settings = config.model_config
    if not settings.get("frozen") or settings.get("extra") != "forbid":
        yield f"{entry}: {config.__name__} must stay frozen and refuse unknown fields, as its base class does"
    for model in _models(config) - {config}:
        where = f"{entry}: {model.__name__}, which is nested in {config.__name__},"
        if model.model_config.get("extra") != "forbid":
            yield f"{where} takes unknown fields, such as misspelt ones; derive it from d9d_core.config.Section"
        if not model.model_config.get("frozen"):
            yield f"{where} can be changed; derive it from d9d_core.config.Section, which is frozen"


def _models(config: Any) -> set[Any]:
    """A config and all configs that its fields can hold: nested ones, items of lists, values, variants of unions."""
    from pydantic import BaseModel

    found: set[Any] = set()
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if not (isinstance(part, type) and issubclass(part, BaseModel)):
            waiting += get_args(part)
        elif part not in found and part.__module__ != "d9d_core.config":
            found.add(part)
            waiting += [field.annotation for field in part.model_fields.values()]
    return found


def _open_unions(model: Any) -> Iterator[str]:
    """Kinds of the components that a config's fields select by name (open unions), also in lists and other unions."""
    from d9d_core.job_file.open_union import Named

    waiting = [part for field in model.model_fields.values() for part in (field.annotation, *field.metadata)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Named):
            yield part.kind
        waiting += get_args(part)
        waiting += getattr(part, "__metadata__", ())


def _nested_round_trip(entry: Entry, model: Any, context: Mapping[str, Any]) -> None:
    """Check that a nested config with default values reads back equal; skip configs with required fields."""
    from pydantic import ValidationError

    try:
        value = model()
    except ValidationError:
        return
    text = json.dumps(value.model_dump(mode="json"))
    again = model.model_validate_json(text, context=context)
    assert again == value, f"{entry}: {value!r}, which its config may hold, reads back as {again!r} from {text}"


def _undocumented(schema: Mapping[str, Any], owner: str) -> Iterator[tuple[str, str]]:
    for field, facts in schema.get("properties", {}).items():
        if not facts.get("description", "").strip():
            yield owner, field
    for name, definition in schema.get("$defs", {}).items():
        yield from _undocumented(definition, name)


def _is_core_token(token: str) -> bool:
    namespace, _, word = token.partition(":")
    if namespace == "mesh":
        return word in MESH_AXES
    if namespace == "model":
        return word in MODEL_TRAITS
    return namespace in _CORE_NAMESPACES and bool(word)

"""Plugin packages written from templates: a working plugin with tests, a job and a README."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from d9d_core.errors import PluginError
from d9d_core.registry.hooks import KINDS as HOOKS
from d9d_core.registry.hooks import NEWEST_API
from d9d_core.registry.known import KnownPlugins

from d9d_testing.scaffold.kinds import BASE_JOB, BASE_PACKAGES, INFERENCE_JOB, KINDS, Kind


def plugin_files(name: str, kind: str) -> dict[str, str]:
    """Files of a new plugin package: path relative to its directory -> contents.

    Args:
        name: name of the distribution, such as ``acme-metrics``; the plugin's own name is derived from it.
        kind: one of :data:`~d9d_testing.scaffold.kinds.KINDS`.

    Raises:
        PluginError: the kind does not exist, or a new plugin cannot have the name.
    """
    if kind not in KINDS:
        raise PluginError(f"--kind {kind}: there is no template of this kind; kinds: {', '.join(KINDS)}")
    package = re.sub(r"[-.]+", "_", name).lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", package):
        raise PluginError(f"'{name}' is not a package name; use letters, digits and dashes, such as acme-metrics")
    if package.startswith("d9d_"):
        raise PluginError(f"'{name}': names that begin with d9d- are reserved for first-party packages; use another")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise PluginError(f"'{name}' is a keyword or a module of Python; use another, such as acme-{package}")
    spec = KINDS[kind]
    word = next(hook.name for hook in HOOKS if hook.hook == spec.hook)
    if home := KnownPlugins.shipped().home(word, package):
        raise PluginError(f"'{name}': the {word} of that name comes from {home}; use another, such as acme-{package}")
    words = _words(package, kind, spec)
    fill = {name: f"common/{name}" for name in ("pyproject.toml", "README.md", "LICENSE")}
    fill |= {".github/workflows/ci.yml": "common/ci.yml"}
    fill |= {f"src/{package}/{name}": f"common/{name}" for name in ("__init__.py", "plugin.py")}
    fill |= {f"src/{package}/conformance.py": f"{kind}/conformance.py"}
    fill |= {f"tests/test_{kind}.py": f"{kind}/test_{kind}.py"}
    if spec.module:
        fill[f"src/{package}/{kind}.py"] = f"{kind}/{kind}.py"
    if spec.configured:
        fill[f"src/{package}/config.py"] = f"{kind}/config.py"
    made = {path: template(source).substitute(words) for path, source in fill.items()}
    made |= {f"src/{package}/py.typed": "", "job.yaml": _job(package, spec)}
    if spec.infer is not None:
        made["infer.yaml"] = _inference_job(package, spec.infer)
    return made


def write_plugin(directory: Path, name: str, kind: str) -> list[Path]:
    """Write a new plugin package.

    Args:
        directory: directory of the package; it must be absent or empty.
        name: name of the distribution, such as ``acme-metrics``.
        kind: one of :data:`~d9d_testing.scaffold.kinds.KINDS`.

    Returns:
        Paths of the files, sorted.

    Raises:
        PluginError: the kind does not exist, the name is invalid, or the directory is not empty or cannot be written.
    """
    made = plugin_files(name, kind)
    try:
        if directory.exists() and any(directory.iterdir()):
            raise PluginError(f"{directory} exists and is not empty; give another --directory")
        for path, text in made.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except OSError as error:
        raise PluginError(f"{directory}: cannot write the package there: {error.strerror}") from error
    return [directory / path for path in sorted(made)]


def template(name: str) -> Template:
    """Template with a path such as ``metric/metric.py``."""
    return Template(files("d9d_testing.scaffold").joinpath("templates", f"{name}.tmpl").read_text("utf-8"))


def _words(package: str, kind: str, spec: Kind) -> dict[str, str]:
    names = {"package": package, "name": package, "Name": "".join(map(str.capitalize, package.split("_")))}
    needs = [*map(_since, ("d9d-core", *spec.needs)), *(["pydantic>=2.9,<3"] if spec.configured else [])]
    tests = {"d9d-testing", "pytest", "torch", *BASE_PACKAGES, *spec.tests}
    tests -= {re.split("[<>=]", need)[0] for need in needs}
    word = next(hook.name for hook in HOOKS if hook.hook == spec.hook)
    usage = f"In a job file:\n\n```yaml\n{_filled(spec.section, names)}\n```" if spec.section else spec.summary
    return {
        **names,
        "distribution": package.replace("_", "-"),
        "kind": word,
        "role": kind,
        "summary": spec.summary,
        "hook": spec.hook,
        "Spec": spec.spec,
        "imports": ", ".join(sorted([*spec.imports, spec.spec])),
        "api": str(NEWEST_API),
        # Oldest d9d-core that the package admits; the package's CI also tests with it.
        "oldest": re.split("[,<]", needs[0].partition(">=")[2])[0],
        "record": "\n".join(f"        {line}" for line in _record(package, kind, spec, names)),
        "usage": usage,
        "commands": "\n".join(f"    {_filled(command, names)}" for command in spec.commands),
        "table": "\n".join(f"| `{path}` | {what} |" for path, what in _contents(package, kind, spec).items()),
        "dependencies": "\n".join(f'    "{line}",' for line in sorted(needs)),
        "test_dependencies": "\n".join(f'    "{line}",' for line in sorted(tests)),
    }


def _since(need: str) -> str:
    """Requirement for a distribution; for a package of d9d, the installed release of d9d-core or a later one."""
    return f"{need}>={'.'.join(version('d9d-core').split('.')[:2])}" if need.startswith("d9d-") else need


def _record(package: str, kind: str, spec: Kind, names: Mapping[str, str]) -> list[str]:
    """Source lines of the fields of the plugin's record."""
    if spec.spec == "CapabilitySpec":  # the only record with a token instead of a name
        token = f'token="model:{package}",  # noqa: S106 - a capability token'
        return [token, f'summary="{spec.summary}",']
    fields = [f'name="{package}"', f'summary="{spec.summary}"', *(_filled(line, names) for line in spec.record)]
    if spec.configured:
        fields.append(f'config=Ref("{package}.config:{names["Name"]}Config")')
    if spec.module and spec.entry:
        fields.append(f'{spec.entry}=Ref("{package}.{kind}:{_filled(spec.build, names)}")')
    return [f"{line}," for line in fields]


def _contents(package: str, kind: str, spec: Kind) -> dict[str, str]:
    """Files of a package -> contents, for its README."""
    found = {f"src/{package}/plugin.py": "the declaration: a table that imports neither torch nor pydantic"}
    if spec.configured:
        found[f"src/{package}/config.py"] = "the fields that a job file may give"
    if spec.module:
        found[f"src/{package}/{kind}.py"] = "the implementation"
    found[f"src/{package}/conformance.py"] = "the conformance suites of d9d-testing, for `d9d plugins conform`"
    found[f"tests/test_{kind}.py"] = "a test of this plugin"
    found["job.yaml"] = "a job that trains in seconds, on a CPU"
    if spec.infer is not None:
        found["infer.yaml"] = "an inference job over the trained model"
    found[".github/workflows/ci.yml"] = "tests on every push, with the oldest and the newest core"
    return found


def _job(package: str, spec: Kind) -> str:
    return _sections("Trains in seconds on a CPU: d9d train job.yaml", {**BASE_JOB, **spec.job}, package)


def _inference_job(package: str, sections: Mapping[str, str]) -> str:
    text = "Runs over the model that job.yaml trains: d9d infer infer.yaml"
    return _sections(text, {**INFERENCE_JOB, **sections}, package)


def _sections(comment: str, sections: Mapping[str, str], package: str) -> str:
    lines = [f"{key}: {_filled(text, {'name': package})}" for key, text in sections.items()]
    return "\n".join([f"# {comment}", *lines, ""])


def _filled(text: str, names: Mapping[str, str]) -> str:
    """Text with ``{name}`` and the like replaced; other braces, which YAML uses, stay."""
    for word, value in names.items():
        text = text.replace(f"{{{word}}}", value)
    return text

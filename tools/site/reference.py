"""API reference of the declared modules: one page each, read from the sources without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import griffe
from roles import comment_of

#: Declared modules, in the order in which a name that several have is documented.
MODULES = ("d9d_core.plugin", "d9d_core.extend", "d9d_weights", "d9d_engine.extend", "d9d_engine.api")
SUITES = "d9d_testing.suites"
#: Start of the module that a name is defined in -> heading of its group.
SEAMS = {
    "d9d_core.config": "Configuration",
    "d9d_core.errors": "Errors",
    "d9d_core.types": "Types that cross seams",
    "d9d_core.tensors": "Types that cross seams",
    "d9d_core.data": "Data",
    "d9d_core.task": "Task",
    "d9d_core.model": "Model",
    "d9d_core.traits": "Traits of models",
    "d9d_core.deferral": "Deferral of weight gradients",
    "d9d_core.kernel": "Kernels",
    "d9d_core.optimizer": "Optimizer and learning rate",
    "d9d_core.strategy": "Strategy",
    "d9d_core.topology": "Topology",
    "d9d_core.grid": "Topology",
    "d9d_core.peft": "Fine-tuning",
    "d9d_core.metric": "Metric",
    "d9d_core.tracker": "Tracker",
    "d9d_core.subscriber": "Subscriber and events",
    "d9d_core.events": "Subscriber and events",
    "d9d_core.health": "Health check",
    "d9d_core.program": "Pipeline schedule and programs",
    "d9d_core.job": "Job file",
    "d9d_core.plugin": "Records",
    "d9d_core.plugin": "Discovery and registry",
    "d9d_weights.graph": "State graphs",
    "d9d_weights.hugging_face": "Model directories",
    "d9d_weights.sharding": "Tensors over ranks",
    "d9d_engine.job": "Job",
    "d9d_engine.run": "Job",
    "d9d_engine.compose": "Job",
    "d9d_verify": "Comparing layouts",
}


def file_of(root: Path, module: str) -> Path:
    """Source file of a module of a package."""
    package, _, rest = module.partition(".")
    base = root / "packages" / package.replace("_", "-") / "src" / package
    inner = base.joinpath(*rest.split(".")) if rest else base
    return inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")


def public_names(root: Path, module: str) -> dict[str, str]:
    """Names of ``__all__`` -> the module that each is imported from; the module itself for its own."""
    tree = ast.parse(file_of(root, module).read_text("utf-8"))
    homes = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return {name: homes.get(name, module) for name in ast.literal_eval(node.value)}
    raise ValueError(f"{module} has no __all__")


def suites(root: Path) -> dict[str, str]:
    """Conformance suites -> module."""
    package = root / "packages" / "d9d-testing" / "src"
    return {
        name: ".".join(file.relative_to(package).with_suffix("").parts)
        for file in sorted((package / "d9d_testing" / "suites").rglob("*.py"))
        for name in re.findall(r"^class (\w+Suite)\b", file.read_text("utf-8"), re.MULTILINE)
    }


def pages(root: Path) -> dict[str, str]:
    """Module -> Markdown of its page. A name that two modules have is documented on the first one's page."""
    found: dict[str, str] = {}
    seen: dict[str, str] = {}
    for module in MODULES:
        groups: dict[str, list[str]] = {}
        elsewhere = []
        for name, home in public_names(root, module).items():
            target = f"{home}.{name}"
            if target in seen:
                elsewhere.append(f"[`{name}`]({seen[target]}.md#{target})")
            else:
                seen[target] = module
                groups.setdefault(_heading(home), []).append(target)
        order = list(dict.fromkeys(SEAMS.values()))
        lines = [f"# {module}", "", _summary(root, module), ""]
        for heading in sorted(groups, key=lambda heading: order.index(heading) if heading in order else len(order)):
            lines += [f"## {heading}", ""]
            lines += [line for target in groups[heading] for line in (f"::: {target}", "")]
        if elsewhere:
            lines += ["## Also here", "", "Documented where they are declared first: " + ", ".join(elsewhere) + ".", ""]
        found[module] = "\n".join(lines)
    lines = [f"# {SUITES}", "", "Conformance suites: derive a class, say what to test, and run pytest.", ""]
    for name, module in suites(root).items():
        lines += [f"::: {module}.{name}", "    options: {heading_level: 2}", ""]
    found[SUITES] = "\n".join(lines)
    return found


def _heading(home: str) -> str:
    fitting = [start for start in SEAMS if home == start or home.startswith(f"{start}.")]
    return SEAMS[max(fitting, key=len)] if fitting else home.rpartition(".")[2].replace("_", " ").capitalize()


def _summary(root: Path, module: str) -> str:
    doc = ast.get_docstring(ast.parse(file_of(root, module).read_text("utf-8"))) or ""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc.partition("\n")[0])


def undocumented(root: Path, modules: Sequence[str]) -> Iterator[str]:
    """One message for each public name of these modules, and public member of such a class, without a docstring."""
    packages = sorted({module.partition(".")[0] for module in modules} | {"d9d_core"})
    loader = griffe.GriffeLoader(search_paths=[root / "packages" / p.replace("_", "-") / "src" for p in packages])
    for package in packages:
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    seen = set()
    for module in modules:
        for name, home in public_names(root, module).items():
            target = loader.modules_collection[f"{home}.{name}"]
            if target.canonical_path not in seen:
                seen.add(target.canonical_path)
                for lacking in _lacking(target.final_target if target.is_alias else target):
                    yield f"{module}: the public name {lacking.canonical_path} has no docstring"


def _lacking(target: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    if not _is_documented(target):
        yield target
    if isinstance(target, griffe.Class):
        for name, member in target.members.items():
            own = isinstance(member, griffe.Function) or "property" in member.labels
            if own and not name.startswith("_") and not _is_documented(member) and not _is_inherited(target, name):
                yield member


def _is_documented(target: griffe.Object | griffe.Alias) -> bool:
    if target.docstring is not None and target.docstring.value.strip():
        return True
    return isinstance(target, griffe.Attribute) and comment_of(target) != ""


def _is_inherited(owner: griffe.Class, name: str) -> bool:
    return any(name in parent.members and _is_documented(parent.members[name]) for parent in owner.mro())

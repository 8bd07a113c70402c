"""Rules of the architecture: imports between and inside packages, imports of declarations, and forbidden names.

The rules are the table below and each member's pyproject.toml. The facts are read from the sources, because in an
environment where everything happens to be installed nothing fails.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import grimp
import pytest
from d9d_core.registry.api import Api, Use, imported_modules, references
from d9d_testing.suites.fresh import import_fresh

ROOT = Path(__file__).parents[1]

#: Rooms of the foundation, lowest layer first. A module imports lower layers and its own; neighbours on one line too.
LAYERS = {
    "d9d_core": (
        {"deprecation", "errors", "interpreter", "trees", "types", "untrusted", "words"},
        {
            "attention",
            "config",
            "containment",
            "custom_op",
            "deferral",
            "elastic",
            "health",
            "kernel",
            "metric",
            "peft",
            "schedule",
            "tensors",
        },
        {
            "accumulators",
            "cost",
            "data",
            "forward",
            "launcher",
            "model",
            "plugin",
            "subscriber",
            "terminal",
            "tracker",
            "traits",
        },
        {"grid", "registry"},
        {"failures", "job_file", "topology"},
        {"strategy", "task"},
        {"first_pass", "inference", "optimizer"},
        {"events"},
        {"components"},
        {"program"},
        {"layout"},
        {"job"},
        {"cli"},
        {"__main__"},
    ),
    "d9d_weights": (
        {"files", "graph", "progress", "templates"},
        {"sharding"},
        {"hugging_face"},
        {"checkpoint"},
        {"model_card"},
        {"state"},
        {"plugin"},
    ),
    "d9d_engine": (
        {"compat", "figures", "machines", "process_env", "sparklines"},
        {"supervision"},
        {"distributed"},
        {"checkpoint", "costs", "profiling", "sleep", "subscribers", "trackers"},
        {"step"},
        {"run"},
        {"compose"},
        {"joining", "own_loop"},
        {"job"},
        {"launch"},
        {"cli"},
        {"plugin"},
    ),
    "d9d_inference": (
        {"config"},
        {"writers", "part_store", "position_parts", "captures", "row_thread"},
        {"generation"},
        {"forwards"},
        {"runner"},
        {"compose"},
        {"job"},
        {"evaluation"},
        {"commands"},
        {"plugin"},
    ),
    "d9d_reports": ({"runs"}, {"report"}, {"commands"}, {"plugin"}),
}
#: Members of the foundation may import each other's modules, downwards; all others only the declared modules.
FOUNDATION = ("d9d_core", "d9d_weights", "d9d_engine")
#: Imports that the tests of every member may make besides: d9d-testing, and its dependencies.
TEST_TOOLS = {
    "d9d_testing",
    "d9d_verify",
    "pytest",
    "hypothesis",
    "torch",
    "safetensors",
    "fsspec",
    "pydantic",
    "yaml",
    *FOUNDATION,
}
#: Declared module -> its names, as tools/public_surface.py writes them down; tests/test_public_surface.py compares.
API = Api.shipped()
DECLARED = API.names
#: Declared modules of core that compute with tensors; all others load without torch.
WITH_TENSORS = {"d9d_core.accumulators", "d9d_core.custom_op", "d9d_core.deferral", "d9d_core.tensors"}
#: Declared although no source file imports it: distribution -> why.
INDIRECT = {
    "numpy": "torch needs it to exchange memory with files and pictures, and does not declare it",
    "d9d-engine": "strategies and schedules train nothing without it, so that one `pip install` is enough",
    "d9d-launch": "engines do nothing without it, so that one `pip install` is enough",
    "fla-core": "an extra, imported as fla, and not in the locked environment",
    "alembic": "mlflow-skinny needs it for a store in a database, and does not declare it",
    "sqlalchemy": "likewise",
    "packaging": "liger-kernel needs it, and does not declare it",
    "pillow": "wandb needs it for pictures, and does not declare it",
    "backports-zstd": "imported by name, as newer Pythons have it as a module of another name",
    "boto3": "resolving what aim asks for takes minutes without a lower bound of it",
}
#: Imported although not declared, where torch is: module -> why.
WITH_TORCH = {"triton": "torch needs one version of it exactly, from distributions of other names on other platforms"}
#: Imported although not declared: (member, module) -> why.
LEFT_TO_USERS = {
    ("d9d-fla", "fla"): "transformers would use it for its own models, also on a CPU, where it fails; an extra has it",
    ("d9d-ray", "ray"): "has 490 MB, which a machine that only submits to a job server does not need",
    ("d9d-torchft", "torchft"): "is only needed where elastic replicas train, and not in the locked environment",
}
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle"}
PICKLING_ARGUMENTS = ("allow_pickle", "pickle_module")
PICKLING_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace."""

    path: Path

    def __str__(self) -> str:
        return self.path.name

    @cached_property
    def project(self) -> dict[str, Any]:
        project: dict[str, Any] = tomllib.loads((self.path / "pyproject.toml").read_text())["project"]
        return project

    @property
    def package(self) -> str:
        return self.path.name.replace("-", "_")

    @property
    def dependencies(self) -> set[str]:
        optional = [line for lines in self.project.get("optional-dependencies", {}).values() for line in lines]
        return {_normal(re.split(r"[\s<>=!~;\[]", line)[0]) for line in [*self.project["dependencies"], *optional]}

    @property
    def sources(self) -> list[Path]:
        return sorted((self.path / "src").rglob("*.py"))


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


EVERY_MEMBER = [
    Member(path.parent) for house in ("packages", "plugins") for path in sorted(ROOT.glob(f"{house}/*/pyproject.toml"))
]
#: The package that only depends on the others has no code for the rules below.
META = ROOT / "packages" / "d9d-all"
MEMBERS = [member for member in EVERY_MEMBER if member.path != META]
members = pytest.mark.parametrize("member", MEMBERS, ids=str)


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    """Every import statement of every member, those inside functions and for type checkers included."""
    packages = [member.package for member in MEMBERS]
    return grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)


@pytest.fixture(scope="module")
def owners() -> Mapping[str, list[str]]:
    """Top-level name of an installed package -> its distributions; to read them all takes a tenth of a second."""
    return packages_distributions()


def imported_by(graph: grimp.ImportGraph, package: str) -> dict[str, set[str]]:
    """Top-level name -> the modules of ``package`` that import it."""
    found: dict[str, set[str]] = {}
    for module in {package, *graph.find_descendants(package)}:
        for target in graph.find_modules_directly_imported_by(module):
            found.setdefault(target.partition(".")[0], set()).add(module)
    found.pop(package, None)
    return found


# --- between packages ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@members
def test_a_member_imports_only_what_it_declares(
    member: Member, imports: grimp.ImportGraph, owners: Mapping[str, list[str]]
) -> None:
    undeclared = []
    for name, modules in sorted(imported_by(imports, member.package).items()):
        if name in sys.stdlib_module_names or (name in WITH_TORCH and "torch" in member.dependencies):
            continue
        if (str(member), name) in LEFT_TO_USERS:
            continue
        distributions = {_normal(owner) for owner in owners.get(name, [name])}
        if not distributions & member.dependencies:
            undeclared.append(f"{', '.join(sorted(modules))} imports {name} ({', '.join(sorted(distributions))})")
    assert undeclared == []


@members
def test_a_member_declares_only_what_it_imports(
    member: Member, imports: grimp.ImportGraph, owners: Mapping[str, list[str]]
) -> None:
    used = imported_by(imports, member.package)
    used_distributions = {_normal(owner) for name in used for owner in owners.get(name, [name])}
    assert member.dependencies - used_distributions - INDIRECT.keys() == set()


def test_the_foundation_imports_downwards_only(imports: grimp.ImportGraph) -> None:
    """And so nothing of the outer ring, nor any plugin."""
    others = {member.package for member in MEMBERS}
    for height, package in enumerate(FOUNDATION):
        upwards = others - set(FOUNDATION[: height + 1])
        assert upwards & imported_by(imports, package).keys() == set(), package


def sources_bound_to_declared_modules() -> Iterator[Path]:
    for member in MEMBERS:
        if member.package not in FOUNDATION:
            yield from member.sources
    yield from (path for path in sorted((ROOT / "examples").rglob("*.py")) if "tests" not in path.parts)


@pytest.mark.thorough
@pytest.mark.parametrize("house", [*(str(m) for m in MEMBERS if m.package not in FOUNDATION), "examples"])
def test_packages_use_each_other_by_the_names_of_their_declared_modules(house: str) -> None:
    found = {}
    for path in sources_bound_to_declared_modules():
        if house in path.relative_to(ROOT).parts[:2]:
            source = path.read_text("utf-8")
            own = path.relative_to(ROOT).parts[1].replace("-", "_")
            uses = [*imported_modules(source), *references(source)]
            found[str(path.relative_to(ROOT))] = API.undeclared(uses, API.exempt(own), suites=house == "d9d-testing")
    assert {path: uses for path, uses in found.items() if uses} == {}


def imports_in_text(text: str) -> Iterator[Use]:
    """Imports in a text that need not be Python otherwise, as a template is not."""
    statement = r"^[ ]*((?:from [\w.]+ import (?:\([^)]*\)|[^\n(]+)|import [\w., ]+))(?:[ ]+#.*)?$"
    for found in re.findall(statement, text, re.MULTILINE):
        yield from imported_modules(found)


def test_templates_show_declared_modules_only() -> None:
    found = {}
    for path in sorted((ROOT / "packages/d9d-testing/src/d9d_testing/scaffold/templates").rglob("*.tmpl")):
        text = re.sub(r"\$\{\w+\}", "FILLED_IN", path.read_text("utf-8"))
        uses = [*imports_in_text(text), *references(text)]
        found[path.name] = API.undeclared(use for use in uses if "FILLED_IN" not in use.name)
    assert len(found) > 1
    assert {path: uses for path, uses in found.items() if uses} == {}


def test_documents_show_declared_modules_only() -> None:
    """In Python fences; ``import package.plugin``, to name a plugin to a registry, besides."""
    entry_points = {(f"{member.package}.plugin", "") for member in MEMBERS}
    found = {}
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "plugins/*/*.md", "examples/**/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            fences = re.findall(
                r"^[ ]*```py(?:thon)?\n(.*?)^[ ]*```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE
            )
            uses = [use for fence in fences for use in (*imports_in_text(fence), *references(fence))]
            found[str(path.relative_to(ROOT))] = API.undeclared(use for use in uses if use[:2] not in entry_points)
    assert {path: uses for path, uses in found.items() if uses} == {}


@members
def test_configs_of_a_plugin_are_declared(member: Member) -> None:
    """A job in Python is made of them."""
    declaration = member.path / "src" / member.package / "plugin.py"
    if member.package in FOUNDATION or not declaration.exists():
        return
    modules = re.findall(r'config=Ref\(\s*f?"([\w.]+):', declaration.read_text("utf-8"))
    assert set(modules) - DECLARED.keys() == set()


@pytest.mark.parametrize(
    "source",
    [
        "from d9d_nn.ops.deferred import anything",
        "from d9d_nn.swiglu import Linear",
        "import d9d_moe.router.selection",
        "def f():\n    from d9d_nn import ops",
        "from d9d_core.failures import describe",
        "from d9d_core.job_file.job import JobConfig",
    ],
)
def test_undeclared_imports_are_recognised(source: str) -> None:
    assert API.undeclared(imported_modules(source), {"d9d_qwen3"}) != []


def test_own_modules_and_declared_names_are_not_undeclared() -> None:
    source = "from d9d_nn.swiglu import SwiGLU\nimport torch\nfrom d9d_qwen3.block import anything"
    assert API.undeclared(imported_modules(source), {"d9d_qwen3"}) == []


@pytest.mark.thorough
@pytest.mark.parametrize("module", sorted(name for name in DECLARED if name.partition(".")[0] in FOUNDATION))
def test_declared_names_are_defined_where_they_are_declared(module: str) -> None:
    loaded = importlib.import_module(module)
    defined = {name for node in ast.parse(Path(str(loaded.__file__)).read_text("utf-8")).body for name in _bound(node)}
    assert set(loaded.__all__) - defined == set()


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines; an import defines none."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.thorough
def test_declared_modules_of_core_load_without_torch() -> None:
    light = sorted(name for name in DECLARED if name.startswith("d9d_core.") and name not in WITH_TENSORS)
    code = f"import sys, {', '.join(light)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.thorough
@members
def test_tests_of_a_member_import_only_what_is_installed_with_it(
    member: Member, owners: Mapping[str, list[str]]
) -> None:
    foreign = []
    for path in sorted((member.path / "tests").rglob("*.py")):
        names = {name.partition(".")[0] for name in imported_names(path)}
        known = set(sys.stdlib_module_names) | TEST_TOOLS | WITH_TORCH.keys() | {member.package}
        for name in sorted(names - known):
            distributions = {_normal(owner) for owner in owners.get(name, [name])}
            optional = f'importorskip("{name}' in path.read_text()
            if not distributions & member.dependencies and not optional:
                foreign.append(f"{path.relative_to(ROOT)} imports {name}")
    assert foreign == []


# --- inside a package ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", LAYERS)
def test_rooms_import_only_downwards(package: str) -> None:
    """Imports inside functions and for type checkers included."""
    graph = grimp.build_graph(package, cache_dir=None)
    heights = {name: height for height, names in enumerate(LAYERS[package]) for name in names}
    present = {module.partition(".")[2] for module in graph.find_children(package)}
    assert present - heights.keys() == set(), f"place new modules of {package} in LAYERS"
    upwards = []
    for importer in sorted(graph.modules - {package}):
        for imported in sorted(graph.find_modules_directly_imported_by(importer) - {package}):
            low, high = heights[importer.split(".")[1]], heights[imported.split(".")[1]]
            if high > low:
                upwards.append(f"{importer} imports {imported}")
    assert upwards == []


def cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules that import each other, however indirectly."""
    found = []
    for module in sorted(graph.modules):
        around = graph.find_downstream_modules(module) & graph.find_upstream_modules(module)
        if around and sorted(around | {module}) not in found:
            found.append(sorted(around | {module}))
    return found


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers included."""
    graph = grimp.build_graph(*(member.package for member in MEMBERS), cache_dir=None)
    assert cycles(graph) == []


# --- declarations ----------------------------------------------------------------------------------------------------


@members
def test_plugins_have_one_entry_point_and_packages_at_most_one(member: Member) -> None:
    points = member.project.get("entry-points", {}).get("d9d", {})
    assert list(points.values()) in (
        [[f"{member.package}.plugin"]] if is_plugin(member) else [[], [f"{member.package}.plugin"]]
    )


def is_plugin(member: Member) -> bool:
    return member.path.parent.name == "plugins"


def test_declarations_and_package_files_import_nothing_heavy() -> None:
    plugins = [f"{m.package}.plugin" for m in MEMBERS if "d9d" in m.project.get("entry-points", {})]
    light = [*(m.package for m in MEMBERS), "d9d_core.plugin", "d9d_testing.pytest_plugin", *plugins]
    facts = import_fresh(*light)
    assert {module: fact.heavy for module, fact in facts.items() if fact.heavy} == {}


@members
def test_a_member_is_complete(member: Member) -> None:
    for needed in ("README.md", "tests", f"src/{member.package}/py.typed"):
        assert (member.path / needed).exists(), f"{member} has no {needed}"
    assert len((member.path / "README.md").read_text()) > 200
    assert member.project["name"] == str(member)


@members
def test_a_member_has_a_quick_test_for_other_versions_of_python_and_torch(member: Member) -> None:
    """Conformance suites are marked ``smoke``; ``thorough`` would leave them out."""
    tests = [ast.parse(file.read_text("utf-8")) for file in (member.path / "tests").rglob("test_*.py")]
    kinds = ast.ClassDef | ast.FunctionDef | ast.Assign
    defined = [node for tree in tests for node in tree.body if isinstance(node, kinds)]
    quick = [node for node in defined if "mark.thorough" not in ast.unparse(node).partition("def ")[0]]
    assert any("mark.smoke" in ast.unparse(node) or _is_suite(node) for node in quick)


def _is_suite(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Suite") for base in node.bases)


def test_the_workspace_installs_every_member() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {str(member) for member in EVERY_MEMBER}
    assert set(root["project"]["dependencies"]) == names
    assert {name for name, source in root["tool"]["uv"]["sources"].items() if source == {"workspace": True}} == names


def test_the_meta_package_has_every_member_and_their_extras_but_no_code() -> None:
    meta = Member(META)
    required = {re.split(r"[<>=]", line)[0] for line in meta.project["dependencies"]}
    # Libraries of trackers and of kernels are many, and a run uses one or two of them.
    chosen = [line for extra in ("kernels", "trackers") for line in meta.project["optional-dependencies"][extra]]
    optional = {re.split(r"[<>=\[]", line)[0] for line in chosen}
    assert required | optional == {str(member) for member in MEMBERS}
    assert required & optional == set()
    assert list(META.rglob("*.py")) == []
    assert len((META / "README.md").read_text()) > 200
    extras = meta.project["optional-dependencies"]
    offered = {f"{m}[{extra}]" for m in MEMBERS for extra in m.project.get("optional-dependencies", {})}
    taken = {
        f"{name}[{extra}]"
        for lines in extras.values()
        for name, listed in (re.findall(r"^(d9d-[\w-]+)\[([\w,]+)\]$", line)[0] for line in lines if "[" in line)
        for extra in listed.split(",")
    }
    # Tools of tests, and torch, which comes with every package that needs it.
    assert offered - taken == {
        "d9d-core[torch]",
        "d9d-testing[hostile]",
        "d9d-testing[launch]",
        "d9d-testing[models]",
        "d9d-testing[moe]",
    }
    assert taken <= offered


@members
def test_only_the_root_configures_lint_and_types(member: Member) -> None:
    tools = tomllib.loads((member.path / "pyproject.toml").read_text())["tool"]
    assert set(tools) <= {"hatch"}


# --- forbidden names -------------------------------------------------------------------------------------------------


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pickling(source: str) -> list[str]:
    """What in a source file writes or reads pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLING_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module.partition(".")[0], *(f"{node.module}.{alias.name}" for alias in node.names)}
            found += sorted(names & (PICKLING_MODULES | PICKLING_CALLS))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in PICKLING_CALLS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in PICKLING_ARGUMENTS and ast.unparse(node.value) != "False":
            found.append(node.arg)
    return found


@pytest.mark.thorough
@members
def test_nothing_pickles(member: Member) -> None:
    found = {str(path.relative_to(ROOT)): pickling(path.read_text()) for path in member.sources}
    assert {path: uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    import dill as d",
        "from pickle import dumps",
        "from torch import load",
        "torch.save(x, f)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(text)",
    ],
)
def test_pickling_is_recognised(source: str) -> None:
    assert pickling(source) != []


@pytest.mark.parametrize("source", ["np.load(f, allow_pickle=False)", "yaml.safe_load(t)", "model.load(x)"])
def test_other_loading_is_not_pickling(source: str) -> None:
    assert pickling(source) == []


# --- alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@members
def test_a_member_passes_its_tests_alone(member: Member, tmp_path: Path) -> None:
    """With this member, its declared dependencies and the test tools installed, at the locked versions, and no more."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "UV_PYTHON", "PYTHONPATH")
    }
    environ |= {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv")}
    python = tmp_path / "venv" / "bin" / "python"

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"

    run("uv", "sync", "--exact", "--python", sys.executable, "--package", str(member), "--package", "d9d-testing")
    run("uv", "pip", "install", "--python", str(python), f"hypothesis=={version('hypothesis')}")
    every = ("-m", "not slow and not gpu")
    run(str(python), "-m", "pytest", str(member.path / "tests"), *every, "-q", "-p", "no:cacheprovider")

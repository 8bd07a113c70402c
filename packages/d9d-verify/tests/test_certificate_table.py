"""The table of a certificate on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_verify.certify import command, run
from d9d_verify.certify.certificate import Cell, Certificate
from d9d_verify.compare import Verdict
from d9d_verify.layouts import Layout
from typer.testing import CliRunner

VERSIONS = {"d9d-core": "0.1", "torch": "2.11.0", "transformers": "5.0"}
CELLS = [Cell("tp=2", "exact", "1e-07"), Cell("pp=2", "refused", "no [b]stages[/b]")]


@pytest.mark.parametrize(
    ("kind", "versions", "head"),
    [
        (
            "llama",
            VERSIONS,
            "model [m], model_type llama, config 0123456789ab, with torch 2.11.0, transformers 5.0",
        ),
        (None, {"torch": "2.11.0"}, "model [m], config 0123456789ab, with torch 2.11.0"),
    ],
)
def test_a_certificate_names_the_model_and_the_libraries_that_computed(
    capsys: pytest.CaptureFixture[str], kind: str | None, versions: dict[str, str], head: str
) -> None:
    command._print(Certificate("[m]", kind, "0123456789abcdef", versions, CELLS))
    first, titles, *rows = capsys.readouterr().out.splitlines()
    assert first == head
    assert titles.split("  ")[0].strip() == "layout or feature"
    assert [row.strip().split(maxsplit=2) for row in rows] == [
        ["tp=2", "exact", "1e-07"], ["pp=2", "refused", "no [b]stages[/b]"],
    ]  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_difference_fails_the_command(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    cells = [*CELLS, Cell("lora", "differs", "0.5")]

    def certified(target: str, _registry: object, note: Any) -> Certificate:
        assert target == "m"
        note("tp=2 \x1b[2J")
        return Certificate(target, None, "0" * 64, VERSIONS, cells)

    monkeypatch.setattr("d9d_verify.certify.run.certify", certified)
    found: list[Any] = []
    monkeypatch.setattr(command, "discover_plugins", lambda *policy: found.append(policy))
    result = CliRunner().invoke(command.app, ["m", "--plugin", "one.py", "--strict-plugins", *options])
    assert found == [([Path("one.py")], False, True)]
    assert result.exit_code == 1
    assert "differs" in result.stdout
    if options:
        assert result.stdout == json.dumps(Certificate("m", None, "0" * 64, VERSIONS, cells).to_json(), indent=1) + "\n"
        assert json.loads(result.stdout)["holds"] is False
    assert "tp=2" in result.stderr
    assert "\x1b" not in result.stderr
    del cells[-1]
    assert CliRunner().invoke(command.app, ["m", *options]).exit_code == 0


def test_a_certificate_has_the_layouts_of_the_manual() -> None:
    one, ring = {"name": "1f1b"}, {"name": "context_parallel", "method": "ring"}
    assert [(one.name, one.mesh, one.parallel, one.pipeline) for one in run.LAYOUTS] == [
        ("replicate 2", {"dp_replicate": 2}, ("replicate",), None),
        ("fsdp 2", {"dp_shard": 2}, ("fsdp",), None),
        ("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ("hsdp",), None),
        ("pp 2", {"pp": 2}, (), one),
        ("tp 2", {"tp": 2}, ("tensor_parallel",), None),
        ("cp 2", {"cp": 2}, (ring,), None),
        ("ep 2", {"dp_shard": 2, "ep": 2}, ("fsdp", "expert_parallel"), None),
        ("tp 2 x pp 2", {"tp": 2, "pp": 2}, ("tensor_parallel",), one),
        ("checkpointing", {}, ("activation_checkpointing",), None),
        ("compile", {}, ("compile",), None),
    ]
    assert (run._STEPS, run._WORDS, run._LORA_RANKS) == (2, 128, (4, 1))


@pytest.mark.parametrize("example", [False, True])
def test_a_type_of_models_is_tried_by_its_example_or_its_defaults(
    example: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(text: str) -> Any:
        return SimpleNamespace(model_dump=lambda mode: {"made": text, "mode": mode})

    form = SimpleNamespace(config_from_json=lambda fields: config(f"from {fields}"))
    if example:
        form.example = lambda kind: config(f"example of {kind}")
    spec = SimpleNamespace(hugging_face=SimpleNamespace(load=lambda: lambda: form), key="known")
    registry: Any = SimpleNamespace(
        entries=lambda kind: [SimpleNamespace(spec=spec)], find=lambda *given: SimpleNamespace(spec=spec)
    )
    monkeypatch.setattr(run, "ModelSpec", SimpleNamespace)
    monkeypatch.setattr(
        run, "model_for_type", lambda fields, _registry: {"llama": ("known", None)}[fields["model_type"]]
    )
    made = "example of llama" if example else "from {'model_type': 'llama'}"
    assert run._model("llama", registry) == {"made": made, "mode": "json"}


RING, ULYSSES = ({"name": "context_parallel", "method": method} for method in ("ring", "ulysses"))


@pytest.mark.parametrize(
    ("name", "refused", "expected"),
    [
        ("cp 2", (), (RING, None, "")),
        ("cp 2", (RING,), (ULYSSES, None, " by method ulysses, because: ring")),
        ("cp 2", (RING, ULYSSES), (RING, "ring", "")),
        ("another", (RING,), (RING, "ring", "")),
    ],
)
def test_a_layout_that_is_refused_is_tried_with_another_strategy(
    name: str, refused: Any, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(job: object, layout: Layout) -> str | None:
        assert (job, layout.name, layout.mesh) == ("job", name, {"cp": 2})
        (strategy,) = layout.parallel
        return strategy["method"] if strategy in refused else None

    monkeypatch.setattr(run, "_refusal", refusal)
    job: Any = "job"
    found, why, remark = run._choose(job, Layout(name, {"cp": 2}, (RING,)))
    assert (*found.parallel, why, remark) == expected


def test_layouts_that_are_not_refused_run_and_have_their_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = (2e-9, "weight")
    told: list[Any] = []

    def verify(*given: Any) -> list[Verdict]:
        told.append((given[0], [layout.name for layout in given[1]], *given[2:]))
        return [Verdict(layout.name, 0.0, 0.0, nothing, nothing, nothing, None) for layout in reversed(given[1])]

    monkeypatch.setattr(run, "verify", verify)
    monkeypatch.setattr(run, "_choose", lambda _job, layout: (layout, layout.mesh.get("why"), layout.mesh["remark"]))
    layouts: Any = [
        Layout("a", {"remark": " by a"}, ()),  # type: ignore[dict-item]
        Layout("b", {"why": "no", "remark": ""}, ()),  # type: ignore[dict-item]
        Layout("c", {"remark": ""}, ()),  # type: ignore[dict-item]
    ]
    job: Any = "job"
    note: Any = "note"
    launch: Any = "launch"
    assert run._in_layouts(job, layouts, note, launch) == [
        Cell("a", "exact", "gradients: 1-cos 2.0e-09 by a"),
        Cell("b", "refused", "no"),
        Cell("c", "exact", "gradients: 1-cos 2.0e-09"),
    ]
    assert told == [("job", ["a", "c"], 2, "note", "launch")]
    assert run._in_layouts(job, layouts[1:2], note, launch) == [Cell("b", "refused", "no")]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("refused", "ranks", "expected"),
    [
        ((), [4], Cell("lora", "exact", "of 4")),
        ((4,), [4, 1], Cell("lora", "exact", "of 1")),
        ((4, 1), [4, 1], Cell("lora", "refused", "rank 1 is too large")),
    ],
)
def test_lora_has_the_first_rank_that_the_model_does_not_refuse(
    refused: tuple[int, ...], ranks: list[int], expected: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def from_values(values: dict[str, Any], registry: str) -> int:
        assert (values["seed"], registry) == (3, "registry")
        rank = values["peft"]["r"]
        tried.append(rank)
        if rank in refused:
            raise JobError(f"rank {rank} is too large\nuse a smaller one")
        return int(rank)

    def in_layouts(tuned: int, layouts: list[Layout], note: str, launch: str) -> list[Cell]:
        assert (layouts, note, launch) == ([Layout("lora", {"dp_shard": 2}, ("fsdp",))], "note", "launch")
        return [Cell("lora", "exact", f"of {tuned}")]

    monkeypatch.setattr(run, "Job", SimpleNamespace(from_values=from_values))
    monkeypatch.setattr(run, "_in_layouts", in_layouts)
    job: Any = SimpleNamespace(resolved=lambda: {"seed": 3, "peft": None}, registry="registry")
    note: Any = "note"
    launch: Any = "launch"
    assert run._with_lora(job, note, launch) == expected
    assert tried == ranks


def test_a_refusal_is_the_first_line_of_what_is_wrong_with_the_scaled_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> None:
        if seen["values"] == "refused":
            raise JobError("heads\nand more")

    seen: dict[str, Any] = {}
    layout = Layout("x", {}, ())
    monkeypatch.setattr(run, "scaled_values", lambda *given: given)
    monkeypatch.setattr(
        run, "layout_values", lambda values, of, ops: seen.update(given=(values, of, ops)) or seen["as"]
    )
    jobs = SimpleNamespace(
        from_values=lambda values, registry: seen.update(values=values, registry=registry) or SimpleNamespace(plan=plan)
    )
    monkeypatch.setattr(run, "Job", jobs)
    job: Any = SimpleNamespace(registry="registry")
    for kind, expected in (("fine", None), ("refused", "heads")):
        seen["as"] = kind
        assert run._refusal(job, layout) == expected
    assert (seen["given"], seen["registry"]) == (((job, [layout], 2), layout, ()), "registry")


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"vocab_size": 50}, 50), ({"vocab_size": 1000}, 128), ({"vocab_size": "auto"}, "auto"), ({}, None)],
)
def test_a_certified_model_has_few_words(values: dict[str, Any], expected: object) -> None:
    model = SimpleNamespace(model_dump=lambda mode, exclude: {**values, "left_out": sorted(exclude), "mode": mode})
    found = run._with_few_words(model)
    assert (found.get("vocab_size"), found["left_out"], found["mode"]) == (expected, ["pretrained"], "json")

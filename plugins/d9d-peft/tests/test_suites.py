"""Fine-tuning methods keep what holds for every one."""

from __future__ import annotations

from typing import ClassVar

import pytest
from d9d_testing.suites.peft import PeftSuite

LORA_OF_THE_REST = {"name": "lora", "r": 3, "alpha": 2, "exclude": ["layers.0*", "layers.1*"]}


@pytest.mark.thorough
class TestLora(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "lora"
    config: ClassVar = {"r": 2, "targets": ["layers.*"]}
    matches_nothing: ClassVar = {"targets": ["absent"]}


@pytest.mark.full
class TestLoraOfSomeLayersWithAStableScale(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "lora"
    config: ClassVar = {"r": 3, "alpha": 4, "rs_lora": True, "exclude": "layers.1*"}
    matches_nothing: ClassVar = {"exclude": ["*"]}


@pytest.mark.full
class TestDora(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "dora"
    config: ClassVar = {"r": 2}
    matches_nothing: ClassVar = {"targets": ["absent"]}


@pytest.mark.full
class TestIa3(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "ia3"
    config: ClassVar = {"targets": ["layers.0*"], "feedforward": ["layers.1*"]}
    matches_nothing: ClassVar = {"targets": ["absent"]}


@pytest.mark.full
class TestStack(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "stack"
    config: ClassVar = {
        "methods": [
            {"name": "lora", "r": 2, "targets": "layers.0*"},
            {
                "name": "stack",
                "methods": [{"name": "ia3", "targets": "layers.1*", "feedforward": []}, LORA_OF_THE_REST],
            },
        ]
    }
    matches_nothing: ClassVar = {
        "methods": [{"name": "full_tune", "match": "*"}, {"name": "lora", "targets": "absent"}]
    }


@pytest.mark.full
class TestStackWithParametersOfTheModel(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "stack"
    config: ClassVar = {"methods": [LORA_OF_THE_REST, {"name": "full_tune", "match": ["layers.1*"]}]}


@pytest.mark.full
class TestFullTune(PeftSuite):
    plugin = "d9d_peft.plugin"
    target = "full_tune"
    config: ClassVar = {"match": ["layers.1*"]}
    matches_nothing: ClassVar = {"match": ["absent"]}

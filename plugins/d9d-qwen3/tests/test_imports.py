from __future__ import annotations

from d9d_testing.suites.fresh import import_fresh


def test_a_config_is_checked_and_its_flops_counted_without_torch() -> None:
    facts = import_fresh("d9d_qwen3.config", "d9d_nn.decoder.flops")
    assert "torch" not in facts["d9d_qwen3.config"].modules | facts["d9d_nn.decoder.flops"].modules

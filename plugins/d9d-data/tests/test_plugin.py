from __future__ import annotations

import subprocess
import sys

from d9d_data import plugin


def test_every_reference_loads_and_names_agree() -> None:
    for record in plugin.d9d_datasets():
        assert record.config.load().model_fields["name"].default == record.name
        assert callable(record.build.load())


def test_declaration_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, d9d_data.plugin as p; list(p.d9d_datasets());"
        "sys.exit(bool({'torch', 'pydantic', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

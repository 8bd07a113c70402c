"""DeepEP's communication buffer: GPU memory that the ranks of a group write into directly.

Only this module imports the library. It uses the interface of ``deep_ep.Buffer`` as documented for version 1.
"""

from __future__ import annotations

import importlib
from typing import Any

from d9d_core.errors import BuildError
from torch import distributed as dist

_INSTALL = (
    "d9d-deepep: the library 'deep_ep' cannot be imported ({error}). The package index has no working release: clone "
    "https://github.com/deepseek-ai/DeepEP, install NVSHMEM as its README says, run `python setup.py install`; "
    "or remove 'deepep' from 'parallel' to dispatch tokens by all-to-all, without a library"
)


def open_buffer(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """Open a buffer for tokens of ``row_bytes`` bytes each. Collective over ``group``.

    Raises:
        BuildError: the library is not installed; the message says how to install it.
    """
    try:
        deep_ep = importlib.import_module("deep_ep")
    except ImportError as error:
        raise BuildError(_INSTALL.format(error=error)) from error
    ranks = group.size()
    configs = [deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)]
    over_nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    over_rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
    return deep_ep.Buffer(group, over_nvlink, over_rdma)

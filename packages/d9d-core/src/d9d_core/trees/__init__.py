"""Nested containers with values at their leaves: walking them, and dividing them into parts by a spec.

Walking is offered here; :mod:`d9d_core.trees.split` divides batches into microbatches or among ranks.
"""

from d9d_core.trees.mapping import leaves, leaves_with_path, map_tree, zip_map
from d9d_core.trees.structure import Structure, flatten, unflatten

__all__ = ["Structure", "flatten", "leaves", "leaves_with_path", "map_tree", "unflatten", "zip_map"]

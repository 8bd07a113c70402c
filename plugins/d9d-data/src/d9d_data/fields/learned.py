"""Field with the tokens to learn in records that are tokenised already."""

from __future__ import annotations

from d9d_core.errors import DataError

from d9d_data.sources.place import Record
from d9d_data.sources.records import value_of

#: Usual names of the fields with labels, and with masks of the tokens to learn.
LABELS = ("labels",)
MASKS = ("loss_mask", "completion_mask", "assistant_masks")


def learned_field(record: Record) -> tuple[str | None, str | None]:
    """Field of the labels and field of the mask that a record has; ``None`` for a field that it lacks.

    Args:
        record: first record of a dataset.

    Raises:
        DataError: the record has several fields of labels or masks.
    """
    found = [name for name in (*LABELS, *MASKS) if value_of(record, name) is not None]
    if len(found) > 1:
        choice = " or ".join(f"'{'labels' if name in LABELS else 'mask'}: {name}'" for name in found)
        raise DataError(f"data: {record.place} has {' and '.join(found)}; choose the tokens to learn: {choice}")
    labels = next((name for name in found if name in LABELS), None)
    return labels, next((name for name in found if name in MASKS), None)

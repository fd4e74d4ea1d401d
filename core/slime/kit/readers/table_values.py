"""Values of tables as those of JSON: what Arrow and `datasets` give, in the digits that the file's owner sees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID


def without_nulls(value: Any, keep: str | None = None) -> Any:
    """Messages or schemas without their nulls, except those of the key `keep` of each."""
    if isinstance(value, list):
        return [without_nulls(one, keep) for one in value]
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k == keep}
    return value


def json_value(value: Any) -> Any:
    """A value as checkpoints store it, so that fresh and resumed runs are alike.

    Dates become text, and so do decimals with decimal places; those without are integers of any size. NaN, which tables
    store for what is missing, becomes null.

    Raises:
        TypeError: JSON has no such value.
    """
    match value:
        case None | str() | int():
            return value
        case float():
            if math.isinf(value):
                raise TypeError("infinity is not a number of JSON")
            return None if math.isnan(value) else value
        case Mapping():
            return {str(name): json_value(one) for name, one in value.items()}
        case list() | tuple():
            return [json_value(one) for one in value]
        case Decimal():
            exponent = value.as_tuple().exponent
            return int(value) if isinstance(exponent, int) and exponent >= 0 else format(value, "f")
        case datetime() | date() | time():
            return value.isoformat()
        case UUID():
            return str(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def has_short_floats(kind: Any) -> bool:
    """Whether an Arrow type has floats of less than 64 bits in it."""
    import pyarrow as pa

    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        return True
    return any(has_short_floats(kind.field(number).type) for number in range(kind.num_fields))


def shortest(value: Any, kind: Any) -> Any:
    """A value with its float32 and float16 as the shortest numbers that stand for them: 0.1, not 0.10000000149."""
    import numpy as np
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_float16(kind):
        return float(str(np.float16(value)))
    if pa.types.is_float32(kind):
        return float(str(np.float32(value)))
    if isinstance(value, Mapping):
        return {
            kind.field(number).name: shortest(value[kind.field(number).name], kind.field(number).type)
            for number in range(kind.num_fields)
        }
    if isinstance(value, list) and pa.types.is_map(kind):
        return [(shortest(key, kind.key_type), shortest(one, kind.item_type)) for key, one in value]
    if isinstance(value, list) and kind.num_fields:
        return [shortest(one, kind.field(0).type) for one in value]
    return value


def may_have_lost_digits(value: float) -> bool:
    """Whether a float may have been an integer of more digits than a float holds.

    Of 16 digits or more, the last may be another's. Fewer, as in 6.022e23, are those that were written.
    """
    large = value.is_integer() and abs(value) > 2**53
    return large and len(Decimal(repr(value)).normalize().as_tuple().digits) >= 16


def whole_beyond_floats(value: Any) -> float | None:
    """A float in a value that may have lost digits; None if there is none."""
    if isinstance(value, float):
        return value if may_have_lost_digits(value) else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((found for one in inner if (found := whole_beyond_floats(one)) is not None), None)

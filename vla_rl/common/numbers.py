"""A float that JSON writes as null where it is not a number, and reads back as NaN."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator


def _null_is_nan(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_null_is_nan)]

"""Results that are a JSON file each: written whole, and read with an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ValidationError

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config, ConfigError


class Saved(Config):
    """Base of such a result.

    Attributes:
        WHAT: it is, for errors. ERROR: what `load` raises. AGAIN: what to do with a file that cannot be used.
        FOR_READERS: keys of the file that `save` adds and `load` passes over.
    """

    WHAT: ClassVar[str]
    ERROR: ClassVar[type[ValueError]] = ConfigError
    AGAIN: ClassVar[str]
    FOR_READERS: ClassVar[tuple[str, ...]] = ()
    schema_version: int = 1

    def save(self, path: Path) -> None:
        """Write JSON, atomically; NaN becomes null."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(Path(path), self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: of the class `ERROR`; missing, truncated, of another schema, or with invalid fields.
        """
        path = Path(path)
        if not path.is_file():
            raise cls.ERROR(f"{cls.WHAT} not found: {path}. {cls.AGAIN}")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise cls.ERROR(f"{path}: not valid JSON, truncated or no {cls.WHAT}: {error}. {cls.AGAIN}") from None
        version = values.get("schema_version") if isinstance(values, dict) else None
        if version != (known := cls.model_fields["schema_version"].default):
            raise cls.ERROR(f"{path}: schema_version is {version!r}, this version reads {known}. {cls.AGAIN}")
        try:
            return cls.model_validate({key: value for key, value in values.items() if key not in cls.FOR_READERS})
        except ValidationError as error:
            first = error.errors()[0]
            found = f"{'.'.join(map(str, first['loc']))}: {first['msg']} (found {first['input']!r:.60})"
            raise cls.ERROR(f"{path}: no usable {cls.WHAT}: {found}. {cls.AGAIN}") from None

"""JSON that tests read, change and write."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


def change_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(read_json(path) | values))


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

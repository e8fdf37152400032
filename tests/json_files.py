"""JSON that tests read, change and write."""

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any


def read_json(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def change_json(path: Path, values: dict[str, Any]) -> None:
    write_json(path, read_json(path) | values)


def write_metrics(run: Path, *records: dict[str, Any]) -> None:
    """By a run's own writer."""
    from dfm_nb.base.metrics import Metrics

    with closing(Metrics(run / "metrics.jsonl")) as metrics:
        for record in records:
            metrics.write(record)


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

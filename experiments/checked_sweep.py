"""Cached check of the configuration of a sweep: only the check itself imports JAX."""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from experiments.sources import CODE, ROOT, code_hash
from experiments.sweep_job import Sweep


def checked_sweep(config: Mapping[str, Any], kept: Path) -> Sweep:
    """Return the jobs that follow from a configuration.

    Args:
        config: the configuration.
        kept: the file that caches the result. It is valid as long as the configuration, the code
            and the files that were read are the same.

    Raises:
        ValueError: a key, a name or a number is wrong; the message says which, and what is valid.
    """
    inputs = repr((config, code_hash(*CODE)))  # JSON would not tell a key 2048 from "2048"
    if kept.exists():
        result = json.loads(kept.read_text())
        if result["inputs"] == inputs and result["files"] == _hashes(result["files"]):
            return Sweep.from_json(result["sweep"])
    from experiments.sweep import make_sweep  # imports JAX
    from simulator.files import write_text

    sweep = make_sweep(config)
    read = [ROOT / sweep.published, *(ROOT / "experiments/schemas").glob("*.yaml")]
    read += [Path(file) for files in sweep.cluster_files.values() for file in files]
    kept.parent.mkdir(parents=True, exist_ok=True)
    result = {"inputs": inputs, "files": _hashes(map(str, read)), "sweep": sweep.to_json()}
    write_text(kept, json.dumps(result))
    return sweep


def _hashes(files: Iterable[str]) -> dict[str, str]:
    """Return the hash of each file; "" for one that is not there."""
    return {
        file: sha256(Path(file).read_bytes()).hexdigest() if Path(file).exists() else ""
        for file in files
    }

"""Seeded generators of tiny checkpoints with an MTP head, for the demo, the examples and tests.

| name      | form                             | its draft                                        |
| --------- | -------------------------------- | ------------------------------------------------ |
| dense     | MiMo, float32                    | is right about 5 times in 6, given recent KV     |
| hybrid    | Qwen3-Next (GDN, MoE), bfloat16  | the same, on a hybrid model                      |
| induction | MiMo, float32                    | is right exactly when its KV has the copy source |
| trained   | MiMo, float32                    | was trained on text, and on looking back         |
| mla       | DeepSeek-V3 (MLA), float32       | as dense's                                       |
| glm       | GLM-4.5, float32                 | as dense's; one or more modules in a row         |
| llama     | Llama, float32                   | none; `eagle3` makes one                         |
| eagle3    | EAGLE-3, float32                 | is one, for a llama                              |

    from wmtp_vllm.tiny_models import build
    path = build("dense", "checkpoints/dense", layers=4)

or `python -m wmtp_vllm.tiny_models dense checkpoints/dense layers=4`. A build takes well under a
second and at most 20 MB. `heldout.py` makes prompts for the trained one.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from wmtp_vllm.tiny_models.checkpoint import FILES, Checkpoint, save
from wmtp_vllm.tiny_models.dense import DenseOptions, dense
from wmtp_vllm.tiny_models.forms import FormOptions, eagle3, glm, llama
from wmtp_vllm.tiny_models.hybrid import HybridOptions, hybrid
from wmtp_vllm.tiny_models.induction import InductionOptions, induction
from wmtp_vllm.tiny_models.mla import MLAOptions, mla
from wmtp_vllm.tiny_models.shipped import FOLDER, TrainedOptions, trained

__all__ = [
    "DenseOptions",
    "FormOptions",
    "HybridOptions",
    "InductionOptions",
    "MLAOptions",
    "Name",
    "TrainedOptions",
    "build",
]

Name = Literal["dense", "hybrid", "induction", "trained", "mla", "glm", "llama", "eagle3"]

GENERATORS: dict[str, tuple[Callable[..., Any], Callable[[Any], Checkpoint]]] = {
    "dense": (DenseOptions, dense),
    "hybrid": (HybridOptions, hybrid),
    "induction": (InductionOptions, induction),
    "trained": (TrainedOptions, trained),
    "mla": (MLAOptions, mla),
    "glm": (FormOptions, glm),
    "llama": (FormOptions, llama),
    "eagle3": (FormOptions, eagle3),
}
MANIFEST = "tiny_model.json"
"""File in a checkpoint that says which model, options and code made it."""


def build(name: Name, path: str | os.PathLike[str], **options: int) -> Path:
    """Make the tiny model `name` in the folder `path`, or find it already made there.

    The checkpoint appears at `path` whole or not at all, so processes may build the same one at
    the same time. One made with other options, or by another version of this code, is replaced.

    Args:
        name: one of the table above.
        path: folder of the checkpoint; its parents are created.
        options: fields of its options' class; "trained" has none.

    Returns:
        `path`, ready for vLLM's `model=`.

    Raises:
        ValueError: unknown name, or an option out of range.
        TypeError: unknown option.
        FileExistsError: `path` exists and is not a tiny model's folder.
    """
    if name not in GENERATORS:
        raise ValueError(f"unknown tiny model {name!r}, expected one of {sorted(GENERATORS)}")
    make_options, generate = GENERATORS[name]
    chosen = make_options(**options)
    manifest = {"name": name, "options": asdict(chosen), "code": _code_digest()}
    path = Path(path)
    if _is_complete(path, manifest):
        return path
    _refuse_foreign(path)

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        save(generate(chosen), fresh)
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _move_into_place(fresh, path, manifest)
    return path


def _move_into_place(fresh: Path, path: Path, manifest: dict[str, Any]) -> None:
    """Rename `fresh` to `path`, unless another process has put the same checkpoint there.

    A folder cannot be renamed over one that holds files, so a stale checkpoint is moved out of the
    way first. Until the rename succeeds other processes may come between, hence the loop.
    """
    stale = fresh.with_name("stale")
    while not _is_complete(path, manifest):
        try:
            fresh.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _refuse_foreign(path)
        with contextlib.suppress(FileNotFoundError):
            path.rename(stale)
            shutil.rmtree(stale)


def _refuse_foreign(path: Path) -> None:
    """Raise FileExistsError rather than replace anything but an empty folder or a tiny model."""
    try:
        foreign = any(path.iterdir()) and not (path / MANIFEST).is_file()
    except FileNotFoundError:
        return
    except NotADirectoryError:
        foreign = True
    if foreign:
        raise FileExistsError(f"{path} exists and is not a tiny model: it has no {MANIFEST}")


def _is_complete(path: Path, manifest: dict[str, Any]) -> bool:
    """Whether `path` holds the checkpoint that `manifest` describes."""
    try:
        found = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == manifest) and all((path / file).is_file() for file in FILES)


def _code_digest() -> str:
    """Hash of this package's sources, so that a changed generator replaces old checkpoints."""
    digest = hashlib.sha256()
    for source in (*sorted(Path(__file__).parent.glob("*.py")), *sorted(FOLDER.iterdir())):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]

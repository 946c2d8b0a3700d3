"""Compares an installed wheel with the working tree at ROOT: `python -I wheel_check.py ROOT`.

Every module in the package folders must import from this interpreter's own environment, and every data file must lie
there with the same content. Exits 1 with the list of what does not hold.
"""

import filecmp
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

DATA_SUFFIXES = {".css", ".html", ".jinja", ".js", ".json", ".safetensors", ".typed", ".yaml"}


def package_files(root: Path, package_to_folder: dict[str, str]) -> Iterator[tuple[Path, Path]]:
    """Each file of the package folders: where it is in the tree, and its place relative to site-packages."""
    for package, folder in package_to_folder.items():
        if package.rpartition(".")[0] in package_to_folder:
            continue  # walked with its parent
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, Path(*package.split(".")) / path.relative_to(root / folder)


def module_problem(place: Path, site_packages: Path) -> str | None:
    name = ".".join(place.with_suffix("").parts)
    if place.name == "__init__.py":
        return f"{name}: package folders hold no __init__.py, a bare `import {place.parts[1]}` must never find them"
    try:
        origin = importlib.import_module(name).__file__
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    if origin is None or Path(origin) != site_packages / place:
        return f"{name}: imported from {origin} instead of the wheel"
    return None


def data_problem(source: Path, installed: Path) -> str | None:
    if not installed.is_file():
        return f"{source.name}: missing from the wheel, see package-data in pyproject.toml ({installed})"
    if not filecmp.cmp(source, installed, shallow=False):
        return f"{source.name}: differs from the working tree ({installed})"
    return None


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    site_packages = Path(sysconfig.get_path("purelib"))
    project = tomllib.loads((root / "pyproject.toml").read_text())
    files = list(package_files(root, project["tool"]["setuptools"]["package-dir"]))
    modules = [place for _, place in files if place.suffix == ".py"]
    data = [(source, site_packages / place) for source, place in files if place.suffix in DATA_SUFFIXES]

    problems = [f"an editable install is active: {finder}" for finder in sys.meta_path if "editable" in str(finder)]
    problems += [problem for place in modules if (problem := module_problem(place, site_packages))]
    problems += [problem for source, installed in data if (problem := data_problem(source, installed))]
    for script in project["project"].get("scripts", {}):
        (entry_point,) = importlib.metadata.entry_points(group="console_scripts", name=script)
        try:
            entry_point.load()
        except Exception as error:
            problems.append(f"console script {script}: {type(error).__name__}: {error}")

    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"wheel: {len(modules)} modules, {len(data)} data files, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

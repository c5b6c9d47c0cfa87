"""What is packaged, declared and offered: compared with the folders on disk."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import packaging.requirements
import packaging.version
import pytest

from jaxaccel import _versions

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def package_folders() -> dict[str, Path]:
    """Every package by its import name; the link is not followed."""
    found = {}
    for name, top in (
        ("jaxaccel", ROOT / "jaxaccel"),
        ("jaxaccel.transforms", ROOT / "transforms"),
    ):
        for init in top.rglob("__init__.py"):
            parts = init.parent.relative_to(top).parts
            if parts[:1] != ("transforms",):
                found[".".join((name, *parts))] = init.parent
    return found


def package_files() -> list[Path]:
    return [file for folder in package_folders().values() for file in folder.glob("*")]


def run(*command: str | Path, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        **kwargs,
    )


def test_package_list_equals_the_folders():
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_folders())


def test_every_folder_with_code_is_a_package():
    for top in (ROOT / "jaxaccel", ROOT / "transforms"):
        folders = {
            file.parent
            for file in top.rglob("*.py")
            if (ROOT / "jaxaccel" / "transforms") not in file.parents
        }
        assert folders <= set(package_folders().values())


def test_package_dir_maps_the_names_to_the_folders():
    mapping = SETUPTOOLS["package-dir"]
    assert mapping == {"jaxaccel": "jaxaccel", "jaxaccel.transforms": "transforms"}
    for name, folder in package_folders().items():
        key = max((k for k in mapping if f"{name}.".startswith(f"{k}.")), key=len)
        rest = name.removeprefix(key).strip(".").replace(".", "/")
        assert (ROOT / mapping[key] / rest).resolve() == folder.resolve()


def test_type_marker_is_declared_and_there():
    assert "py.typed" in SETUPTOOLS["package-data"]["jaxaccel"]
    assert (ROOT / "jaxaccel" / "py.typed").is_file()


def test_link_is_relative_and_committed():
    link = ROOT / "jaxaccel" / "transforms"
    listed = run("git", "ls-files", "--stage", "jaxaccel/transforms", cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    # 120000 is git's mode of a symbolic link; its content is the target.
    mode, blob, *_ = listed.stdout.split()
    assert mode == "120000"
    assert run("git", "cat-file", "-p", blob, cwd=ROOT).stdout == "../transforms"
    if link.is_symlink():
        assert link.readlink() == Path("../transforms")


def test_root_folder_refuses_its_own_name():
    done = run(sys.executable, "-c", "import transforms", cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "import jaxaccel.transforms" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("folder", ["transforms", "jaxaccel"])
def test_imports_are_absolute(folder):
    relative = re.compile(r"^\s*from\s+\.|^\s*(from|import)\s+transforms\b", re.M)
    files = [file for file in package_files() if file.suffix == ".py"]
    files = [file for file in files if (ROOT / folder) in file.parents]
    assert files
    assert not [file for file in files if relative.search(file.read_text())]


def test_transforms_import_each_other_under_the_public_name():
    text = (ROOT / "transforms" / "__init__.py").read_text(encoding="utf-8")
    sources = re.findall(r"^from (\S+) import", text, re.M)
    assert sources
    assert all(source.startswith("jaxaccel.transforms._") for source in sources)


def jax_requirement() -> packaging.requirements.Requirement:
    found = [packaging.requirements.Requirement(x) for x in PROJECT["dependencies"]]
    return next(requirement for requirement in found if requirement.name == "jax")


def test_excluded_jax_versions_are_those_that_import_warns_about():
    excluded = {s.version for s in jax_requirement().specifier if s.operator == "!="}
    assert excluded == set(_versions.BAD_JAXLIB)


def test_dependencies_have_floors_and_no_caps():
    for text in PROJECT["dependencies"]:
        requirement = packaging.requirements.Requirement(text)
        operators = sorted({s.operator for s in requirement.specifier})
        assert operators in (["!=", ">="], [">="]), text


@pytest.mark.parametrize("version", ["0.10.1", "0.12.0.1"])
def test_supported_jax_versions_are_allowed(version):
    assert packaging.version.Version(version) in jax_requirement().specifier


def test_jaxtyping_is_no_runtime_dependency():
    names = {
        packaging.requirements.Requirement(x).name for x in PROJECT["dependencies"]
    }
    assert not names & {"jaxtyping", "beartype", "pytest", "matplotlib", "rich"}
    for file in package_files():
        if file.suffix == ".py":
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(from|import) (jaxtyping|beartype)", text, re.M)


def test_extras_named_in_messages_exist():
    extras = set(PROJECT["optional-dependencies"])
    named = set()
    for file in package_files():
        if file.suffix == ".py":
            named.update(re.findall(r"jaxaccel\[(\w+)\]", file.read_text()))
    assert named, "ImportErrors of optional dependencies name an extra"
    assert named <= extras
    inner = re.findall(r"jaxaccel\[(\w+)\]", str(PROJECT["optional-dependencies"]))
    assert set(inner) <= extras


def test_cuda_extras_are_those_of_jax():
    extras = PROJECT["optional-dependencies"]
    for name in ("cuda", "cuda12", "cuda13"):
        assert extras[name] == [f"jax[{name}]"]


def test_version_is_written_once_and_the_same():
    text = (ROOT / "jaxaccel" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{PROJECT["version"]}"' in text
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["version"] in changelog


TARGETS = (
    "train",
    "test",
    "test-all",
    "bench",
    "transfer-figure",
    "lint",
    "docs",
    "clean",
)


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists(target):
    done = run("make", "-n", target, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.findall(r"^\.PHONY:(.*)$", makefile, re.M)[0].split()
    assert target in phony


def test_scripts_that_make_runs_exist():
    for target in TARGETS:
        commands = run("make", "-n", target, cwd=ROOT).stdout
        # `bench` loops over the names of its scripts.
        loop = "".join(re.findall(r"for script in ([\w ]+);", commands)).split()
        for path in re.findall(r"python (\S+\.py)", commands):
            for name in loop if "$script" in path else [""]:
                assert (ROOT / path.replace("$script", name)).is_file()


def test_ci_entry_lints_and_tests():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert run("bash", "-n", script, cwd=ROOT).returncode == 0
    lines = script.read_text(encoding="utf-8").splitlines()
    assert "make lint" in lines and "make test" in lines
    assert "set -euo pipefail" in lines


def test_linters_are_configured_for_all_code():
    tool = PYPROJECT["tool"]
    assert set(tool["ruff"]["lint"]["select"]) >= {"E", "F", "I", "UP", "B", "D"}
    folders = {"jaxaccel", "tests", "benchmarks", "examples"}
    assert set(tool["pyright"]["include"]) == folders
    tracked = run("git", "ls-files", "*.py", cwd=ROOT)
    if tracked.returncode == 0:
        tops = {name.split("/")[0] for name in tracked.stdout.split()}
        # The link brings transforms in under its import name; the site's extension
        # imports what the docs extra alone installs.
        assert tops <= folders | {"transforms", "docs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy: a build writes into its source folder."""
    source = tmp_path_factory.mktemp("source") / "jaxaccel"
    out = tmp_path_factory.mktemp("wheel")
    source.mkdir()
    names = ["jaxaccel", "transforms", "pyproject.toml", "README.md", "LICENSE"]
    tar = ["tar", "--exclude=__pycache__", "-cf", "-", *names]
    archive = subprocess.run(tar, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-xf", "-"], cwd=source, input=archive, check=True)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir")
    done = run(*pip, out, source, cwd=out)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{name.replace('.', '/')}/{file.name}"
        for name, folder in package_folders().items()
        for file in folder.glob("*.py")
    }
    assert expected <= names
    assert "jaxaccel/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"jaxaccel", f"jaxaccel-{PROJECT['version']}.dist-info"}


@pytest.mark.slow
def test_installed_wheel_is_imported_from_an_empty_folder(wheel, tmp_path):
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
    done = run(*pip, target, wheel, cwd=empty)
    assert done.returncode == 0, done.stderr
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        # The editable installation must not answer in the wheel's place.
        "sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"
        "import jaxaccel.data, jaxaccel.train, jaxaccel.transforms\n"
        "print(jaxaccel.transforms.__file__)\n"
        "print(jaxaccel.transforms.znorm().__class__.__name__)\n"
    )
    done = run(sys.executable, "-c", code, cwd=empty)
    assert done.returncode == 0, done.stderr
    file, name = done.stdout.split()
    assert Path(file) == target / "jaxaccel" / "transforms" / "__init__.py"
    assert name == "GradientTransformationExtraArgs"

"""Runs what the documents show: Python, commands, links; builds the site."""

import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax
import jaxtyping
import pytest

from jaxaccel import _fetch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
    ]
)
CARDS = sorted((DOCS / "methods").glob("*.md"))
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
)
COMMAND_LANGUAGES = {"bash", "console", "sh", "shell"}
documents = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)

_BLOCK = re.compile(r"^( *)```([\w.+-]*)[^\n]*\n(.*?)^\1```[ ]*$", re.M | re.S)
_PRINT = re.compile(r"^ *print\(.*\)  # (.*)$", re.M)


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    text = document.read_text(encoding="utf-8")
    return [(language, body) for _, language, body in _BLOCK.findall(text)]


@pytest.fixture
def as_users_have_it(tmp_path, monkeypatch):
    """jax's default settings, an empty folder to run in, and nothing to fetch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXACCEL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(_fetch, "fetch_files", _refuse_to_fetch)
    jaxtyping.config.update("jaxtyping_disable", True)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _refuse_to_fetch(folder: Path, *args: object, **kwargs: object) -> str:
    raise AssertionError(f"documents run on the digits, not on {folder.name}")


@documents
def test_python_blocks_run_and_print_what_they_say(document, as_users_have_it):
    namespace = {"__name__": "__main__"}
    for language, body in blocks(document):
        if language not in ("python", "py"):
            continue
        if body.lstrip().startswith(">>>"):
            run_doctest(body, namespace, document)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, str(document), "exec"), namespace)
        expected = _PRINT.findall(body)
        if expected:
            assert printed.getvalue().splitlines() == expected


def run_doctest(body: str, namespace: dict, document: Path) -> None:
    test = doctest.DocTestParser().get_doctest(
        body, namespace, document.name, str(document), 0
    )
    report = io.StringIO()
    result = doctest.DocTestRunner().run(test, out=report.write, clear_globs=False)
    assert result.failed == 0, report.getvalue()
    namespace.update(test.globs)


def test_the_check_of_printed_values_sees_them():
    assert _PRINT.findall("x = 1\nprint(x)  # 1\n    print(a(b))  # two words\n") == [
        "1",
        "two words",
    ]


def check_make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{name} \?=", makefile, re.M), f"no variable {name}"
    assert targets, "make without a target"
    done = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # What ARGS hands on has to be an option of the script that runs.
    args = dict(word.split("=", 1) for word in words if "=" in word).get("ARGS", "")
    scripts = re.findall(r"python (\S+\.py)", done.stdout)
    if args and scripts:
        check_options(ROOT / scripts[0], shlex.split(args))


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        check_module(words[1:])
        return
    script = ROOT / words[0]
    assert script.is_file(), f"{words[0]} does not exist"
    if re.fullmatch(r"examples/\d\d_\w+\.py", words[0]):
        assert not words[1:], "tests/test_examples.py runs them without options"
        return
    check_options(script, words[1:])


def check_module(words: list[str]) -> None:
    if words[0] == "pip":
        check_pip(words[1:])
    elif words[0] == "venv":
        assert len(words) == 2
    else:
        assert words[0] == "pytest", f"`python -m {words[0]}` is not checked"


_HELP: dict[Path, str] = {}


def check_options(script: Path, words: list[str]) -> None:
    if script not in _HELP:
        done = subprocess.run(
            [sys.executable, str(script), "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        _HELP[script] = done.stdout
    for word in words:
        if word.startswith("-"):
            option = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", _HELP[script]), (
                f"{script.name} has no option {option}"
            )


def check_pip(words: list[str]) -> None:
    assert words[0] == "install", f"`pip {words[0]}` is not checked"
    for word in words[1:]:
        if word in ("-e", "-U", "--upgrade"):
            continue
        name, bracket, extras = word.partition("[")
        assert name in ("jaxaccel", "."), f"`pip install {word}` is not checked"
        if bracket:
            assert set(extras.rstrip("]").split(",")) <= EXTRAS


def check_tensorboard(words: list[str]) -> None:
    assert words[:1] == ["--logdir"] and len(words) == 2
    assert importlib.util.find_spec("tensorboard")


def check_git(words: list[str]) -> None:
    assert words[0] == "clone"


def check_cd(words: list[str]) -> None:
    assert words == ["jaxaccel"], "only into the clone"


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "cd": check_cd,
    "git": check_git,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "tensorboard": check_tensorboard,
}


def commands(body: str) -> list[list[str]]:
    """The commands of a block, as words; of a console session, those typed."""
    lines = body.replace("\\\n", " ").splitlines()
    if any(line.lstrip().startswith("$ ") for line in lines):
        lines = [x.strip()[2:] for x in lines if x.strip().startswith("$ ")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_command(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name = words.pop(0).split("=")[0]
        known = ("JAXACCEL_DATA", "JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
        assert name in known, f"{name} is not checked"
    program = Path(words[0]).name
    assert program in CHECKS, f"`{shlex.join(words)}` is a command nobody checks"
    assert not {"|", ">", "&&", ";"} & set(words), "one plain command a line"
    CHECKS[program](words[1:])


@documents
def test_commands_work(document):
    for language, body in blocks(document):
        if language in COMMAND_LANGUAGES:
            for words in commands(body):
                check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "rm -rf build",
        "make no-such-target",
        "make train NO_SUCH_VARIABLE=1",
        "make train | tee log",
        "python examples/no_such_example.py",
        "python -m no_such_module",
        "pip install numpy",
        "pip install 'jaxaccel[no_such_extra]'",
        "NO_SUCH_SETTING=1 make train",
    ],
)
def test_the_check_of_commands_refuses(line):
    with pytest.raises(AssertionError):
        check_command(shlex.split(line))


@documents
def test_blocks_are_of_a_language_that_is_checked(document):
    plain = {"text", "toml", "yaml", "json", "bibtex"}
    known = COMMAND_LANGUAGES | plain | {"python", "py"}
    assert {language for language, _ in blocks(document)} <= known


@documents
def test_inline_commands_work(document):
    text = _BLOCK.sub("", document.read_text(encoding="utf-8"))
    for code in re.findall(r"`([^`\n]+)`", text):
        words = code.split()
        if words[0] == "make" and len(words) > 1 and "..." not in code:
            check_command(shlex.split(code))
        if words[0] == "pip":
            check_command(shlex.split(code))


@documents
def test_paths_in_the_text_exist(document):
    text = _BLOCK.sub("", document.read_text(encoding="utf-8"))
    tops = "transforms|jaxaccel|tests|benchmarks|examples|docs"
    for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def links(document: Path) -> list[str]:
    text = _BLOCK.sub("", document.read_text(encoding="utf-8"))
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)", text)
    found += re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    return [link for link in found if not re.match(r"(https?|mailto):", link)]


def slug(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", heading.strip().lower())
    return re.sub(r"[\s-]+", "-", words)


@documents
def test_relative_links_resolve(document):
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            text = target.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text), re.M)
            assert anchor in {slug(heading) for heading in headings}, link


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_method_cards_have_one_order_and_a_verdict(card):
    text = card.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == [
        "What it does",
        "How to use it",
        "Cost",
        "When not to",
        "Measured here",
        "Verdict",
        "Reference",
    ]
    verdict = text.split("## Verdict")[1].split("**")[1]
    assert verdict in {"helps", "trade-off", "no evidence"}
    overview = (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"(methods/{card.name}) | {verdict} |" in overview
    assert re.search(r"arXiv:\d{4}\.\d{4,5}", text.split("## Reference")[1])


@pytest.mark.parametrize(
    "name", ["data", "graph", "ops", "records", "train", "transforms"]
)
def test_reference_has_every_public_name(name):
    text = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    listed = re.findall(rf"^::: jaxaccel\.{name}\.(\w+)$", text, re.M)
    module = importlib.import_module(f"jaxaccel.{name}")
    assert sorted(listed) == sorted(module.__all__)


def test_docstrings_are_turned_into_markdown():
    pytest.importorskip("griffe")
    path = DOCS / "_extensions" / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docs_docstrings", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (
        "One.\n\n::\n\n    x = 1\n\n.. math:: a \\\\\n    b\n\nwith :math:`c` here.\n"
    )
    assert module.to_markdown(text) == (
        "One.\n\n\n    x = 1\n\n$$\na \\\\\nb\n$$\n\nwith $c$ here.\n"
    )


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "train" / "index.html").read_text("utf-8")
    assert ".. math::" not in page and ":math:" not in page

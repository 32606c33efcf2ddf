# SPDX-License-Identifier: Apache-2.0
"""Style that a linter does not know: budgets, names, folders, and what must never appear in the product."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"proto", "kvgrpc", "csrc", "tests", "deploy", "benchmarks", "docs", "examples"}
BUILD_OUTPUT = {"build", "dist", "__pycache__"}

MODULE_LINES = 400
FUNCTION_LINES = 70
CONSTRUCTOR_PARAMETERS = 6
CORE_CODE_LINES = 4270  # docs/adr/0021 to 0024, 0028, 0029, 0031, 0034

CORE_IMPORTS = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "kvgrpc.core",
    "math",
    "operator",
    "typing",
}
CLASS_WORDS = {"Manager", "Handler", "Helper", "Helpers", "Util", "Utils", "Base", "Impl", "V2"}
SNAKE_WORDS = {"manager", "handler", "helper", "helpers", "utils", "impl", "v2"}
EXECUTES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}


def generated(path: Path) -> bool:
    return path.relative_to(ROOT).match("kvgrpc/v1/*_pb2*")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if not generated(path)]


def text_files() -> Iterator[Path]:
    endings = {".py", ".cpp", ".hpp", ".proto", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".cfg", ""}
    here = [path for path in ROOT.iterdir() if path.is_file()]
    below = (path for folder in sorted(FOLDERS | {".ci"}) for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in (*here, *below):
        if path.suffix in endings and not BUILD_OUTPUT & set(path.parts) and path.name != ".git":
            yield path


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), str(path)))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


OURS = python_files("kvgrpc", "tests", "benchmarks", "examples")
PRODUCT = python_files("kvgrpc")
NATIVE = [path for ending in ("cpp", "hpp", "cu") for path in sorted((ROOT / "csrc").rglob(f"*.{ending}"))]


def test_top_level_folders_are_the_designed_ones():
    visible = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {name for name in visible - BUILD_OUTPUT if not name.endswith(".egg-info")} <= FOLDERS


def test_modules_fit_on_a_few_screens():
    assert {name_of(path): lines_of(path) for path in (*OURS, *NATIVE) if lines_of(path) > MODULE_LINES} == {}


def code_lines_of(path: Path) -> int:
    """Lines without blank ones, comments and docstrings."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in layout | {tokenize.ENCODING}]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_core_stays_small():
    assert sum(code_lines_of(path) for path in python_files("kvgrpc/core")) <= CORE_CODE_LINES


def test_contributing_says_how_small():
    said = re.findall(r"the core up to ([\d,]+) lines", (ROOT / "CONTRIBUTING.md").read_text())
    assert said == [f"{CORE_CODE_LINES:,}"]


def test_functions_fit_on_a_screen():
    long = {
        f"{name_of(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in OURS
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    }
    assert long == {}


def test_constructors_take_few_parameters():
    wide = {
        f"{name_of(path)}:{node.lineno}": count
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        and node.name == "__init__"
        and (count := len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1) > CONSTRUCTOR_PARAMETERS
    }
    assert wide == {}


def test_names_say_what_a_thing_is():
    found: list[str] = []
    for path in PRODUCT:
        if SNAKE_WORDS & set(path.stem.lower().split("_")):
            found.append(name_of(path))
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and CLASS_WORDS & set(re.findall(r"[A-Z][a-z0-9]*", node.name)):
                found.append(f"{name_of(path)}:{node.lineno} {node.name}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and SNAKE_WORDS & set(node.name.split("_")):
                found.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert found == []


def test_every_file_names_its_licence():
    others = ("Makefile", "CMakeLists.txt", "pyproject.toml", ".ci/run")
    owned = [*OURS, *NATIVE, *(ROOT / "proto").rglob("*.proto"), *(ROOT / name for name in others)]
    line = "SPDX-License-Identifier: Apache-2.0"
    assert [name_of(path) for path in owned if line not in "".join(path.read_text().splitlines()[:2])] == []


def catches_everything(node: ast.ExceptHandler) -> bool:
    names = ast.unparse(node.type) if node.type is not None else "BaseException"
    return re.search(r"\b(Base)?Exception\b", names) is not None


def test_broad_catches_are_only_in_outermost_loops():
    broad = [
        f"{name_of(path)}:{node.lineno}"
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler)
        and catches_everything(node)
        # cleaning up and raising on hides nothing
        and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)
        and "outermost" not in path.read_text().splitlines()[node.lineno - 1]
    ]
    assert broad == [], "say on the line which outermost loop it is, or catch what can happen"


def test_the_core_imports_only_pure_modules():
    foreign = [
        f"{name_of(path)}: {module}"
        for path in python_files("kvgrpc/core")
        for node in nodes(path)
        for module in imported(node)
        if module.split(".")[0] not in CORE_IMPORTS and ".".join(module.split(".")[:2]) not in CORE_IMPORTS
    ]
    assert foreign == []


def test_only_transfer_touches_the_extension():
    foreign = {
        name_of(path)
        for path in PRODUCT
        if re.search(r"\b_native\b", path.read_text()) and not path.is_relative_to(ROOT / "kvgrpc/transfer")
    }
    assert foreign == set()


def test_nothing_in_the_product_executes_data():
    found: list[str] = []
    for path in PRODUCT:
        for node in nodes(path):
            found += [f"{name_of(path)}: {m}" for m in imported(node) if m.split(".")[0] in EXECUTES]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "numpy.load"}:
                    found.append(f"{name_of(path)}:{node.lineno} {called}")
    assert found == []


def test_only_the_settings_read_the_environment():
    readers = {
        name_of(path)
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.environb", "os.getenv"}
    }
    assert {reader for reader in readers if not reader.startswith("kvgrpc/config/")} == set()


@pytest.mark.parametrize("start", ["work", "home", "root", "tmp", "Users", "mnt"])
def test_no_path_of_one_machine(start: str):
    absolute = re.compile(rf"(?<![\w.$}}/-])/{start}/\w")
    found = [
        f"{name_of(path)}:{number}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if absolute.search(line)
    ]
    assert found == []


def test_the_environment_of_vllm_has_what_the_package_needs():
    """It is installed without pip's resolver."""
    needs = [need for need in requires("kvgrpc") or [] if "extra ==" not in need]
    pinned = {normal(line) for line in (ROOT / "tests/vllm/constraints.txt").read_text().splitlines()}
    assert needs
    assert {normal(need) for need in needs} - pinned == set()


def normal(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")

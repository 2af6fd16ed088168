"""The README's examples run as they stand, and what it promises is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OTHERS = ("numpy", "transformers", "tokenizers", "datasets", "safetensors", "scipy", "matplotlib", "jinja2", "rich")
OTHERS += ("tyro", "yaml", "triton")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), names)
    if "hidden" in names:
        assert names["hidden"].shape == (8, 16, 64)
    else:
        assert type(names["same"]) is type(names["model"])


def test_there_are_examples_and_every_linked_file_exists():
    assert len(EXAMPLES) == 2
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_make_target_that_the_readme_names_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert {"demo", "test"} <= named <= set(targets)


def test_the_core_needs_torch_alone(tmp_path):
    """The first example runs where nothing but torch can be imported, and models say what is missing."""
    block = f"import sys\nfor name in {OTHERS}: sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", block + EXAMPLES[0]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hide = "import importlib.util\nimportlib.util.find_spec = lambda name, package=None: None\n"
    done = subprocess.run([sys.executable, "-c", hide + "import geonorm.models"], capture_output=True, text=True)
    assert "geonorm.models needs transformers; run pip install 'geonorm[hf]'" in done.stderr


def test_subpackages_are_imported_when_first_named():
    code = (
        "import sys, geonorm\n"
        "assert 'transformers' not in sys.modules\n"
        "assert callable(geonorm.models.rewire) and callable(geonorm.data.prepare)\n"
        "assert not hasattr(geonorm, 'nonsense')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

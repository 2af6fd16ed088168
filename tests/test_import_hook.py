"""Saved models load after `import geonorm` alone, in a fresh interpreter, whatever is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from family_models import rewired_model

LOAD = "m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]); print(type(m).__module__, type(m).__name__)"
ORDERS = {
    "geonorm first": "import geonorm, transformers",
    "transformers first": "import transformers, geonorm",
    "transformers' table first": "from transformers import AutoConfig; import transformers, geonorm",
    "a stock model between": "import geonorm, transformers; from transformers import LlamaForCausalLM",
    "a stock module directly": "import geonorm, transformers.models.llama.modeling_llama; import transformers",
    "peft between": "import geonorm, peft, transformers",
    "our classes first": "import geonorm.models, transformers",
}


def fresh(code: str, *arguments: str) -> str:
    """Standard output of the code in an interpreter of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import sys\n{code}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rewired_model("mistral", "geonorm").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("order", [pytest.param(key, marks=pytest.mark.slow) for key in ORDERS])
def test_a_saved_model_loads_after_import_geonorm(order, saved):
    if "peft" in ORDERS[order]:
        pytest.importorskip("peft")
    printed = fresh(f"{ORDERS[order]}\n{LOAD}", str(saved))
    assert printed == "geonorm.models.families GeonormMistralForCausalLM"


def test_a_saved_model_loads_in_both_orders(saved):
    script = f"""
{ORDERS["geonorm first"]}
assert not any(name.startswith("transformers.models.llama") for name in sys.modules)
assert "geonorm.models" not in sys.modules
{LOAD}
import transformers.models.auto.configuration_auto as table
import inspect, pickle
assert "class AutoConfig" in inspect.getsource(table)
assert "geonorm_llama" in pickle.loads(pickle.dumps(table.CONFIG_MAPPING))
assert "geonorm_nothing" not in table.CONFIG_MAPPING
"""
    assert fresh(script, str(saved)).endswith("GeonormMistralForCausalLM")
    assert fresh(f"{ORDERS['transformers first']}\n{LOAD}", str(saved)).endswith("GeonormMistralForCausalLM")


def test_import_geonorm_needs_torch_alone():
    heavy = "transformers", "safetensors", "huggingface_hub"
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in heavy)
    printed = fresh(f"{blocked}\nimport geonorm, geonorm.placements\nprint('transformers.models' in sys.modules)")
    assert printed == "False"


def test_the_hook_is_set_once():
    code = "import geonorm, importlib; importlib.reload(geonorm)"
    printed = fresh(f"{code}\nprint(sum(type(finder).__module__.startswith('geonorm') for finder in sys.meta_path))")
    assert printed == "1"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["geonorm.models, peft", "peft, geonorm.models", "geonorm, peft, geonorm.models"])
def test_peft_knows_our_types_whatever_is_imported_first(order):
    pytest.importorskip("peft")
    code = f"import {order}\nfrom peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as table"
    assert fresh(f"{code}\nprint(*table['geonorm_llama'], 'geonorm_phi3' in table)") == "q_proj v_proj False"


def test_our_classes_do_without_peft():
    assert fresh("sys.modules['peft'] = None\nimport geonorm.models\nprint('whole')") == "whole"

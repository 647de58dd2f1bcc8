import subprocess
import sys


def test_the_plugin_registry_is_empty_and_discovery_finds_nothing(plugin_registry):
    assert list(plugin_registry) == []
    assert list(type(plugin_registry).discover()) == []


def test_the_tiny_model_is_a_folder_that_transformers_loads(tiny_model_folder):
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tiny_model_folder).config.model_type == "qwen3"


def test_loading_the_plugin_costs_no_heavy_import():
    program = (
        "import sys, composer_core.testing.pytest_plugin\nprint(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""What the embedded engine uses of vLLM, held against the installed version, so that an upgrade says what moved."""

import importlib
import inspect
import re

import pytest

from app.engines.embedded import CONTRACT, SERVING
from app.engines.vllm_options import BUILTIN_DEFAULTS, RESERVED, VLLM_SERIES

# Importing vLLM takes a while, and PyTorch warns of itself.
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def find(name: str) -> object:
    """The object that `module:Class.attribute` names."""
    module, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ImportError as exc:
        pytest.fail(f"vLLM has no module {module} any more ({exc}); app/engines uses it")
    for part in path.split("."):
        if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", {}):
            pytest.fail(f"vLLM's {module} has no {path} any more; app/engines uses it")
        found = getattr(found, part, None)
    return found


def test_version_is_the_pinned_one() -> None:
    import vllm

    assert vllm.__version__.startswith(f"{VLLM_SERIES}."), f"{vllm.__version__} is installed, {VLLM_SERIES} is pinned"


@pytest.mark.parametrize("line", CONTRACT)
def test_what_is_used_is_there_and_takes_these_parameters(line: str) -> None:
    name, parameters = re.fullmatch(r"([^(]+)(?:\((.*)\))?", line).groups()
    found = find(name)
    if parameters is not None:
        known = inspect.signature(found).parameters
        missing = [item for item in parameters.split(", ") if item and item not in known]
        assert not missing, f"vLLM's {name} does not take {missing} any more; it takes {list(known)}"


def test_an_iterations_stats_tell_of_preemptions() -> None:
    assert find("vllm.v1.metrics.stats:IterationStats")().num_preempted_reqs == 0  # type: ignore[operator]


@pytest.mark.parametrize("operation", SERVING)
def test_serving_objects_answer_as_they_did(operation: str) -> None:
    attribute, method, request_class = SERVING[operation]
    find(request_class)
    source = inspect.getsource(find("vllm.entrypoints.generate.api_router:init_generate_state"))
    assert f"state.{attribute} =" in source, f"vLLM's application state has no {attribute} any more"
    classes = {
        "openai_serving_chat": "chat_completion.serving:OpenAIServingChat",
        "openai_serving_completion": "completion.serving:OpenAIServingCompletion",
    }
    serving = find(f"vllm.entrypoints.openai.{classes[attribute]}.{method}")
    assert list(inspect.signature(serving).parameters)[:3] == ["self", "request", "raw_request"]


def test_options_that_are_set_or_reserved_still_exist() -> None:
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs

    known = set(AsyncEngineArgs.__dataclass_fields__) | set(BaseFrontendArgs.__dataclass_fields__)
    assert set(BUILTIN_DEFAULTS) <= known
    assert known >= RESERVED
    assert "enable_prompt_tokens_details" in known


def test_frames_begin_and_end_as_they_are_cut() -> None:
    source = inspect.getsource(find("vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"))
    assert 'yield f"data: {data}\\n\\n"' in source
    assert 'yield "data: [DONE]\\n\\n"' in source

"""What a tested interpreter tells about itself. Works with the stand-in and with the real vLLM."""

import sys

PLANNER = "vllm.v1.core.kv_cache_utils"
FUNCTIONS = (
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "_get_kv_cache_groups_uniform_page_size",
)


def armed():
    """How many finders of ours wait for vLLM."""
    return sum(hasattr(finder, "altay_kvfix") for finder in sys.meta_path)


def hooks():
    """Import the planner; how often each of its functions is wrapped by us."""
    __import__(PLANNER)
    return [_depth(getattr(sys.modules[PLANNER], name, None)) for name in FUNCTIONS]


def _depth(function):
    depth = 0
    while function is not None:
        depth += type(function).__name__ == "_PlannerFunction"
        function = getattr(function, "__wrapped__", None)
    return depth


class _Config:
    """The attributes given, and None for every other one that is asked for."""

    def __init__(self, **values):
        vars(self).update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def plan(full=16, gdn=54):
    """Have the stand-in's planner group the layers of an ALTAY stack; the groups' lengths."""
    __import__(PLANNER)
    planner = sys.modules[PLANNER]
    specs = {f"full.{i}": planner.Spec("full") for i in range(full)}
    specs |= {f"gdn.{i}": planner.Spec("gdn") for i in range(gdn)}
    config = _Config(
        model_config=_Config(
            architecture="LomonosovZenitAltayForConditionalGeneration", max_model_len=4096
        ),
        scheduler_config=_Config(max_num_seqs=1),
        parallel_config=_Config(pipeline_parallel_size=1),
        cache_config=_Config(),
    )
    [worker] = planner.get_kv_cache_configs(config, [specs], [1 << 30])
    return [len(group.layer_names) for group in worker.kv_cache_groups]

"""Planners of releases that do not exist yet: a real one's source, changed in one place.

``python doctored.py`` runs in a process of its own (see suite.py) and prints one JSON
object: case -> engine -> what happened. Every engine starts in a fork of its own, where the changed
planner is loaded for the first time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import planning

INNER = "_get_kv_cache_groups_uniform_page_size"
OUTER = "def get_kv_cache_groups(\n    vllm_config: VllmConfig"
PLANNER = "{planner}"
"""Stands for the name of the planner's module."""

Change = Callable[[str], str]
"""Source of the planner -> source of the planner of a release to come."""


@dataclass(frozen=True)
class Case:
    change: Change
    says: str | None = None
    """What the one line, and the error of ``required``, have to say; None where the change does not
    matter and the certified layout is applied."""
    raises: str | None = None
    """What vLLM itself raises, with us or without."""


def replaced(old: str, new: str) -> Change:
    def change(source: str) -> str:
        assert old in source, f"{old!r} is not in the planner"
        return source.replace(old, new)

    return change


def appended(text: str) -> Change:
    return lambda source: f"{source}\n\n{text}\n"


def both(first: Change, second: Change) -> Change:
    return lambda source: second(first(source))


def called(call: str) -> Change:
    """The one call of ``get_kv_cache_groups`` for the engine, written otherwise."""
    pattern = re.compile(r"(?<=[=n] )get_kv_cache_groups\(vllm_config, (\w*specs?)\)")

    def change(source: str) -> str:
        source, times = pattern.subn(call, source)
        assert times == 1, times
        return source

    return change


def redefined(definition: str) -> Change:
    """``get_kv_cache_groups`` with other parameters."""
    return appended(
        f"_old = get_kv_cache_groups\n\n\n{definition}\n    return _old(vllm_config, specs)"
    )


def inner_takes(parameter: str) -> Change:
    head = f"def {INNER}(\n    kv_cache_spec: dict[str, KVCacheSpec],\n"
    return replaced(head, f"{head}    {parameter},\n")


def inner_called(call: str) -> Change:
    return replaced(f"groups = {INNER}(filtered_spec)", f"groups = {call}")


def then(statements: str) -> Change:
    """After the layers are divided."""
    place = "    # Add hidden-state layers back with page aligned to the common page.\n"
    return replaced(place, f"    {statements}\n{place}")


NEW_FIELD = replaced(
    "logger = init_logger(__name__)\n",
    """logger = init_logger(__name__)

import dataclasses


@dataclasses.dataclass
class KVCacheGroupSpec(KVCacheGroupSpec):
    tier: str = "device"
""",
)

CASES = {
    "the inner function is renamed": Case(
        replaced(INNER, "_divide_layers"), f"there is no function vllm.v1.core.{PLANNER}.{INNER}"
    ),
    "the outer function is renamed": Case(
        both(
            called(r"group_layers(vllm_config, \1)"),
            replaced(OUTER, OUTER.replace("get_kv_cache_groups", "group_layers")),
        ),
        f"there is no function vllm.v1.core.{PLANNER}.get_kv_cache_groups",
    ),
    "the planner moved": Case(
        lambda source: source, f"there is no function vllm.v1.core.{PLANNER}.get_kv_cache_configs"
    ),
    "the inner function needs more": Case(
        both(inner_takes("vllm_config"), inner_called(f"{INNER}(filtered_spec, vllm_config)")),
        f"{INNER} takes other arguments: kv_cache_spec, vllm_config",
    ),
    "the inner function is given more": Case(
        both(inner_takes("width=None"), inner_called(f"{INNER}(filtered_spec, width=None)")),
        f"{INNER} is called with other arguments",
    ),
    "the outer function is given more": Case(
        both(
            called(r"get_kv_cache_groups(vllm_config, \1, platform=None)"),
            redefined("def get_kv_cache_groups(vllm_config, specs, platform=None):"),
        ),
        "get_kv_cache_groups is called with other arguments",
    ),
    "the outer function's arguments are swapped": Case(
        both(
            called(r"get_kv_cache_groups(\1, vllm_config)"),
            redefined("def get_kv_cache_groups(specs, vllm_config):"),
        ),
        "get_kv_cache_groups is called with other arguments",
    ),
    "the inner function is not called": Case(
        both(
            inner_called("_divide_layers(filtered_spec)"),
            appended(
                f"import types\n\n_divide_layers = types.FunctionType({INNER}.__code__, globals())"
            ),
        ),
        f"{INNER} was called 0 times",
    ),
    "groups are made elsewhere": Case(
        called(r"create_kv_cache_group_specs(\1, [[name] for name in \1])"),
        "the KV cache groups were not made by the wrapped functions",
    ),
    "layers are not dealt out in turn": Case(
        replaced("layers[i::num_groups]", "layers[i * group_size : (i + 1) * group_size]"),
        "layers are grouped by a rule that is not known",
    ),
    "groups are changed after the layers are divided": Case(
        then("groups.reverse()"), "the groups were changed after the layers had been divided"
    ),
    "groups have a new field that is used": Case(
        both(NEW_FIELD, then("for group in groups: group.tier = 'host'")),
        "a KV cache group has tier='host'",
    ),
    "another package put its own in place": Case(
        appended(
            f"_inner = {INNER}\n{INNER} = lambda specs: _inner(specs)\n"
            f"{INNER}.__module__ = 'another.package'"
        ),
        f"{INNER} was replaced by another.package.<lambda>",
    ),
    "vLLM raises where groups are forced": Case(
        both(
            then("assert _planned.append(1) or len(_planned) < 2, 'once is enough'"),
            appended("_planned = []"),
        ),
        "once is enough",
    ),
    "vLLM raises": Case(
        then("raise ValueError('these layers can not be grouped')"),
        raises="ValueError: these layers can not be grouped",
    ),
    "groups have a new field that is not used": Case(NEW_FIELD),
    "another rule for the size": Case(
        replaced("if max_num_layers < min_num_layers * 1.5:", "if True:")
    ),
    "somebody wrapped the functions before": Case(
        appended(
            f"""import functools

{INNER} = functools.partial({INNER})
get_kv_cache_groups = functools.partial(get_kv_cache_groups)
_old_configs = get_kv_cache_configs


def get_kv_cache_configs(*args, **kwargs):
    return _old_configs(*args, **kwargs)
"""
        )
    ),
    "more can be given": Case(
        both(
            inner_takes("width=None"),
            redefined("def get_kv_cache_groups(vllm_config, specs, platform=None):"),
        )
    ),
}

ENGINES = {
    "off": {planning.LAYOUT: "off"},
    "ALTAY": {},
    "required": {planning.LAYOUT: "required"},
    "searched": {},
    "not searched": {"RADIANCE_KV_GROUP_OPT": "0"},
}
"""Engine -> its settings. The first has vLLM's own layout, whatever is changed."""


def main() -> None:
    import vllm_models as models

    # What the planner imports, once for all forks.
    for name in ("vllm.v1.request", "vllm.config", "vllm.v1.kv_cache_spec_registry"):
        import_module(name)
    assert "vllm.v1.core.kv_cache_utils" not in sys.modules
    planning.silence_vllm()
    answers: dict[str, dict[str, Any]] = {}
    for case in CASES:
        answers[case] = {}
        for engine in ENGINES:
            answers[case][engine] = _in_a_fork(lambda c=case, e=engine: _start(c, e, models))
    print(json.dumps(answers))


def _in_a_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = function()
        except BaseException:
            answer = {"crash": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer


def _start(case: str, engine: str, models: Any) -> dict[str, Any]:
    """Load the changed planner and plan with it, as an engine does."""
    os.environ.update(ENGINES[engine])
    altay = engine in ("off", "ALTAY")
    config = models.vllm_config(**({} if altay else {"architecture": "SomeHybridForCausalLM"}))
    specs = models.altay()
    if engine == "searched":  # and found: 8 holds a fifth more than the 5 that vLLM takes
        specs = models.model(window=(5, models.sliding_window())) | models.altay(16, 48)
    answer: dict[str, Any] = {"groups": None, "error": None}
    with tempfile.TemporaryDirectory() as folder, planning.logged() as log:
        planner, own = _link_changed(Path(folder), case)
        answer["says"] = (CASES[case].says or "").replace(PLANNER, planner)
        try:
            result = planning.plan(import_module(f"vllm.v1.core.{own}"), config, specs)
            answer["groups"] = planning.lengths(result[0])
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
    answer["lines"] = [line for line in log.ours() if not line.startswith("INFO")]
    return answer


def _link_changed(folder: Path, case: str) -> tuple[str, str]:
    """Have vLLM's modules found in ``folder``: links to the real ones, but for the planner.

    Returns:
        The module that holds the planner in the real release, and in the changed one.
    """
    import vllm.v1.core

    real = Path(vllm.__path__[0])
    for package in (Path(), Path("v1"), Path("v1/core")):
        (folder / package).mkdir(exist_ok=True)
        for entry in (real / package).iterdir():
            if (package / entry.name).as_posix() not in ("v1", "v1/core"):
                (folder / package / entry.name).symlink_to(entry)
    vllm.__path__[:] = [str(folder)]
    vllm.v1.__path__[:] = [str(folder / "v1")]
    vllm.v1.core.__path__[:] = [str(folder / "v1/core")]

    core = folder / "v1/core"
    files = [core / f"{name}.py" for name in ("kv_cache_planning", "kv_cache_utils")]
    planner = next(file for file in files if file.exists())
    source = CASES[case].change(planner.read_text())
    planner.unlink()
    if case == "the planner moved":
        # As vLLM 0.33 did: the file stays, for other things.
        (core / "kv_cache_grouping.py").write_text(source)
        planner.write_text(
            "from vllm.v1.core.kv_cache_grouping import *\n\n"
            "del get_kv_cache_configs, get_kv_cache_groups\n"
        )
        return planner.stem, "kv_cache_grouping"
    planner.write_text(source)
    return planner.stem, planner.stem


if __name__ == "__main__":
    main()

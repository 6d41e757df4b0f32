"""Puts the decision into vLLM: arms the import hook, wraps the planner, falls back.

vLLM's planner runs as it is. Its own grouping runs first and is only watched; where the decision is
another layout, it runs once more with the group size forced, inside the one function that chooses
it. Everything around that function stays vLLM's code, run by vLLM. Whatever goes wrong on the way
leaves vLLM with the answer it gave itself, unless the layout was required.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import wrapt

from . import vllm_compat
from .certified import ARCHITECTURE
from .layout import LayoutPlan
from .planner import Outcome, Situation, decide
from .report import (
    ConfigsCall,
    KVLayoutError,
    PlanReport,
    log_failure,
    log_once,
    settings_now,
    stand_aside,
    write_trace,
)
from .settings import LAYOUT_ENV_NAME, Mode, Settings
from .vllm_compat import Groups, Specs, UnknownPlannerError
from .vllm_releases import PLANNER_MODULES

_T = TypeVar("_T")

_armed = False
_forced_altay = False


# --- arming ------------------------------------------------------------------------------------


def arm() -> bool:
    """Have the planner wrapped as soon as vLLM loads it, or now if it is loaded.

    Returns:
        True when this call armed the process, False when it was armed before or
        ``ALTAY_KVFIX_DISABLE`` is set.

    Raises:
        KVLayoutError: in ``required`` mode, when this vLLM's planner is not where it should be.
    """
    global _armed
    if _armed or settings_now().disabled:
        return False
    with _never_stopping_vllm():
        if "vllm" in sys.modules:
            vllm_compat.planner_module()
        for module in PLANNER_MODULES:
            _on_every_load(module, _wrap_planner)
    # Not before: where the layout is required, a second attempt to import vLLM must fail again.
    _armed = True
    return True


def install(*, force: bool = False) -> bool:
    """See :func:`altay_kvfix.install_altay72_compact_kv_layout`."""
    global _forced_altay
    _forced_altay = _forced_altay or force
    installed = arm()
    if not installed and not settings_now().disabled:
        write_trace("install_reused")
    return installed


def _on_every_load(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call back with the module: now if it is loaded, and whenever it has been executed.

    Where the start-up hook was never armed, wrapt waits for the module instead. It forgets a
    callback once it has called it, so there a module that is loaded again stays as it is.
    """
    finder: Any
    for finder in sys.meta_path:
        if hasattr(finder, "altay_kvfix"):
            finder.callbacks[name] = callback
            if name in sys.modules:
                callback(sys.modules[name])
            return
    wrapt.register_post_import_hook(callback, name)


def _wrap_planner(planner: ModuleType) -> None:
    with _never_stopping_vllm():
        if planner.__name__ != vllm_compat.planner_module():
            return  # where older releases have it
        vllm_compat.check_planner_functions(planner)
        wrappers = {
            vllm_compat.CONFIGS_FUNCTION: _on_configs,
            vllm_compat.GLOBAL_GROUPS_FUNCTION: _on_global_groups,
            vllm_compat.GROUPS_FUNCTION: _on_groups,
            vllm_compat.UNIFORM_PAGE_FUNCTION: _on_uniform_page,
        }
        for name in vllm_compat.wrapped_functions(planner):
            native = getattr(planner, name)
            if not isinstance(native, _PlannerFunction):
                wrapped = _PlannerFunction(native, partial(wrappers[name], planner))
                vllm_compat.replace_everywhere(planner, name, native, wrapped)
        logging.getLogger(planner.__name__).addFilter(_hold_back)
        write_trace("install_new")


@contextmanager
def _never_stopping_vllm() -> Iterator[None]:
    """Whatever goes wrong inside leaves vLLM as it is, unless the layout is required."""
    try:
        yield
    except KVLayoutError:
        raise
    except UnknownPlannerError as unknown:
        stand_aside(unknown)
    except Exception:
        if settings_now().mode is Mode.REQUIRED:
            raise
        log_failure()


class _PlannerFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped planner function, told apart from other tools' wrappers by its type."""

    def __reduce_ex__(self, protocol: Any) -> str:
        # Functions are pickled by name and copied as they are; wrapt's wrappers refuse both.
        return str(self.__wrapped__.__qualname__)

    def __copy__(self) -> _PlannerFunction:
        return self

    def __deepcopy__(self, memo: Any) -> _PlannerFunction:
        return self


def _is_replaced(planner: ModuleType) -> bool:
    """Whether a planner function is somebody else's. Says so; raises where the layout is required.

    Replaced before we wrapped it, the innermost function is not vLLM's; replaced since, ours is
    not in it any more. A wrapper that shows what it wraps, as tracers do (``__wrapped__``), is
    taken to call it. If it does not, the watched run shows that, and vLLM's own answer stays.
    """
    with _never_stopping_vllm():
        for name in vllm_compat.wrapped_functions(planner):
            current: Any = getattr(planner, name, None)
            ours = inspect.unwrap(current, stop=lambda f: type(f) is _PlannerFunction)
            if type(ours) is not _PlannerFunction:
                stranger = current
            else:
                stranger = inspect.unwrap(ours)
                if vllm_compat.is_vllms(stranger):
                    continue
            who = (
                f"{getattr(stranger, '__module__', None)}."
                f"{getattr(stranger, '__qualname__', repr(stranger))}"
            )
            stand_aside(UnknownPlannerError(f"{planner.__name__}.{name} was replaced by {who}"))
            return True
    return False


def _leave_alone(planner: ModuleType, native: Callable[..., _T], args: Any, kwargs: Any) -> _T:
    """Call ``native``, with whatever it calls of ours doing nothing."""
    untouched = _Pass(watching=False)
    try:
        with _set(_pass, untouched):
            return native(*args, **kwargs)
    finally:
        _release(planner, untouched.held)


# --- what is known while vLLM plans ------------------------------------------------------------


@dataclass
class _Pass:
    """One run of vLLM's grouping: watched, or with its groups forced."""

    forced: list[list[str]] | None = None
    watching: bool = True
    """False for a grouping that vLLM starts inside another one: it runs untouched."""
    unknown: str | None = None
    """Why a call of the innermost function was not understood."""
    calls: list[tuple[Specs, list[list[str]]]] = field(default_factory=list)
    """What the innermost function was given, and the layer names of each group it answered."""
    in_uniform_page: bool = False
    held: list[logging.LogRecord] = field(default_factory=list)
    held_of_uniform_page: list[logging.LogRecord] = field(default_factory=list)


_configs_call: ContextVar[ConfigsCall | None] = ContextVar("configs_call", default=None)
_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass
class _GlobalGroups:
    """What get_global_kv_cache_groups made, for the get_kv_cache_configs that follows."""

    groups: Groups
    call: ConfigsCall
    again: Callable[[], Groups]
    """Makes them once more."""


_global_groups: _GlobalGroups | None = None
_repeating: ContextVar[bool] = ContextVar("repeating", default=False)


# --- the wrapped functions ---------------------------------------------------------------------


def _on_global_groups(
    planner: ModuleType, native: Callable[..., Groups], _: Any, args: Any, kwargs: Any
) -> Groups:
    """get_global_kv_cache_groups (vLLM >= 0.33): the real plan, before memory is profiled."""
    global _global_groups
    if _is_replaced(planner):
        return _leave_alone(planner, native, args, kwargs)
    try:
        call = ConfigsCall(*vllm_compat.global_groups_arguments(*args, **kwargs))
    except TypeError as error:
        return _stand_aside_from(
            planner, vllm_compat.GLOBAL_GROUPS_FUNCTION, error, native, args, kwargs
        )
    with _set(_configs_call, call):
        groups = native(*args, **kwargs)
    _look_at_result(planner, call, [groups])
    _global_groups = _GlobalGroups(groups, call, partial(native, *args, **kwargs))
    return groups


def _on_configs(
    planner: ModuleType, native: Callable[..., Any], _: Any, args: Any, kwargs: Any
) -> Any:
    """get_kv_cache_configs: remembers the memory, checks the end result in ``required``."""
    if _is_replaced(planner):
        return _leave_alone(planner, native, args, kwargs)
    try:
        call = ConfigsCall(*vllm_compat.configs_arguments(*args, **kwargs))
    except TypeError as error:
        return _stand_aside_from(planner, vllm_compat.CONFIGS_FUNCTION, error, native, args, kwargs)
    made = _global_groups
    if made is not None and any(a is made.groups for a in (*args, *kwargs.values())):
        call, groups = _with_memory(made, call)
        args = [groups if a is made.groups else a for a in args]
        kwargs = {name: groups if a is made.groups else a for name, a in kwargs.items()}
    with _set(_configs_call, call):
        configs = native(*args, **kwargs)
    _look_at_result(planner, call, [config.kv_cache_groups for config in configs])
    return configs


def _with_memory(made: _GlobalGroups, call: ConfigsCall) -> tuple[ConfigsCall, Groups]:
    """Make a layout of ours once more now that the memory is known.

    What it must leave room for can only be looked at now, and what it holds can only be told now.
    """
    if not made.call.changed:
        return made.call, made.groups
    with _never_stopping_vllm(), _set(_configs_call, call), _set(_repeating, True):
        return call, made.again()
    return made.call, made.groups


def _on_groups(
    planner: ModuleType, native: Callable[..., Groups], _: Any, args: Any, kwargs: Any
) -> Groups:
    """get_kv_cache_groups: the decision."""
    if _pass.get() is not None or _is_replaced(planner):
        return _leave_alone(planner, native, args, kwargs)
    try:
        vllm_config, specs = vllm_compat.groups_arguments(*args, **kwargs)
    except TypeError as error:
        return _stand_aside_from(planner, vllm_compat.GROUPS_FUNCTION, error, native, args, kwargs)
    return _plan(planner, "top_level_active", vllm_config, specs, lambda: native(*args, **kwargs))


def _on_uniform_page(
    planner: ModuleType, native: Callable[..., Groups], _: Any, args: Any, kwargs: Any
) -> Groups:
    """_get_kv_cache_groups_uniform_page_size: watched, or its groups built as decided."""
    current = _pass.get()
    if current is None and _is_replaced(planner):
        return _leave_alone(planner, native, args, kwargs)
    if current is not None and not current.watching:
        return native(*args, **kwargs)
    try:
        specs = vllm_compat.uniform_page_arguments(*args, **kwargs)
    except TypeError as error:
        if current is None:
            function = vllm_compat.UNIFORM_PAGE_FUNCTION
            return _stand_aside_from(planner, function, error, native, args, kwargs)
        current.unknown = str(_unknown_call(vllm_compat.UNIFORM_PAGE_FUNCTION, error))
        return native(*args, **kwargs)
    if current is None:
        # Called on its own, by a platform or a test: decided like a whole planning call.
        call = _configs_call.get()
        vllm_config = call.vllm_config if call else None
        again = partial(getattr(planner, vllm_compat.UNIFORM_PAGE_FUNCTION), *args, **kwargs)
        return _plan(planner, "private_uniform_active", vllm_config, specs, again)
    if current.forced is not None:
        return vllm_compat.build_groups(planner, specs, current.forced)
    current.in_uniform_page = True
    groups = native(*args, **kwargs)
    current.in_uniform_page = False
    current.calls.append((dict(specs), vllm_compat.layer_names(groups)))
    return groups


def _unknown_call(function: str, error: TypeError) -> UnknownPlannerError:
    return UnknownPlannerError(f"{function} is called with other arguments ({error})")


def _stand_aside_from(
    planner: ModuleType,
    function: str,
    error: TypeError,
    native: Callable[..., _T],
    args: Any,
    kwargs: Any,
) -> _T:
    """Leave a call that is not understood, and all that it calls, to vLLM."""
    call = _configs_call.get()
    if call is not None:
        call.planned = True  # and needs no second line
    stand_aside(_unknown_call(function, error))
    return _leave_alone(planner, native, args, kwargs)


# --- planning ----------------------------------------------------------------------------------


def _plan(
    planner: ModuleType, event: str, vllm_config: Any, specs: Specs, group: Callable[[], Groups]
) -> Groups:
    """Let vLLM group the layers, and replace its answer where the decision is another layout."""
    first = _Pass()
    try:
        with _set(_pass, first):
            native = group()
    except BaseException:
        _release(planner, first.held)
        raise
    groups = native
    with _never_stopping_vllm():
        call = _configs_call.get()
        if call is not None:
            call.planned = True
        settings = settings_now()
        for error in settings.errors:
            log_once(logging.ERROR, str(error))
        situation, families = _read_situation(planner, vllm_config, specs, native, first)
        decision = decide(situation, settings)
        report = PlanReport(event, call, settings, situation, decision, vllm_config, native)
        if decision.outcome is Outcome.REFUSE:
            raise report.refused()
        if decision.plan is None:
            report.kept_native()
        else:
            dealt = _deal(families, decision.plan)
            second = _Pass(forced=dealt)
            with _set(_pass, second):
                forced = group()
            vllm_compat.check_same_cache(native, forced, dealt)
            report.applied(forced)
            if call is not None:
                call.changed = True
                call.certified = dealt if decision.rule == "certified" else None
            groups = forced
    if groups is native:
        _release(planner, first.held)
    else:
        _release_relevant(planner, first, second)
    return groups


def _read_situation(
    planner: ModuleType, vllm_config: Any, specs: Specs, native: Groups, watched: _Pass
) -> tuple[Situation, list[list[str]]]:
    """Plain values for the decision, and the layer names of each family."""
    call = _configs_call.get()
    is_altay = _is_altay(vllm_config)
    if len(native) < 2:
        return Situation(is_altay, native_only="the model is not hybrid"), []
    if vllm_config is not None:
        if vllm_compat.hybrid_manager_disabled(vllm_config):
            return Situation(is_altay, native_only="the hybrid KV cache manager is disabled"), []
        if call is None and vllm_compat.pipeline_stages(vllm_config) > 1:
            own = "a worker plans its own pipeline stage, for profiling"
            return Situation(is_altay, native_only=own), []
        undivided = vllm_compat.undivided_reason(planner, vllm_config, native)
        if undivided:
            return Situation(is_altay, undivided=undivided), []
    if watched.unknown:
        return Situation(is_altay, unknown=watched.unknown), []
    try:
        families = vllm_compat.watched_families(watched.calls, native)
    except UnknownPlannerError as unknown:
        return Situation(is_altay, unknown=str(unknown)), []
    if len(families) < 2:
        return Situation(is_altay, native_only="the model is not hybrid"), []
    situation = Situation(
        is_altay,
        family_counts=tuple(len(family) for family in families),
        hidden_state_layers=sum(vllm_compat.is_hidden_state(spec) for spec in specs.values()),
    )
    if vllm_config is None:
        return situation, families
    return replace(
        situation,
        not_searched=vllm_compat.not_searched_reason(vllm_config, native),
        kv_connector=vllm_compat.has_kv_connector(vllm_config),
        max_model_len=vllm_compat.max_model_len(vllm_config),
        problem=lambda tokens: vllm_compat.search_problem(
            vllm_config,
            specs,
            families,
            native,
            tokens,
            call.worker_specs if call else (),
            call.available_memory if call else (),
        ),
    ), families


def _deal(families: list[list[str]], plan: LayoutPlan) -> list[list[str]]:
    dealt = vllm_compat.deal_families(families, plan.group_size)
    if sorted(map(len, dealt)) != sorted(plan.group_lengths):
        raise UnknownPlannerError(f"the groups dealt out are not those of {plan}")
    return dealt


def _is_altay(vllm_config: Any) -> bool:
    return _forced_altay or (
        vllm_config is not None and ARCHITECTURE in vllm_compat.architectures(vllm_config)
    )


def _look_at_result(
    planner: ModuleType, call: ConfigsCall, groups_per_worker: Sequence[Groups]
) -> None:
    """Look at what the engine is about to use, whoever made it.

    In ``required`` mode these must be the certified groups. In the other modes there is a warning
    where another layout was wanted and vLLM came to these without the wrapped functions.
    """
    with _never_stopping_vllm():
        settings = settings_now()
        if not call.planned:
            _judge_unplanned(planner, call, settings, max(groups_per_worker, key=len, default=()))
        elif call.certified is not None and settings.mode is Mode.REQUIRED:
            found = vllm_compat.layers_per_group(groups_per_worker)
            if found != [set(names) for names in call.certified]:
                reason = (
                    f"the groups about to be used have {[len(names) for names in found]} layers, "
                    f"the certified ones {[len(names) for names in call.certified]}"
                )
                write_trace("refused", reason=reason)
                raise KVLayoutError(f"{LAYOUT_ENV_NAME}=required: {reason}")


def _judge_unplanned(
    planner: ModuleType, call: ConfigsCall, settings: Settings, groups: Groups
) -> None:
    call.planned = True
    if len(groups) < 2 or vllm_compat.hybrid_manager_disabled(call.vllm_config):
        return
    undivided = vllm_compat.undivided_reason(planner, call.vllm_config, groups)
    unknown = UnknownPlannerError("the KV cache groups were not made by the wrapped functions")
    situation = Situation(
        _is_altay(call.vllm_config),
        undivided=undivided,
        unknown=None if undivided else str(unknown),
    )
    decision = decide(situation, settings)
    report = PlanReport("native", call, settings, situation, decision, call.vllm_config, groups)
    if decision.outcome is Outcome.REFUSE:
        raise report.refused()
    report.kept_native()


# --- vLLM's own log lines ----------------------------------------------------------------------


def _hold_back(record: logging.LogRecord) -> bool:
    """A filter on the planner's logger: keeps the lines of a watched run until it is decided."""
    if _repeating.get():
        return False  # said the first time
    current = _pass.get()
    if current is None:
        return True
    current.held.append(record)
    if current.in_uniform_page:
        current.held_of_uniform_page.append(record)
    return False


def _release(planner: ModuleType, records: Sequence[logging.LogRecord]) -> None:
    logger = logging.getLogger(planner.__name__)
    for record in records:
        logger.handle(record)


def _release_relevant(planner: ModuleType, watched: _Pass, forced: _Pass) -> None:
    """Let out what is true of the forced layout, once.

    The padding warnings of the layout that is not used are dropped. The rest was said in the first
    run, partly through functions that say a thing only once, and may have been said again.
    """
    records = [r for r in watched.held if r not in watched.held_of_uniform_page]
    said = {record.getMessage() for record in records}
    _release(planner, records + [r for r in forced.held if r.getMessage() not in said])

"""The child process of ``plan``: lets the installed vLLM plan a model that has no weights.

The layers are built on the meta device, their cache specs are asked for as a worker asks for them,
and vLLM's planner is called with the hook in place, so that what is reported is what an engine
would do. This is the one file that uses vLLM's API for that; how vLLM plans is known to
:mod:`altay_kvfix.vllm_compat` alone.

It is a process of its own because vLLM logs to stdout, starts processes and keeps global state.
Reads a JSON object (:class:`ModelQuestion`) from stdin and writes JSON lines to stdout:
``{"step": text}`` while it works, then ``{"report": {...}}`` or ``{"error": text}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import hook, planner, vllm_compat
from ..planner import Decision, Situation
from ..report import settings_now
from ..search import Problem
from ..settings import Settings
from .table import PlanTable, make_table, without_sizes

_LONGEST_REASON = 400
"""Characters of an error of vLLM's that are shown; the whole of it is in the log."""

_PLENTY = 1 << 60
"""Bytes, where no memory is given: no guard for little memory must have a say then."""


@dataclass(frozen=True)
class ModelQuestion:
    """What to plan; the settings are in the environment, as for an engine."""

    model: str
    engine_arguments: dict[str, Any]
    """Keyword arguments of vLLM's EngineArgs, those that were given."""
    kv_memory: int | None = None
    """Bytes for the KV cache on each GPU."""
    gpu_memory: int | None = None
    """Bytes of each GPU that vLLM may use, from which the weights are taken off."""
    weights: int | None = None
    """Bytes of all weights, where they are known better than from the layers."""


def main() -> None:
    # Whatever is printed from here on, by vLLM or a library below it, is none of the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    question = ModelQuestion(**json.load(sys.stdin))
    try:
        report = _plan(question, lambda step: answer(step=step))
    except _CannotPlan as failure:
        answer(error=str(failure), wrong_input=failure.wrong_input)
        sys.exit(1)
    answer(report=report)


class _CannotPlan(Exception):
    """Says to the person what can't be planned, and why."""

    def __init__(self, message: str, *, wrong_input: bool = False) -> None:
        super().__init__(message)
        self.wrong_input = wrong_input


class _Asked:
    """What the hook asked the planner, and got for an answer, in vLLM's last planning call."""

    def __init__(self) -> None:
        self.situation: Situation | None = None
        self.decision: Decision | None = None
        self.families: Sequence[Sequence[str]] = ()
        self.native: vllm_compat.Groups = ()

    def watch(self) -> None:
        """Stand between the hook and what it calls, in this process alone."""
        decide, search_problem = planner.decide, vllm_compat.search_problem

        def watched_decide(situation: Situation, settings: Settings) -> Decision:
            self.situation, self.decision = situation, decide(situation, settings)
            return self.decision

        def watched_problem(
            config: Any, specs: Any, families: Any, native: Any, *others: Any
        ) -> Problem:
            self.families, self.native = families, native
            return search_problem(config, specs, families, native, *others)

        hook.decide = watched_decide  # type: ignore[attr-defined]
        vllm_compat.search_problem = watched_problem  # type: ignore[assignment]


def _plan(question: ModelQuestion, step: Callable[[str], None]) -> dict[str, Any]:
    step("importing vLLM")
    try:
        import torch

        # An accelerator's build of vLLM knows no platform on a machine without one.
        if not torch.accelerator.is_available():
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        import vllm  # noqa: F401
    except ImportError as error:
        raise _CannotPlan(f"vLLM can't be imported: {error}") from error

    asked = _Asked()
    asked.watch()
    hook.install()

    step("reading the configuration")
    model = _build(question, step)
    kv_memory, memory_notes = _kv_memory(question, model)
    step("planning")
    refusal = _run_planner(model, kv_memory)
    if asked.decision is None or asked.situation is None:
        raise _CannotPlan(refusal or "vLLM's planner did not ask for a decision")
    table = _table(asked, asked.situation, asked.decision, model.config, bool(kv_memory))
    notes = [*model.notes, *memory_notes]
    if refusal:
        notes.append(f"vLLM would refuse to start: {refusal}")
    config = model.config
    return {
        "model": question.model,
        "architecture": config.model_config.architecture,
        "vllm_version": vllm_compat.version(),
        "platform": model.platform,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "notes": notes,
        **asdict(table),
    }


# --- the model ---------------------------------------------------------------------------------


@dataclass
class _Model:
    config: Any
    """The VllmConfig of the first pipeline stage."""
    worker_specs: list[dict[str, Any]]
    """Cache specs of the layers of each pipeline stage."""
    weight_bytes: list[int]
    """Bytes of the parameters on one GPU of each stage."""
    platform: str
    notes: list[str]


def _build(question: ModelQuestion, step: Callable[[str], None]) -> _Model:
    """Build the model; where it can't be built as it is, without what the KV cache does not need.

    Weights may be quantised for kernels that this machine has not, and what a multimodal model
    needs for its other modalities may not be installed.
    """
    from pydantic import ValidationError
    from vllm.transformers_utils.config import get_config

    trust = bool(question.engine_arguments.get("trust_remote_code"))
    try:
        hf_config = get_config(question.model, trust_remote_code=trust)
    except Exception as error:
        message = f"{question.model}/config.json: {_first_line(error)}"
        raise _CannotPlan(message, wrong_input=True) from error
    failures: list[Exception] = []
    for note, arguments in _attempts(hf_config):
        try:
            model = _build_stages(question.engine_arguments | arguments, question.model, step)
        except Exception as error:
            print(f"{note or 'as it is'}: {error!r}", file=sys.stderr)
            failures.append(error)
            continue
        if note:
            model.notes.append(f"{note}, since as it is: {_first_line(failures[0])}")
        return model
    raise _CannotPlan(
        f"the model can't be built: {_first_line(failures[0])}",
        wrong_input=isinstance(failures[0], ValidationError),
    ) from failures[0]


def _attempts(hf_config: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """What is left out, and how that is said to vLLM."""
    yield None, {}
    quantized = getattr(hf_config, "quantization_config", None)
    cache_dtype = _cache_dtype_of(quantized) if quantized else {}
    if quantized:
        unquantized = {"hf_overrides": _without_quantization}
        yield "planned without the weights' quantisation", unquantized | cache_dtype
    text = hf_config.get_text_config()
    if text is not hf_config and _text_architecture(text):
        yield "planned from the text part", {"hf_overrides": _text_part} | cache_dtype


def _cache_dtype_of(quantized: Any) -> dict[str, Any]:
    """A quantisation may name the KV cache's type too, which must not get lost with it."""
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    dtype = get_kv_cache_quant_algo_string(quantized)
    if dtype is None and quantized.get("kv_cache_scheme"):
        dtype = "fp8"
    return {"kv_cache_dtype": dtype} if dtype else {}


def _without_quantization(config: Any) -> Any:
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _text_part(config: Any) -> Any:
    text = config.get_text_config()
    if text is not config:
        text.architectures = [_text_architecture(text)]
    return _without_quantization(text)


def _text_architecture(text_config: Any) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text_config.model_type)
    return name if isinstance(name, str) else None


def _build_stages(arguments: dict[str, Any], model: str, step: Callable[[str], None]) -> _Model:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    engine = EngineArgs(model=model, skip_tokenizer_init=True, **arguments)
    stages = engine.pipeline_parallel_size
    configs, worker_specs, weight_bytes = [], [], []
    for stage in range(stages):
        step(f"building the layers, stage {stage + 1} of {stages}" if stages > 1 else
             "building the layers")  # fmt: skip
        config: Any = engine.create_engine_config()
        with set_current_vllm_config(config):
            _pretend_parallel(engine.tensor_parallel_size, stages, stage)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                layers = [initialize_model(config)]
                if config.speculative_config and config.speculative_config.draft_model_config:
                    draft = config.speculative_config.draft_model_config
                    # It runs on the last stage, after the target's layers.
                    if stage == stages - 1:
                        layers.append(initialize_model(config, model_config=draft))
            current_platform.update_block_size_for_backend(config)
            worker_specs.append(get_kv_cache_spec(config))
        weight_bytes.append(sum(p.nbytes for part in layers for p in part.parameters()))
        configs.append(config)
    return _Model(configs[0], worker_specs, weight_bytes, current_platform.device_type, [])


def _pretend_parallel(tensor_size: int, stages: int, stage: int) -> None:
    """Have vLLM take this process for the first tensor-parallel rank of a pipeline stage.

    Layers ask the process groups for rank and size when they are built, and talk to nobody.
    """
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        store = tempfile.NamedTemporaryFile(prefix="altay-kvfix-", delete=False)  # noqa: SIM115
        parallel = get_current_vllm_config().parallel_config
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        parallel.tensor_parallel_size = parallel.pipeline_parallel_size = 1
        try:
            parallel_state.init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        finally:
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size = sizes
            os.unlink(store.name)
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    tensor.world_size, tensor.rank_in_group = tensor_size, 0
    pipeline.world_size, pipeline.rank_in_group = stages, stage
    pipeline.ranks = list(range(stages))
    pipeline.rank = stage


# --- planning ----------------------------------------------------------------------------------


def _kv_memory(question: ModelQuestion, model: _Model) -> tuple[list[int], list[str]]:
    """Bytes for the KV cache on a GPU of each stage; none where no memory is given."""
    stages = len(model.worker_specs)
    if question.kv_memory is not None:
        return [question.kv_memory] * stages, []
    if question.gpu_memory is None:
        return [], []
    weights = model.weight_bytes
    source = "from the layers' shapes"
    if question.weights is not None:
        gpus = model.config.parallel_config.tensor_parallel_size * stages
        weights = [question.weights // gpus] * stages
        source = "as given"
    left = [question.gpu_memory - w for w in weights]
    note = (
        f"KV cache memory is an estimate: weights of {max(weights) / 2**30:.1f} GiB on a GPU "
        f"({source}) are taken off, activations and CUDA graphs are not"
    )
    if min(left) <= 0:
        raise _CannotPlan(
            f"weights of {max(weights) / 2**30:.1f} GiB on a GPU ({source}) leave nothing of "
            f"{question.gpu_memory / 2**30:.1f} GiB for the KV cache"
        )
    return left, [note]


def _prepare_as_engine(model: _Model) -> None:
    """What the engine core does between asking the workers for specs and planning.

    Releases before 0.29 have no layouts of the cache's memory to agree on.
    """
    import vllm.v1.attention.backends.utils as backends
    from vllm.config import set_current_vllm_config
    from vllm.v1.core import single_type_kv_cache_manager as managers

    register = getattr(managers, "register_all_kvcache_specs", None)
    if register is not None:
        register(model.config)
    if hasattr(backends, "resolve_kv_cache_layout"):
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        with set_current_vllm_config(model.config):
            of_worker = backends.get_supported_kv_cache_layouts(
                get_current_attn_backends(model.config)
            )
            backends.resolve_kv_cache_layout(
                model.config,
                [[layout.name for layout in of_worker]] * len(model.worker_specs),
                [spec for specs in model.worker_specs for spec in specs.values()],
            )


def _run_planner(model: _Model, kv_memory: list[int]) -> str | None:
    """Call vLLM's planner as the engine does; why it would refuse to start, or None."""
    vllm_planner: Any = importlib.import_module(vllm_compat.planner_module())
    _prepare_as_engine(model)
    memory = kv_memory or [_PLENTY] * len(model.worker_specs)
    try:
        groups = []
        if hasattr(vllm_planner, vllm_compat.GLOBAL_GROUPS_FUNCTION):
            groups = [vllm_planner.get_global_kv_cache_groups(model.config, model.worker_specs)]
        vllm_planner.get_kv_cache_configs(model.config, model.worker_specs, memory, *groups)
    except (ValueError, RuntimeError) as error:
        return _first_line(error)
    return None


def _table(
    question: _Asked, situation: Situation, decision: Decision, config: Any, has_memory: bool
) -> PlanTable:
    if situation.problem is None:
        return without_sizes(decision, vllm_compat.max_model_len(config))
    settings = settings_now()
    longest = situation.max_model_len
    tokens = min(settings.plan_tokens or longest, longest)
    problem = situation.problem(tokens)
    spec_of = {n: g.kv_cache_spec for g in question.native for n in g.layer_names}
    # Hidden-state layers come last, each a family of its own.
    firsts = [spec_of[names[0]] for names in question.families]
    firsts += [spec for spec in spec_of.values() if vllm_compat.is_hidden_state(spec)]
    return make_table(
        decision,
        settings,
        problem if has_memory else replace(problem, pages=None),
        kinds=[vllm_compat.kind(spec) for spec in firsts],
        max_model_len=longest,
        request_tokens=tokens,
        # A recurrent state is not divided into blocks of tokens.
        block_size=max(
            (
                spec.block_size
                for spec, f in zip(firsts, problem.families, strict=True)
                if f.is_attention
            ),
            default=None,
        ),
        page_bytes=firsts[0].page_size_bytes,
    )


def _first_line(error: BaseException) -> str:
    """What a person needs of an error; vLLM's own may be pages long."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        details = error.errors()[0]
        field = ".".join(map(str, details["loc"]))
        message = details["msg"].removeprefix("Value error, ")
        lines = [f"{field}: {message}" if field else message]
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if len(first) <= _LONGEST_REASON else first[: _LONGEST_REASON - 3] + "..."


if __name__ == "__main__":
    main()

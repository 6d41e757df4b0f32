"""altay-kvfix: KV cache groups of the right size for hybrid models in vLLM.

The public API. Importing it loads neither vLLM nor wrapt.
"""

from .certified import COMPACT_PLAN, LEGACY_PLAN, REPAIR_ID
from .layout import LayoutPlan, make_layout_plan
from .settings import TRACE_ENV_NAME, expect_family_counts

__version__ = "0.1.0"

__all__ = [
    "COMPACT_PLAN",
    "LEGACY_PLAN",
    "REPAIR_ID",
    "TRACE_ENV_NAME",
    "LayoutPlan",
    "__version__",
    "expect_family_counts",
    "install_altay72_compact_kv_layout",
    "make_layout_plan",
]


def install_altay72_compact_kv_layout(*, force: bool = False) -> bool:
    """Have the certified layout applied in this process, from a model's own package.

    Call it where the package is loaded in every vLLM process: its ``vllm.general_plugins`` entry
    point. It works before or after the planner is loaded, and where the start-up hook was never
    armed.

    Args:
        force: Treat the model as ALTAY although its config does not name the architecture. The
            family counts still have to be the certified ones.

    Returns:
        True when this call installed the hook, False when it was there already or
        ``ALTAY_KVFIX_DISABLE`` is set.

    Raises:
        RuntimeError: in ``required`` mode, when wrapt is missing or this vLLM's planner is not
            known. In the other modes that is one warning line.
    """
    try:
        from .hook import install
    except Exception as error:  # a broken wrapt may fail in any way
        from .report import stand_aside

        stand_aside(f"wrapt can't be used ({error!r})")
        return False
    return install(force=force)

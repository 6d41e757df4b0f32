"""What an interpreter looks like from inside; ``doctor`` runs this file's text in other processes.

It runs in whatever interpreter a vLLM process would be, whether this package is importable there or
not: the standard library alone, and what Python 3.6 knows. Whoever runs it puts
these into its globals: OUT, the file to write the answer to; NAMES, the environment variables to
report (not all: an environment has secrets in it); MODULES, modules to import in turn; FUNCTIONS,
which to look at in the last of them that exists.
"""

import importlib
import importlib.util
import json
import os
import sys
from typing import Any, Dict, List


def look(names: List[str], modules: List[str], functions: List[str]) -> Dict[str, Any]:
    facts: Dict[str, Any] = {
        "executable": sys.executable,
        "version": list(sys.version_info[:3]),
        "pid": os.getpid(),
        "no_site": bool(sys.flags.no_site),
        "ignore_environment": bool(sys.flags.ignore_environment),
        "isolated": bool(getattr(sys.flags, "isolated", False)),
        "directory": os.getcwd(),
        "armed": [f.altay_kvfix for f in sys.meta_path if hasattr(f, "altay_kvfix")],
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "environment": dict((name, os.environ[name]) for name in names if name in os.environ),
        "variables": len(os.environ),
        "vllm_folder": None,
        "wrapt": None,
        "wrapt_error": None,
        "package_error": None,
        "wrapped": None,
        "import_error": None,
    }
    try:
        found = importlib.util.find_spec("vllm")
        if found is not None and found.submodule_search_locations:
            facts["vllm_folder"] = next(iter(found.submodule_search_locations))
    except Exception as error:
        facts["import_error"] = repr(error)
    try:
        import wrapt

        facts["wrapt"] = getattr(wrapt, "__version__", "unknown")
    except Exception as error:
        facts["wrapt_error"] = repr(error)
    try:
        import altay_kvfix.hook  # noqa: F401
    except Exception as error:
        facts["package_error"] = repr(error)
    if modules:
        facts["wrapped"] = []
        try:
            for name in modules:
                if importlib.util.find_spec(name) is not None:
                    module = importlib.import_module(name)
            for name in functions:
                if type(getattr(module, name, None)).__module__ == "altay_kvfix.hook":
                    facts["wrapped"].append(name)
        except Exception as error:
            facts["import_error"] = repr(error)
    return facts


with open(OUT, "w") as file:  # type: ignore[name-defined]
    facts = look(NAMES, MODULES, FUNCTIONS)  # type: ignore[name-defined]
    json.dump(facts, file)

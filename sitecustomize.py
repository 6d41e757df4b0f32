"""The start-up hook: runs the sitecustomize it shadows, and waits for vLLM. Nothing else.

It runs in every Python process of the container. So it imports only what every interpreter has
loaded already, prints nothing, and can't fail an interpreter. The rest of this package is loaded
when somebody imports vllm. This file parses on Python 2.7, where it does nothing.
"""

import os
import sys

_FOLDER = os.path.realpath(os.path.dirname(__file__))

# What altay_kvfix.settings knows better; needed here before, or without, importing it.
_SWITCHED_OFF = ("1", "true", "yes", "on")
_NOT_REQUIRED = ("", "attention_exact", "off", "legacy", "0", "false")


class _ImportWatch(object):
    """A finder that answers with what the other finders have, to call back after the import.

    ``callbacks`` maps a module's name to a function, called with the module each time it has been
    executed: also when it is reloaded, or deleted and imported again.
    """

    altay_kvfix = _FOLDER

    def __init__(self, callbacks):
        self.callbacks = callbacks

    def find_spec(self, name, path=None, target=None):
        if name not in self.callbacks or self._is_asking_for(name):
            return None
        # Nothing may be imported here and sys.meta_path must stay as it is: the import system
        # holds a lock and is walking through it.
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._trip(spec)
                    return spec
        return None

    def _is_asking_for(self, name):
        # Another delegating finder asks us back while we ask it. The stack tells that for this
        # thread alone, and can't be left in the wrong state by a finder that raises.
        code = self.find_spec.__func__.__code__
        return any(
            f.f_code is code and f.f_locals["name"] == name for f in _frames(sys._getframe(2))
        )

    def _trip(self, spec):
        """Have the spec's loader call back after it has executed a watched module.

        The loader stays the object that was found, so that the module and its spec never show
        another one. For a single execution an attribute stands in front of its method. A zip
        importer is shared by all modules of its archive, hence the look at the name.
        """
        if spec.loader is None:
            spec.loader = _namespace_loader(spec)
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if hasattr(execute, "altay_kvfix"):
            return
        if execute is None or isinstance(loader, type) or not hasattr(loader, "__dict__"):
            _not_active(ImportError("can't watch %r load %s" % (loader, spec.name)))
            return
        # ddtrace's loader, for one, has an attribute in front of its method already.
        shadowed = vars(loader).get("exec_module")

        def execute_and_call_back(module):
            callback = self.callbacks.get(module.__name__)
            if callback is None:
                execute(module)
                return
            if shadowed is None:
                del loader.exec_module
            else:
                loader.exec_module = shadowed
            execute(module)
            callback(module)

        execute_and_call_back.altay_kvfix = _FOLDER
        loader.exec_module = execute_and_call_back


def _namespace_loader(spec):
    # What the import system itself fills in, a moment later, for a directory without __init__.py.
    external = sys.modules["_frozen_importlib_external"]
    kind = getattr(external, "NamespaceLoader", None) or external._NamespaceLoader
    loader = kind.__new__(kind)
    loader._path = spec.submodule_search_locations
    return loader


def _arm(vllm):
    if _is_switched_off():
        return
    try:
        from altay_kvfix import install_altay72_compact_kv_layout

        install_altay72_compact_kv_layout()
    except Exception as error:
        _not_active(error)


def _not_active(error):
    """Say so and go on, unless the layout is, or may be meant to be, required."""
    if os.environ.get("ZENIT_ALTAY_KV_LAYOUT", "").strip().lower() not in _NOT_REQUIRED:
        raise error
    try:
        sys.stderr.write(
            "altay-kvfix: not active, vLLM keeps its own KV cache layout: %r\n" % (error,)
        )
    except Exception:
        pass  # stderr is closed or full, which must not fail the import of vllm


def _is_switched_off():
    return os.environ.get("ALTAY_KVFIX_DISABLE", "").strip().lower() in _SWITCHED_OFF


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(entry):
    try:
        return os.path.samefile(entry, _FOLDER)
    except (OSError, TypeError, ValueError):
        return False


def _folder_is_ours_alone():
    """Whether the folder is our checkout, or was made for us by ``pip install --target``."""
    try:
        names = os.listdir(_FOLDER)
    except OSError:  # a zip file
        return False
    if "pyproject.toml" in names and "altay_kvfix" in names:
        return True
    return all(
        name in ("altay_kvfix", "wrapt", "bin", "__pycache__")
        or name.startswith(("altay_kvfix-", "wrapt-", "sitecustomize.py"))
        for name in names
    )


def _leave_front():
    """Move our folder to the end of sys.path, so that nothing beside us shadows the container's.

    A folder that other things live in stays where it is: somebody put it there for them.

    Returns the entries behind our folder, as they were.
    """
    ours = [i for i, entry in enumerate(sys.path) if _is_ours(entry)]
    if not ours:
        return list(sys.path)
    behind = [entry for entry in sys.path[ours[0] + 1 :] if not _is_ours(entry)]
    if _folder_is_ours_alone():
        folder = sys.path[ours[0]]
        sys.path[:] = [entry for i, entry in enumerate(sys.path) if i not in ours] + [folder]
    return behind


def _run_shadowed(entries):
    """Run the sitecustomize that Python would have run without us, in our place.

    It is looked for behind our folder only: what stands in front of us has run already, and ran us.
    Nor is one run that we are running: it may look for the next one itself and come upon us again.
    """
    callers = [f for f in _frames(sys._getframe(1)) if f.f_code.co_name == "_run_shadowed"]
    running = [getattr(f.f_locals.get("spec"), "origin", None) for f in callers]
    for finder in list(sys.meta_path):
        if hasattr(finder, "find_spec"):
            spec = finder.find_spec("sitecustomize", entries)
            # A bare directory of that name has no origin.
            if spec is None or not spec.origin or spec.origin in running:
                continue
            # An editable install of this package has a finder that leads back to this file.
            if _is_ours(os.path.dirname(spec.origin)):
                continue
            # What importlib.import_module() would do with the spec. importlib itself would be one
            # more import in every process.
            sys.modules["_frozen_importlib"]._load(spec)
            return


def _start():
    if sys.version_info < (3, 5):
        return
    behind = _leave_front()
    armed = any(hasattr(finder, "altay_kvfix") for finder in sys.meta_path)
    if sys.version_info >= (3, 10) and not armed and not _is_switched_off():
        sys.meta_path.insert(0, _ImportWatch({"vllm": _arm}))
    _run_shadowed(behind)


_start()

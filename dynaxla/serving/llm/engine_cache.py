"""An engine's programs in the store: a process that serves a model which another process served captures nothing.

Dynamo takes many seconds for a program of a language model. `aot_compile` stores what Dynamo makes, without its guards: sizes
are fixed, nobody else calls these functions, and all else that guards would read is in the key, or compared at loading.
"""

from __future__ import annotations

import io
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import transformers

from dynaxla.aot_cache.capture_key import capture_environment, registered_ops
from dynaxla.aot_cache.module_fingerprint import fingerprint_modules
from dynaxla.aot_cache.object_fingerprint import NoFingerprint, fingerprint
from dynaxla.cache.key import Key
from dynaxla.cache.kinds import ENGINE_CHECK, ENGINE_PROGRAM, EntryKind
from dynaxla.device.registration import device_in_use
from dynaxla.options import Options
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime_state import process
from dynaxla.torch_api.dynamo import compile_lock

logger = logging.getLogger("dynaxla")

_OPTIONS: Mapping[str, object] = MappingProxyType({"package": "captures"})
"""With which an engine's programs are captured."""

_UNREAD = ("generation_config",)  # it is `generate`'s, and has a hash in it that no other process gives

Compiled = Callable[..., Any]


class EnginePrograms:
    """The compiled methods of an object of which nothing changes but elements of tensors.

    A method is compiled at the first call of each name, for the sizes of that call: loaded from the store, or captured and
    stored. Finding it costs a call 0.3 us.

    Args:
        owner: the object.
        capacity: the number of names.
    """

    def __init__(self, owner: object, capacity: int) -> None:
        self.object = owner
        self._programs: ProgramCache[str, Compiled] = ProgramCache(capacity)

    def run(self, method: Callable[..., Any], name: str, *args: Any) -> Any:
        """Calls a method of the object.

        Args:
            name: the function's for Dynamo, which keeps it apart from others of the same method. One name has one set of sizes.
        """
        compiled = self._programs.get_or_make(name, lambda: self._compile(method, name, args))
        return compiled(self.object, *args)

    def _compile(self, method: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Compiled:
        """The function for arguments of these sizes."""
        function = FunctionType(method.__code__.replace(co_name=name), method.__globals__, name)
        key = self._key(ENGINE_PROGRAM, function, args)
        found = None if key is None else self._found(key)
        if found is not None:
            return found
        made = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=False)
        return made if key is None else self._captured(function, args, key) or made

    def check_once(self, check: Callable[..., None], args: tuple[Any, ...], run: Callable[[], None]) -> None:
        """Runs a check of the object, unless one like it was run before, by whichever process, and raised nothing.

        Args:
            check, args: whose code, and what else, the outcome depends on.
        """
        key, store = self._key(ENGINE_CHECK, check, args), process().executables.store
        if key is not None and store is not None and store.get(ENGINE_CHECK.name, key) is not None:
            return
        run()
        if key is not None and store is not None:
            store.put(ENGINE_CHECK.name, key, b"", {"check": check.__name__})

    @cached_property
    def _identity(self) -> str | None:
        try:
            return fingerprint(self.object, unread=_UNREAD)
        except NoFingerprint as unknown:
            _not_kept(f"nothing says what the model does: {unknown}")
            return None

    def _key(self, kind: EntryKind, function: Callable[..., Any], args: tuple[Any, ...]) -> Key | None:
        shared = process()
        if shared.executables.store is None or self._identity is None:
            return None
        return kind.key(
            Options.from_mapping(_OPTIONS),
            capture_environment(),
            method=function.__qualname__,
            code=fingerprint(function.__code__),
            owner=self._identity,
            arguments=fingerprint(args),
            platform=device_in_use().platform,
            transformers=transformers.__version__,
            registered=registered_ops(shared.registered.current),
        )

    def _found(self, key: Key) -> Compiled | None:
        """What was kept, if the code that was captured is still what would run."""
        store = process().executables.store
        content = None if store is None else store.get(ENGINE_PROGRAM.name, key)
        if store is None or content is None:
            return None
        try:
            head, _, function = content.partition(b"\n")
            modules = json.loads(head)
            if fingerprint_modules(modules) != modules:
                return None
            with compile_lock:
                loaded: Any = torch.compiler.load_compiled_function(io.BytesIO(function))
        except Exception as error:  # whatever was kept, it is captured anew
            logger.info("a program that was kept is captured anew: %s: %s", type(error).__name__, error)
            store.reject(ENGINE_PROGRAM.name, key)
            return None
        loaded.disable_guard_check()
        return loaded  # type: ignore[no-any-return]

    def _captured(self, function: FunctionType, args: tuple[Any, ...], key: Key) -> Compiled | None:
        """A function that was captured, and is kept if it can be; None where it cannot be captured so."""
        options = {**_OPTIONS, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        compiled: Any = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=False, options=options)  # type: ignore[arg-type]
        try:
            with compile_lock:  # which torch takes for captures in calls alone
                made = compiled.aot_compile(((self.object, *args), {}))
        except Exception as error:  # of torch's, or of the model: who compiles it as ever raises what it raises
            _not_kept(f"{function.__name__} cannot be captured by aot_compile: {type(error).__name__}: {error}")
            return None
        made.disable_guard_check()
        try:
            content = _content(made)
        except Exception as error:  # of torch's pickles
            _not_kept(f"{function.__name__} cannot be saved: {type(error).__name__}: {error}")
            return made  # type: ignore[no-any-return]
        store = process().executables.store
        if store is not None:
            store.put(ENGINE_PROGRAM.name, key, content, {"function": function.__name__})
        return made  # type: ignore[no-any-return]


def _content(made: Any) -> bytes:
    """A line of JSON, the digests of the modules whose code was captured; then what torch saves."""
    head = json.dumps(fingerprint_modules(source.module for source in made.source_info().inlined_sources)).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "function")
        made.save_compiled_function(str(path))
        return head + b"\n" + path.read_bytes()


def _not_kept(reason: str) -> None:
    process().recorder.note(captures_not_kept=f"an engine's programs: {reason}")

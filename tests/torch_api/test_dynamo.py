"""What the wall relies on of Dynamo: the capture at hand, breaks and their words, and what torch.compile returned."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dynaxla
from dynaxla.torch_api import capture_limit, captured_functions, dynamo, dynamo_capture, frames, modules, patches
from tests.torch_api.boundary import boundary

Look = Callable[[GraphModule], Any]


def _looking(look: Look, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What is seen from within a backend at every graph of a call."""
    seen = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(look(module))
        return module.forward

    torch.compile(function, backend=backend)(*args)
    return seen


def _broken(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def _jumps(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def _breaks_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


@boundary("frames.variables_of")
def test_variables_of_running_functions_are_found() -> None:
    secret = 42
    found = frames.variables_of("test_variables_of_running_functions_are_found", __name__)
    assert found is not None
    assert found["secret"] == secret
    assert frames.variables_of("no_such_function", __name__) is None


@boundary(
    "dynamo_capture.find_graph_break",
    "dynamo_capture.DynamoBreak",
    "dynamo_capture.breaks",
    "dynamo_capture.shorten_message",
)
def test_a_graph_says_why_it_ended() -> None:
    first, last = _looking(dynamo_capture.find_graph_break, _broken, torch.ones(3))
    assert last is None
    assert first.reason.startswith("Call to `torch._dynamo.graph_break()`: User-inserted graph break")
    assert first.stack[-1].name == "_broken"
    assert first.stack[-1].line == "torch._dynamo.graph_break()"
    assert first in dynamo_capture.breaks()


@boundary("dynamo_capture.shorten_message")
def test_a_jump_on_a_tensor_has_dynamos_word() -> None:
    first, *_ = _looking(dynamo_capture.find_graph_break, _jumps, torch.ones(3))
    assert first.reason == "the program goes on by a tensor's value, which is known only when it runs"


@boundary("dynamo_capture.failures", "dynamo_capture.CaptureFailure")
def test_functions_that_are_left_to_eager_are_remembered() -> None:
    torch.compile(_breaks_in_a_loop, backend="eager")(torch.ones(3))
    found = [failure for failure in dynamo_capture.failures() if failure.function == "_breaks_in_a_loop"]
    assert found
    assert found[-1].file == __file__
    assert "graph break" in found[-1].reason
    assert isinstance(found[-1].line, int)


@boundary("dynamo_capture.find_recapture", "dynamo_capture.Recapture", "dynamo_capture.get_capture_start_ns")
def test_a_capture_says_how_often_and_since_when() -> None:
    def function(x: Tensor, n: int) -> Tensor:
        return x + n

    seen = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append((dynamo_capture.find_recapture(), dynamo_capture.get_capture_start_ns()))
        return module.forward

    compiled = torch.compile(function, backend=backend, dynamic=False)
    before = time.time_ns()
    compiled(torch.ones(3), 1)
    compiled(torch.ones(3), 2)
    (first, began), (again, _) = seen
    assert first is None
    assert began is not None
    assert before <= began <= time.time_ns()
    assert again is not None
    assert again.graphs == 2
    assert "n == 1" in again.reason
    assert (dynamo_capture.find_recapture(), dynamo_capture.get_capture_start_ns()) == (None, None)


@boundary(
    "dynamo_capture.captured_code",
    "dynamo_capture.captured_arguments",
    "dynamo_capture.get_capturing_backend",
    "dynamo_capture.parse_resumed_name",
)
def test_the_function_that_is_captured_is_known() -> None:
    def look(module: GraphModule) -> Any:
        code = dynamo_capture.captured_code()
        assert code is not None
        return code.co_name, set(dynamo_capture.captured_arguments()), dynamo_capture.get_capturing_backend()

    (name, given, backend), (resumed, _, other) = _looking(look, _broken, torch.ones(3))
    assert (name, given) == ("_broken", {"x"})
    assert backend is other is not None
    assert dynamo_capture.parse_resumed_name(resumed) == ("_broken", _broken.__code__.co_firstlineno + 2)
    assert dynamo_capture.parse_resumed_name("_broken") is None
    nothing = (
        dynamo_capture.captured_code(),
        dynamo_capture.captured_arguments(),
        dynamo_capture.get_capturing_backend(),
    )
    assert nothing == (None, {}, None)


@boundary(
    "dynamo_capture.captured_code",
)
def test_other_threads_capture_nothing() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(dynamo_capture.captured_code()))
    thread.start()
    thread.join()
    assert found == [None]


@boundary("dynamo_capture.captured_callable")
def test_a_module_of_torch_is_captured_by_a_wrapper() -> None:
    layer = nn.Linear(3, 3)
    assert _looking(lambda _: dynamo_capture.captured_callable(), layer, torch.ones(1, 3)) == [layer]
    assert _looking(lambda _: dynamo_capture.captured_callable(), torch.sin, torch.ones(3)) in ([None], [torch.sin])
    assert dynamo_capture.captured_callable() is None


@boundary("dynamo.mark_dynamic")
def test_a_marked_dim_is_a_symbol() -> None:
    x = torch.ones(5, 3)
    dynamo.mark_dynamic(x, 0)
    (seen,) = _looking(_first_shape, lambda x: x + 1, x)
    assert isinstance(seen[0], torch.SymInt)
    assert seen[1] == 3


@boundary("dynamo.mark_maybe_dynamic", "dynamo.make_recapture_error")
def test_a_backend_has_a_graph_captured_again_with_a_symbol() -> None:
    shapes = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        shapes.append(_first_shape(module))
        if dynamo.mark_maybe_dynamic(inputs[-1], 0):
            raise dynamo.make_recapture_error()
        return module.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for size in (5, 7):  # the second has no mark, and is no reason for another graph
        x = torch.ones(size, 3)
        assert torch.equal(compiled(x), x + 1)
    assert shapes[0] == (5, 3)
    assert isinstance(shapes[1][0], torch.SymInt)
    assert len(shapes) == 2


@boundary("dynamo.is_automatic_dynamic")
@pytest.mark.parametrize("dynamic", [None, False])
def test_a_capture_of_fixed_sizes_is_known(dynamic: bool | None) -> None:
    seen = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(dynamo.is_automatic_dynamic())
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend, dynamic=dynamic)(torch.ones(3))
    assert seen == [dynamic is None]


def _first_shape(module: GraphModule) -> Any:
    values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    return next(value.shape for value in values if isinstance(value, Tensor))


@boundary("dynamo.lift_capture_limits", "capture_limit.most_captures")
def test_captures_have_a_limit() -> None:
    before = capture_limit.most_captures()
    assert before < 1000
    with dynamo.lift_capture_limits():
        assert capture_limit.most_captures() == sys.maxsize
        assert torch._dynamo.config.accumulated_recompile_limit == sys.maxsize
    assert capture_limit.most_captures() == before


@boundary("captured_functions.capture_checks")
def test_checks_of_tensors_are_captured() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > 0)
        return x + 1

    captured_functions.capture_checks()
    before = len(dynaxla.read_metrics().captured)
    torch.compile(checked, backend="dynaxla")(torch.ones(3))
    (capture,) = dynaxla.read_metrics().captured[before:]
    assert capture.ended is None


@boundary("capture_limit.raise_limit")
@pytest.mark.parametrize(
    ("backend", "limit", "captures"), [("dynaxla", None, 12), ("dynaxla", 8, 8), ("eager", None, 8)]
)
def test_the_limit_of_captures_is_raised_where_nobody_set_it(backend: str, limit: int | None, captures: int) -> None:
    def scaled(x: torch.Tensor, word: str) -> torch.Tensor:
        return x * len(word)

    compiled = torch.compile(scaled, backend=backend, recompile_limit=limit)
    for word in range(12):
        compiled(torch.ones(2), str(word))
    assert captures == len(torch._dynamo.eval_frame._debug_get_cache_entry_list(scaled.__code__))


@boundary("dynamo.is_fully_dynamic")
@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_captures_are_known(dynamic: bool) -> None:
    seen = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(dynamo.is_fully_dynamic())
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend, dynamic=dynamic)(torch.ones(3))
    assert seen == [dynamic]


@boundary("dynamo.forget")
def test_what_was_captured_can_be_forgotten() -> None:
    graphs = []

    def function(x: Tensor) -> Tensor:
        return x + 1

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(function, backend=backend)
    for _ in range(2):
        compiled(torch.ones(3))
    dynamo.forget(function.__code__)
    compiled(torch.ones(3))
    assert len(graphs) == 2


class _Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@boundary("dynamo.is_left_to_python")
def test_code_of_torch_nn_is_left_to_python() -> None:
    assert dynamo.is_left_to_python(nn.Sequential.forward)
    assert not dynamo.is_left_to_python(_Own.forward)


@boundary("modules.compiled_call", "modules.has_hooks")
def test_modules_keep_hooks_and_what_they_are_compiled_to() -> None:
    module = _Own()
    assert (modules.compiled_call(module), modules.has_hooks(module)) == (None, False)
    module.compile(backend="eager")
    assert callable(modules.compiled_call(module))
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert modules.has_hooks(module)
    handle.remove()
    module.register_forward_hook(lambda *_: None)
    assert modules.has_hooks(module)


@boundary("modules.move_tensors")
def test_all_tensors_of_a_module_are_moved() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.weight.grad = torch.ones(2)
    weight = module.weight
    modules.move_tensors(module, lambda tensor: tensor + 1)
    assert module.weight is weight
    assert module.weight.grad is not None
    assert module.running_mean is not None
    for tensor in (module.weight, module.weight.grad, module.running_mean + 1):
        assert tensor.tolist() == [2, 2]


@boundary("dynamo.backend_of", "dynamo.called_backend", "dynamo.name_of")
@pytest.mark.parametrize("kind", ["module", "function", "in place"])
def test_what_torch_compile_returned_knows_its_backend(kind: str) -> None:
    called = []

    def function(x: Tensor) -> Tensor:
        return x + 1

    module = _Own()
    if kind == "in place":
        module.compile(backend="aot_eager")
        compiled: Any = module
    else:
        compiled = torch.compile(module if kind == "module" else function, backend="aot_eager")
    backend = dynamo.backend_of(compiled)
    assert dynamo.name_of(backend) == "aot_eager"
    assert dynamo.backend_of(function) is None

    def hooked(module: GraphModule, inputs: Sequence[Any]) -> Any:
        return lambda *args: called.append(dynamo.called_backend()) or module.forward(*args)

    again = torch.compile(function, backend=hooked)
    again(torch.ones(3))
    assert called == [dynamo.backend_of(again)]
    assert called[0] is not None
    assert dynamo.called_backend() is None


@boundary("dynamo.is_ours")
@pytest.mark.parametrize("name", ["dynaxla", "aot_eager"])
def test_what_dynamo_captures_for_is_known_through_its_wrappers(name: str) -> None:
    found: list[bool] = []

    def asked(x: Tensor) -> Tensor:
        at = frames.variables_of("_compile", "torch._dynamo.convert_frame")
        assert at is not None
        found.append(dynamo.is_ours(at["compiler_fn"]))
        return x

    constant = torch._dynamo.assume_constant_result(lambda: len(asked(torch.ones(1))))
    compiled = torch.compile(lambda x: x + constant(), backend=name)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert found == [name == "dynaxla"]


@boundary("dynamo_capture.get_capturing_backend", "dynamo.called_backend", "dynamo.backend_of")
def test_one_backend_object_stands_for_a_compiled_function_at_capture_and_call() -> None:
    seen = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(dynamo_capture.get_capturing_backend())
        return lambda *args: seen.append(dynamo.called_backend()) or module.forward(*args)

    compiled = torch.compile(_Own(), backend=backend)
    compiled(torch.ones(3))
    assert seen == [dynamo.backend_of(compiled)] * 2


@boundary("dynamo.BackendCompilerFailed", "dynamo.TorchDynamoException")
def test_errors_of_a_backend_are_wrapped() -> None:
    fault = ValueError("mine")

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        raise fault

    with pytest.raises(dynamo.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert caught.value.inner_exception is fault
    assert isinstance(caught.value, dynamo.TorchDynamoException)


@boundary("dynamo.compile_lock")
def test_the_thread_that_captures_holds_the_lock() -> None:
    def is_free() -> bool:
        found: list[bool] = []

        def look() -> None:
            found.append(dynamo.compile_lock.acquire(blocking=False))
            if found[0]:
                dynamo.compile_lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    assert _looking(lambda _: is_free(), lambda x: x + 1, torch.ones(3)) == [False]
    assert is_free()


@boundary("dynamo.leave_streams_to_python")
def test_captured_code_is_released_where_there_is_a_device() -> None:
    dynaxla.use("cpu")  # which leaves them

    def captured() -> Callable[[], object]:
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        compiled(torch.ones(3))
        (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(compiled._torchdynamo_orig_callable.__code__)
        return weakref.ref(entry.code)

    code = captured()
    assert code() is not None
    torch._dynamo.reset()
    gc.collect()
    assert code() is None


@boundary("dynamo.leave_streams_to_python")
def test_dynamos_code_asks_a_table_for_streams() -> None:
    dynaxla.use("cpu")
    device = torch.device("dynaxla", 0)
    asked = torch._dynamo.utils.get_current_stream
    assert isinstance(asked(device), torch.Stream)
    assert asked(device).device == device
    assert asked(device) is asked(device)
    assert not hasattr(asked, "__code__")  # of C: there is no frame for Dynamo to look at
    with pytest.raises(ValueError, match="accelerator"):
        asked(torch.device("cpu"))


@boundary("dynamo.mark_calls_in_profiles_alone")
def test_calls_of_graphs_are_marked_in_profiles() -> None:
    patches.apply_patches()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(3))
    with torch.profiler.profile() as profile:
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert [event.name for event in profile.events()].count("Pregraph bytecode") == 1


@boundary("dynamo.mark_calls_in_profiles_alone")
def test_nothing_is_marked_where_nobody_profiles() -> None:
    patches.apply_patches()
    mark = torch._dynamo.utils.record_pregraph_bytecode_enter()
    assert mark is None
    torch._dynamo.utils.record_pregraph_bytecode_exit(mark)


@boundary("captured_functions.capture_scans")
def test_scans_are_captured_for_many_sizes() -> None:
    captured_functions.capture_scans()
    before = len(dynaxla.read_metrics().captured)
    compiled = torch.compile(lambda x: associative_scan(torch.mul, x, 0, combine_mode="generic"), backend="dynaxla")
    for size in (9, 11, 12, 14):
        compiled(torch.ones(size))
    assert len(dynaxla.read_metrics().captured) - before == 2


@boundary("dynamo.begin_branches_between_captures")
def test_a_branch_outside_waits_for_the_capture_of_another_thread() -> None:
    tracing, found = threading.Event(), []

    def branch() -> None:
        assert tracing.wait(60)
        found.append(torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x * 2, (torch.ones(3),)))

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        def run(*args: Any) -> Any:
            tracing.set()
            thread.join(0.5)  # as long as the branch would need to begin
            return module(*args)

        return make_fx(run)(*inputs)

    thread = threading.Thread(target=branch)
    thread.start()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        thread.join()
    assert found[0].tolist() == [2, 2, 2]


@boundary("dynamo.find_undisabled")
def test_functions_that_dynamo_is_disabled_for_are_found() -> None:
    def function() -> int:
        return 1

    assert dynamo.find_undisabled(torch._dynamo.disable(torch._dynamo.disable(function))) is function
    assert dynamo.find_undisabled(function) is function

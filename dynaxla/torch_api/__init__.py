"""The only modules that use private names of torch, one module for each area of torch.

A private name is one that torch may change in any release: a module or name that begins with an underscore, anything in
torch.fx.experimental, an attribute that only torch's own code reads. Each function lists the private names that it relies on.
tests/torch_api checks each of them on the installed torch; tests/torch_api/test_wall.py fails if another part of the package
uses such a name.

    overloads     operators: their types and schemas
    custom_ops    operators defined by users, and their autograd formulas
    python_kernels    Python kernels, which torch asks before any decomposition table
    transforms    transforms around a call (torch.func, forward_ad), and the tensors that they wrap
    decompositions    torch's decompositions and their helper functions
    dynamo_capture    the function that Dynamo is capturing, and why graphs end
    dynamo        Dynamo: its settings, exceptions and lock, and the results of torch.compile
    aot           AOTAutograd: its call, its analysis of inputs, forward and backward nodes
    symbols       symbolic sizes: expressions, examples, guards, ranges
    size_functions    the sympy functions in such expressions
    fakes         fake tensors, their modes and storages
    storages      memory: addresses, copy-on-write marks, versions, DLPack
    modules       private attributes of torch.nn.Module
    pytree        nested arguments as flat lists
    artifacts     cache artifacts (`torch.compiler.save_cache_artifacts`)
    capture_cache AOTAutograd's cache: its entries, keys and settings
    capture_state the state of torch in which a graph is captured, to capture it again
    dynamo_packages   Dynamo's captures on disk: fixes of torch's errors with wrapped functions
    dynamo_guards the guards of Dynamo's captures on disk
    graph_pickling    serialized captured graphs
    gc_guard      Python's cyclic collector
    frames        local variables of running functions of torch
    patches       the attributes of torch that the package replaces, and why

Other modules may use the names of ATen ops (`torch.ops.aten._to_copy`), which are data, and two keys of a node's `meta` that
torch documents for exported graphs: "val", the fake value, and "stack_trace".
All names exist in torch 2.13.0, on which the tests run, and in the sources of 2.11.0 and 2.12.1, unless a function
says otherwise.
"""
